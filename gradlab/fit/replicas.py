"""The replicas of a tf.distribute strategy: each one's examples, one sum over all, one update on
all."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab._batches import examples_of, map_tensors, rows_of, tensors_of
from gradlab.averaging import sum_rows
from gradlab.fit import keras_private as internals


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes for all workers."""
    cluster = strategy.cluster_resolver
    if cluster is None or not cluster.task_type:
        return True
    has_chief = "chief" in cluster.cluster_spec().jobs
    return cluster.task_type == "chief" or (not has_chief and cluster.task_id == 0)


def rows_of_replica(window: Any, replicas: tf.Tensor) -> Any:
    """This replica's examples of a window that is shared by a number of replicas, as equally as
    possible."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group % replicas
    examples = examples_of(window)
    rows = slice(examples * index // replicas, examples * (index + 1) // replicas)
    return map_tensors(lambda tensor: rows_of(tensor, rows), window)


def sum_over_replicas(tensors: Any) -> Any:
    """The sums of a nest of tensors over the replicas, with one all-reduce for all of them; None
    stays None. Rows (`tf.IndexedSlices`) are gathered, and summed where they are the same."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensors
    flat = [one for one in tensors_of(tensors) if not isinstance(one, tf.IndexedSlices)]
    dtype = tf.float64 if any(tensor.dtype == tf.float64 for tensor in flat) else tf.float32
    packed = tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in flat], axis=0)
    pieces = tf.split(
        context.all_reduce(tf.distribute.ReduceOp.SUM, packed), [tf.size(tensor) for tensor in flat]
    )
    sums = iter(
        tf.cast(tf.reshape(piece, tensor.shape), tensor.dtype)
        for piece, tensor in zip(pieces, flat)
    )
    return map_tensors(
        lambda one: _sum_of_rows(one) if isinstance(one, tf.IndexedSlices) else next(sums), tensors
    )


def _sum_of_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    context = tf.distribute.get_replica_context()
    values = context.all_gather(slices.values, axis=0)
    numbers, sums = sum_rows(values, context.all_gather(slices.indices, axis=0))
    return tf.IndexedSlices(sums, numbers, slices.dense_shape)


def replicas_here(strategy: tf.distribute.Strategy) -> int:
    """How many of the replicas are in this process."""
    return 1 if strategy.num_replicas_in_sync == 1 else len(strategy.extended.worker_devices)


def over_workers(strategy: tf.distribute.Strategy, numbers: list[int]) -> np.ndarray:
    """Integers of this worker and of all others, which must call this too: shape (workers,
    numbers).

    With one worker, they are its own.
    """
    own = np.array([numbers])
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return own

    def gathered():
        return tf.distribute.get_replica_context().all_gather(tf.constant(own), axis=0)

    found = strategy.experimental_local_results(tf.function(lambda: strategy.run(gathered))())[
        0
    ].numpy()
    return found[:: replicas_here(strategy)]  # the replicas of a worker say the same


def apply_gradients(
    optimizer: Any, gradients: list, variables: list, only_if: tf.Tensor | None = None
) -> None:
    """Applies gradients that are the same on all replicas, once.

    Args:
        optimizer: a Keras optimizer.
        gradients, variables: the gradients, already summed over the replicas, and their variables.
        only_if: a boolean scalar, the same on all replicas. If it is False nothing happens, not
            even to `iterations`.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if tf.distribute.has_strategy():
        internals.take_gradients_as_summed(optimizer)
    if only_if is None:
        _apply(optimizer, gradients, variables)
    elif replicas == 1:
        tf.cond(only_if, lambda: _apply(optimizer, gradients, variables), lambda: 0)
    else:
        # Replicas cannot wait for each other inside a branch, so one branch is taken for all of
        # them together.
        context.merge_call(_apply_on_each(optimizer, variables), args=(gradients, only_if))


def _apply_on_each(optimizer: Any, variables: list) -> Callable:
    def merged(strategy, gradients, only_if):
        def apply():
            strategy.extended.call_for_each_replica(_apply, args=(optimizer, gradients, variables))
            return 0

        tf.cond(strategy.experimental_local_results(only_if)[0], apply, lambda: 0)

    return merged


def _apply(optimizer: Any, gradients: list, variables: list) -> int:
    """Applies gradients by the method that Keras' `fit` calls, which an optimizer may have of its
    own."""
    optimizer.apply_gradients(zip(gradients, variables))
    return 0

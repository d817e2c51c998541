"""What the replicas of a tf.distribute strategy share: the examples of a window, and one sum."""

from typing import Any

import tensorflow as tf


def replica_rows(window, replicas):
    """This replica's part of a window that so many replicas share; as equal as can be."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group % replicas
    examples = examples_of(window)
    rows = slice(examples * index // replicas, examples * (index + 1) // replicas)
    return tf.nest.map_structure(lambda part: None if part is None else part[rows], window)


def sum_over_replicas(tensors: Any) -> Any:
    """The sums of a nest of tensors over the replicas, in one all-reduce; None stays None."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensors
    flat = [tensor for tensor in tf.nest.flatten(tensors) if tensor is not None]
    dtype = tf.float64 if any(tensor.dtype == tf.float64 for tensor in flat) else tf.float32
    packed = tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in flat], axis=0)
    parts = tf.split(context.all_reduce(tf.distribute.ReduceOp.SUM, packed), [tf.size(tensor) for tensor in flat])
    sums = iter(tf.cast(tf.reshape(part, tensor.shape), tensor.dtype) for part, tensor in zip(parts, flat))
    return tf.nest.map_structure(lambda tensor: None if tensor is None else next(sums), tensors)


def take_gradients_as_summed(optimizer) -> None:
    """Keras optimizers sum gradients over the replicas themselves, after clipping them on each: too late, and twice."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise ValueError(
            f"Several replicas need a Keras optimizer, keras.optimizers.Adam and the like. Received: {optimizer!r}"
        )
    optimizer._all_reduce_sum_gradients = list


def examples_of(x):
    """The number of examples in a nest of tensors."""
    return tf.shape(next(tensor for tensor in tf.nest.flatten(x) if tensor is not None))[0]

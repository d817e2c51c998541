"""What tracing a model's forward pass once shows: which variables it assigns, and what its losses divide by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import examples_of, map_tensors, microbatches
from gradlab.averaging import accumulation_dtype
from gradlab.training import _keras_internals as internals
from gradlab.training import batch_norm
from gradlab.training.input_checks import label_rules
from gradlab.training.objective import Objective, common_divisor
from gradlab.training.replicas import sum_over_replicas


@dataclass(frozen=True)
class Plan:
    """The result of tracing one micro-batch's forward pass aside.

    Attributes:
        carried: the Keras variables that a forward pass assigns, other than moving averages of batch normalization.
        draws: for the random seeds among them, by their position, how often a forward pass draws from them.
        averages: the moving averages of batch normalization.
        normalizing: the names of the layers that normalize each micro-batch by its own statistics.
        labels: which targets are class numbers, as `label_rules` describes.
        kinds: for each term of the loss, the kind of its divisor.
        divisors: the divisors of the whole window, one for each term, if the terms differ in them; else None.
        is_sum: whether the sums of gradients are the update's gradients, without a division.
    """

    carried: list
    draws: dict[int, int]
    averages: batch_norm.MovingAverages
    normalizing: list[str]
    labels: list
    kinds: list[str]
    divisors: list | None
    is_sum: bool

    def begin(self, carried: list) -> list:
        """The values that a replica's window begins with. Each replica draws different random numbers."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return [
            v.value + tf.cast(tf.stack([replica, 0]), v.value.dtype) if i in self.draws else v.value
            for i, v in enumerate(carried)
        ]

    def end(self, carried: list, values: list, steps: tf.Tensor) -> list:
        """The values after a window of a number of micro-batches. Seeds end equal on all replicas, however uneven."""
        return [
            v.value + tf.cast(tf.stack([0, self.draws[i] * steps]), v.value.dtype) if i in self.draws else value
            for i, (v, value) in enumerate(zip(carried, values))
        ]


def make_plan(
    model: keras.Model, objective: Objective, batch: tuple, microbatch_size: int, skip_nonfinite: bool
) -> Plan:
    """Traces one micro-batch's forward pass aside, and returns what it showed.

    Args:
        model: the model.
        objective: its loss.
        batch: (x, y, sample_weight), this replica's part of the window.
        microbatch_size: the examples of a micro-batch.
        skip_nonfinite: whether micro-batches may be left out, which not every combination of losses allows.

    Raises:
        ValueError: losses with different divisors together with skip_nonfinite, or a synchronized BatchNormalization on
            several replicas.
    """
    batch_norm.check(model, tf.distribute.get_strategy().num_replicas_in_sync)
    divisors, found = _trace(model, objective, batch)
    terms, assigned = found["terms"], found["assigned"]
    layers, calls = batch_norm.normalizing_layers(model, assigned)
    usual = [i for i, layer in enumerate(layers) if not layer.renorm and layer.momentum < 1]
    averages = batch_norm.MovingAverages([layers[i] for i in usual], [calls[i] for i in usual])
    own = {id(variable) for variable in averages.variables}
    carried = [v for v in model.variables if id(v) in assigned and id(v) not in own]
    kinds = [term.kind for term in terms]
    counts = None
    if common_divisor(terms) is None:
        if skip_nonfinite:
            raise ValueError(
                "skip_nonfinite needs losses that all divide by the number of examples, or one loss alone. "
                f"Received: losses that divide by {', '.join(kinds)}"
            )
        # Losses with different divisors share one gradient, so the window's divisors must be known beforehand.
        counts = sum_over_replicas(_count(divisors, batch, microbatch_size, len(kinds)))
        counts = [tf.ones_like(count) if kind == "sum" else count for count, kind in zip(counts, kinds)]
    return Plan(
        carried=carried,
        draws={i: assigned[id(v)] for i, v in enumerate(carried) if internals.is_seed_state(v)},
        averages=averages,
        normalizing=[layer.name for layer in layers],
        labels=label_rules(found["y"], terms),
        kinds=kinds,
        divisors=counts,
        is_sum=counts is not None or kinds[0] == "sum",
    )


def _trace(model: keras.Model, objective: Objective, batch: tuple) -> tuple[Callable, dict]:
    """A function (x, y, sample_weight) -> the divisors of the loss' terms, and what tracing it showed."""
    found: dict[str, Any] = {}

    @tf.function(autograph=False)
    def divisors(x, y, sample_weight):
        with internals.CountingScope([(v, v.value) for v in model.variables], collect_losses=True) as scope:
            y_pred = model(x, training=True)
            _, terms = objective(y, y_pred, sample_weight, scope.losses, examples_of(x))
        found.update(terms=terms, assigned=scope.assigned, y=y)
        return [term.divisor for term in terms]

    specs = map_tensors(lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), batch)
    divisors.get_concrete_function(*specs)
    return divisors, found


def _count(divisors: Callable, batch: tuple, microbatch_size: int, terms: int) -> list:
    """The sums of the terms' divisors over this replica's window."""
    steps, microbatch = microbatches(batch, microbatch_size)

    def body(step, counts):
        seen = divisors(*microbatch(step))
        return step + 1, [count + tf.cast(more, count.dtype) for count, more in zip(counts, seen)]

    zeros = [tf.zeros([], accumulation_dtype(keras.config.floatx()))] * terms
    return tf.while_loop(lambda step, _: step < steps, body, (tf.constant(0), zeros), parallel_iterations=1)[1]

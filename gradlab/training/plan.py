"""The plan of a window: which variables its forward passes carry along, and what its losses divide by."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from gradlab._batches import examples_of, microbatches
from gradlab.averaging import accumulation_dtype
from gradlab.training import _keras_internals as internals
from gradlab.training import batch_norm
from gradlab.training.input_checks import label_rules
from gradlab.training.metrics import MetricsPlan
from gradlab.training.objective import Term, common_divisor
from gradlab.training.replicas import sum_over_replicas
from gradlab.training.tracing import Traced


@dataclass(frozen=True)
class Plan:
    """What the forward passes of a window have in common.

    Attributes:
        carried: the Keras variables that a forward pass assigns, other than moving averages of batch normalization.
        once: the positions of those whose new value does not depend on the examples: counters, spectral norms. As in
            the large batch they change once per window, so every micro-batch begins with their first value.
        draws: for the random seeds among them, by their position, how often a forward pass draws from them.
        averages: the moving averages of batch normalization.
        normalizing: the names of the layers that normalize each micro-batch by its own statistics.
        labels: which targets are class numbers, as `label_rules` describes.
        kinds: for each term of the loss, the kind of its divisor.
        loss_weights: for each term its factor in the total loss.
        numbers: the names of losses that give one number for a batch, as in `Objective`.
        unknown: the names of losses of which it is unknown whether they depend on other examples, as in `Objective`.
        adding: the names of the layers that add losses; empty if the model's own loss takes care of them.
        metrics: how metrics are updated.
        examples: the number of examples of the window over all replicas, or None if nothing asks for it.
        divisors: the divisors of the whole window, one for each term, if the terms differ in them; else None. Those
            that are proportional to the examples are None.
        is_sum: whether the sums of gradients are the update's gradients, without a division.
    """

    carried: list
    once: set[int]
    draws: dict[int, int]
    averages: batch_norm.MovingAverages
    normalizing: list[str]
    labels: list
    kinds: list[str]
    loss_weights: list
    numbers: list[str]
    unknown: list[str]
    adding: list[str]
    metrics: MetricsPlan
    examples: tf.Tensor | None
    divisors: list | None
    is_sum: bool

    def begin(self) -> list:
        """The values that a replica's window begins with. Each replica draws different random numbers."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return [
            v.value + tf.cast(tf.stack([replica, 0]), v.value.dtype) if i in self.draws else tf.identity(v.value)
            for i, v in enumerate(self.carried)
        ]

    def scope(self, values: list) -> internals.RecordingScope:
        """A scope for the next micro-batch, which begins with these values."""
        carried = [(v, value) for i, (v, value) in enumerate(zip(self.carried, values)) if i not in self.once]
        return internals.RecordingScope([*carried, *((v, tf.zeros_like(v.value)) for v in self.averages.variables)])

    def values(self, scope: keras.StatelessScope) -> list:
        """The values of the variables after a micro-batch."""
        return [scope.get_current_value(v) for v in self.carried]

    def end(self, values: list, steps: tf.Tensor) -> None:
        """Assigns the values after a window of a number of micro-batches. Seeds end equal on all replicas."""
        several = tf.distribute.get_replica_context().num_replicas_in_sync > 1
        for i, (variable, value) in enumerate(zip(self.carried, values)):
            if i in self.draws and several:
                value = variable.value + tf.cast(tf.stack([0, self.draws[i] * steps]), value.dtype)
            variable.assign(value)

    def window_divisors(self, terms: list[Term], examples: tf.Tensor) -> list | None:
        """The divisors of the window, for a micro-batch with these terms and so many examples; None for its own."""
        if self.divisors is None:
            return None
        return [
            term.divisor * tf.cast(self.examples, term.divisor.dtype) / tf.cast(examples, term.divisor.dtype)
            if divisor is None
            else divisor
            for term, divisor in zip(terms, self.divisors)
        ]


def make_plan(
    model: keras.Model,
    traced: Traced,
    batch: tuple,
    microbatch_size: int,
    *,
    training: bool = True,
    skip_nonfinite: bool = False,
) -> Plan:
    """Makes the plan of a window.

    Args:
        model: the model.
        traced: what tracing its forward pass showed.
        batch: (x, y, sample_weight), this replica's part of the window.
        microbatch_size: the examples of a micro-batch, to count divisors if these must be known beforehand.
        training: whether to train the model or to evaluate it.
        skip_nonfinite: whether micro-batches may be left out.

    Raises:
        ValueError: the model or its losses cannot be computed in micro-batches, or not with skip_nonfinite.
    """
    assigned, terms = traced.assigned, traced.terms
    layers, calls = batch_norm.normalizing_layers(model, {key: times for key, (_, times) in assigned.items()})
    usual = [i for i, layer in enumerate(layers) if not layer.renorm and layer.momentum < 1]
    averages = batch_norm.MovingAverages([layers[i] for i in usual], [calls[i] for i in usual])
    own = {id(variable) for variable in averages.variables}
    carried = [variable for key, (variable, _) in assigned.items() if key not in own]
    _check_overwritten(model, training)
    seeds = {i for i, v in enumerate(carried) if internals.is_seed_state(v)}
    kinds = [term.kind for term in terms]
    counts = None
    if common_divisor(terms) is None:
        if skip_nonfinite:
            raise ValueError(
                "skip_nonfinite needs losses that all divide by the number of examples, or one loss alone. "
                f"Received: losses that divide by {', '.join(kinds)}"
            )
        # Losses with different divisors share one gradient, so the window's divisors must be known beforehand. An
        # evaluation has no gradient: its sums are divided at the end.
        counts = [None] * len(kinds)
        if "own" in kinds and training:
            counts = sum_over_replicas(_count(traced.divisors, batch, microbatch_size, len(kinds)))
        by_kind = {"sum": tf.ones([], accumulation_dtype(keras.config.floatx())), "examples": None}
        counts = [by_kind.get(kind, count) for count, kind in zip(counts, kinds)]
    each = traced.metrics.counting
    asks_for_examples = counts is not None or traced.numbers or traced.adding
    return Plan(
        carried=carried,
        once={i for i, v in enumerate(carried) if i not in seeds and id(v) not in each and not traced.of_data[id(v)]},
        draws={i: assigned[id(carried[i])][1] for i in seeds},
        averages=averages,
        normalizing=[layer.name for layer in layers],
        labels=label_rules(traced.y, terms),
        kinds=kinds,
        loss_weights=[term.loss_weight for term in terms],
        numbers=traced.numbers,
        unknown=traced.unknown,
        adding=traced.adding,
        metrics=traced.metrics,
        examples=sum_over_replicas(examples_of(batch[0])) if asks_for_examples else None,
        divisors=counts,
        is_sum=counts is not None or kinds[0] == "sum",
    )


def _count(divisors: Callable, batch: tuple, microbatch_size: int, terms: int) -> list:
    """The sums of the terms' divisors over this replica's window."""
    steps, microbatch = microbatches(batch, microbatch_size)

    def body(step, counts):
        seen = divisors(*microbatch(step))
        return step + 1, [count + tf.cast(more, count.dtype) for count, more in zip(counts, seen)]

    zeros = [tf.zeros([], accumulation_dtype(keras.config.floatx()))] * terms
    return tf.while_loop(lambda step, _: step < steps, body, (tf.constant(0), zeros), parallel_iterations=1)[1]


def _check_overwritten(model: keras.Model, training: bool) -> None:
    """Raises ValueError if gradients of a variable are not gradients: those of float8 layers are new values."""
    overwritten = [v.path for v in model.trainable_variables if v.overwrite_with_gradient] if training else []
    if overwritten:
        raise ValueError(
            "Variables must not be overwritten with their gradients, as those of float8 layers are: such values cannot "
            f"be added up. Received: {', '.join(overwritten)}"
        )

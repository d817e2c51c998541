"""The plan of a window: which variables its forward passes assign, and what its losses divide
by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import examples_of, microbatches, times
from gradlab.averaging import accumulation_dtype
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import common_divisor
from gradlab.fit.losses.term import Term
from gradlab.fit.losses.whole_batch import BatchLossInputs, check_passes
from gradlab.fit.program.input_checks import label_rules
from gradlab.fit.program.precut import check_padding, is_padded
from gradlab.fit.program.tracing import Traced
from gradlab.fit.replicas import sum_over_replicas
from gradlab.fit.variables.assigned_at_once import Direct
from gradlab.fit.variables.carried_variables import CarriedState, make_state

ASSIGNED_WARNING = (
    "{path} is assigned from the examples in a forward pass: the micro-batches assign it one "
    "after the other, each from its own examples, so it is not what the large batch would give it."
)


@dataclass(frozen=True)
class Plan:
    """What the forward passes of a window have in common.

    Attributes:
        traced: what tracing one of them showed.
        state: the variables that a forward pass assigns.
        of_examples: the paths of those whose new value depends on the examples, other than metrics
            and moving averages of batch normalization: each micro-batch assigns them, where the
            large batch would once.
        labels: which targets are class numbers, as `label_rules` describes.
        divisor_kinds: for each term of the loss, the kind of its divisor.
        loss_weights: for each term its factor in the total loss.
        examples: the number of examples of the window over all replicas, or None if nothing asks
            for it.
        divisors: the divisors of the whole window, one for each term, if the terms differ in them;
            else None. Those that are proportional to the examples are None.
        is_sum: whether the sums of gradients are the update's gradients, without a division.
        whole: what losses over the whole batch see of a micro-batch: by the position of their term.
        is_padded: whether texts are padded to another length in each micro-batch.
    """

    traced: Traced
    state: CarriedState
    of_examples: list[str]
    labels: list
    divisor_kinds: list[str]
    loss_weights: list
    examples: tf.Tensor | None
    divisors: list | None
    is_sum: bool
    whole: dict[int, BatchLossInputs]
    is_padded: bool

    def loss(self, term_sums: list) -> tuple[tf.Tensor, list]:
        """The loss of a window without regularization, and that of each term before loss weights.

        Args:
            term_sums: for each term: (the sum of its totals, the sum of its divisors).
        """
        means = [
            total if kind == "sum" else tf.math.divide_no_nan(total, divisor)
            for (total, divisor), kind in zip(term_sums, self.divisor_kinds)
        ]
        return tf.add_n(
            [times(mean, factor) for mean, factor in zip(means, self.loss_weights)]
        ), means

    def give_back(self, values: list, only_counters: bool = False) -> None:
        """Gives the variables that are assigned at once these values; or only those that do not
        depend on examples."""
        for one, value in zip(self.traced.direct, values):
            if not (only_counters and (one.of_data or one.draws)):
                one.assign(value)

    def mean_factors(self, examples: tf.Tensor, dtype: tf.DType) -> list:
        """For each number of a micro-batch the factor that makes it a mean over the examples:
        window / examples."""
        reductions = self.traced.reductions
        if "sum" not in reductions:
            return [1.0] * len(reductions)
        factor = tf.math.divide_no_nan(tf.cast(self.examples, dtype), tf.cast(examples, dtype))
        return [factor if reduction == "sum" else 1.0 for reduction in reductions]

    def weight(self, terms: list[Term], examples: tf.Tensor) -> tf.Tensor:
        """The weight of a micro-batch's loss: 1 if losses are sums or shares, else the number it
        was divided by."""
        if self.is_sum:
            return tf.ones_like(examples)
        return (
            examples
            if self.divisor_kinds[0] == "examples"
            else tf.cast(common_divisor(terms), examples.dtype)
        )

    def window_divisors(self, terms: list[Term], examples: tf.Tensor) -> list | None:
        """The divisors of the window, for a micro-batch with these terms and so many examples; None
        for its own."""
        if self.divisors is None:
            return None
        return [
            term.divisor
            * tf.cast(self.examples, term.divisor.dtype)
            / tf.cast(examples, term.divisor.dtype)
            if divisor is None
            else divisor
            for term, divisor in zip(terms, self.divisors)
        ]


def make_plan(
    model: keras.Model,
    traced: Traced,
    batch: tuple,
    microbatch_size: Any,
    *,
    training: bool = True,
    skip_nonfinite: bool = False,
    jit: bool = False,
    may_repeat: bool = False,
) -> Plan:
    """Makes the plan of a window.

    Args:
        model: the model.
        traced: what tracing its forward pass showed.
        batch: (x, y, sample_weight), this replica's part of the window.
        microbatch_size: the examples of a micro-batch or a `Cut`, to count divisors if these must
            be known beforehand.
        training: whether to train the model or to evaluate it.
        skip_nonfinite: whether micro-batches may be left out.
        jit: whether XLA compiles each micro-batch's forward and backward pass.
        may_repeat: whether the window may be computed again.

    Raises:
        ValueError: the model or its losses cannot be computed in micro-batches, or not with
            skip_nonfinite.
    """
    terms = traced.terms
    _check_overwritten(model, training)
    _check_direct(traced.direct, may_repeat)
    if jit:
        _check_loops(traced.graph)
    if is_padded(microbatch_size):
        check_padding(traced)
    whole = {i: term.whole for i, term in enumerate(terms) if term.whole is not None}
    if whole and skip_nonfinite:
        raise ValueError(
            "skip_nonfinite must be False with a loss over the whole batch, to which a "
            f"micro-batch that is left out would still belong. Received: {skip_nonfinite!r}"
        )
    check_passes(list(whole.values()), traced.graph)
    kinds = [term.kind for term in terms]
    counts = None
    if common_divisor(terms) is None:
        if skip_nonfinite:
            raise ValueError(
                "skip_nonfinite needs losses that all divide by the number of examples, or one "
                f"loss alone. Received: losses that divide by {', '.join(kinds)}"
            )
        # Losses with different divisors share one gradient, so the window's divisors must be known
        # beforehand. An evaluation has no gradient: its sums are divided at the end.
        counts = [None] * len(kinds)
        if "own" in kinds and training:
            counts = sum_over_replicas(_count(traced.divisors, batch, microbatch_size, len(kinds)))
        by_kind = {"sum": tf.ones([], accumulation_dtype(keras.config.floatx())), "examples": None}
        counts = [by_kind.get(kind, count) for count, kind in zip(counts, kinds)]
    asks_for_examples = counts is not None or "sum" in traced.reductions
    return Plan(
        traced=traced,
        state=make_state(
            traced.assigned,
            traced.of_data,
            internals.layers_of(model),
            traced.metrics.counting,
            traced.direct_of_keras,
        ),
        of_examples=_of_examples(model, traced),
        labels=label_rules(traced.y, terms),
        divisor_kinds=kinds,
        loss_weights=[term.loss_weight for term in terms],
        examples=sum_over_replicas(examples_of(batch[0])) if asks_for_examples else None,
        divisors=counts,
        is_sum=counts is not None or kinds[0] == "sum",
        whole=whole,
        is_padded=is_padded(microbatch_size),
    )


def check_noise(plan: Plan) -> None:
    """Raises ValueError unless the gradients of micro-batches show the noise of examples."""
    if plan.whole:
        raise ValueError(
            "noise_scale must be False with a loss over the whole batch, of which no micro-batch "
            "has a gradient of its own. Received: True"
        )
    if set(plan.divisor_kinds) != {"examples"}:
        raise ValueError(
            "noise_scale needs losses that divide by the number of examples. Received: losses that "
            f"divide by {', '.join(plan.divisor_kinds)}"
        )


def _of_examples(model: keras.Model, traced: Traced) -> list[str]:
    normalizing = [
        one
        for one in internals.layers_of(model)
        if isinstance(one, keras.layers.BatchNormalization)
    ]
    known = [
        *model.metrics_variables,
        *(variable for layer in normalizing for variable in layer.variables),
    ]
    others = set(traced.assigned) - {id(variable) for variable in [*known, *traced.direct_of_keras]}
    carried = [traced.assigned[key][0].path for key in others if traced.of_data[key]]
    return carried + [one.name for one in traced.direct if one.of_data]


def _count(divisors: Callable, batch: tuple, microbatch_size: Any, terms: int) -> list:
    """The sums of the terms' divisors over this replica's window."""
    steps, microbatch = microbatches(batch, microbatch_size)

    def body(step, counts):
        seen = divisors(*microbatch(step))
        return step + 1, [count + tf.cast(more, count.dtype) for count, more in zip(counts, seen)]

    zeros = [tf.zeros([], accumulation_dtype(keras.config.floatx()))] * terms
    return tf.while_loop(
        lambda step, _: step < steps, body, (tf.constant(0), zeros), parallel_iterations=1
    )[1]


def _check_direct(direct: list[Direct], may_repeat: bool) -> None:
    """Raises ValueError for variables that are assigned at once where they cannot get their value
    back."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if direct and (replicas > 1 or may_repeat):
        where = f"on {replicas} replicas" if replicas > 1 else 'with microbatch_size="auto"'
        raise ValueError(
            "Layers and losses must assign their variables with Keras, as those of add_weight, "
            f"outside of loops and functions of TensorFlow. Received: {direct[0].name}, {where}"
        )


def _check_loops(graph: tf.Graph) -> None:
    """Raises ValueError for loops, such as those of recurrent layers: what they keep cannot leave
    XLA."""
    loops = [
        operation.name
        for operation in graph.get_operations()
        if operation.type in ("While", "StatelessWhile")
    ]
    if loops:
        raise ValueError(
            "jit_compile must be False for a model with loops, such as recurrent layers that are "
            f"not unrolled. Received: {loops[0]}"
        )


def _check_overwritten(model: keras.Model, training: bool) -> None:
    """Raises ValueError if gradients of a variable are not gradients: those of float8 layers are
    new values."""
    overwritten = (
        [v.path for v in model.trainable_weights if v.overwrite_with_gradient] if training else []
    )
    if overwritten:
        raise ValueError(
            "Variables must not be overwritten with their gradients, as those of float8 layers "
            f"are: such values cannot be added up. Received: {', '.join(overwritten)}"
        )

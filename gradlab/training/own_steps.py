"""value_and_gradients: a loss of one's own and its gradients, computed one micro-batch at a
time."""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradlab import _checks
from gradlab._batches import (
    as_tensor,
    examples_of,
    map_tensors,
    rows_of,
    spec_of,
    spread_rows,
    tensors_of,
)
from gradlab.averaging import divide
from gradlab.training import batch_norm
from gradlab.training.own_loss import TracedLoss, entries_of, sum_dtype, trace_loss
from gradlab.training.reduction_check import ReductionCheck
from gradlab.training.replicas import sum_over_replicas
from gradlab.window import Loop, Microbatch, accumulate

REDUCTIONS = ("mean", "sum")


@tf.autograph.experimental.do_not_convert  # which would convert all of gradlab, with warnings
def value_and_gradients(
    loss: Callable[..., Any],
    variables: Any,
    data: Any,
    microbatch_size: int,
    reduction: str = "mean",
    *,
    in_flight: int = 1,
) -> tuple[Any, Any]:
    """Computes a loss and its gradients for a batch, one micro-batch at a time.

    It takes the place of a `tf.GradientTape` in a `train_step` or a loop of your own. This::

        with tf.GradientTape() as tape:
            loss = mean_loss(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)

    becomes::

        loss, gradients = value_and_gradients(mean_loss, model.trainable_variables, (x, y), microbatch_size=4)

    and gives the same numbers. Only one micro-batch's activations are in memory. Call it inside a
    `tf.function`, as Keras calls a `train_step`: elsewhere the loss is traced anew in each call.

    Everything that depends on the examples belongs in `data`, such as random numbers for a
    generator: each micro-batch gets its rows. Layers draw random numbers for each micro-batch.
    Batch normalization uses the statistics of each micro-batch, and its moving averages are updated
    once. On several replicas, each computes its own examples, as a tape does.

    Args:
        loss: a function (`*data`) -> a scalar, or a dict, list or tuple of tensors. The entry
            "loss", or else the first one, is differentiated. Each entry is either a scalar, or has
            a row for each example.
        variables: what to differentiate with respect to: variables of TensorFlow or Keras, or a
            nest of them.
        data: a tuple of the arguments of `loss`: nests of tensors with the same number of examples.
            A single argument need not be in a tuple. None where an argument is missing.
        microbatch_size: the number of examples of a micro-batch; the last one of a batch may be
            smaller.
        reduction: what the scalars are: "mean" for means over the examples; "sum" for sums over
            them. With "sum", the entry that is differentiated may also have a row for each example,
            as in `tape.gradient(losses, ...)`, which differentiates the sum.
        in_flight: the number of micro-batches that may be computed at once, as in
            `gradlab.window.Loop`.

    Returns:
        What `loss` returns for the whole batch, and the gradients: a nest like the variables, of
        dense tensors, or None where the loss does not depend on the variable.

    Raises:
        ValueError: an argument out of range, entries that are neither scalars nor rows, a loss that
            is not a scalar although the reduction is "mean", or a loss that assigns variables from
            the examples.
        tf.errors.InvalidArgumentError: a scalar is not what the reduction says, or rows depend on
            other examples. gradlab compares the entries for a few examples with those for their
            halves in the first three calls. A loss that draws random numbers is compared in the
            first call, and only gross differences show, such as a sum where a mean was promised.
            Compiled with XLA, which drops such errors, the scalars and gradients are NaN.

    Example:
        >>> w = tf.Variable(2.0)
        >>> step = tf.function(lambda x: value_and_gradients(lambda x: tf.reduce_mean((w * x) ** 2), w, x, 2))
        >>> loss, gradient = step(tf.constant([1.0, 2.0, 3.0]))
        >>> round(float(loss), 4), round(float(gradient), 4)      # w ** 2 * mean(x ** 2), 2 * w * mean(x ** 2)
        (18.6667, 18.6667)
    """
    _checks.positive_integer("microbatch_size", microbatch_size)
    _checks.positive_integer("in_flight", in_flight)
    _checks.one_of("reduction", reduction, REDUCTIONS)
    _checks.function("loss", loss)
    flat = tf.nest.flatten(variables)
    if not flat:
        raise ValueError(f"variables must hold at least one variable. Received: {variables!r}")
    _checks.variables("variables", flat)
    data = map_tensors(as_tensor, data if isinstance(data, tuple) else (data,))
    if not tensors_of(data):
        raise ValueError(f"data must hold at least one tensor. Received: {data!r}")
    scalars = [tensor for tensor in tensors_of(data) if tensor.shape.rank == 0]
    if scalars:
        raise ValueError(
            f"data must be tensors with a row for each example. Received: a scalar, {scalars[0]!r}"
        )
    is_mean = reduction == "mean"
    traced = trace_loss(loss, map_tensors(spec_of, data), is_mean)
    if traced.state.normalizing:
        warnings.warn(
            batch_norm.WARNING.format(layers=", ".join(traced.state.normalizing)), stacklevel=2
        )
    is_right = _check(traced, data, is_mean, max(2, int(microbatch_size)))
    with tf.control_dependencies([is_right]):
        data = map_tensors(tf.identity, data)
    window = _Window(traced, loss, examples_of(data), int(microbatch_size), is_mean, is_right)
    sums = accumulate(
        window.forward,
        flat,
        data,
        microbatch_size,
        window.begin(),
        loop=Loop(in_flight, weight_dtype=window.dtype),
    )
    gradients = divide(sums.gradients, None, flat)
    return window.end(sums), tf.nest.pack_sequence_as(variables, gradients)


def _check(traced: TracedLoss, data: tuple, is_mean: bool, most: int) -> tf.Tensor:
    """Whether the entries are what they are said to be: a boolean scalar. Computing it fails if
    they are not."""
    few = tf.minimum(examples_of(data), most)
    # Halves have other statistics; two copies of some examples have the same as one
    if traced.state.normalizing:
        half = slice(0, tf.minimum(examples_of(data), tf.maximum(1, few // 2)))
        data = map_tensors(lambda tensor: _twice(rows_of(tensor, half)), data)
        few = 2 * half.stop
    else:
        data = spread_rows(data, few)

    def scalars(rows, shift):
        part = map_tensors(lambda tensor: rows_of(tensor, rows), data)
        return traced.scalars(tf.constant(shift), *part)

    dtypes = [entry.dtype for entry in traced.entries]
    of_rows = [entry.shape.rank != 0 for entry in traced.entries]
    return ReductionCheck(traced.names, dtypes, is_mean, of_rows, traced.main, traced.is_random)(
        scalars, few
    )


def _twice(tensor: Any) -> Any:
    """The examples of a tensor, and after them the same examples."""
    join = (
        tf.sparse.concat
        if isinstance(tensor, tf.SparseTensor)
        else lambda axis, both: tf.concat(both, axis)
    )
    return join(0, [tensor, tensor])


class _Window:
    """The forward passes of a window, as `accumulate` calls them, and what they return together.

    Args:
        traced: what tracing the loss showed.
        loss: the loss.
        examples: the number of examples of the window.
        microbatch_size: that of a micro-batch.
        is_mean: whether scalars are means over the examples, otherwise sums.
        is_right: whether they are; if not, all results are NaN.

    Attributes:
        dtype: the type in which the entries are added up.
    """

    def __init__(
        self,
        traced: TracedLoss,
        loss: Callable,
        examples: tf.Tensor,
        microbatch_size: int,
        is_mean: bool,
        is_right: tf.Tensor,
    ):
        self._traced = traced
        self._loss = loss
        self._examples = examples
        self._is_mean = is_mean
        self._steps = -(-examples // microbatch_size)
        self.dtype = sum_dtype(traced.entries)
        self._one = tf.where(
            is_right, tf.ones([], self.dtype), tf.constant(float("nan"), self.dtype)
        )

    def begin(self) -> tuple:
        """The state before the first micro-batch: variables, statistics, and the entries so far."""
        state = self._traced.state
        return (
            state.begin(),
            state.averages.zeros(self.dtype),
            [self._nothing(entry) for entry in self._traced.entries],
        )

    def _nothing(self, entry: tf.Tensor) -> Any:
        if entry.shape.rank == 0:
            return tf.zeros([], self._type_of_sum(entry))
        return tf.TensorArray(
            entry.dtype, self._steps, infer_shape=False, element_shape=entry.shape
        )

    def _type_of_sum(self, entry: tf.Tensor) -> tf.DType:
        return entry.dtype if entry.dtype.is_integer and not self._is_mean else self.dtype

    def forward(self, microbatch: tuple, number: tf.Tensor, carried: tuple) -> Microbatch:
        """One micro-batch's forward pass."""
        values, statistics, kept = carried
        state = self._traced.state
        examples = examples_of(microbatch)
        share = tf.cast(examples, self.dtype) / tf.cast(self._examples, self.dtype)
        share = self._one * share if self._is_mean else self._one
        with state.scope(values) as scope:
            _, entries = entries_of(self._loss(*microbatch))
        kept = [self._with(one, entry, number, share) for one, entry in zip(kept, entries)]
        loss = tf.reduce_sum(entries[self._traced.main])
        after = state.values(scope), state.averages.add(statistics, scope, examples), kept
        return Microbatch(loss, tf.cast(examples, self.dtype), after, share)

    def _with(self, kept: Any, entry: tf.Tensor, number: tf.Tensor, share: tf.Tensor) -> Any:
        if entry.shape.rank != 0:
            return kept.write(number, entry)
        return kept + tf.cast(entry, kept.dtype) * tf.cast(share, kept.dtype)

    def end(self, sums: Any) -> Any:
        """Assigns the variables, and gives what the loss returns for the whole batch."""
        values, statistics, kept = sums.state
        steps = sum_over_replicas(tf.size(sums.weights))
        state = self._traced.state
        state.end(values, steps, state.averages.over_replicas(statistics))
        entries = []
        for one, entry in zip(kept, self._traced.entries):
            whole = tf.ensure_shape(one.concat(), entry.shape) if entry.shape.rank != 0 else one
            entries.append(tf.cast(whole, entry.dtype) if entry.dtype.is_floating else whole)
        return self._traced.result(entries)

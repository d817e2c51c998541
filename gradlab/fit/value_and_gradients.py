"""value_and_gradients: a loss of one's own and its gradients, computed one micro-batch at a
time."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from gradlab._traced_graphs import Dependence, stateful_draws
from gradlab.averaging import accumulation_dtype, divide
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_check import CallCheck
from gradlab.fit.replicas import sum_over_replicas
from gradlab.fit.variables import batch_norm
from gradlab.fit.variables.assigned_at_once import direct_variables
from gradlab.fit.variables.carried_variables import CarriedState, make_state
from gradlab.window import Loop, Microbatch, accumulate

REDUCTIONS = ("mean", "sum")
# The types of operations that make no mean of a mean, and no sum of a sum, whatever the numbers.
NOT_LINEAR = ("Exp", "Log", "Log1p", "Pow", "Reciprocal", "Rsqrt", "Sqrt", "Square")


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
            A single argument may stand without a tuple. None where an argument is missing.
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
    window = _LossPasses(traced, loss, examples_of(data), int(microbatch_size), is_mean, is_right)
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


def _check(traced: "TracedLoss", data: tuple, is_mean: bool, most: int) -> tf.Tensor:
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
        part = data if rows is None else map_tensors(lambda tensor: rows_of(tensor, rows), data)
        return traced.scalars(tf.constant(shift), *part)

    dtypes = [entry.dtype for entry in traced.entries]
    of_rows = [entry.shape.rank != 0 for entry in traced.entries]
    return CallCheck(traced.names, dtypes, is_mean, of_rows, traced.main, traced.is_random)(
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


class _LossPasses:
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
        traced: "TracedLoss",
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


@dataclass(frozen=True)
class TracedLoss:
    """What tracing the loss once showed.

    Attributes:
        scalars: a function (shift, *data) -> a number for each entry, shape (entries,): the scalar
            itself, or for rows the sum of what `_of_rows` makes of them. Random seeds are shifted
            by the integer, so each one draws other numbers.
        like: what the loss returned.
        names, entries: the names of its entries, and the traced tensors.
        main: the position of the entry that is differentiated.
        state: the variables that the loss assigns.
        is_random: whether the loss draws random numbers.
    """

    scalars: Callable
    like: Any
    names: list[str]
    entries: list[tf.Tensor]
    main: int
    state: CarriedState
    is_random: bool

    def result(self, entries: list) -> Any:
        """The entries in the structure that the loss returned."""
        if isinstance(self.like, Mapping):
            return dict(zip(self.like, entries))
        if hasattr(self.like, "_fields"):
            return type(self.like)(*entries)
        return type(self.like)(entries) if isinstance(self.like, (list, tuple)) else entries[0]


def trace_loss(loss: Callable[..., Any], specs: tuple, is_mean: bool) -> TracedLoss:
    """Traces the loss for any number of examples, and checks what it returns and assigns."""
    found: dict[str, Any] = {}

    @tf.function(autograph=False)
    def scalars(shift, *data):
        with internals.RecordingScope([], shift) as scope:
            like = loss(*data)
            names, entries = entries_of(like)
            _check_created(waiting)
        of_data = Dependence(tensors_of(tf.nest.flatten(data, expand_composites=True)))
        depends = {
            key: key in scope.direct or of_data(scope.state_mapping[key]) for key in scope.assigned
        }
        found.update(like=like, names=names, entries=entries, scope=scope, of_data=depends)
        dtype = sum_dtype(entries)
        return tf.stack(
            [
                tf.cast(entry, dtype) if entry.shape.rank == 0 else _of_rows(entry, dtype)
                for entry in entries
            ]
        )

    waiting = internals.variables_not_created()
    if not tf.distribute.has_strategy():
        internals.create_global_seed()
    graph = scalars.get_concrete_function(tf.TensorSpec([], tf.int32), *specs).graph
    names = found["names"]
    entries = found["entries"]
    scope = found["scope"]
    main = names.index("loss") if "loss" in names else 0
    _check_entries(names, entries, main, is_mean)
    layers = {id(layer): layer for caller in scope.callers for layer in internals.layers_of(caller)}
    state = make_state(scope.assigned, found["of_data"], layers.values())
    _check_assigned(state, found["of_data"], graph)
    _check_linear(
        names,
        entries,
        is_mean,
        Dependence([one for one in graph.inputs if one.dtype != tf.resource]),
    )
    is_random = bool(state.draws or stateful_draws(graph))
    return TracedLoss(scalars, found["like"], names, entries, main, state, is_random)


def entries_of(like: Any) -> tuple[list[str], list[tf.Tensor]]:
    """The names and the tensors of what a loss returned."""
    if isinstance(like, Mapping):
        names = [str(name) for name in like]
        entries = list(like.values())
    elif isinstance(like, (list, tuple)):
        names = [str(name) for name in getattr(like, "_fields", range(len(like)))]
        entries = list(like)
    else:
        names = ["loss"]
        entries = [like]
    if not entries or any(entry is None or tf.nest.is_nested(entry) for entry in entries):
        raise ValueError(
            f"loss must return a tensor, or a dict, list or tuple of tensors. Received: {like!r}"
        )
    return names, [tf.convert_to_tensor(entry) for entry in entries]


def _of_rows(entry: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A number that is a sum over the rows; rows that are centered over the batch do not cancel in
    it."""
    if not (entry.dtype.is_floating or entry.dtype.is_integer or entry.dtype.is_bool):
        return tf.zeros([], dtype)
    rows = tf.cast(entry, dtype)
    return tf.reduce_sum(tf.abs(rows + 0.1) + tf.sin(3 * rows))


def _check_created(waiting: list[str]) -> None:
    """Raises ValueError for layers that were not built, other than those with variables that were
    waiting before."""
    created = [path for path in internals.variables_not_created() if path not in waiting]
    if created:
        raise ValueError(
            "loss must not create variables: build the model before the first step. Received: "
            f"{', '.join(created)}"
        )


def _check_entries(names: list[str], entries: list, main: int, is_mean: bool) -> None:
    for name, entry in zip(names, entries):
        if entry.shape.rank != 0 and (entry.shape.rank is None or entry.shape[0] is not None):
            raise ValueError(
                "Each entry that loss returns must be a scalar, or have a row for each example. "
                f"Received: {name} of shape {entry.shape}"
            )
    if not entries[main].dtype.is_floating:
        raise ValueError(
            f"loss must be a floating-point number. Received: {entries[main].dtype.name}"
        )
    if is_mean and entries[main].shape.rank != 0:
        raise ValueError(
            'loss must be a scalar if the reduction is "mean"; a tape differentiates the sum of '
            'losses of several examples, for which the reduction is "sum". Received: '
            f"{names[main]} of shape {entries[main].shape}"
        )


def _check_linear(names: list[str], entries: list, is_mean: bool, of_data: Callable) -> None:
    """Raises ValueError for a scalar that is a root, a power or the like of a number of the whole
    batch."""
    reduction = "mean" if is_mean else "sum"
    for name, entry in zip(names, entries):
        waiting = [entry] if entry.shape.rank == 0 else []
        seen: set[str] = set()
        while waiting:
            one = waiting.pop()
            numbers = [tensor for tensor in one.op.inputs if tensor.shape.rank == 0]
            if one.op.type in NOT_LINEAR and numbers and of_data(numbers[0]):
                raise ValueError(
                    f"{name} must be a {reduction} over the examples, as the reduction says; a "
                    f"function of such a number is none. Received: {one.op.type} of a number of "
                    "the whole batch"
                )
            if one.op.name not in seen:
                seen.add(one.op.name)
                waiting += numbers


def _check_assigned(state: CarriedState, of_data: dict[int, bool], graph: tf.Graph) -> None:
    """Raises ValueError for assignments that micro-batches cannot add up."""
    wrong = [v.path for i, v in enumerate(state.carried) if i not in state.draws and of_data[id(v)]]
    wrong += [one.name for one in direct_variables(graph, [], lambda tensor: True)]
    if wrong:
        raise ValueError(
            "loss must not assign variables from the examples, such as those of metrics: return "
            f"the values, and update the metrics afterwards. Received: {', '.join(wrong)}"
        )


def sum_dtype(entries: list) -> tf.DType:
    """The type in which the entries are added up."""
    types = {accumulation_dtype(entry.dtype) for entry in entries if entry.dtype.is_floating}
    return tf.float64 if tf.float64 in types else tf.float32

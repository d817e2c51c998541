"""Tracing a loss of one's own once: what it returns, and which variables it assigns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gradlab._batches import tensors_of
from gradlab.averaging import accumulation_dtype
from gradlab.training import _keras_internals as internals
from gradlab.training.direct import direct_variables
from gradlab.training.state import CarriedState, make_state, stateful_draws
from gradlab.training.tracing import Dependence

# The types of operations that make no mean of a mean, and no sum of a sum, whatever the numbers.
NOT_LINEAR = ("Exp", "Log", "Log1p", "Pow", "Reciprocal", "Rsqrt", "Sqrt", "Square")


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

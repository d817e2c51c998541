"""GradientAccumulator: the weighted mean of the gradients of several micro-batches, summed in
variables."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab._checks import floating_dtype, sequence
from gradlab._checks import variables as check_variables
from gradlab.averaging import accumulation_dtype, check_gradients, variable_name


class GradientAccumulator:
    """Sums gradients in variables of its own and returns their weighted mean.

    In pseudocode::

        zero():          sum = 0                          weight = 0
        add(g, w):       sum = sum + w * g                weight = weight + w
        mean():          sum / weight

    The mean divides by the weight that was actually added, never by a planned number of
    micro-batches, so a ragged tail counts by its true size. If micro-batches differ in size, pass
    the number of examples (or tokens) of each as its weight.

    It works eagerly, inside `tf.function`, and in a `tf.compat.v1` static graph. In a static graph,
    `zero`, `add` and `mean` return operations and tensors that a session runs. Use one
    `session.run` for each, in this order: within a single run, a graph does not execute its
    operations in the order in which they were built.

    Args:
        variables: the variables whose gradients are summed: tf.Variable or Keras variables.
        dtype: the type of the sums. None: float32 for half-precision variables, otherwise the
            variable's own type.

    Raises:
        ValueError: there are no variables, or the type of a sum is not a floating-point type.

    Example:
        >>> w = tf.Variable([1.0, 2.0], name="w")
        >>> accumulator = GradientAccumulator([w])
        >>> accumulator.add([tf.constant([3.0, 0.0])], weight=2)      # the mean gradient of two examples
        >>> accumulator.add([tf.constant([0.0, 3.0])], weight=1)      # the ragged tail: one example
        >>> accumulator.mean()[0].numpy()
        array([2., 1.], dtype=float32)
    """

    def __init__(self, variables: Sequence, dtype: tf.DType | str | None = None) -> None:
        sequence("variables", variables, of="variables")
        self._variables = list(variables)
        if not self._variables:
            raise ValueError(
                "GradientAccumulator needs at least one variable. Received: an empty list"
            )
        check_variables("variables", self._variables)
        floating_dtype("dtype", dtype)
        self._dtypes = [accumulation_dtype(v.dtype, dtype) for v in self._variables]
        for variable, wanted in zip(self._variables, self._dtypes):
            if not wanted.is_floating:
                raise ValueError(
                    "GradientAccumulator needs a floating-point type for the sum of "
                    f"{variable_name(variable)}. Received: {wanted.name}"
                )
        self._sums = [
            tf.Variable(tf.zeros(v.shape, wanted), trainable=False, name=f"{_leaf(v)}_sum")
            for v, wanted in zip(self._variables, self._dtypes)
        ]
        # In float32, the number of examples is exact up to 16.7 million per window.
        weight_dtype = tf.float64 if tf.float64 in self._dtypes else tf.float32
        self._weight = tf.Variable(tf.zeros([], weight_dtype), trainable=False, name="weight_sum")
        # A variable without any gradient has the mean None, as in the large batch, so that
        # optimizers skip it.
        self._reached = [False] * len(self._variables)

    @property
    def variables(self) -> list[tf.Variable]:
        """The accumulator's own variables: one sum for each model variable, and the weight."""
        return [*self._sums, self._weight]

    @property
    def weight(self) -> tf.Tensor:
        """The sum of the weights added since `zero()`, a scalar."""
        return tf.convert_to_tensor(self._weight)

    def zero(self) -> tf.Operation | None:
        """Set the sums and the weight to zero, to begin a new window.

        Returns:
            In a static graph, the operation that does it; otherwise None.
        """
        return _done([variable.assign(tf.zeros_like(variable)) for variable in self.variables])

    def add(self, gradients: Sequence, weight: float | tf.Tensor = 1.0) -> tf.Operation | None:
        """Add the gradients of one micro-batch's mean loss.

        Args:
            gradients: for each variable, in order: a tensor of its shape; a `tf.IndexedSlices`,
                whose rows are added in place, without a dense copy; or None, which counts as zero.
                Their type is that of the variable or that of its sum.
            weight: the weight of the micro-batch, usually its number of examples: a number of 0 or
                more, or a scalar tensor.

        Returns:
            In a static graph, the operation that adds the gradients; otherwise None.

        Raises:
            ValueError: the gradients differ from the variables in number, shape or type, a
                `tf.IndexedSlices` names a row that does not exist, or the weight is negative or not
                finite. Nothing is added then. Inside `tf.function` and in static graphs, what
                TensorFlow knows only when the operation runs is raised as a
                `tf.errors.InvalidArgumentError` with the same message.
        """
        sequence("gradients", gradients, of="gradients")
        gradients = list(gradients)
        check_gradients(gradients, self._variables, "GradientAccumulator.add", self._dtypes)
        weight, checks = _checked_weight(weight, self._weight.dtype)
        for gradient, variable in zip(gradients, self._variables):
            checks += _checks_of_gradient(gradient, variable)
        with tf.control_dependencies(checks):
            added = [
                self._add_to(total, gradient, weight)
                for total, gradient in zip(self._sums, gradients)
                if gradient is not None
            ]
        with tf.control_dependencies([*checks, *added]):
            added.append(self._weight.assign_add(weight))
        self._reached = [
            seen or gradient is not None for seen, gradient in zip(self._reached, gradients)
        ]
        return _done(added)

    def _add_to(self, total: tf.Variable, gradient: Any, weight: tf.Tensor) -> Any:
        """Adds weight * gradient to a sum."""
        share = tf.cast(weight, total.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.cast(gradient.values, total.dtype) * share
            return total.scatter_add(tf.IndexedSlices(rows, gradient.indices))
        return total.assign_add(tf.cast(gradient, total.dtype) * share)

    def mean(self) -> list:
        """The weighted mean of all gradients added since `zero()`.

        Returns:
            For each variable a tensor of its shape and type, or None if no gradient of this
            variable was ever added.

        Raises:
            ValueError: no gradients with a weight above 0 were added. Inside `tf.function` and in
                static graphs, the same message is raised as a `tf.errors.InvalidArgumentError` when
                the operation runs.
        """
        names = ", ".join(variable_name(variable) for variable in self._variables)
        nothing = f"mean() needs gradients: none with a weight above 0 were added since zero() for {names}"
        if not any(self._reached) or (tf.executing_eagerly() and self._weight.numpy() == 0):
            raise ValueError(nothing)
        with tf.control_dependencies([tf.debugging.assert_positive(self._weight, message=nothing)]):
            weight = tf.identity(self._weight)
        return [
            tf.cast(total / tf.cast(weight, total.dtype), variable.dtype) if reached else None
            for total, variable, reached in zip(self._sums, self._variables, self._reached)
        ]


def _checked_weight(weight: Any, dtype: tf.DType) -> tuple[tf.Tensor, list]:
    """The weight as a scalar of this type, and the operations that check it, in a graph.

    Raises:
        ValueError: it is not a number, or negative, or not finite in this type.
    """
    rule = "weight must be finite and 0 or more. Received:"
    if isinstance(weight, Real):
        if not 0 <= weight <= float(dtype.max):  # type: ignore[operator]
            raise ValueError(f"{rule} {weight!r}")
        return tf.constant(float(weight), dtype), []
    try:
        tensor = tf.convert_to_tensor(weight)
    except (TypeError, ValueError):
        raise ValueError(f"{rule} {weight!r}") from None
    if tensor.shape.rank not in (None, 0) or not (
        tensor.dtype.is_floating or tensor.dtype.is_integer
    ):
        raise ValueError(f"weight must be one real number. Received: {weight!r}")
    cast = tf.cast(tensor, dtype)
    return cast, _checks(tf.math.is_finite(cast) & (cast >= 0), rule, tensor)


def _checks_of_gradient(gradient: Any, variable: Any) -> list:
    """The operations that check, in a graph, what `check_gradients` cannot know.

    Raises:
        ValueError: it is known already that the gradient does not fit.
    """
    if gradient is None:
        return []
    shape = list(variable.shape)
    rule = f"GradientAccumulator.add: the gradient of {variable_name(variable)} must have"
    if not isinstance(gradient, tf.IndexedSlices):
        if tf.TensorShape(gradient.shape).is_fully_defined():
            return []
        found = tf.shape(gradient)
        return _checks(
            tf.reduce_all(tf.equal(found, shape)),
            f"{rule} the variable's shape {tuple(shape)}. Received:",
            found,
        )
    values = tf.convert_to_tensor(gradient.values)
    indices = tf.convert_to_tensor(gradient.indices)
    if not indices.dtype.is_integer:
        raise ValueError(f"{rule} integers as indices. Received: {indices.dtype.name}")
    found = tf.shape(values)
    expected = tf.concat([[tf.size(indices)], tf.constant(shape[1:], tf.int32)], 0)
    rows = f"{rule} one row of shape {tuple(shape[1:])} for each index. Received:"
    if values.shape.rank != len(shape) or indices.shape.rank not in (None, 1):
        raise ValueError(f"{rows} {values.shape} for indices of shape {indices.shape}")
    missing = tf.boolean_mask(indices, (indices < 0) | (indices >= shape[0]))[:1]
    return [
        *_checks(tf.reduce_all(tf.equal(found, expected)), rows, found),
        *_checks(
            tf.equal(tf.size(missing), 0),
            f"{rule} indices from 0 to {shape[0] - 1}. Received:",
            missing,
        ),
    ]


def _checks(is_right: tf.Tensor, rule: str, shown: tf.Tensor) -> list:
    """Raises ValueError with the rule and the value shown if it is known that something is wrong.

    Returns:
        In a graph, the operations that check it when they run.
    """
    if not tf.executing_eagerly():
        return [tf.debugging.Assert(is_right, [rule, shown], summarize=-1)]
    if not is_right:
        numbers = np.ravel(shown.numpy()).tolist()
        raise ValueError(f"{rule} {numbers[0] if len(numbers) == 1 else tuple(numbers)}")
    return []


def _done(operations: list) -> tf.Operation | None:
    """In a static graph, one operation that runs all of these; otherwise None, since program order
    runs them."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or graph.building_function:
        return None
    return tf.group(*operations)


def _leaf(variable: Any) -> str:
    return variable_name(variable).replace("/", "_")

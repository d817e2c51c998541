"""Arithmetic on gradients, such as their mean over towers: pure functions for graphs, tf.function
and eager code."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import tensorflow as tf

from gradlab import _checks


def average_gradients(
    tower_grads: Sequence[Sequence[tuple]], weights: Sequence | None = None
) -> list[tuple]:
    """Average each variable's gradient over the towers.

    For every variable, this stacks the towers' gradients along a new first axis and takes the mean
    over that axis. With weights it takes the weighted mean, sum(weight * gradient) / sum(weight),
    so that towers with different numbers of examples give the gradient of the whole batch. In a
    static graph the towers synchronize here: no gradient can be applied before the last tower has
    computed its own.

    Args:
        tower_grads: a list over towers of lists of (gradient, variable), as `compute_gradients`
            returns them. The towers share their variables and list them in the same order. A
            gradient is a tensor of its variable's shape, a `tf.IndexedSlices`, or None if the
            tower's loss does not depend on the variable.
        weights: the number of examples of each tower (numbers or scalar tensors), needed if these
            numbers differ. Each tower's gradient is then that of its own mean loss. A tower of
            weight 0 must still have finite gradients. None: all towers count equally.

    Returns:
        A list of (mean gradient, variable), with the variables of the first tower. None counts as
        zero, unless every tower has None: then the mean is None, and optimizers skip the variable.
        If every gradient is a `tf.IndexedSlices`, so is the mean, and it contains each row once.
        Half-precision gradients are averaged in float32 and returned in their own type.

    Raises:
        ValueError: there are no towers, the towers have different variables, a gradient differs
            from its variable in shape or type, the weights do not match the towers, or a weight is
            negative or not finite.

    Example:
        >>> w = tf.Variable([1.0, 2.0], name="w")
        >>> towers = [[(tf.constant([1.0, 1.0]), w)], [(tf.constant([4.0, 7.0]), w)]]
        >>> average_gradients(towers)[0][0].numpy()
        array([2.5, 4. ], dtype=float32)
        >>> average_gradients(towers, weights=[2, 1])[0][0].numpy()
        array([2., 3.], dtype=float32)
    """
    towers = _checked_towers(tower_grads)
    if not towers:
        raise ValueError(
            "average_gradients needs the gradients of at least one tower. Received: an empty list"
        )
    variables = [variable for _, variable in towers[0]]
    for number, tower in enumerate(towers):
        _check_same_variables(number, [variable for _, variable in tower], variables)
        check_gradients([gradient for gradient, _ in tower], variables, owner=f"tower {number}")
    if weights is not None:
        weights = _checked_weights(weights, len(towers))
    columns = zip(*([gradient for gradient, _ in tower] for tower in towers))
    return [(_mean(column, weights), variable) for column, variable in zip(columns, variables)]


def _mean(gradients: Sequence, weights: Sequence | None) -> tf.Tensor | tf.IndexedSlices | None:
    """The (weighted) mean of one variable's gradients over the towers."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    dtype = present[0].dtype
    compute = accumulation_dtype(dtype)
    if weights is None:
        weights = [1.0] * len(gradients)
        total = float(len(gradients))
    else:
        # Of a Python number, tf.cast would keep the digits of float32.
        weights = [
            tf.constant(float(weight), compute)
            if isinstance(weight, Real)
            else tf.cast(weight, compute)
            for weight in weights
        ]
        total = tf.add_n(weights)
    weights = [weight for weight, gradient in zip(weights, gradients) if gradient is not None]

    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        values = (
            tf.concat([tf.cast(g.values, compute) * w for g, w in zip(present, weights)], axis=0)
            / total
        )
        rows, sums = sum_rows(values, tf.concat([g.indices for g in present], axis=0))
        return tf.IndexedSlices(tf.cast(sums, dtype), rows, present[0].dense_shape)
    stack = tf.stack(
        [tf.cast(tf.convert_to_tensor(g), compute) * w for g, w in zip(present, weights)]
    )
    return tf.cast(tf.reduce_sum(stack, axis=0) / total, dtype)


def sum_rows(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum the values that have the same index: the different indices, and the sum for each of them.

    Optimizers and norms square each row, and the square of a sum is not the sum of the squares.
    """
    rows, position = tf.unique(indices)
    return rows, tf.math.unsorted_segment_sum(values, position, tf.size(rows))


def accumulation_dtype(dtype: tf.DType | str, chosen: tf.DType | str | None = None) -> tf.DType:
    """The type in which gradients are summed: the chosen one, or float32 for the half-precision
    types, otherwise their own type.

    >>> accumulation_dtype("bfloat16"), accumulation_dtype("float64")
    (tf.float32, tf.float64)
    >>> accumulation_dtype("float32", chosen="float64")
    tf.float64
    """
    dtype = tf.as_dtype(dtype)
    if chosen is not None:
        return tf.as_dtype(chosen)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def divide(gradients: Sequence, weight: tf.Tensor | None, variables: Sequence) -> list:
    """Divide sums of weighted gradients by their weight and cast each to its variable's type.

    Args:
        gradients: for each variable a sum of gradients, which may be a `tf.IndexedSlices`, or None,
            which stays None.
        weight: the sum of the weights, a scalar; a weight of 0 gives gradients of 0. None: only
            cast.
        variables: the variables that the gradients belong to, in the same order.
    """
    if weight is not None:
        gradients = [s if s is None else _divided(s, weight) for s in gradients]
    return [
        s if s is None else tf.cast(s, variable.dtype) for s, variable in zip(gradients, variables)
    ]


def _divided(total: tf.Tensor | tf.IndexedSlices, weight: tf.Tensor) -> Any:
    weight = tf.cast(weight, total.dtype)
    if isinstance(total, tf.IndexedSlices):
        values = tf.math.divide_no_nan(total.values, weight)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    return tf.math.divide_no_nan(total, weight)


def squared_norm(gradients: Sequence, dtype: tf.DType | str) -> tf.Tensor:
    """The sum of the squares of all elements of the gradients, computed in the given type: a
    scalar."""
    halves = [tf.zeros([], dtype)]
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            _, gradient = sum_rows(gradient.values, gradient.indices)
        if gradient is not None:
            halves.append(tf.nn.l2_loss(tf.cast(gradient, dtype)))
    return 2 * tf.add_n(halves)


def mean_norms(squared_norms: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """The norms of mean gradients, from the squared norms of share * mean gradient; 0 for a share
    of 0."""
    return tf.sqrt(tf.math.divide_no_nan(squared_norms, shares**2))


def all_finite(tensors: Sequence) -> tf.Tensor:
    """Whether no tensor contains NaN or inf: a boolean scalar. None is skipped."""
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors if t is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])


def variable_name(variable: Any) -> str:
    """The name of a variable for an error message: a Keras variable's path, a TensorFlow variable's
    name."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def check_gradients(
    gradients: Sequence, variables: Sequence, owner: str, dtypes: Sequence | None = None
) -> None:
    """Raise ValueError, naming the variable, unless each gradient is None or matches its variable
    in shape and type.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None.
        variables: the variables that they belong to, in the same order.
        owner: the source of the gradients, for the message, such as "tower 1".
        dtypes: for each variable, a second type that its gradient may have (that of an
            accumulator).
    """
    if len(gradients) != len(variables):
        names = ", ".join(variable_name(variable) for variable in variables)
        raise ValueError(
            f"{owner} must have one gradient for each of the {len(variables)} variables ({names}). "
            f"Received: {len(gradients)}"
        )
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        if gradient is None:
            continue
        if not hasattr(gradient, "shape") or not hasattr(gradient, "dtype"):
            raise ValueError(
                f"{owner}: the gradient of {variable_name(variable)} must be a tensor, "
                f"tf.IndexedSlices or None. Received: {gradient!r}"
            )
        if not tf.TensorShape(gradient.shape).is_compatible_with(variable.shape):
            raise ValueError(
                f"{owner}: the gradient of {variable_name(variable)} must have the variable's "
                f"shape {tuple(variable.shape)}. Received: {tuple(gradient.shape)}"
            )
        allowed = {tf.as_dtype(variable.dtype).name} | ({dtypes[i].name} if dtypes else set())
        if tf.as_dtype(gradient.dtype).name not in allowed:
            raise ValueError(
                f"{owner}: the gradient of {variable_name(variable)} must have the type "
                f"{' or '.join(sorted(allowed))}. Received: {tf.as_dtype(gradient.dtype).name}"
            )


def _check_same_variables(number: int, variables: list, expected: list) -> None:
    if len(variables) != len(expected):
        raise ValueError(
            f"Every tower must have the same variables: tower 0 has {len(expected)}. Received: "
            f"{len(variables)} from tower {number}"
        )
    for variable, first in zip(variables, expected):
        if variable is not first:
            raise ValueError(
                "Every tower must have the same variables in the same order: tower 0 has "
                f"{variable_name(first)}. Received: {variable_name(variable)} from tower {number}"
            )


def _checked_towers(tower_grads: Any) -> list[list]:
    of = "lists of (gradient, variable)"
    _checks.sequence("tower_grads", tower_grads, of)
    towers = []
    for tower in tower_grads:
        _checks.sequence("tower_grads", tower, of)
        towers.append(list(tower))
        for pair in towers[-1]:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(
                    f"tower_grads must be a list of {of}. Received: {pair!r} in one of them"
                )
            _checks.variables("tower_grads", [pair[1]])
    return towers


def _checked_weights(weights: Sequence, towers: int) -> list:
    _checks.sequence("weights", weights, "numbers")
    weights = list(weights)
    if len(weights) != towers:
        raise ValueError(
            f"weights must have one number for each of the {towers} towers. Received: {weights!r}"
        )
    known = [number for number in map(_number, weights) if number is not None]
    is_right = all(0 <= number < math.inf for number in known)
    if not is_right or (len(known) == towers and sum(known) <= 0):
        raise ValueError(f"weights must be finite, 0 or more, and not all 0. Received: {weights!r}")
    return weights


def _number(weight: Any) -> float | None:
    """A weight as a number; None if it is known only when the graph runs.

    Raises:
        ValueError: it is not one real number.
    """
    if isinstance(weight, Real):
        return float(weight)
    try:
        tensor = tf.convert_to_tensor(weight)
    except (TypeError, ValueError):
        raise ValueError(
            f"weights must be real numbers or scalar tensors. Received: {weight!r}"
        ) from None
    if tensor.shape.rank not in (None, 0) or not (
        tensor.dtype.is_floating or tensor.dtype.is_integer
    ):
        raise ValueError(f"weights must be real numbers or scalar tensors. Received: {weight!r}")
    return float(tensor) if tf.executing_eagerly() else None

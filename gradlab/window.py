"""The loop over a window's micro-batches inside one compiled function: the heart of gradlab."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab.averaging import accumulation_dtype


class Window(NamedTuple):
    """What one window gave.

    Attributes:
        gradients: for each variable the weighted mean over the window, in the variable's type, or None.
        losses: each micro-batch's weighted mean loss, shape (micro-batches,).
        weights: each micro-batch's weight, shape (micro-batches,).
    """

    gradients: list
    losses: tf.Tensor
    weights: tf.Tensor


def window_gradients(
    loss: Callable, variables: Sequence[tf.Variable], batch: Any, weights, microbatch_size, in_flight: int = 1
) -> Window:
    """The gradients of a batch's mean loss, computed one micro-batch at a time.

    In words::

        sum = 0
        for each micro-batch of microbatch_size examples (the last may be smaller):
            gradient = gradient of its mean loss
            sum = sum + its weight * gradient
        gradients = sum / weight of all

    Call it inside a `tf.function`: the loop is a `tf.while_loop`, so neither the number of micro-batches nor, when it
    is a tensor, their size makes TensorFlow trace again.

    Args:
        loss: a function (micro-batch, number) -> the loss of each example, shape (examples,). number counts the
            window's micro-batches from 0: an integer scalar.
        variables: what to differentiate by.
        batch: any nest of tensors with the same first dimension.
        weights: the examples' weights, shape (examples,); their sum must be above 0.
        microbatch_size: examples a micro-batch: an integer or an integer scalar tensor.
        in_flight: how many micro-batches may be under way at once. 1 is safe: the memory of one micro-batch, however
            many there are. Each further one adds the activations of a micro-batch and can save time where
            micro-batches are small.

    Returns:
        A `Window`.

    Example:
        >>> w = tf.Variable(2.0)
        >>> squares = lambda x, number: (w * x) ** 2
        >>> window = tf.function(lambda x: window_gradients(squares, [w], x, tf.ones_like(x), 2))
        >>> result = window(tf.constant([1.0, 2.0, 3.0]))
        >>> round(float(result.gradients[0]), 4), result.losses.numpy()      # 2 * w * mean(x ** 2)
        (18.6667, array([10., 36.], dtype=float32))
    """
    variables = list(variables)
    examples = tf.shape(weights)[0]
    steps = -(-examples // microbatch_size)
    dtypes = [accumulation_dtype(variable.dtype) for variable in variables]
    reached = [False] * len(variables)  # filled in while the loop's body is traced

    def body(step, sums, losses, step_weights):
        rows = slice(step * microbatch_size, tf.minimum((step + 1) * microbatch_size, examples))
        part, part_weights = tf.nest.map_structure(lambda tensor: tensor[rows], (batch, weights))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            weight = tf.reduce_sum(part_weights)
            each = tf.cast(loss(part, step), part_weights.dtype)
            mean = tf.math.divide_no_nan(tf.reduce_sum(each * part_weights), weight)
        gradients = tape.gradient(mean, variables)
        for i, gradient in enumerate(gradients):
            reached[i] = gradient is not None
        sums = [_add(total, gradient, weight) for total, gradient in zip(sums, gradients)]
        return step + 1, sums, losses.write(step, mean), step_weights.write(step, weight)

    zeros = [tf.zeros(variable.shape, dtype) for variable, dtype in zip(variables, dtypes)]
    arrays = [tf.TensorArray(weights.dtype, steps, element_shape=[]) for _ in range(2)]
    _, sums, losses, step_weights = tf.while_loop(
        lambda step, *_: step < steps, body, (tf.constant(0), zeros, *arrays), parallel_iterations=in_flight
    )
    total = tf.reduce_sum(weights)
    gradients = [
        tf.cast(s / tf.cast(total, s.dtype), variable.dtype) if seen else None
        for s, variable, seen in zip(sums, variables, reached)
    ]
    return Window(gradients, losses.stack(), step_weights.stack())


def _add(total, gradient, weight):
    """total + weight * gradient, without a dense copy of a sparse gradient."""
    if gradient is None:
        return total
    weight = tf.cast(weight, total.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.values, total.dtype) * weight
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], rows)
    return total + weight * tf.cast(gradient, total.dtype)

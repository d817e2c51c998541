"""Adaptive gradient clipping: limits the gradient of each unit to a share of the norm of its
weights."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradlab import _checks


def clip_adaptively(
    gradients: Sequence,
    variables: Sequence,
    clipping: float = 0.01,
    eps: float = 1e-3,
    scale: Any = 1.0,
) -> list:
    """Scales down gradients that are large compared to the weights: `|gradient| <= clipping *
    max(|weights|, eps)`.

    The rule applies to each unit on its own. A unit is all the weights of one output of a layer: a
    column of a dense kernel, a filter of a convolution, a whole bias or scale. Clip the mean over
    the window, once per update; clipping each micro-batch gives a different result.

    Args:
        gradients: for each variable a tensor of its shape, or None.
        variables: the variables.
        clipping: the largest ratio of the two norms, above 0: 0.01 for large batches, more for
            small ones.
        eps: a lower bound for the norm of the weights, so that weights of 0 can change.
        scale: the factor by which the gradients were multiplied, in mixed precision.

    Returns:
        The clipped gradients.

    Raises:
        ValueError: clipping or eps is not a finite number above 0.

    Source: Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
    Normalization (2021), section 4.1.

    Example:
        >>> w, g = tf.Variable([[3.0, 3.0], [4.0, 4.0]]), tf.constant([[0.0, 0.03], [5.0, 0.0]])
        >>> clip_adaptively([g], [w], clipping=0.1)[0].numpy()      # columns of norm 5: at most 0.5
        array([[0.  , 0.03],
               [0.5 , 0.  ]], dtype=float32)
    """
    _checks.positive_number("clipping", clipping)
    _checks.positive_number("eps", eps)
    return [
        None
        if gradient is None
        else _clipped(gradient, tf.convert_to_tensor(variable), clipping, eps, scale)
        for gradient, variable in zip(gradients, variables)
    ]


def _clipped(gradient, weights, clipping, eps, scale):
    # Of a Python number, tf.cast would keep the digits of float32.
    factor = tf.constant(clipping, gradient.dtype) * tf.cast(scale, gradient.dtype)
    largest = factor * tf.maximum(_norms(weights), tf.constant(eps, weights.dtype))
    norms = _norms(gradient)
    return tf.where(norms > largest, gradient * tf.math.divide_no_nan(largest, norms), gradient)


def _norms(tensor):
    """The norm of each unit, in a shape that broadcasts against the tensor."""
    inputs = list(range(tensor.shape.rank - 1)) or [0]
    return tf.sqrt(
        tf.reduce_sum(tensor**2, axis=inputs if tensor.shape.rank else None, keepdims=True)
    )

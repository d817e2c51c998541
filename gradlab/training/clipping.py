"""Adaptive gradient clipping: each unit's gradient is held to a share of its weights' norm."""

from collections.abc import Sequence

import tensorflow as tf

from gradlab import _checks


def clip_adaptively(gradients: Sequence, variables: Sequence, clipping: float = 0.01, eps: float = 1e-3, scale=1.0):
    """Scales down what is large beside the weights: |gradient| <= clipping * max(|weights|, eps), unit by unit.

    A unit is what one output of a layer depends on: a column of a dense kernel, a filter of a convolution, a whole bias
    or scale. Clip the mean over the window, once per update: clipping each micro-batch is another thing.

    Args:
        gradients: for each variable a tensor of its shape, or None.
        variables: the variables.
        clipping: the largest ratio, above 0: 0.01 for large batches, more for small ones.
        eps: the least norm that weights are taken to have, so that zeros can grow.
        scale: what the gradients were multiplied by, in mixed precision.

    Returns:
        The gradients, clipped.

    Raises:
        ValueError: clipping or eps is not a finite number above 0.

    Source: Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without Normalization (2021),
    section 4.1.

    Example:
        >>> w, g = tf.Variable([[3.0, 3.0], [4.0, 4.0]]), tf.constant([[0.0, 0.03], [5.0, 0.0]])
        >>> clip_adaptively([g], [w], clipping=0.1)[0].numpy()      # columns of norm 5: at most 0.5
        array([[0.  , 0.03],
               [0.5 , 0.  ]], dtype=float32)
    """
    _checks.positive_number("clipping", clipping)
    _checks.positive_number("eps", eps)
    return [
        None if gradient is None else _clipped(gradient, tf.convert_to_tensor(variable), clipping, eps, scale)
        for gradient, variable in zip(gradients, variables)
    ]


def _clipped(gradient, weights, clipping, eps, scale):
    largest = tf.cast(clipping * scale, gradient.dtype) * tf.maximum(_norms(weights), tf.cast(eps, weights.dtype))
    norms = _norms(gradient)
    return tf.where(norms > largest, gradient * tf.math.divide_no_nan(largest, norms), gradient)


def _norms(tensor):
    """The norm of each unit, in a shape that broadcasts against the tensor's."""
    inputs = list(range(tensor.shape.rank - 1)) or [0]
    return tf.sqrt(tf.reduce_sum(tensor**2, axis=inputs if tensor.shape.rank else None, keepdims=True))

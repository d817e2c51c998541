"""Batches as nests of tensors: how many examples they hold, and how they are cut into micro-batches."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def map_tensors(function: Callable, *nests: Any) -> Any:
    """Applies a function to the tensors of nests of one structure, in which None marks a missing tensor and stays."""
    return tf.nest.map_structure(lambda *tensors: None if tensors[0] is None else function(*tensors), *nests)


def tensors_of(batch: Any) -> list:
    """The tensors of a nest, without the missing ones."""
    return [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]


def examples_of(batch: Any, axis: int = 0) -> tf.Tensor:
    """The number of examples in a nest of tensors: an integer scalar tensor."""
    return tf.shape(tensors_of(batch)[0])[axis]


def microbatches(batch: Any, microbatch_size: int | tf.Tensor, axis: int = 0) -> tuple:
    """Cuts a batch into micro-batches, of which the last may be smaller.

    Args:
        batch: a nest of tensors with the same number of examples.
        microbatch_size: the examples of a micro-batch: an integer or an integer scalar tensor.
        axis: the axis along which the examples lie.

    Returns:
        The number of micro-batches, and a function (number) -> that micro-batch. If all sizes are Python numbers and
        there is no ragged tail, TensorFlow knows the micro-batches' shapes.
    """
    known = tensors_of(batch)[0].shape[axis]
    examples = examples_of(batch, axis) if known is None else known
    steps = -(-examples // microbatch_size)
    if axis == 0 and known is not None and isinstance(microbatch_size, int) and known % microbatch_size == 0:
        cut = map_tensors(lambda t: tf.reshape(t, tf.concat([[steps, microbatch_size], tf.shape(t)[1:]], 0)), batch)
        return steps, lambda step: map_tensors(lambda tensor: tensor[step], cut)

    def microbatch(step):
        rows = slice(step * microbatch_size, tf.minimum((step + 1) * microbatch_size, examples))
        return map_tensors(lambda tensor: tensor[(slice(None),) * axis + (rows,)], batch)

    return steps, microbatch

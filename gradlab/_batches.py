"""Batches as nests of tensors: how many examples they hold, and how they are cut into
micro-batches."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab import _checks


class Cut(NamedTuple):
    """Where a batch is cut into micro-batches of different sizes.

    Attributes:
        splits: the first example of each micro-batch, and the number of examples: shape
            (micro-batches + 1,).
        widths: for each tensor of the batch, flattened: the size of its second axis in each
            micro-batch, of shape (micro-batches,), or None to leave it as it is.
    """

    splits: tf.Tensor
    widths: list

    @property
    def sizes(self) -> tf.Tensor:
        """The number of examples of each micro-batch, shape (micro-batches,)."""
        return self.splits[1:] - self.splits[:-1]


def map_tensors(function: Callable, *nests: Any) -> Any:
    """Applies a function to the tensors of nests of one structure, in which None marks a missing
    tensor and stays."""
    return tf.nest.map_structure(
        lambda *tensors: None if tensors[0] is None else function(*tensors), *nests
    )


def tensors_of(batch: Any) -> list:
    """The tensors of a nest, without the missing ones."""
    return [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]


def as_tensor(value: Any) -> Any:
    """A tensor of an array; sparse and ragged tensors stay what they are."""
    if not _is_dense(value):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(
            f"A batch must hold arrays, tensors or nests of them. Received: {value!r}"
        ) from None


def times(tensor: tf.Tensor, factor: Any) -> tf.Tensor:
    """A tensor times a number or a tensor, in the tensor's type. Of a Python number, tf.cast would
    keep the digits of float32."""
    is_number = isinstance(factor, (int, float))
    return tensor * (factor if is_number else tf.cast(factor, tensor.dtype))


def examples_of(batch: Any, axis: int = 0) -> tf.Tensor:
    """The number of examples in a nest of tensors: an integer scalar tensor."""
    return length_of(tensors_of(batch)[0], axis)


def rows_of(tensor: Any, rows: slice, axis: int = 0) -> Any:
    """The examples from rows.start to rows.stop; a sparse or ragged tensor must have them along its
    first axis."""
    if isinstance(tensor, tf.SparseTensor):
        start = rows.start
        stop = rows.stop
        sizes = [
            tensor.dense_shape[i] if size is None else size for i, size in enumerate(tensor.shape)
        ]
        sizes[0] = tf.cast(stop - start, tf.int64)
        part = tf.sparse.slice(tensor, [tf.cast(start, tf.int64), *[0] * (len(sizes) - 1)], sizes)
        # tf.sparse.slice forgets the shape of an example, which layers must know.
        return tf.SparseTensor(
            part.indices, part.values, tf.stack([tf.cast(size, tf.int64) for size in sizes])
        )
    return tensor[(slice(None),) * axis + (rows,)]


def spread_rows(batch: Any, number: tf.Tensor) -> Any:
    """Some examples, spread over the batch, because neighbors are often alike; of sparse tensors
    the first ones."""
    if any(isinstance(tensor, tf.SparseTensor) for tensor in tensors_of(batch)):
        return map_tensors(lambda tensor: rows_of(tensor, slice(0, number)), batch)
    rows = (
        tf.range(tf.cast(number, tf.int64))
        * tf.cast(examples_of(batch), tf.int64)
        // tf.cast(number, tf.int64)
    )
    return map_tensors(lambda tensor: tf.gather(tensor, rows), batch)


def unequal_weights(weights: Any) -> Any:
    """Sample weights that change from example to example as well, unless all are equal."""

    def vary(tensor):
        if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
            return tensor
        shape = tf.shape(tensor)
        factors = 1 + 0.2 * tf.sin(7 * tf.cast(tf.range(shape[0]), tensor.dtype))
        varied = tensor * tf.reshape(factors, tf.concat([shape[:1], tf.ones_like(shape[1:])], 0))
        return tf.where(tf.reduce_min(tensor) < tf.reduce_max(tensor), varied, tensor)

    return map_tensors(vary, weights)


def spec_of(tensor: Any) -> tf.TypeSpec:
    """The type of tensors like this one, or of its type, with any number of examples."""
    shape = None if tensor.shape.rank is None else [None, *tensor.shape[1:]]
    if isinstance(tensor, (tf.SparseTensor, tf.SparseTensorSpec)):
        return tf.SparseTensorSpec(shape, tensor.dtype)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, tensor.dtype, tensor.ragged_rank, tensor.row_splits.dtype)
    if isinstance(tensor, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, tensor.dtype, tensor.ragged_rank, tensor.row_splits_dtype)
    return tf.TensorSpec(shape, tensor.dtype)


def equal_nests(one: Any, other: Any) -> bool:
    """Whether two nests have the same structure and equal leaves."""
    try:
        tf.nest.assert_same_structure(one, other)
    except (ValueError, TypeError):
        return False
    return tf.nest.flatten(one) == tf.nest.flatten(other)


def steps_of(examples: Any, microbatch_size: int | tf.Tensor | Cut) -> Any:
    """The number of micro-batches of a batch with so many examples."""
    if isinstance(microbatch_size, Cut):
        return tf.size(microbatch_size.splits) - 1
    return -(-examples // microbatch_size)


def microbatches(batch: Any, microbatch_size: int | tf.Tensor | Cut, axis: int = 0) -> tuple:
    """Cuts a batch into micro-batches, of which the last may be smaller.

    Args:
        batch: a nest of tensors with the same number of examples.
        microbatch_size: the examples of a micro-batch: an integer or an integer scalar tensor, or a
            `Cut`.
        axis: the axis along which the examples lie.

    Returns:
        The number of micro-batches, and a function (number) -> that micro-batch. If all sizes are
        Python numbers and there is no ragged tail, TensorFlow knows the micro-batches' shapes.

    Raises:
        ValueError: tensors of different lengths, or a microbatch_size that is not a positive
            integer. Lengths that TensorFlow does not know yet are compared when the operation runs:
            tf.errors.InvalidArgumentError.
    """
    if isinstance(microbatch_size, Cut):
        return _microbatches_as_cut(batch, microbatch_size)
    if not tf.is_tensor(microbatch_size):
        _checks.positive_integer("microbatch_size", microbatch_size)
        microbatch_size = int(microbatch_size)
    batch, known = _of_one_length(map_tensors(as_tensor, batch), axis)
    examples = examples_of(batch, axis) if known is None else known
    steps = steps_of(examples, microbatch_size)
    sizes_are_known = (
        known is not None and isinstance(microbatch_size, int) and known % microbatch_size == 0
    )
    if axis == 0 and sizes_are_known and all(map(_is_dense, tensors_of(batch))):
        cut = map_tensors(
            lambda t: tf.reshape(t, tf.concat([[steps, microbatch_size], tf.shape(t)[1:]], 0)),
            batch,
        )
        return steps, lambda step: map_tensors(lambda tensor: tensor[step], cut)

    def microbatch(step):
        rows = slice(step * microbatch_size, tf.minimum((step + 1) * microbatch_size, examples))
        return map_tensors(lambda tensor: rows_of(tensor, rows, axis), batch)

    return steps, microbatch


def _microbatches_as_cut(batch: Any, cut: Cut) -> tuple:
    """The number of micro-batches, and a function (number) -> that micro-batch, for a `Cut`."""

    def microbatch(step):
        rows = slice(cut.splits[step], cut.splits[step + 1])
        found = []
        for tensor, widths in zip_longest(tf.nest.flatten(batch), cut.widths):
            part: Any = None if tensor is None else rows_of(tensor, rows)
            found.append(part if widths is None else part[:, : widths[step]])
        return tf.nest.pack_sequence_as(batch, found)

    return steps_of(None, cut), microbatch


def _of_one_length(batch: Any, axis: int) -> tuple:
    """The batch, after a check that its tensors have the same number of examples, and that number
    if it is known."""
    rule = "All tensors of a batch must have the same number of examples. Received:"
    tensors = tensors_of(batch)
    lengths = [tensor.shape[axis] for tensor in tensors]
    if len({length for length in lengths if length is not None}) > 1:
        raise ValueError(f"{rule} {', '.join(map(str, lengths))}")
    if len(tensors) > 1 and None in lengths:
        counts = tf.stack([length_of(tensor, axis) for tensor in tensors])
        check = tf.debugging.Assert(
            tf.reduce_all(counts == counts[0]), [rule, counts], summarize=-1
        )
        with tf.control_dependencies([check] if check is not None else []):
            batch = map_tensors(tf.identity, batch)
    return batch, lengths[0]


def length_of(tensor: Any, axis: int = 0) -> tf.Tensor:
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[axis], tf.int32)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.shape(tensor)[axis]


def _is_dense(tensor: Any) -> bool:
    return not isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor))

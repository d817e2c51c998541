"""Losses of a table of logits that never exists as a whole, in either pass.

The logits of a language model, tokens times vocabulary, are often its largest activation. A
contrastive loss has a table of all pairs. Both are a product of rows and columns, of which a loss
needs sums over the columns only. So a block of columns at a time is computed, added to the sums and
dropped; the backward pass computes it again::

    forward:   for each block of classes:  z = inputs @ kernel[block] + bias[block];  sums += what the loss needs of z
    backward:  for each block of classes:  z again;  d = the loss's derivative by z
               gradient of inputs += d @ kernel[block]^T;  gradient of kernel[block] = inputs^T @ d

The sum of exponentials is kept as its logarithm (Milakov and Gimelshein 2018, arXiv 1805.02867). A
small block makes up for the products that are computed twice; a large one does not
(docs/guides/large_vocabulary.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab import _checks
from gradlab.averaging import accumulation_dtype

# The sums over the blocks are no part of a second derivative, which would be wrong
ONCE = "A loss in chunks can be differentiated once."


class Block(NamedTuple):
    """Some columns of a table.

    Attributes:
        logits: shape (rows, columns of the block).
        first: the number of its first column in the table.
        is_new: which of its columns no block before it had, shape (columns of the block,); None if
            all are new, as in all blocks but the last one.
    """

    logits: tf.Tensor
    first: int | tf.Tensor
    is_new: tf.Tensor | None

    def only_new(self, values: tf.Tensor, otherwise: float) -> tf.Tensor:
        """Values of the block's shape, with a number in the place of those that are not new."""
        if self.is_new is None:
            return values
        return tf.where(self.is_new, values, tf.constant(otherwise, values.dtype))

    def of_labels(self, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """For each row whether its label is among the new columns, and the label's column in the
        block, or 0."""
        column = labels - tf.cast(self.first, labels.dtype)
        is_here = (column >= 0) & (column < tf.shape(self.logits, labels.dtype)[1])
        if self.is_new is not None:
            is_here &= tf.gather(self.is_new, tf.where(is_here, column, 0))
        return is_here, tf.where(is_here, column, 0)


def cross_entropy(
    inputs: Any,
    kernel: Any,
    labels: Any,
    bias: Any = None,
    *,
    chunk: int,
    label_smoothing: float = 0.0,
    transposed: bool = False,
) -> tf.Tensor:
    """The cross-entropy of `inputs @ kernel + bias` with labels, a chunk of the classes at a time.

    Values and gradients are those of a dense layer and `keras.losses.sparse_categorical_crossentropy`
    with `from_logits=True`, to rounding. Memory holds `chunk` logits for each row instead of all.

    Args:
        inputs: what the last layer gets, shape (..., features).
        kernel: the weights of the last layer, shape (features, classes).
        labels: integers, shape (...). As on a GPU, the loss of one that is no class is NaN.
        bias: shape (classes,), or None.
        chunk: the classes whose logits exist at a time.
        label_smoothing: the part of each target that all classes share, from 0 to below 1.
        transposed: the shape of kernel is (classes, features), as that of an embedding.

    Returns:
        A loss for each label, in the type of the inputs, or float32 for half-precision types.

    Raises:
        ValueError: chunk is no positive integer, label_smoothing is not from 0 to below 1, or
            labels are no integers.
        LookupError: a second derivative was asked for.

    Example:
        >>> hidden, kernel = tf.ones([1, 3, 2]), tf.zeros([2, 1000])
        >>> losses = cross_entropy(hidden, kernel, tf.zeros([1, 3], tf.int32), chunk=100)
        >>> losses.shape.as_list(), round(float(losses[0, 0]), 4)    # the logarithm of 1,000
        ([1, 3], 6.9078)
    """
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing must be from 0 to below 1. Received: {label_smoothing!r}"
        )
    table = _Table(inputs, kernel, bias, chunk, transposed)
    smoothing = tf.constant(label_smoothing, table.dtype)
    share = smoothing / tf.cast(table.classes, table.dtype)  # of each class in each target

    def add(sums: tuple, block: Block) -> tuple:
        normalizer, total = sums
        new = block.only_new(block.logits, -float("inf"))
        both = tf.stack([normalizer, tf.reduce_logsumexp(new, axis=1)])
        if label_smoothing:
            total += tf.reduce_sum(block.only_new(block.logits, 0.0), axis=1)
        return tf.reduce_logsumexp(both, axis=0), total

    def loss(sums: tuple, own: tf.Tensor) -> tf.Tensor:
        normalizer, total = sums
        return normalizer - (1 - smoothing) * own - share * total

    def slope(sums: tuple, block: Block) -> tf.Tensor:
        probabilities = tf.exp(block.logits - sums[0][:, tf.newaxis])
        return probabilities - share if label_smoothing else probabilities

    return table.losses(labels, Rule((-float("inf"), 0.0), add, loss, slope, 1 - smoothing))


def sigmoid(
    inputs: Any, kernel: Any, labels: Any, bias: Any = None, *, chunk: int, transposed: bool = False
) -> tf.Tensor:
    """The loss of SigLIP: each logit of `inputs @ kernel + bias` says by itself whether its row and
    its column match.

    Source: Zhai et al. 2023, arXiv 2303.15343. Arguments: see `cross_entropy`.

    Returns:
        For each label the sum of the binary cross-entropies of its row.

    Raises:
        ValueError: chunk is no positive integer, or labels are no integers.

    Example:
        >>> one, other = tf.eye(2), tf.eye(2)
        >>> losses = sigmoid(10 * one, other, tf.range(2), bias=-5 * tf.ones(2), chunk=1, transposed=True)
        >>> [round(float(loss), 4) for loss in losses]
        [0.0134, 0.0134]
    """
    table = _Table(inputs, kernel, bias, chunk, transposed)

    def add(sums: tuple, block: Block) -> tuple:
        each = block.only_new(tf.nn.softplus(block.logits), 0.0)
        return (sums[0] + tf.reduce_sum(each, axis=1),)

    def loss(sums: tuple, own: tf.Tensor) -> tf.Tensor:
        return sums[0] - own  # softplus(-z) = softplus(z) - z

    def slope(sums: tuple, block: Block) -> tf.Tensor:
        return tf.sigmoid(block.logits)

    rule = Rule((0.0,), add, loss, slope, tf.ones([], table.dtype))
    return table.losses(labels, rule)


def argmax(
    inputs: Any, kernel: Any, bias: Any = None, *, chunk: int, transposed: bool = False
) -> tf.Tensor:
    """The class with the largest logit, for each row. Arguments: see `cross_entropy`.

    Returns:
        int32, shape (...): of equal logits the first, as `tf.argmax`.

    Example:
        >>> argmax([[1.0, 0.0]], [[0.0, 2.0, 1.0], [9.0, 0.0, 0.0]], chunk=2).numpy().tolist()
        [1]
    """
    table = _Table(inputs, kernel, bias, chunk, transposed)

    def better(number: int | tf.Tensor, best: tf.Tensor, at: tf.Tensor) -> tuple:
        block = table.block(number)[0]
        new = block.only_new(block.logits, -float("inf"))
        place = tf.argmax(new, axis=1, output_type=tf.int32)
        value = tf.reduce_max(new, axis=1)
        return tf.maximum(value, best), tf.where(value > best, block.first + place, at)

    count = tf.shape(table.rows)[0]
    begin = (tf.fill([count], tf.constant(-float("inf"), table.dtype)), tf.zeros([count], tf.int32))
    place = table.over_blocks(begin, better)[1]
    return tf.reshape(place, tf.shape(table.inputs)[:-1])


class Rule(NamedTuple):
    """A loss of a row of a table, as sums over its columns and the logit of its label.

    Attributes:
        begin: the numbers with which the sums begin.
        add: a function (sums, block) -> sums.
        loss: a function (sums over all blocks, logits of the labels) -> the loss of each row.
        slope: a function (sums over all blocks, block) -> the derivative of each row's loss by its
            logits, but for the label's.
        of_label: what the derivative by the label's logit is less than slope says, a scalar.
    """

    begin: tuple[float, ...]
    add: Callable
    loss: Callable
    slope: Callable
    of_label: tf.Tensor


class _Table:
    """A table of logits.

    Args:
        inputs, kernel, bias, chunk, transposed: as of `cross_entropy`.

    Attributes:
        inputs: as a tensor.
        rows: the inputs in a matrix.
        classes: the number of columns.
        dtype: the type of the sums.
    """

    def __init__(self, inputs: Any, kernel: Any, bias: Any, chunk: int, transposed: bool):
        _checks.positive_integer("chunk", chunk)
        self.inputs = tf.convert_to_tensor(inputs)
        self.rows = tf.reshape(self.inputs, [-1, self.inputs.shape[-1]])
        self.dtype = accumulation_dtype(self.inputs.dtype)
        self._kernel = tf.convert_to_tensor(kernel)
        self._axis = 0 if transposed else 1
        known = self._kernel.shape[self._axis]
        self.classes = tf.shape(self._kernel)[self._axis] if known is None else known
        self._chunk = tf.minimum(chunk, self.classes) if known is None else min(chunk, known)
        self._blocks = -(-self.classes // self._chunk)
        zeros = tf.zeros([self.classes], self._kernel.dtype)
        self._bias = zeros if bias is None else tf.convert_to_tensor(bias)

    def block(self, number: int | tf.Tensor) -> tuple[Block, tf.Tensor]:
        """A block, given its number, and the weights that it is a product of."""
        first = number * self._chunk
        is_new = None
        if isinstance(self.classes, int):
            size = min(self._chunk, self.classes - first)
        else:  # in a loop all blocks are of one size, so the last one goes back a little
            size = self._chunk
            first = tf.minimum(first, self.classes - size)
            is_new = first + tf.range(size) >= number * size
        # XLA needs the sizes, not the ends
        places = ([0, first], [-1, size]) if self._axis else ([first, 0], [size, -1])
        weights = tf.cast(tf.slice(self._kernel, *places), self.rows.dtype)
        bias = tf.cast(tf.slice(self._bias, [first], [size]), self.rows.dtype)
        logits = tf.matmul(self.rows, weights, transpose_b=not self._axis) + bias
        return Block(tf.cast(logits, self.dtype), first, is_new), weights

    def over_blocks(self, begin: tuple, add: Callable) -> tuple:
        """What `add` makes of all blocks: a function (number, *sums) -> sums.

        One block exists at a time, so the blocks wait for one another. Where their number is known,
        the graph has all of them: XLA and TensorFlow then write a gradient in place.
        """
        if isinstance(self.classes, int):
            sums = begin
            for number in range(self._blocks):
                with tf.control_dependencies(sums):
                    sums = add(number, *sums)
            return sums
        return tf.while_loop(
            lambda number, *_: number < self._blocks,
            lambda number, *sums: (number + 1, *add(number, *sums)),
            (0, *begin),
            parallel_iterations=1,
        )[1:]

    def losses(self, labels: Any, rule: Rule) -> tf.Tensor:
        """A loss for each label, whose backward pass computes the blocks again."""
        labels = tf.convert_to_tensor(labels)
        if not labels.dtype.is_integer:
            raise ValueError(f"labels must be integers. Received: {labels.dtype.name}")
        targets = tf.reshape(tf.cast(labels, tf.int64), [-1])

        def add(number: int | tf.Tensor, own: tf.Tensor, *sums: tf.Tensor) -> tuple:
            block = self.block(number)[0]
            is_here, column = block.of_labels(targets)
            found = tf.gather(block.logits, column, batch_dims=1)
            return (tf.where(is_here, found, own), *rule.add(sums, block))

        @tf.custom_gradient
        def compute(rows: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple:
            # A row without its label in any block keeps the NaN that it begins with
            begin = (float("nan"), *rule.begin)
            start = tuple(
                tf.fill(tf.shape(targets), tf.constant(each, self.dtype)) for each in begin
            )
            own, *sums = self.over_blocks(start, add)

            def backward(upstream: tf.Tensor) -> tuple:
                def slope(block: Block) -> tf.Tensor:
                    return rule.slope(tuple(sums), block) * upstream[:, tf.newaxis]

                return self._gradients(targets, slope, rule.of_label * upstream)

            return rule.loss(tuple(sums), own), backward

        return tf.reshape(compute(self.rows, self._kernel, self._bias), tf.shape(labels))

    def _gradients(self, targets: tf.Tensor, slope: Callable, of_label: tf.Tensor) -> tuple:
        """The gradients of the rows, of the kernel and of the bias."""
        rows = self.rows
        numbers = tf.range(tf.shape(rows, targets.dtype)[0])

        def add(
            number: int | tf.Tensor, of_rows: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor
        ) -> tuple:
            block, weights = self.block(number)
            is_here, column = block.of_labels(targets)
            exact = tf.tensor_scatter_nd_sub(
                block.only_new(slope(block), 0.0),
                tf.stack([numbers, column], axis=1),
                tf.where(is_here, of_label, 0.0),
            )
            rounded = tf.cast(exact, rows.dtype)  # as that of a layer with these inputs
            factors = (rows, rounded) if self._axis else (rounded, rows)
            of_kernel = tf.matmul(*factors, transpose_a=True)
            return (
                of_rows + tf.matmul(rounded, weights, transpose_b=bool(self._axis)),
                _added(kernel, block.first, of_kernel, self._axis),
                _added(bias, block.first, tf.reduce_sum(exact, axis=0), 0),
            )

        begin = tuple(map(tf.zeros_like, (rows, self._kernel, self._bias)))
        found = self.over_blocks(begin, add)
        return tuple(tf.raw_ops.PreventGradient(input=each, message=ONCE) for each in found)


def _added(whole: tf.Tensor, first: int | tf.Tensor, block: tf.Tensor, axis: int) -> tf.Tensor:
    """A tensor to which a block was added along an axis."""
    block = tf.cast(block, whole.dtype)
    if isinstance(first, int):  # written in place, and compiled by XLA
        before = [0] * axis
        rest = whole.shape.rank - axis - 1
        end = tf.shape(whole)[:axis], [first + block.shape[axis]], tf.shape(whole)[axis + 1 :]
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=whole,
            begin=[*before, first, *[0] * rest],
            end=tf.concat(end, axis=0),
            strides=[1] * whole.shape.rank,
            value=block,
        )
    columns = first + tf.range(tf.shape(block)[axis])
    if axis:
        return tf.transpose(_added(tf.transpose(whole), first, tf.transpose(block), 0))
    return tf.tensor_scatter_nd_add(whole, columns[:, tf.newaxis], block)

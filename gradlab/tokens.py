"""token_batches: texts of any length in micro-batches of about equal numbers of tokens, with little
padding."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from gradlab import _checks


def token_batches(
    dataset: tf.data.Dataset,
    tokens: int,
    sort_within: int = 256,
    *,
    buckets: Sequence[int] | None = None,
    padding: Any = 0,
) -> tf.data.Dataset:
    """Cuts texts of any length into micro-batches of at most `tokens` tokens, padding included.

    Each element of the result is a window: the effective batch behind one update. It holds
    sort_within texts that follow each other in the dataset, sorted by length, so texts of a
    micro-batch have almost the same length. Long texts come in micro-batches of few, short ones in
    micro-batches of many. A sum over all texts of the window is the same in any order: the update
    is that of the unsorted batch. Sorting a whole dataset would give short and long texts separate
    updates; here each update has both.

    Train with `gradlab.microbatched(model, "given")` or `gradlab.Trainer(...,
    microbatch_size="given")`, which take the micro-batches as they are. The loss must leave padding
    out: by a mask, such as an `Embedding` with `mask_zero=True` makes, by `ignore_class`, or by
    weights.

    Args:
        dataset: single texts, not batches: (x, y) or (x, y, sample_weight), or nests of them. What
            has a first axis of unknown size is a sequence, and is padded; a text's length is that
            of its longest sequence.
        tokens: the most tokens of a micro-batch, padding included: examples times length.
        sort_within: the number of texts of a window. The last window of an epoch may have fewer.
        buckets: the lengths to which texts are padded, in rising order. None: multiples of 8 up to
            64, then eight lengths between a power of two and the next one. Fewer lengths are fewer
            shapes, which XLA compiles one by one, and more padding.
        padding: the number that stands after the end of a sequence: one for all, or a nest of
            numbers like dataset's. For targets, it must be the number that the loss ignores, such
            as its `ignore_class`; for weights, 0.

    Returns:
        A dataset of windows: nests of ragged tensors of shape (micro-batches, texts, length, ...),
        or (micro-batches, texts, ...) for what is no sequence. It is a `tf.data.Dataset`: `shuffle`
        the texts before, and `prefetch` the windows after.

    Raises:
        ValueError: an argument out of range, or a dataset without texts of any length.
        tf.errors.InvalidArgumentError: while iterating, for a text that is longer than tokens or
            than the last bucket; in `fit` a ValueError.

    Example:
        >>> texts = tf.RaggedTensor.from_row_lengths(range(1, 22), [2, 9, 1, 5, 4])
        >>> dataset = tf.data.Dataset.from_tensor_slices((texts, [0, 1, 0, 1, 1]))
        >>> for x, y in token_batches(dataset, tokens=16, sort_within=5, buckets=[4, 8, 16]):
        ...     [microbatch.to_tensor().shape.as_list() for microbatch in x], y.to_list()
        ([[1, 16], [1, 8], [3, 4]], [[1], [1], [1, 0, 0]])
    """
    _checks.positive_integer("tokens", tokens)
    _checks.positive_integer("sort_within", sort_within)
    table = tf.constant(_checked_buckets(buckets, tokens))
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"dataset must be a tf.data.Dataset of single texts. Received: {dataset!r}"
        )
    sequences = [_is_sequence(spec) for spec in tf.nest.flatten(dataset.element_spec)]
    if not any(sequences):
        raise ValueError(
            "dataset must hold sequences of any length, of a shape that begins with None; "
            "tf.RaggedTensor.from_tensor(x, padding=0) takes the padding from texts that have "
            f"some. Received: {dataset.element_spec}"
        )
    fill = tf.nest.flatten(padding) if tf.nest.is_nested(padding) else [padding] * len(sequences)
    if len(fill) != len(sequences):
        raise ValueError(
            f"padding must be a number, or one for each of the {len(sequences)} parts of a text. "
            f"Received: {padding!r}"
        )
    weights = (
        sequences[-len(tf.nest.flatten(dataset.element_spec[2])) :]
        if _is_weighted(dataset.element_spec)
        else []
    )
    if any(weights) and any(number != 0 for number in fill[-len(weights) :]):
        raise ValueError(
            "padding must be 0 for sample_weight: give a number for each part. Received: "
            f"{padding!r}"
        )

    def cut(*window):
        window = window[0] if len(window) == 1 else window
        flat = tf.nest.flatten(window)
        lengths = tf.reduce_max(
            [_lengths(part) for part, is_one in zip(flat, sequences) if is_one], axis=0
        )
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        splits = _splits(_padded_length(tf.gather(lengths, order), table), tokens)
        cut = [
            _padded(tf.gather(part, order), splits, table, number)
            if is_one
            else tf.gather(part, order)
            for part, is_one, number in zip(flat, sequences, fill)
        ]
        return tf.nest.pack_sequence_as(
            window, [tf.RaggedTensor.from_row_splits(part, splits) for part in cut]
        )

    return dataset.ragged_batch(sort_within).map(cut, num_parallel_calls=1)


def _checked_buckets(buckets: Sequence[int] | None, tokens: int) -> list[int]:
    """The lengths to which texts are padded, up to the most tokens."""
    if buckets is None:
        lengths = [8]
        step = 8
        while lengths[-1] < tokens:
            lengths.append(lengths[-1] + step)
            step = max(8, 2 ** (lengths[-1].bit_length() - 1) // 8)
        return [min(length, tokens) for length in lengths]
    lengths = list(buckets)
    for length in lengths:
        _checks.positive_integer("buckets", length, otherwise="a sequence, each of them ")
    if not lengths or any(one >= other for one, other in pairwise(lengths)) or lengths[-1] > tokens:
        raise ValueError(
            f"buckets must rise, and end with {tokens} tokens at most, of which a micro-batch may "
            f"have no more. Received: {lengths}"
        )
    return lengths


def _is_weighted(spec: Any) -> bool:
    """Whether texts with this type are (x, y, sample_weight)."""
    return isinstance(spec, tuple) and len(spec) == 3


def _is_sequence(spec: Any) -> bool:
    return spec.shape.rank is not None and spec.shape.rank > 0 and spec.shape[0] is None


def _lengths(part: tf.RaggedTensor) -> tf.Tensor:
    return tf.cast(part.row_lengths(), tf.int32)


def _padded_length(lengths: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """The lengths to which texts of these lengths are padded."""
    too_long = tf.boolean_mask(lengths, lengths > table[-1])[:1]
    rule = tf.strings.format("A text must have at most {} tokens. Received:", table[-1])
    check = tf.debugging.Assert(tf.equal(tf.size(too_long), 0), [rule, too_long])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.gather(table, tf.searchsorted(table, lengths))


def _splits(lengths: tf.Tensor, tokens: int) -> tf.Tensor:
    """Where sorted texts are cut: a micro-batch ends when it is full, or when texts become a
    quarter shorter.

    Filling it with shorter texts saves micro-batches but pads more, which takes longer
    (benchmarks/NOTES.md).

    Args:
        lengths: the padded lengths of the texts, the longest first.
        tokens: the most tokens of a micro-batch.
    """
    texts = tf.size(lengths)

    def body(start, number, starts):
        alike = tf.math.count_nonzero(4 * lengths >= 3 * lengths[start], dtype=tf.int32)
        stop = tf.minimum(alike, start + tokens // lengths[start])
        return stop, number + 1, starts.write(number, stop)

    starts = tf.TensorArray(tf.int32, 1, dynamic_size=True, element_shape=[]).write(0, 0)
    found = tf.while_loop(
        lambda start, *_: start < texts, body, (0, 1, starts), parallel_iterations=1
    )
    return tf.cast(found[2].stack(), tf.int64)


def _padded(
    part: tf.RaggedTensor, splits: tf.Tensor, table: tf.Tensor, padding: Any
) -> tf.RaggedTensor:
    """The sequences, each padded to the length of its micro-batch."""
    of_microbatches = tf.RaggedTensor.from_row_splits(_lengths(part), splits)
    widths = _padded_length(tf.reduce_max(of_microbatches, axis=1), table)
    of_texts = tf.repeat(widths, of_microbatches.row_lengths())
    padding = tf.cast(padding, part.dtype)
    dense = part.to_tensor(padding)
    more = [
        [0, 0],
        [0, tf.reduce_max(widths) - tf.shape(dense)[1]],
        *[[0, 0]] * (dense.shape.rank - 2),
    ]
    dense = tf.pad(dense, more, constant_values=padding)
    return tf.RaggedTensor.from_tensor(dense, lengths=tf.cast(of_texts, tf.int64))

"""token_batches: what stands in the windows, against texts that plain Python sorts and cuts."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab import token_batches

TEXTS = tf.data.Dataset.from_tensor_slices(
    (tf.ragged.constant([[1, 2, 3], [4], [5, 6]]), [0, 1, 2])
)


def dataset_of(lengths):
    """Texts of these lengths, whose tokens say which text they are from, with their numbers as
    targets."""
    texts = tf.RaggedTensor.from_row_lengths(
        np.repeat(np.arange(len(lengths)) + 1, lengths), lengths
    )
    return tf.data.Dataset.from_tensor_slices((texts, tf.range(1, len(lengths) + 1)))


def cut_in_python(lengths, tokens, buckets):
    """The micro-batches of a window: lists of (text, padded length)."""
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = []
    while left:
        widths = [next(bucket for bucket in buckets if bucket >= lengths[i]) for i in left]
        count = min(tokens // widths[0], sum(width >= 0.75 * widths[0] for width in widths))
        found.append([(i + 1, widths[0]) for i in left[:count]])
        left = left[count:]
    return found


# Some windows have texts of one length only, and some texts are empty.
LENGTHS = np.concatenate(
    [np.random.default_rng(0).integers(0, 21, 150), [0] * 30, [20] * 30, range(21), [0, 1] * 9]
)


@pytest.mark.parametrize(
    ("lengths", "tokens", "sort_within", "buckets"),
    [
        (LENGTHS, 20, 12, (4, 8, 20)),
        (LENGTHS, 60, 5, (4, 8, 20)),
        (LENGTHS, 33, 1, (20,)),
        (LENGTHS, 47, 30, tuple(range(1, 21))),
        ([0], 20, 12, (4, 8, 20)),
    ],
)
def test_windows_hold_the_texts_in_order_of_length(lengths, tokens, sort_within, buckets):
    found = []
    for x, y in token_batches(dataset_of(lengths), tokens, sort_within, buckets=buckets):
        assert np.array_equal(x.row_splits, y.row_splits)
        values = x.flat_values.numpy()
        rows = y.flat_values.numpy()
        ends = x.values.row_splits.numpy()  # of each text
        found.append([])
        for first, last in itertools.pairwise(x.row_splits.numpy()):
            texts = [values[begin:end] for begin, end in itertools.pairwise(ends[first : last + 1])]
            assert sum(map(len, texts)) <= tokens
            found[-1].append([(row, len(text)) for row, text in zip(rows[first:last], texts)])
            for text, row in zip(texts, rows[first:last]):
                length = lengths[row - 1]
                assert list(text[:length]) == [row] * length and not np.any(text[length:])
    offsets = range(0, len(lengths), sort_within)
    expected = [cut_in_python(lengths[i : i + sort_within], tokens, buckets) for i in offsets]
    assert found == [
        [[(i + row, width) for row, width in part] for part in window]
        for i, window in zip(offsets, expected)
    ]


def test_the_default_buckets_are_few_and_pad_by_an_eighth_at_most():
    buckets = [*range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)]
    # The shortest and the longest text of each bucket.
    lengths = np.sort([1, *buckets, *(bucket + 1 for bucket in buckets[:-1])])
    widths = np.concatenate(
        [x.row_lengths(axis=2).flat_values for x, _ in token_batches(dataset_of(lengths), 512, 1)]
    )
    assert np.all(widths >= lengths) and np.all(widths - lengths < np.maximum(8, lengths / 8))
    assert sorted(set(widths)) == buckets
    # No more than tokens
    assert {int(x.bounding_shape()[2]) for x, _ in token_batches(dataset_of([30]), 30)} == {30}


def test_nests_sequences_of_their_own_lengths_and_paddings():
    def text(source, target):
        x = {"source": tf.fill([source, 2], 7.0), "about": tf.stack([source, target])}
        return x, tf.ones([target], tf.int64), tf.cast(target, tf.float32)

    dataset = tf.data.Dataset.from_tensor_slices(([3, 1, 2], [1, 6, 2])).map(text)
    padding = {"source": -1.0, "about": 0}, -100, 0.0
    (x, y, weights) = next(iter(token_batches(dataset, 8, buckets=[1, 4, 8], padding=padding)))
    assert x["about"].to_list() == [[[1, 6]], [[3, 1], [2, 2]]] and weights.to_list() == [
        [6.0],
        [1.0, 2.0],
    ]
    assert x["source"].to_list() == [
        [[[7.0, 7.0]]],
        [[[7.0, 7.0]] * 3 + [[-1.0, -1.0]], [[7.0, 7.0]] * 2 + [[-1.0, -1.0]] * 2],
    ]
    assert y.to_list() == [[[1] * 6 + [-100] * 2], [[1, -100, -100, -100], [1, 1, -100, -100]]]
    assert x["source"].dtype == tf.float32 and y.dtype == tf.int64


def test_a_dataset_of_texts_alone():
    only = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3]]))
    assert [x.to_list() for x in token_batches(only, 2, buckets=[1, 2])] == [[[[1, 2]], [[3]]]]


REFUSED = {
    "tokens": (lambda: token_batches(TEXTS, 0), "tokens must be a positive integer. Received: 0"),
    "sort_within": (
        lambda: token_batches(TEXTS, 8, 2.5),
        "sort_within must be a positive integer. Received: 2.5",
    ),
    "no dataset": (
        lambda: token_batches([[1]], 8),
        r"dataset must be a tf.data.Dataset of single texts. "
        r"Received: \[\[1\]\]",
    ),
    "padded texts": (
        lambda: token_batches(tf.data.Dataset.from_tensor_slices(np.ones([2, 3])), 8),
        r"dataset must hold sequences of any length, of a shape that begins with None; .* takes "
        r"the padding from texts "
        r"that have some. Received: TensorSpec\(shape=\(3,\).*",
    ),
    "buckets that fall": (
        lambda: token_batches(TEXTS, 8, buckets=[4, 2]),
        r"buckets must rise, and end with 8 tokens at most, .* may have no more. Received: \[4, "
        r"2\]",
    ),
    "no buckets": (
        lambda: token_batches(TEXTS, 8, buckets=[]),
        r"buckets must rise, .* Received: "
        r"\[\]",
    ),
    "buckets above tokens": (
        lambda: token_batches(TEXTS, 8, buckets=[9]),
        r"buckets must rise, "
        r".* Received: \[9\]",
    ),
    "a bucket that is no number": (
        lambda: token_batches(TEXTS, 8, buckets=["a"]),
        "buckets must be a sequence, each of them a positive integer. Received: 'a'",
    ),
    "a padding of weights": (
        lambda: token_batches(tf.data.Dataset.zip(TEXTS, TEXTS, TEXTS), 8, padding=1),
        "padding must be 0 for sample_weight: give a number for each part. Received: 1",
    ),
    "paddings": (
        lambda: token_batches(TEXTS, 8, padding=(0, 0, 0)),
        r"padding must be a number, or one for each of the 2 parts of a text. Received: \(0, 0, "
        r"0\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        call()


@pytest.mark.parametrize(("tokens", "buckets", "most"), [(2, None, 2), (8, [1, 2], 2)])
def test_a_text_that_is_too_long(tokens, buckets, most):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"A text must have at most {most} tokens. Received:"
    ):
        list(gradlab.token_batches(TEXTS, tokens, buckets=buckets))

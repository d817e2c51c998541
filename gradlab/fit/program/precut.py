"""microbatch_size="given": windows whose micro-batches the dataset has cut already, as
`gradlab.token_batches` does.

Such a window is a nest of ragged tensors whose first axis counts the micro-batches, and the second
their examples. A third one of any length holds the tokens of a text. A window without ragged
tensors is one micro-batch.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradlab._batches import Cut, examples_of, map_tensors, microbatches, tensors_of
from gradlab.fit.program.tracing import Traced

GIVEN = "given"
RULE = (
    "The loss {name} must not depend on padding, whose amount depends on how micro-batches are "
    "cut: give the outputs a mask (mask_zero=True), the loss ignore_class, or each token a weight "
    'with reduction="mean_with_sample_weight". Received: a loss that counts all positions alike'
)
RULE_OF_NUMBERS = (
    "The loss {name} must be a value for each text or token: gradlab cannot tell whether one "
    "number for a padded micro-batch depends on its padding. Received: one number"
)


def is_precut(microbatch_size: Any) -> bool:
    """Whether it is "given"; it may also be a tensor, a variable or a `Cut`, which cannot be
    compared with it."""
    return isinstance(microbatch_size, str) and microbatch_size == GIVEN


def specs_of_microbatch(specs: Any, microbatch_size: Any) -> Any:
    """The types of a micro-batch's tensors, for the types of a window: dense if it is cut
    already."""

    def dense(spec):
        return (
            tf.TensorSpec(spec.shape[1:], spec.dtype)
            if isinstance(spec, tf.RaggedTensorSpec)
            else spec
        )

    return map_tensors(dense, specs) if is_precut(microbatch_size) else specs


def join(window: Any, microbatch_size: Any) -> tuple[Any, Cut | None]:
    """The examples of a window one after the other, as dense tensors, and where the window was cut.

    Args:
        window: a nest of tensors as above.
        microbatch_size: "given"; otherwise the window is left as it is.

    Raises:
        ValueError: some of the tensors are ragged, but not all, or the step is not compiled.
        tf.errors.InvalidArgumentError: the tensors are cut in different places.
    """
    if not is_precut(microbatch_size):
        return window, None
    tensors = tensors_of(window)
    ragged = [tensor for tensor in tensors if isinstance(tensor, tf.RaggedTensor)]
    flat = tf.nest.flatten(window)
    if not ragged:
        return window, Cut(tf.stack([0, examples_of(window)]), [None] * len(flat))
    if len(ragged) < len(tensors):
        raise ValueError(
            "All tensors of a window must be cut into micro-batches, or none. Received: "
            f"{len(ragged)} of {len(tensors)} that are ragged"
        )
    if tf.executing_eagerly() and any(tensor.ragged_rank > 1 for tensor in ragged):
        raise ValueError(
            "run_eagerly must be False with texts of any length: shapes show which axes are "
            "padded only while TensorFlow traces the step. Received: True"
        )
    splits = ragged[0].row_splits
    rule = "x, y and sample_weight must be cut into micro-batches in the same places. Received:"
    checks = [
        tf.debugging.Assert(
            tf.reduce_all(tf.equal(tf.shape(other.row_splits), tf.shape(splits)))
            & tf.reduce_all(
                other.row_splits[: tf.size(splits)] == splits[: tf.size(other.row_splits)]
            ),
            [rule, other.row_splits],
            summarize=-1,
        )
        for other in ragged[1:]
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        splits = tf.cast(splits, tf.int32)
    widths = [None if tensor is None else _widths(tensor) for tensor in flat]
    return map_tensors(_rows, window), Cut(splits, widths)


def weighted(weight_fn: Callable | None, window: tuple, cut: Cut | None = None) -> tuple:
    """The window (x, y, sample_weight) with the weights of `weight_fn`, and where it is cut.

    If it is cut, the function sees one micro-batch at a time, padded as the dataset padded it.
    """
    if weight_fn is None:
        return window, cut
    x, y, sample_weight = window
    if cut is None:
        weights = weight_fn(x, y)
        widths = None
    else:
        weights, widths = _weights_of_each(weight_fn, x, y, cut)
        cut = Cut(cut.splits, [*cut.widths[:-1], widths])
    if sample_weight is not None:
        weights *= tf.cast(sample_weight, weights.dtype)
    return (x, y, weights), cut


def _weights_of_each(weight_fn: Callable, x: Any, y: Any, cut: Cut) -> tuple:
    """The weights of all examples, and their lengths in each micro-batch: those of the targets, or
    None."""
    flat = tf.nest.flatten((x, y))
    inputs = len(tf.nest.flatten(x))
    steps, microbatch = microbatches((x, y), Cut(cut.splits, cut.widths[: len(flat)]))
    shape = (first := weight_fn(*microbatch(0))).shape  # only its type is used
    padded = [i for i in (*range(inputs, len(flat)), *range(inputs)) if cut.widths[i] is not None]
    of_tokens = bool(padded) and shape.rank > 1 and shape[1] != 1
    size = [
        0,
        *(tf.shape(first)[i] if shape[i] is None else shape[i] for i in range(1, shape.rank)),
    ]
    if of_tokens:
        size[1] = tf.shape(flat[padded[0]])[1]

    def body(step, found):
        weights = weight_fn(*microbatch(step))
        if of_tokens:
            weights = tf.pad(
                weights, [[0, 0], [0, size[1] - tf.shape(weights)[1]], *[[0, 0]] * (shape.rank - 2)]
            )
        return step + 1, tf.concat([found, weights], 0)

    invariants = (tf.TensorShape([]), tf.TensorShape([None] * shape.rank))
    begin = (tf.constant(0), tf.zeros(size, first.dtype))
    weights = tf.while_loop(lambda step, _: step < steps, body, begin, invariants)[1]
    return weights, cut.widths[padded[0]] if of_tokens else None


def rows_to_predict(x: Any) -> tf.Tensor:
    """The number of examples, at least 1, of a batch that must not be cut, because it is predicted
    in order."""
    if any(isinstance(tensor, tf.RaggedTensor) for tensor in tensors_of(x)):
        raise ValueError(
            "x must be padded to be predicted: the texts of a window are sorted by length, so "
            "their predictions would be in another order. Received: a window of micro-batches"
        )
    return tf.maximum(1, examples_of(x))


def is_padded(size: Any) -> bool:
    """Whether micro-batches of this size hold texts, which are padded to another length in each of
    them."""
    return isinstance(size, Cut) and any(widths is not None for widths in size.widths)


def check_padding(traced: Traced) -> None:
    """Raises ValueError for a loss that depends on the length to which texts are padded."""
    counting = [term.name for term in traced.terms if term.counts_padding]
    for names, rule in (
        (counting, RULE),
        (traced.batch_valued + traced.adding_layers, RULE_OF_NUMBERS),
    ):
        if names:
            raise ValueError(rule.format(name=", ".join(names)))


def _widths(tensor: tf.RaggedTensor) -> tf.Tensor | None:
    """The length to which texts are padded in each micro-batch; None if there are no texts."""
    if tensor.ragged_rank == 1:
        return None
    return tf.cast(tf.reduce_max(tensor.row_lengths(axis=2), axis=1), tf.int32)


def _rows(tensor: tf.RaggedTensor) -> tf.Tensor:
    """The examples, all of them padded to one length."""
    return tensor.values.to_tensor() if tensor.ragged_rank > 1 else tensor.values

"""microbatch_size="given": windows whose micro-batches the dataset has cut already, as `gradlab.token_batches` does.

Such a window is a nest of ragged tensors whose first axis counts the micro-batches, and the second their examples. A
third one of any length holds the tokens of a text. A window without ragged tensors is one micro-batch.
"""

from typing import Any

import tensorflow as tf

from gradlab._batches import Cut, examples_of, map_tensors, tensors_of
from gradlab.training.tracing import Traced

GIVEN = "given"
RULE = (
    "The loss {name} must not depend on padding, of which there is more or less as micro-batches are cut: give the "
    "outputs a mask (mask_zero=True), the loss ignore_class, or each token a weight with "
    'reduction="mean_with_sample_weight". Received: a loss that counts all positions alike'
)


def is_given(microbatch_size: Any) -> bool:
    """Whether it is "given"; it may also be a tensor, a variable or a `Cut`, which cannot be compared with it."""
    return isinstance(microbatch_size, str) and microbatch_size == GIVEN


def specs_of_microbatch(specs: Any, microbatch_size: Any) -> Any:
    """The types of a micro-batch's tensors, for the types of a window: dense if it is cut already."""

    def dense(spec):
        return tf.TensorSpec(spec.shape[1:], spec.dtype) if isinstance(spec, tf.RaggedTensorSpec) else spec

    return map_tensors(dense, specs) if is_given(microbatch_size) else specs


def uncut(window: Any, microbatch_size: Any) -> tuple[Any, Cut | None]:
    """The examples of a window one after the other, as dense tensors, and where the window was cut.

    Args:
        window: a nest of tensors as above.
        microbatch_size: "given"; otherwise the window is left as it is.

    Raises:
        ValueError: some of the tensors are ragged, but not all.
        tf.errors.InvalidArgumentError: the tensors are cut in different places.
    """
    if not is_given(microbatch_size):
        return window, None
    tensors = tensors_of(window)
    ragged = [tensor for tensor in tensors if isinstance(tensor, tf.RaggedTensor)]
    flat = tf.nest.flatten(window)
    if not ragged:
        return window, Cut(tf.stack([0, examples_of(window)]), [None] * len(flat))
    if len(ragged) < len(tensors):
        raise ValueError(
            "All tensors of a window must be cut into micro-batches, or none. "
            f"Received: {len(ragged)} of {len(tensors)} that are ragged"
        )
    splits = ragged[0].row_splits
    rule = "x, y and sample_weight must be cut into micro-batches in the same places. Received:"
    checks = [
        tf.debugging.Assert(
            tf.reduce_all(tf.equal(tf.shape(other.row_splits), tf.shape(splits)))
            & tf.reduce_all(other.row_splits[: tf.size(splits)] == splits[: tf.size(other.row_splits)]),
            [rule, other.row_splits],
            summarize=-1,
        )
        for other in ragged[1:]
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        splits = tf.cast(splits, tf.int32)
    widths = [None if tensor is None else _widths(tensor) for tensor in flat]
    return map_tensors(_rows, window), Cut(splits, widths)


def with_weights(cut: Cut | None, x: Any, y: Any, sample_weight: Any) -> Cut | None:
    """Where a window was cut, after it got weights: those for tokens are as wide as the targets."""
    if cut is None or cut.widths[-1] is not None or sample_weight is None or sample_weight.shape.rank < 2:
        return cut
    inputs = len(tf.nest.flatten(x))
    known = [widths for widths in (*cut.widths[inputs:], *cut.widths[:inputs]) if widths is not None]
    return Cut(cut.splits, [*cut.widths[:-1], *known[:1]]) if known else cut


def rows_to_predict(x: Any) -> tf.Tensor:
    """The number of examples, at least 1, of a batch that must not be cut, because it is predicted in order."""
    if any(isinstance(tensor, tf.RaggedTensor) for tensor in tensors_of(x)):
        raise ValueError(
            "x must be padded to be predicted: the texts of a window are sorted by length, so their predictions would "
            "be in another order. Received: a window of micro-batches"
        )
    return tf.maximum(1, examples_of(x))


def is_padded(size: Any) -> bool:
    """Whether micro-batches of this size hold texts, which are padded to another length in each of them."""
    return isinstance(size, Cut) and any(widths is not None for widths in size.widths)


def check_padding(traced: Traced) -> None:
    """Raises ValueError for a loss that depends on the length to which texts are padded."""
    names = [term.name for term in traced.terms if term.counts_padding] + traced.numbers + traced.adding
    if names:
        raise ValueError(RULE.format(name=", ".join(names)))


def _widths(tensor: tf.RaggedTensor) -> tf.Tensor | None:
    """The length to which texts are padded in each micro-batch; None if there are no texts."""
    if tensor.ragged_rank == 1:
        return None
    return tf.cast(tf.reduce_max(tensor.row_lengths(axis=2), axis=1), tf.int32)


def _rows(tensor: tf.RaggedTensor) -> tf.Tensor:
    """The examples, all of them padded to one length."""
    return tensor.values.to_tensor() if tensor.ragged_rank > 1 else tensor.values

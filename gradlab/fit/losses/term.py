"""The loss of one output over one micro-batch, split into a sum and a divisor."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab.fit import keras_private as internals
from gradlab.fit.losses.chunked_head import ChunkedLoss
from gradlab.fit.losses.whole_batch import BatchLossInputs

# Losses whose targets are class numbers or texts, with another rank than the predictions.
OWN_LABELS = (
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.categorical_generalized_cross_entropy,
    keras.losses.ctc,
)


class Term(NamedTuple):
    """The loss of one output over one micro-batch.

    Attributes:
        total: the weighted sum of the losses of its examples, or of their elements: a scalar.
        divisor: the number by which Keras divides that sum for a batch like this one; 1 for the
            reduction "sum".
        kind: "examples" if the divisor is proportional to the number of examples, "own" if it
            depends on a mask or on sample weights, "sum" if there is none, "number" if the total is
            said to be a mean or a sum over examples.
        loss_weight: the factor of the term in the total loss.
        labels: None, or if labels are class numbers: (labels, number of classes, one more label
            that is allowed).
        name: the name of the loss.
        is_known: whether each example surely has a loss of its own, whatever the other examples of
            the batch.
        whole: what a loss over the whole batch sees of this micro-batch; None for other losses. Its
            total is then 0, or a number that has the loss' gradient.
        counts_padding: whether it depends on the length to which the examples of a micro-batch are
            padded.
    """

    total: tf.Tensor
    divisor: tf.Tensor
    kind: str
    loss_weight: Any = 1.0
    labels: tuple | None = None
    name: str = ""
    is_known: bool = True
    whole: BatchLossInputs | None = None
    counts_padding: bool = False


def check_reduction(loss: keras.losses.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise ValueError(
            f"{loss.name} must have a reduction for gradlab to know the large batch's loss: "
            "sum_over_batch_size, mean, mean_with_sample_weight or sum. Received: "
            f"{loss.reduction!r}"
        )


class SumAndDivisor(keras.losses.Loss):
    """A Keras loss that appends its `Term` to a list.

    Args:
        loss: the loss.
        loss_weight: the factor of the term.
        terms: the list.
        by_weight: whether to divide by the sum of the sample weights, whatever the loss' reduction
            says.
        of_batch: a function (loss, loss weight, (y_true, y_pred, sample_weight)) -> a scalar, which
            is called for a loss that does not surely give one value for each example. It appends
            the term instead.
    """

    def __init__(
        self,
        loss: keras.losses.Loss,
        loss_weight: Any,
        terms: list[Term],
        by_weight: bool,
        of_batch: Callable,
    ):
        check_reduction(loss)
        # "<lambda>" is no scope's name
        super().__init__(name=loss.name.strip("<>"), reduction="sum", dtype=loss.dtype)
        self._loss = loss
        self._loss_weight = loss_weight
        self._terms = terms
        self._divides_by_weight = by_weight
        self._of_batch = of_batch
        # For the types of targets and predictions: whether there is a row for each example
        self._proven: dict = {}
        self._divide_by = "mean_with_sample_weight" if by_weight else loss.reduction

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        if type(self._loss).__call__ is not keras.losses.Loss.__call__:
            return self._one_number(y_true, y_pred, sample_weight)
        # The reduction "sum" leaves it undivided
        total = super().__call__(y_true, y_pred, sample_weight)
        if not self._has_rows:
            return self._one_number(y_true, y_pred, sample_weight)
        mask = _both(internals.mask_of(y_pred), internals.mask_of(self._values))
        self._check_ranks(y_true, y_pred, mask, sample_weight)
        divisor, kind = self._divisor(mask, sample_weight, total.dtype)
        labels = self._labels(y_true, y_pred)
        is_known = internals.is_by_example(self._loss) or isinstance(self._loss, ChunkedLoss)
        padded = self._counts_padding(y_true, y_pred, mask, sample_weight)
        self._terms.append(
            Term(
                total,
                divisor,
                kind,
                self._loss_weight,
                labels,
                self.name,
                is_known,
                counts_padding=padded,
            )
        )
        return total

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        values = self._loss.call(y_true, y_pred)
        # A function may return 0
        self._values = values if tf.is_tensor(values) else tf.convert_to_tensor(values)
        self._has_rows = self._values.shape.rank != 0 and self._gives_rows(y_true, y_pred)
        return self._values

    def _gives_rows(self, y_true: Any, y_pred: Any) -> bool:
        """Whether the values surely have a row for each example: known of Keras' losses, proven by
        shape of others."""
        if internals.relates_examples(self._loss):
            return False
        if internals.is_by_example(self._loss):
            return not self._reduces_batch(y_pred)
        tensors = tf.nest.flatten((y_true, y_pred))
        if not all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in tensors):
            return True  # the rows of sparse and ragged tensors cannot be counted by shape
        types = tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)
        if types not in self._proven:
            self._proven[types] = all(
                self._has_rows_for(size, (y_true, y_pred)) for size in (11, 13)
            )
        return self._proven[types]

    def _reduces_batch(self, y_pred: Any) -> bool:
        """Whether an argument `axis` of one of Keras' losses names the first axis, or all of
        them."""
        axes = internals.function_of_loss(self._loss)[1].get("axis", -1)
        if axes is None:
            return True
        axes = axes if isinstance(axes, (list, tuple)) else [axes]
        return any(axis in (0, -(y_pred.shape.rank or 0)) for axis in axes)

    def _has_rows_for(self, size: int, batch: tuple) -> bool:
        """Whether TensorFlow infers that the values for so many examples have as many rows."""

        def values(*batch):
            with keras.StatelessScope():  # what the loss assigns counts for nothing
                return self._loss.call(*batch)

        specs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec([size, *tensor.shape[1:]], tensor.dtype), batch
        )
        try:
            shape = (
                tf.function(values, autograph=False)
                .get_concrete_function(*specs)
                .structured_outputs.shape
            )
        except Exception:  # of the loss, for this number of examples: nothing is proven
            return False
        return shape.rank is not None and shape.rank > 0 and shape[0] == size

    def _check_ranks(self, y_true: Any, y_pred: Any, mask: Any, sample_weight: Any) -> None:
        """Raises ValueError where TensorFlow would pair the examples with another dimension, if
        that has their number.

        Keras fails unless the batch is as large as the dimension; for micro-batches, `b` would have
        to be.
        """
        has_own_rank = internals.function_of_loss(self._loss)[0] in OWN_LABELS
        if (
            internals.is_by_example(self._loss)
            and not has_own_rank
            and not _have_one_rank(y_true, y_pred)
        ):
            raise ValueError(
                f"The targets of {self.name} must have as many dimensions as the predictions, "
                f"whose shape is {_shape(y_pred)}. Received: targets of shape {_shape(y_true)}"
            )
        for name, factor in ("sample_weight", sample_weight), ("mask", mask):
            if (
                factor is not None
                and factor.shape.rank != 0
                and not _have_one_rank(self._values, factor)
            ):
                raise ValueError(
                    f"{name} must have as many dimensions as the values of {self.name}, whose "
                    f"shape is {_shape(self._values)}. Received: a shape of {_shape(factor)}"
                )

    def _one_number(self, y_true, y_pred, sample_weight) -> tf.Tensor:
        """The loss as Keras computes it, for a batch as a whole."""
        if self._divides_by_weight:
            raise ValueError(
                f"{self.name} must give a loss for each example if weight_fn weighs them. "
                "Received: one number for the whole batch"
            )
        return self._of_batch(self._loss, self._loss_weight, (y_true, y_pred, sample_weight))

    def _divisor(self, mask, sample_weight, dtype) -> tuple[tf.Tensor, str]:
        if self._divide_by == "sum":
            return tf.ones([], dtype), "sum"
        elements = tf.cast(tf.size(self._values), dtype)
        if self._divide_by == "mean_with_sample_weight" and (
            mask is not None or sample_weight is not None
        ):
            weights = tf.cast(mask if sample_weight is None else sample_weight, dtype)
            if mask is not None and sample_weight is not None:
                mask, weights = internals.same_rank(tf.cast(mask, dtype), weights)
                weights = mask * weights
            return tf.reduce_sum(weights), "own"
        if mask is not None:
            mask = tf.cast(mask, dtype)
            return elements * tf.reduce_mean(mask), "own"
        return elements, "examples"

    def _counts_padding(self, y_true, y_pred, mask, sample_weight) -> bool:
        """Whether there are positions of texts, but not a value for each of them with a mask or
        weights of its own."""
        axes = lengths_of(y_pred)
        if not axes:  # the CTC loss finds the lengths of its targets by itself
            return (
                bool(lengths_of(y_true))
                and internals.function_of_loss(self._loss)[0] is not keras.losses.ctc
            )
        if self._values.shape.rank is None or self._values.shape.rank <= axes[-1]:
            return True
        weighted = self._divide_by in ("sum", "mean_with_sample_weight") and weighs(
            sample_weight, axes
        )
        return mask is None and not weighted

    def _labels(self, y_true, y_pred) -> tuple | None:
        if isinstance(self._loss, ChunkedLoss):
            return y_true, self._loss.head.classes, self._loss.ignore_class
        function, arguments = internals.function_of_loss(self._loss)
        if (
            function is not keras.losses.sparse_categorical_crossentropy
            or not internals.is_by_example(self._loss)
        ):
            return None  # a `call` of its own may change the labels first
        return (
            y_true,
            y_pred.shape[arguments.get("axis", -1)],
            getattr(self._loss, "ignore_class", None),
        )


def lengths_of(tensors: Any) -> list[int]:
    """The axes of a tensor or a nest of them, other than the first one, along which a size is not
    known."""
    axes: set[int] = set()
    for tensor in tf.nest.flatten(tensors):
        sizes = [0, None] if tensor.shape.rank is None else tensor.shape
        axes |= {axis for axis, size in enumerate(sizes) if axis and size is None}
    return sorted(axes)


def weighs(sample_weight: Any, axes: list[int]) -> bool:
    """Whether there is a weight for each position along some axes; a size of 1 would be
    broadcast."""
    if sample_weight is None or len(sample_weight.shape) <= axes[-1]:
        return False
    return all(sample_weight.shape[axis] != 1 for axis in axes)


def _have_one_rank(one: Any, other: Any) -> bool:
    """Whether Keras gives both the same rank, as far as is known; nests have none."""
    if any(not tf.is_tensor(each) or each.shape.rank is None for each in (one, other)):
        return True
    return len({tensor.shape.rank for tensor in internals.same_rank(one, other)}) == 1


def _shape(tensor: tf.Tensor) -> tuple:
    """The shape for any number of examples: it may be known for a few that gradlab looks at."""
    return (None, *tensor.shape[1:])


def _both(one, other):
    """Where both masks let an element through; None is no mask."""
    if one is None or other is None:
        return other if one is None else one
    return tf.cast(one, tf.bool) & tf.cast(other, tf.bool)

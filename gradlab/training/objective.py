"""A Keras loss split into sums and divisors, so that micro-batches add up to the large batch.

Keras gives one number for each batch, already divided: by the number of examples, by the number of elements that a mask
lets through, or by the sum of the sample weights, depending on the loss' `reduction`. The mean of the micro-batches'
numbers is the large batch's only if every micro-batch divides by the same number. So gradlab keeps the two apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab.averaging import accumulation_dtype
from gradlab.training import _keras_internals as internals


class Term(NamedTuple):
    """The loss of one output over one micro-batch.

    Attributes:
        total: the weighted sum of the losses of its examples, or of their elements: a scalar.
        divisor: the number by which Keras divides that sum for a batch like this one; 1 for the reduction "sum".
        kind: "examples" if the divisor is proportional to the number of examples, "own" if it depends on a mask or on
            sample weights, "sum" if there is none.
        labels: None, or if labels are class numbers: (labels, number of classes, one more label that is allowed).
    """

    total: tf.Tensor
    divisor: tf.Tensor
    kind: str
    labels: tuple | None = None


class Objective:
    """The losses of a compiled model, as sums and divisors.

    Args:
        loss, loss_weights: as for `keras.Model.compile`.
        output_names: the names of the model's outputs, to find losses by name.
        by_weight: divide every loss by the sum of its sample weights, whatever its reduction says.

    Raises:
        ValueError: a loss that is no sum over examples: `reduction=None`, or a reduction of its own.
    """

    def __init__(
        self, loss: Any, loss_weights: Any = None, output_names: list[str] | None = None, by_weight: bool = False
    ):
        self._terms: list[Term] = []
        self._divisors: list | None = None
        # A model without layers: its compute_loss assigns the losses to the outputs by Keras' own rules.
        self._losses = keras.Model()
        self._losses.output_names = output_names
        if loss is not None:
            loss = keras.tree.map_structure(lambda one: one and _SumAndDivisor(one, self._take, by_weight), loss)
            self._losses.compile(loss=loss, loss_weights=loss_weights, jit_compile=False)
        self._empty = loss is None

    def __call__(
        self, y: Any, y_pred: Any, sample_weight: Any, added: list, examples: Any, divisors: list | None = None
    ) -> tuple[tf.Tensor, list[Term]]:
        """The loss of one micro-batch.

        Args:
            y, y_pred, sample_weight: its targets, predictions and weights.
            added: the scalars that layers added to the loss, each a mean over the examples.
            examples: the number of examples, a scalar tensor.
            divisors: the divisors of the whole window, one for each term, to compute the micro-batch's share in the
                window's loss. None: its own divisors.

        Returns:
            (loss, terms): the scalar loss, and its `Term`s. Losses added by layers are the last term.
        """
        self._terms, self._divisors = [], divisors
        losses = [] if self._empty else [self._losses.compute_loss(None, y, y_pred, sample_weight)]
        if added:
            dtype = accumulation_dtype(keras.config.floatx())
            total = tf.add_n([tf.cast(loss, dtype) for loss in added])
            examples = tf.cast(examples, dtype)
            losses.append(self._take(Term(total * examples, examples, "examples")))
        if not losses:
            raise ValueError("There is no loss to compute: give one to compile, or add one in a layer. Received: None")
        return tf.add_n(losses), self._terms

    def _take(self, term: Term) -> tf.Tensor:
        """Keeps a term, and returns its share in the loss."""
        divisor = term.divisor if self._divisors is None else self._divisors[len(self._terms)]
        self._terms.append(term)
        return tf.math.divide_no_nan(term.total, tf.cast(divisor, term.total.dtype))


def common_divisor(terms: list[Term]) -> tf.Tensor | None:
    """The number by which the loss of a micro-batch with these terms was divided; None if the terms differ in it."""
    kinds = {term.kind for term in terms}
    if kinds == {"own"}:
        return terms[0].divisor if len(terms) == 1 else None
    return terms[0].divisor if len(kinds) == 1 else None


class _SumAndDivisor(keras.losses.Loss):
    """A Keras loss that passes its sum and its divisor to a function, and returns the function's result."""

    def __init__(self, loss: Any, take: Callable[[Term], tf.Tensor], by_weight: bool):
        loss = keras.losses.get(loss)
        if not isinstance(loss, keras.losses.Loss):
            name = getattr(loss, "__name__", type(loss).__name__).strip("<>")  # a scope cannot be named "<lambda>"
            loss = internals.loss_of_function(loss, name)
        if loss.reduction in (None, "none"):
            raise ValueError(
                f"{loss.name} must have a reduction for gradlab to know the large batch's loss: sum_over_batch_size, "
                f"mean, mean_with_sample_weight or sum. Received: {loss.reduction!r}"
            )
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(f"A loss must reduce as keras.losses.Loss does. Received: {type(loss).__name__}.__call__")
        super().__init__(name=loss.name, reduction="sum", dtype=loss.dtype)
        self._loss, self._hand_in = loss, take
        self._divide_by = "mean_with_sample_weight" if by_weight else loss.reduction

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        total = super().__call__(y_true, y_pred, sample_weight)  # the reduction "sum" leaves it undivided
        mask = _both(internals.mask_of(y_pred), internals.mask_of(self._values))
        divisor, kind = self._divisor(mask, sample_weight, total.dtype)
        return self._hand_in(Term(total, divisor, kind, self._labels(y_true, y_pred)))

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        self._values = self._loss.call(y_true, y_pred)
        if self._values.shape.rank == 0:
            raise ValueError(
                f"{self.name} must give a loss for each example, so that micro-batches add up to the large batch. "
                "Received: one number for the whole batch"
            )
        return self._values

    def _divisor(self, mask, sample_weight, dtype) -> tuple[tf.Tensor, str]:
        if self._divide_by == "sum":
            return tf.ones([], dtype), "sum"
        elements = tf.cast(tf.size(self._values), dtype)
        if self._divide_by == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
            weights = tf.cast(mask if sample_weight is None else sample_weight, dtype)
            if mask is not None and sample_weight is not None:
                mask, weights = internals.same_rank(tf.cast(mask, dtype), weights)
                weights = mask * weights
            return tf.reduce_sum(weights), "own"
        if mask is not None:
            mask = tf.cast(mask, dtype)
            return elements * tf.reduce_mean(mask), "own"
        return elements, "examples"

    def _labels(self, y_true, y_pred) -> tuple | None:
        function, arguments = internals.function_of_loss(self._loss)
        if function is not keras.losses.sparse_categorical_crossentropy:
            return None
        return y_true, y_pred.shape[arguments.get("axis", -1)], getattr(self._loss, "ignore_class", None)


def _both(one, other):
    """Where both masks let an element through; None is no mask."""
    if one is None or other is None:
        return other if one is None else one
    return tf.cast(one, tf.bool) & tf.cast(other, tf.bool)

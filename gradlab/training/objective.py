"""A Keras loss taken apart into sums and what they divide by, so that micro-batches add up to the large batch.

Keras gives each batch one number, already divided: by its examples, by the elements that a mask lets through, or by
the sum of its sample weights, as each loss' `reduction` says. The mean of micro-batches' numbers is the large batch's
only when every micro-batch divides by the same. So gradlab keeps the two apart.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

# Keras exports neither; they are what compile() itself wraps functions with, and how losses and weights are aligned.
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper

from gradlab.averaging import accumulation_dtype


class Term(NamedTuple):
    """One output's loss over one micro-batch.

    Attributes:
        total: the weighted sum of the losses of its examples (or of their elements), a scalar.
        divisor: what Keras divides that by in a batch like this one; 1 for the reduction "sum".
        kind: "examples" when the divisor is proportional to the number of examples, "own" when it depends on a mask or
            on sample weights, "sum" when there is none.
        labels: None, or where labels are class numbers: (the labels, the number of classes, one more label allowed).
    """

    total: tf.Tensor
    divisor: tf.Tensor
    kind: str
    labels: tuple | None = None


class Objective:
    """The losses of a compiled model, in parts.

    Args:
        loss, loss_weights: as for `keras.Model.compile`.
        output_names: the model's, to find losses by name.
        by_weight: divide every loss by the sum of its sample weights, whatever its reduction says.

    Raises:
        ValueError: a loss that has no sum over examples: `reduction=None`, or its own way of reducing.
    """

    def __init__(self, loss, loss_weights=None, output_names=None, by_weight: bool = False):
        self._terms: list[Term] = []
        self._divisors: list | None = None
        # A model without layers: its compute_loss finds the loss for each output by Keras' own rules.
        self._losses = keras.Model()
        self._losses.output_names = output_names
        if loss is not None:
            loss = keras.tree.map_structure(lambda one: one and _Parts(one, self._take, by_weight), loss)
            self._losses.compile(loss=loss, loss_weights=loss_weights, jit_compile=False)
        self._empty = loss is None

    def __call__(self, y, y_pred, sample_weight, added: list, examples, divisors: list | None = None):
        """One micro-batch's loss.

        Args:
            y, y_pred, sample_weight: the micro-batch's.
            added: the scalars that layers added to the loss, each a mean over the examples.
            examples: their number, a scalar tensor.
            divisors: the window's, one a term, to share in its loss; None: the micro-batch's own.

        Returns:
            (loss, terms): the scalar loss, and its `Term`s; added losses come last, as one.
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

    def _take(self, term: Term):
        """Notes a term and gives its share in the loss."""
        divisor = term.divisor if self._divisors is None else self._divisors[len(self._terms)]
        self._terms.append(term)
        return tf.math.divide_no_nan(term.total, tf.cast(divisor, term.total.dtype))


def common_divisor(terms: list[Term]):
    """What the loss of a micro-batch with these terms was divided by, or None when its terms differ in that."""
    kinds = {term.kind for term in terms}
    if kinds == {"own"}:
        return terms[0].divisor if len(terms) == 1 else None
    return terms[0].divisor if len(kinds) == 1 else None


def label_rules(y, terms: list[Term]) -> list[tuple]:
    """Which targets are class numbers: (their place in y flattened, the number of classes, one more label or None)."""
    return [
        (i, *term.labels[1:])
        for term in terms
        if term.labels
        for i, target in enumerate(tf.nest.flatten(y))
        if target is term.labels[0]
    ]


def wrong_labels(y, rules: list[tuple]) -> list[tuple]:
    """For each of the rules: (its sentence, the first label that breaks it, shape (1,) or (0,) when none does)."""
    found = []
    for i, classes, also in rules:
        labels = tf.cast(tf.nest.flatten(y)[i], tf.int64)
        right = (labels >= 0) & (labels < classes)
        if also is not None:
            right |= labels == also
        rule = f"labels must be classes from 0 to {classes - 1}. Received:"
        found.append((rule, tf.boolean_mask(labels, ~right)[:1]))
    return found


class _Parts(keras.losses.Loss):
    """A Keras loss that hands its sum and its divisor to `take`, and returns what that gives."""

    def __init__(self, loss, take, by_weight: bool):
        loss = keras.losses.get(loss)
        if not isinstance(loss, keras.losses.Loss):
            name = getattr(loss, "__name__", type(loss).__name__).strip("<>")  # "<lambda>" is no name for a scope
            loss = LossFunctionWrapper(loss, name=name)
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

    def __call__(self, y_true, y_pred, sample_weight=None):
        total = super().__call__(y_true, y_pred, sample_weight)  # "sum": not divided yet
        mask = _both(getattr(y_pred, "_keras_mask", None), getattr(self._values, "_keras_mask", None))
        divisor, kind = self._divisor(mask, sample_weight, total.dtype)
        return self._hand_in(Term(total, divisor, kind, self._labels(y_true, y_pred)))

    def call(self, y_true, y_pred):
        self._values = self._loss.call(y_true, y_pred)
        if self._values.shape.rank == 0:
            raise ValueError(
                f"{self.name} must give a loss for each example, so that micro-batches add up to the large batch. "
                "Received: one number for the whole batch"
            )
        return self._values

    def _divisor(self, mask, sample_weight, dtype) -> tuple:
        if self._divide_by == "sum":
            return tf.ones([], dtype), "sum"
        elements = tf.cast(tf.size(self._values), dtype)
        if self._divide_by == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
            weights = tf.cast(mask if sample_weight is None else sample_weight, dtype)
            if mask is not None and sample_weight is not None:
                mask, weights = squeeze_or_expand_to_same_rank(tf.cast(mask, dtype), weights)
                weights = mask * weights
            return tf.reduce_sum(weights), "own"
        if mask is not None:
            mask = tf.cast(mask, dtype)
            return elements * tf.reduce_mean(mask), "own"
        return elements, "examples"

    def _labels(self, y_true, y_pred) -> tuple | None:
        if getattr(self._loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
            return None
        axis = getattr(self._loss, "_fn_kwargs", {}).get("axis", -1)
        return y_true, y_pred.shape[axis], getattr(self._loss, "ignore_class", None)


def _both(one, other):
    if one is None or other is None:
        return other if one is None else one
    return tf.cast(one, tf.bool) & tf.cast(other, tf.bool)

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
from gradlab.training.whole_batch import Whole, WholeBatch, differentiable, seen_by


class Term(NamedTuple):
    """The loss of one output over one micro-batch.

    Attributes:
        total: the weighted sum of the losses of its examples, or of their elements: a scalar.
        divisor: the number by which Keras divides that sum for a batch like this one; 1 for the reduction "sum".
        kind: "examples" if the divisor is proportional to the number of examples, "own" if it depends on a mask or on
            sample weights, "sum" if there is none.
        loss_weight: the factor of the term in the total loss.
        labels: None, or if labels are class numbers: (labels, number of classes, one more label that is allowed).
        name: the name of the loss.
        is_known: whether each example surely has a loss of its own, whatever the other examples of the batch.
        whole: what a loss over the whole batch sees of this micro-batch; None for other losses. Its total is then 0, or
            a number that has the loss' gradient.
    """

    total: tf.Tensor
    divisor: tf.Tensor
    kind: str
    loss_weight: Any = 1.0
    labels: tuple | None = None
    name: str = ""
    is_known: bool = True
    whole: Whole | None = None


class Objective:
    """The losses of a compiled model, as sums and divisors.

    Args:
        loss, loss_weights: as for `keras.Model.compile`.
        output_names: the names of the model's outputs, to find losses by name.
        by_weight: divide every loss by the sum of its sample weights, whatever its reduction says.
        own: the model's own `compute_loss`, a function (x, y, y_pred, sample_weight) -> a scalar. It takes the place of
            loss and loss_weights. None: there is none.

    Attributes:
        numbers: the names of the losses that give one number for a batch instead of one for each example, as of the
            last call: `own`, or losses of `compile`.
        unknown: the names of losses with a value for each example that may depend on other examples, likewise.

    Raises:
        ValueError: a loss without a reduction.
    """

    def __init__(
        self,
        loss: Any,
        loss_weights: Any = None,
        output_names: list[str] | None = None,
        by_weight: bool = False,
        own: Callable | None = None,
    ):
        self._taken: list[Term] = []
        self._slopes: list | None = None
        self.own = own
        self.numbers: list[str] = []
        self.unknown: list[str] = []
        for one in keras.tree.flatten(loss):
            if isinstance(one, keras.losses.Loss):
                _check_reduction(one)
        self._compiled: Any = None

        def replace(one, loss_weight):
            if isinstance(one, WholeBatch):
                return lambda *seen: self._whole_term(_by_weight(one) if by_weight else one, loss_weight, seen)
            return _SumAndDivisor(one, loss_weight, self._taken, by_weight)

        if isinstance(loss, WholeBatch) and own is None:  # the only loss, which sees the nest of all outputs
            self._compiled = replace(loss, 1.0 if loss_weights is None else loss_weights)
        elif loss is not None and own is None:
            self._compiled = internals.LossOfOutputs(loss, loss_weights, output_names, replace)

    def __call__(
        self,
        batch: tuple,
        y_pred: Any,
        added: list,
        examples: Any,
        factors: list | None = None,
        slopes: list | None = None,
    ) -> list:
        """The terms of one micro-batch's loss.

        Args:
            batch: (x, y, sample_weight).
            y_pred: the predictions.
            added: the losses that layers added. As in Keras, one that is not a scalar counts as its sum.
            examples: the number of examples, a scalar tensor.
            factors: for each of the `one_by_one` losses a factor that makes it a mean over the examples. None: they
                are means.
            slopes: for each loss over the whole batch, in order, its gradients with respect to these predictions.
                None: the terms of these losses are 0.

        Returns:
            The list of `Term`s. The added losses together are the last one.
        """
        dtype = accumulation_dtype(keras.config.floatx())
        examples = tf.cast(examples, dtype)
        terms = self._terms(batch, y_pred, slopes)
        left = iter([1.0] * (len(terms) + len(added)) if factors is None else factors)

        def as_mean(number):
            return tf.cast(number, dtype) * tf.cast(next(left), dtype) * examples

        terms = [
            Term(as_mean(term.total), examples, "examples", term.loss_weight) if term.kind == "number" else term
            for term in terms
        ]
        if added and self.own is None:
            terms.append(Term(tf.add_n([as_mean(tf.reduce_sum(loss)) for loss in added]), examples, "examples"))
        if not terms:
            raise ValueError("There is no loss to compute: give one to compile, or add one in a layer. Received: None")
        return terms

    def one_by_one(self, batch: tuple, y_pred: Any, added: list) -> list:
        """The losses that are one number for a batch, in the order of `numbers`, those that layers added, and the sums
        of those that are `unknown`.

        An own loss that adds `model.losses` itself contains what layers added already.
        """
        terms = self._terms(batch, y_pred)
        numbers = [term.total for term in terms if term.kind == "number"]
        numbers += [tf.reduce_sum(loss) for loss in added] if self.own is None else []
        return numbers + [term.total for term in terms if not term.is_known]

    def _terms(self, batch: tuple, y_pred: Any, slopes: list | None = None) -> list[Term]:
        """The terms of the model's own loss, or of the losses of `compile`; of kind "number" for one for the batch."""
        x, y, sample_weight = batch
        self._taken.clear()
        self._slopes = None if slopes is None else list(slopes)
        if self.own is not None:
            number = tf.reduce_sum(self.own(x, y, y_pred, sample_weight))
            self._taken.append(Term(number, None, "number", name="compute_loss"))
        elif self._compiled is not None:
            self._compiled(y, y_pred, sample_weight)
        self.numbers = [term.name for term in self._taken if term.kind == "number"]
        self.unknown = [term.name for term in self._taken if not term.is_known]
        return list(self._taken)

    def _whole_term(self, loss: WholeBatch, loss_weight: Any, seen: tuple) -> tf.Tensor:
        """Appends the term of a loss over the whole batch."""
        whole, dtype = seen_by(loss, *seen), accumulation_dtype(keras.config.floatx())
        total = tf.zeros([], dtype)
        if self._slopes is not None:
            total = tf.cast(differentiable(whole, self._slopes.pop(0)), dtype)
        self._taken.append(Term(total, tf.ones([], dtype), "sum", loss_weight, name=loss.name, whole=whole))
        return total

    @property
    def is_regularized(self) -> bool:
        """Whether the regularization losses of the weights belong to the loss."""
        return self.own is None or getattr(self.own, "is_regularized", True)


class OwnLoss:
    """A model's own `compute_loss`, without regularization: a function (x, y, y_pred, sample_weight) -> its result.

    Attributes:
        is_regularized: whether the last call asked for the regularization losses of the weights. These are not a mean
            over examples, and are added once per update.
    """

    def __init__(self, model: keras.Model, training: bool):
        self._model, self._training = model, training
        self.is_regularized = False

    def __call__(self, *batch: Any) -> tf.Tensor:
        with internals.without_regularizers(self._model.trainable_variables) as regularizer:
            loss = internals.compute_loss(self._model, *batch, training=self._training)
        self.is_regularized = regularizer.was_asked
        return loss


def total_loss(
    terms: list[Term], divisors: list | None = None, totals: dict[int, tf.Tensor] | None = None
) -> tf.Tensor:
    """The loss with these terms, a scalar; given the divisors of a window, the micro-batch's share in its loss.

    Args:
        terms: the terms.
        divisors: the divisors of the window, one for each term. None: those of the terms.
        totals: other totals of some terms, by their position.
    """
    divisors = [term.divisor for term in terms] if divisors is None else divisors
    known = [(totals or {}).get(i, term.total) for i, term in enumerate(terms)]
    shares = [tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype)) for total, divisor in zip(known, divisors)]
    dtype = accumulation_dtype(keras.config.floatx())
    return tf.add_n([tf.cast(share * term.loss_weight, dtype) for share, term in zip(shares, terms)])


def common_divisor(terms: list[Term]) -> tf.Tensor | None:
    """The number by which the loss of a micro-batch with these terms was divided; None if the terms differ in it."""
    kinds = {term.kind for term in terms}
    if kinds == {"own"}:
        return terms[0].divisor if len(terms) == 1 else None
    return terms[0].divisor if len(kinds) == 1 else None


def _by_weight(loss: WholeBatch) -> WholeBatch:
    """The same loss, divided by the sum of the sample weights."""
    return WholeBatch(loss.fn, "mean_with_sample_weight", loss.name)


def _check_reduction(loss: keras.losses.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise ValueError(
            f"{loss.name} must have a reduction for gradlab to know the large batch's loss: sum_over_batch_size, "
            f"mean, mean_with_sample_weight or sum. Received: {loss.reduction!r}"
        )


class _SumAndDivisor(keras.losses.Loss):
    """A Keras loss that appends its `Term` to a list."""

    def __init__(self, loss: keras.losses.Loss, loss_weight: Any, terms: list[Term], by_weight: bool):
        _check_reduction(loss)
        super().__init__(name=loss.name.strip("<>"), reduction="sum", dtype=loss.dtype)  # "<lambda>" is no scope's name
        self._loss, self._loss_weight, self._terms = loss, loss_weight, terms
        self._divides_by_weight = by_weight
        self._divide_by = "mean_with_sample_weight" if by_weight else loss.reduction

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        if type(self._loss).__call__ is not keras.losses.Loss.__call__:
            return self._one_number(y_true, y_pred, sample_weight)
        total = super().__call__(y_true, y_pred, sample_weight)  # the reduction "sum" leaves it undivided
        if self._values.shape.rank == 0:
            return self._one_number(y_true, y_pred, sample_weight)
        mask = _both(internals.mask_of(y_pred), internals.mask_of(self._values))
        divisor, kind = self._divisor(mask, sample_weight, total.dtype)
        labels, is_known = self._labels(y_true, y_pred), internals.is_by_example(self._loss)
        self._terms.append(Term(total, divisor, kind, self._loss_weight, labels, self.name, is_known))
        return total

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        values = self._loss.call(y_true, y_pred)
        self._values = values if tf.is_tensor(values) else tf.convert_to_tensor(values)  # a function may return 0
        return self._values

    def _one_number(self, y_true, y_pred, sample_weight) -> tf.Tensor:
        """The loss as Keras computes it, for a batch as a whole."""
        if self._divides_by_weight:
            raise ValueError(
                f"{self.name} must give a loss for each example if weight_fn weighs them. "
                "Received: one number for the whole batch"
            )
        number = tf.reduce_sum(internals.unscaled(self._loss(y_true, y_pred, sample_weight)))
        self._terms.append(Term(number, None, "number", self._loss_weight, name=self.name))
        return number

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

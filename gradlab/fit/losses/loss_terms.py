"""A Keras loss split into sums and divisors, so that micro-batches add up to the large batch.

Keras gives one number for each batch, already divided: by the number of examples, by the number of
elements that a mask lets through, or by the sum of the sample weights, depending on the loss'
`reduction`. The mean of the micro-batches' numbers is the large batch's only if every micro-batch
divides by the same number. So gradlab keeps the two apart.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import times
from gradlab.averaging import accumulation_dtype
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.term import SumAndDivisor, Term, check_reduction, lengths_of
from gradlab.fit.losses.whole_batch import WholeBatch, differentiable, seen_by


class Objective:
    """The losses of a compiled model, as sums and divisors.

    Args:
        loss, loss_weights: as for `keras.Model.compile`.
        output_names: the names of the model's outputs, to find losses by name.
        by_weight: divide every loss by the sum of its sample weights, whatever its reduction says.
        own: the model's own `compute_loss`, a function (x, y, y_pred, sample_weight) -> a scalar.
            It takes the place of loss and loss_weights. None: there is none.
        batch_losses: what losses are said to be that give one number for a batch: "mean" or "sum"
            over the examples, or a dict with that for the names of layers and losses. None: nothing
            is said of them.

    Attributes:
        batch_valued: the names of the losses that give one number for a batch instead of one for
            each example, as of the last call: `own`, or losses of `compile`.
        unknown: the names of losses with a value for each example that may depend on other
            examples, likewise.
        sees_whole: whether there is a loss over the whole batch, as far as is known: all are after
            the first call.

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
        batch_losses: str | dict[str, str] | None = None,
    ):
        self._taken: list[Term] = []
        self._prediction_gradients: list | None = None
        self.own = own
        self._batch_losses = batch_losses
        self.batch_valued: list[str] = []
        self.unknown: list[str] = []
        for one in keras.tree.flatten(loss):
            if isinstance(one, keras.losses.Loss):
                check_reduction(one)
        self.sees_whole = own is None and any(
            isinstance(one, WholeBatch) for one in keras.tree.flatten(loss)
        )
        self._compiled: Any = None

        def replace(one, loss_weight):
            if isinstance(one, WholeBatch):
                return lambda *seen: self._whole_term(
                    _by_weight(one) if by_weight else one, loss_weight, seen
                )
            return SumAndDivisor(one, loss_weight, self._taken, by_weight, self._batch_term)

        # The only loss, which sees the nest of all outputs
        if isinstance(loss, WholeBatch) and own is None:
            self._compiled = replace(loss, 1.0 if loss_weights is None else loss_weights)
        elif loss is not None and own is None:
            self._compiled = internals.LossOfOutputs(loss, loss_weights, output_names, replace)

    def __call__(
        self,
        batch: tuple,
        y_pred: Any,
        added: list,
        examples: Any,
        mean_factors: list | None = None,
        prediction_gradients: list | None = None,
    ) -> list:
        """The terms of one micro-batch's loss.

        Args:
            batch: (x, y, sample_weight).
            y_pred: the predictions.
            added: the losses that layers added. As in Keras, one that is not a scalar counts as its
                sum.
            examples: the number of examples, a scalar tensor.
            mean_factors: for each of the numbers that are said to be means or sums, in the order of
                `batch_valued` and then of added, a factor that makes it a mean over the examples.
                None: they are means.
            prediction_gradients: for each loss over the whole batch, in order, its gradients with respect to
                these predictions. None: the terms of these losses are 0.

        Returns:
            The list of `Term`s. The added losses together are the last one.
        """
        dtype = accumulation_dtype(keras.config.floatx())
        examples = tf.cast(examples, dtype)
        terms = self._terms(batch, y_pred, prediction_gradients)
        left = iter([1.0] * (len(terms) + len(added)) if mean_factors is None else mean_factors)

        def as_mean(number):
            return tf.cast(number, dtype) * tf.cast(next(left), dtype) * examples

        terms = [
            Term(as_mean(term.total), examples, "examples", term.loss_weight)
            if term.kind == "number"
            else term
            for term in terms
        ]
        if added and self.own is None:
            terms.append(
                Term(
                    tf.add_n([as_mean(tf.reduce_sum(loss)) for loss in added]), examples, "examples"
                )
            )
        if not terms:
            raise ValueError(
                "There is no loss to compute: give one to compile, or add one in a layer. "
                "Received: None"
            )
        return terms

    def one_by_one(self, batch: tuple, y_pred: Any, added: list) -> list:
        """The losses that are one number for a batch, in the order of `batch_valued`, those that
        layers added, and the sums of those that are `unknown`.

        An own loss that adds `model.losses` itself contains what layers added already.
        """
        terms = self._terms(batch, y_pred)
        numbers = [term.total for term in terms if term.kind == "number"]
        numbers += [tf.reduce_sum(loss) for loss in added] if self.own is None else []
        return numbers + [term.total for term in terms if not term.is_known]

    def _terms(
        self, batch: tuple, y_pred: Any, prediction_gradients: list | None = None
    ) -> list[Term]:
        """The terms of the model's own loss, or of the losses of `compile`; of kind "number" for
        one for the batch."""
        x, y, sample_weight = batch
        self._taken.clear()
        self._prediction_gradients = (
            None if prediction_gradients is None else list(prediction_gradients)
        )
        with internals.undivided_losses():
            if self.own is not None:
                self._taken.append(self._own_term(self.own(x, y, y_pred, sample_weight)))
            elif self._compiled is not None:
                self._compiled(y, y_pred, sample_weight)
        self.batch_valued = [term.name for term in self._taken if term.kind == "number"]
        self.unknown = [term.name for term in self._taken if not term.is_known]
        return list(self._taken)

    def _own_term(self, number: Any) -> Term:
        """The term of the model's own `compute_loss`."""
        if number.shape.rank != 0:
            raise ValueError(
                f"compute_loss must return a scalar. Received: a tensor of shape {number.shape}"
            )
        return Term(number, None, "number", name="compute_loss")

    def _batch_term(self, loss: keras.losses.Loss, loss_weight: Any, seen: tuple) -> tf.Tensor:
        """Appends the term of a loss that may relate the examples: what it is said to be, or over
        the whole batch."""
        name = loss.name.strip("<>")
        if self.said_of(name) is None:
            self.sees_whole = True
            return self._whole_term(loss, loss_weight, seen)
        number = tf.reduce_sum(loss(*seen))
        self._taken.append(Term(number, None, "number", loss_weight, name=name))
        return number

    def said_of(self, name: str) -> str | None:
        """What a loss with this name, which gives one number for a batch, is said to be: "mean",
        "sum" or None."""
        said = self._batch_losses
        return said.get(name) if isinstance(said, dict) else said

    def _whole_term(self, loss: keras.losses.Loss, loss_weight: Any, seen: tuple) -> tf.Tensor:
        """Appends the term of a loss over the whole batch."""
        whole = seen_by(loss, *seen)
        dtype = accumulation_dtype(keras.config.floatx())
        total = tf.zeros([], dtype)
        if self._prediction_gradients is not None:
            total = tf.cast(differentiable(whole, self._prediction_gradients.pop(0)), dtype)
        padded = any(lengths_of(tensor) for tensor in tf.nest.flatten(seen) if tf.is_tensor(tensor))
        divisor = tf.ones([], dtype)
        self._taken.append(
            Term(
                total,
                divisor,
                "sum",
                loss_weight,
                name=loss.name,
                whole=whole,
                counts_padding=padded,
            )
        )
        return total

    @property
    def is_regularized(self) -> bool:
        """Whether the regularization losses of the weights must be added.

        A mean of the model's own contains them already, if it wants them: the shares of the
        micro-batches sum to 1, so a number that is the same in each of them counts once.
        """
        return self.own is None


def total_loss(
    terms: list[Term], divisors: list | None = None, totals: dict[int, tf.Tensor] | None = None
) -> tf.Tensor:
    """The loss with these terms, a scalar; given the divisors of a window, the micro-batch's share
    in its loss.

    Args:
        terms: the terms.
        divisors: the divisors of the window, one for each term. None: those of the terms.
        totals: other totals of some terms, by their position.
    """
    divisors = [term.divisor for term in terms] if divisors is None else divisors
    known = [(totals or {}).get(i, term.total) for i, term in enumerate(terms)]
    shares = [
        tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))
        for total, divisor in zip(known, divisors)
    ]
    dtype = accumulation_dtype(keras.config.floatx())
    return tf.add_n(
        [tf.cast(times(share, term.loss_weight), dtype) for share, term in zip(shares, terms)]
    )


def common_divisor(terms: list[Term]) -> tf.Tensor | None:
    """The number by which the loss of a micro-batch with these terms was divided; None if the terms
    differ in it."""
    kinds = {term.kind for term in terms}
    if kinds == {"own"}:
        return terms[0].divisor if len(terms) == 1 else None
    return terms[0].divisor if len(kinds) == 1 else None


def _by_weight(loss: WholeBatch) -> WholeBatch:
    """The same loss, divided by the sum of the sample weights."""
    return WholeBatch(loss.fn, "mean_with_sample_weight", loss.name)

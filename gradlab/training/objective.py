"""A Keras loss split into sums and divisors, so that micro-batches add up to the large batch.

Keras gives one number for each batch, already divided: by the number of examples, by the number of
elements that a mask lets through, or by the sum of the sample weights, depending on the loss'
`reduction`. The mean of the micro-batches' numbers is the large batch's only if every micro-batch
divides by the same number. So gradlab keeps the two apart.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab.averaging import accumulation_dtype
from gradlab.training import _keras_internals as internals
from gradlab.training.term import SumAndDivisor, Term, check_reduction, lengths_of
from gradlab.training.whole_batch import WholeBatch, differentiable, seen_by


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
        numbers: the names of the losses that give one number for a batch instead of one for each
            example, as of the last call: `own`, or losses of `compile`.
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
        self._slopes: list | None = None
        self.own = own
        self._batch_losses = batch_losses
        self.numbers: list[str] = []
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
        factors: list | None = None,
        slopes: list | None = None,
    ) -> list:
        """The terms of one micro-batch's loss.

        Args:
            batch: (x, y, sample_weight).
            y_pred: the predictions.
            added: the losses that layers added. As in Keras, one that is not a scalar counts as its
                sum.
            examples: the number of examples, a scalar tensor.
            factors: for each of the numbers that are said to be means or sums, in the order of
                `numbers` and then of added, a factor that makes it a mean over the examples. None:
                they are means.
            slopes: for each loss over the whole batch, in order, its gradients with respect to
                these predictions. None: the terms of these losses are 0.

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
        """The losses that are one number for a batch, in the order of `numbers`, those that layers
        added, and the sums of those that are `unknown`.

        An own loss that adds `model.losses` itself contains what layers added already.
        """
        terms = self._terms(batch, y_pred)
        numbers = [term.total for term in terms if term.kind == "number"]
        numbers += [tf.reduce_sum(loss) for loss in added] if self.own is None else []
        return numbers + [term.total for term in terms if not term.is_known]

    def _terms(self, batch: tuple, y_pred: Any, slopes: list | None = None) -> list[Term]:
        """The terms of the model's own loss, or of the losses of `compile`; of kind "number" for
        one for the batch."""
        x, y, sample_weight = batch
        self._taken.clear()
        self._slopes = None if slopes is None else list(slopes)
        with internals.undivided_losses():
            if self.own is not None:
                self._taken.append(self._own_term(self.own(x, y, y_pred, sample_weight)))
            elif self._compiled is not None:
                self._compiled(y, y_pred, sample_weight)
        self.numbers = [term.name for term in self._taken if term.kind == "number"]
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
        if self._slopes is not None:
            total = tf.cast(differentiable(whole, self._slopes.pop(0)), dtype)
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
        """Whether the regularization losses of the weights belong to the loss."""
        return self.own is None or getattr(self.own, "is_regularized", True)


class _NoRegularizer(keras.regularizers.Regularizer):
    """A regularizer whose loss is 0, and which remembers what it gave for each variable."""

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape
        self.given: dict[int, list] = {}

    def __call__(self, weights: Any) -> tf.Tensor:
        nothing = tf.zeros([], keras.config.floatx())
        self._tape.watch(nothing)
        self.given.setdefault(id(weights), []).append(nothing)
        return nothing


@contextlib.contextmanager
def _without_regularizers(variables: list, tape: tf.GradientTape) -> Iterator[_NoRegularizer]:
    """Gives variables another regularizer for a while, which it yields. `losses` of a model shows
    them no other way."""
    nothing = _NoRegularizer(tape)
    kept = [
        (variable, variable.regularizer)
        for variable in variables
        if variable.regularizer is not None
    ]
    try:
        for variable, _ in kept:
            variable.regularizer = nothing
        yield nothing
    finally:
        for variable, regularizer in kept:
            variable.regularizer = regularizer


OWN_REGULARIZATION = (
    "The compute_loss of {model} must add the regularization losses of the weights once, all of "
    "them or none: gradlab adds them once per update. Received: {received}"
)


class OwnLoss:
    """A model's own `compute_loss`, without regularization: a function (x, y, y_pred,
    sample_weight) -> its result.

    Attributes:
        is_regularized: whether the last call added the regularization losses of the weights. These
            are not a mean over examples, and are added once per update.

    Raises:
        ValueError: it adds the regularization of some weights only.
        tf.errors.InvalidArgumentError: it adds a multiple of it.
    """

    def __init__(self, model: keras.Model, training: bool):
        self._model = model
        self._training = training
        self.is_regularized = False

    def __call__(self, *batch: Any) -> tf.Tensor:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape, _without_regularizers(variables, tape) as regularizer:
            loss = tf.convert_to_tensor(
                internals.compute_loss(self._model, *batch, training=self._training)
            )
        given = list(regularizer.given.values())
        slopes = [
            [slope for slope in each if slope is not None] for each in tape.gradient(loss, given)
        ]
        self.is_regularized = any(slopes)
        if not self.is_regularized:
            return loss
        if not all(slopes) or len(given) < sum(
            variable.regularizer is not None for variable in variables
        ):
            raise ValueError(
                OWN_REGULARIZATION.format(
                    model=self._model.name, received="that of some weights only"
                )
            )
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        totals = tf.stack([tf.add_n(each) for each in slopes])
        once = tf.abs(totals - 1) < 1e-6
        if replicas > 1:  # Keras divides it among them
            once |= tf.abs(totals * replicas - 1) < 1e-6
        check = tf.debugging.Assert(
            tf.reduce_all(once),
            [OWN_REGULARIZATION.format(model=self._model.name, received="multiples of"), totals],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(loss)


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
        [tf.cast(share * term.loss_weight, dtype) for share, term in zip(shares, terms)]
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

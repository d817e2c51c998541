"""Whether losses are what they are said to be: compared in the first windows, for examples and
their halves.

A loss that is one number for a batch, of a layer or of the model's own `compute_loss`, is said to
be a mean or a sum over the examples. Then the mean of the halves' numbers, weighted by their sizes,
or their sum, must be the number of all examples. A load-balancing loss, the product of two means,
is neither.

A loss function that returns a value for each example must not use the other examples, as a
contrastive loss does: the sum of its values must be the sum of the halves' sums.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import (
    examples_of,
    map_tensors,
    rows_of,
    spec_of,
    spread_rows,
    tensors_of,
    unequal_weights,
)
from gradlab._traced_graphs import Dependence, stateful_draws
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import Objective

UNKNOWN, MEAN, SUM, NEITHER, RANDOM = range(5)
KINDS = {"mean": MEAN, "sum": SUM}
MOST_LOSSES = 4096  # of one model: how many are added is known only when the function is traced
# That must tell the same: one alone may have equal labels or weights, or a factor that is still 0
WINDOWS = 3

RANDOM_WARNING = (
    "{name} draws random numbers, so gradlab cannot check that an example's loss does not depend "
    "on the other examples."
)
RULE = (
    '{name} must be a {reduction} over the examples, as batch_losses="{reduction}" says; its '
    "values for some examples and for their two halves are not. Received:"
)
OTHERS_RULE = (
    "{name} must give each example a loss that does not depend on the other examples of the "
    "batch; the sum of its values for some examples is not that of their two halves "
    "(gradlab.WholeBatch computes such a loss). Received:"
)


class LossCheck:
    """Compares losses with what they are said to be, in the first windows that tell."""

    def __init__(self):
        # A variable, once it is built; its last element counts the windows that told
        self._kinds: Any = None
        self._is_settled = False

    def build(self) -> None:
        """Creates the variable that remembers; with several replicas, call it in the strategy's
        scope."""
        if self._kinds is None:
            with tf.init_scope():
                self._kinds = tf.Variable(
                    tf.fill([MOST_LOSSES + 1], UNKNOWN),
                    trainable=False,
                    # Each replica finds out by itself
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )

    def check(
        self,
        names: list[str],
        reductions: list[str],
        losses: Callable,
        batch: tuple,
        microbatch_size: Any,
    ) -> tf.Tensor:
        """Fails when it is computed, if a loss is not what it is said to be.

        Args:
            names: the names of the losses.
            reductions: what each is said to be: "mean", "sum", or "rows" for the sum of one value
                for each example.
            losses: a function (batch) -> a function (whether to change the predictions) -> (the
                losses of the batch, of the same batch once more, of its first half, of its second
                half, the relative rounding error to expect of each), all of shape (losses,).
            batch: (x, y, sample_weight).
            microbatch_size: the examples of a micro-batch: the most that are looked at, or 2.

        Returns:
            What to `remember` of this window.
        """
        number = len(names)
        few = tf.minimum(examples_of(batch), tf.maximum(2, microbatch_size))
        remembered = self._kinds.read_value()
        known = remembered[:number]
        windows_seen = remembered[MOST_LOSSES]

        def compare():
            part = spread_rows((*batch[:2], unequal_weights(batch[2])), few)
            of_part = losses(part)
            seen = of_part(True)
            kinds = _kinds(seen, few)
            unknown = kinds == UNKNOWN
            as_they_are = tf.cond(
                tf.reduce_any(unknown),
                lambda: _kinds(of_part(False), few),
                lambda: tf.identity(kinds),
            )
            kinds = tf.where(unknown, as_they_are, kinds)
            for i, (name, reduction) in enumerate(zip(names, reductions)):
                numbers = tf.stack([seen[0][i], *(half[i] for half in seen[2:4])])
                said = KINDS.get(reduction, SUM)
                is_right = (kinds[i] == said) | (kinds[i] == UNKNOWN) | (kinds[i] == RANDOM)
                rule = OTHERS_RULE if reduction == "rows" else RULE
                tf.debugging.Assert(
                    is_right, [rule.format(name=name, reduction=reduction), numbers]
                )
            kinds = tf.where(known == RANDOM, known, kinds)
            now = windows_seen + tf.cast(tf.reduce_all(kinds != UNKNOWN), windows_seen.dtype)
            return tf.concat([kinds, tf.fill([MOST_LOSSES - number], UNKNOWN), [now]], 0)

        return tf.cond((windows_seen < WINDOWS) & (few > 1), compare, lambda: remembered)

    def remember(self, found: tf.Tensor) -> None:
        """Keeps what `check` found, once the window counts: one that is only tried, or fails, does
        not."""
        self._kinds.assign(found)

    def warnings(self, names: list[str], reductions: list[str]) -> list[str]:
        """A warning for each of these losses that cannot be compared, once all others are
        settled."""
        if self._kinds is None or self._is_settled:
            return []
        *kinds, windows_seen = (
            tf.distribute.get_strategy().experimental_local_results(self._kinds)[0].numpy().tolist()
        )
        self._is_settled = windows_seen >= WINDOWS
        drawing = [
            name
            for name, kind, one in zip(names, kinds, reductions)
            if kind == RANDOM and one == "rows"
        ]
        return [RANDOM_WARNING.format(name=name) for name in sorted(set(drawing))]


def both_halves(examples: tf.Tensor) -> tuple[slice, slice]:
    """The rows of the first and of the second half."""
    middle = (examples + 1) // 2
    return slice(0, middle), slice(middle, examples)


def rounding(dtype: tf.DType) -> float:
    """The relative error to expect of sums of this type."""
    return {tf.float16: 1e-2, tf.bfloat16: 6e-2}.get(dtype, 1e-4)


def moved(predictions: Any, is_moved: Any) -> Any:
    """Predictions that are a little different, element by element, if is_moved; those in [0, 1]
    stay in it.

    The model's own may say nothing of a loss: where it is zero, as at the start, or where its parts
    cancel, as in the sum of normalized outputs, which leaves only rounding errors.
    """

    def move(tensor):
        if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
            return tensor
        other = tf.where(is_moved, 0.05 + tensor * (0.7 + 0.2 * tf.sin(100 * tensor)), tensor)
        mask = internals.mask_of(tensor)
        if mask is not None:
            internals.set_mask(other, mask)
        return other

    return map_tensors(move, predictions)


def _kinds(seen: tuple, examples: tf.Tensor) -> tf.Tensor:
    whole, again, first, second, near = seen
    dtype = whole.dtype
    near = tf.cast(near, dtype)
    share = tf.cast((examples + 1) // 2, dtype) / tf.cast(examples, dtype)

    def equals(other, *parts):
        size = tf.reduce_max(tf.abs(tf.stack([whole, *parts])), axis=0)
        return tf.abs(whole - other) <= near * size

    # A comparison with NaN, as the loss of one example may be, is false.
    is_mean = equals(share * first + (1 - share) * second, first, second)
    is_sum = equals(first + second, first, second)
    kinds = tf.where(is_mean, MEAN, tf.where(is_sum, SUM, NEITHER))
    kinds = tf.where(equals(again), kinds, RANDOM)
    return tf.where((is_mean & is_sum) | ~tf.math.is_finite(whole), UNKNOWN, kinds)


class Halves:
    """The losses of a batch, of the same batch once more, and of its halves, as `LossCheck.check`
    asks for them.

    If layers add losses, each part has a forward pass of its own; it is traced once for all of
    them. Otherwise the parts share one forward pass, so it does not matter whether the model draws
    random numbers.

    Args:
        model: the model.
        objective: its loss.
        scope: a function (shift) -> a scope for a forward pass, whose random numbers depend on the
            integer.
        training: whether to train the model or to evaluate it.
        adding: whether layers add losses.
        dtype: the type of the losses.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        scope: Callable,
        training: bool,
        adding: bool,
        dtype: Any,
    ):
        self._model = model
        self._objective = objective
        self._scope = scope
        self._training = training
        self._adding = adding
        self._dtype = dtype
        self._near: list[float] = []
        self._random: list[bool] = []  # whether each loss draws random numbers

    def __call__(self, batch: tuple) -> Callable[[bool], tuple]:
        """A function (whether to change the predictions) -> the losses of a batch and its parts, as
        a tuple."""
        halves = both_halves(examples_of(batch))
        if self._adding:
            whole = tf.function(self._of_model, autograph=False)
            whole.get_concrete_function(
                map_tensors(spec_of, batch), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)
            )

            def of_model(is_moved):
                found = [
                    whole(_part(batch, rows), tf.constant(is_moved), tf.constant(shift))
                    for shift, rows in enumerate((None, None, *halves))
                ]
                # Operations that draw with a seed of TensorFlow's draw the same numbers in each of
                # these calls.
                found[1] = tf.where(self._random, tf.constant(float("nan"), self._dtype), found[1])
                return *found, self._near

            return of_model
        with self._scope(0):
            y_pred = internals.outputs_of(self._model, batch[0], self._training)
        known = tensors_of(batch)[0].shape[0]

        def of_loss(is_moved):
            predicted = moved(y_pred, is_moved)
            parts = [
                predicted,
                predicted,
                *(_predictions(predicted, rows, known) for rows in halves),
            ]
            with self._scope(0):
                each = zip((None, None, *halves), parts)
                found = [
                    self._stacked(self._objective.one_by_one(_part(batch, rows), y, []))
                    for rows, y in each
                ]
            return *found, self._near

        return of_loss

    def _of_model(self, batch: tuple, is_moved: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        with self._scope(shift) as scope:
            y_pred = moved(internals.outputs_of(self._model, batch[0], self._training), is_moved)
            found = self._objective.one_by_one(batch, y_pred, scope.losses)
        drawing = stateful_draws(tf.compat.v1.get_default_graph())
        is_random = Dependence([output for operation in drawing for output in operation.outputs])
        self._random = [is_random(loss) for loss in found]
        return self._stacked(found)

    def _stacked(self, found: list) -> tf.Tensor:
        self._near = [rounding(loss.dtype) for loss in found]
        return tf.stack([tf.cast(loss, self._dtype) for loss in found])


def _part(batch: tuple, rows: slice | None) -> tuple:
    return batch if rows is None else map_tensors(lambda tensor: rows_of(tensor, rows), batch)


def _predictions(y_pred: Any, rows: slice, known: int | None) -> Any:
    """Some rows of predictions and of their masks, for a batch whose number of examples may be
    known.

    What is known to have another number of rows stays whole.
    """

    def cut(tensor):
        if not tensor.shape.rank or tensor.shape[0] != known:
            return tensor
        part = rows_of(tensor, rows)
        mask = internals.mask_of(tensor)
        if mask is not None:
            internals.set_mask(part, rows_of(mask, rows))
        return part

    return map_tensors(cut, y_pred)

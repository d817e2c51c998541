"""Whether losses are what they are said to be: compared for some examples and for their halves.

A loss that is one number for a batch is said to be a mean or a sum over the examples. Then the mean
of the halves' numbers, weighted by their sizes, or their sum, must be the number of all examples. A
load-balancing loss, the product of two means, is neither.

A loss with a value for each example must not use the other examples, as a contrastive loss does:
the sum of its values must be the sum of the halves' sums.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

# Windows, or calls, that must tell: one alone may have equal labels or weights, or a factor that is
# still 0. One if a loss of one's own draws random numbers, because each comparison has a small
# chance to refuse a loss that is right.
WINDOWS = 3
RANDOM_CALLS = 1
REPETITIONS = 4
# A loss that draws random numbers is refused only if it is this many times closer to a sum than a
# sum is to a mean, or the other way around, and if the noise is as small.
CLEARLY = 4.0
WRONG = -1

RANDOM_WARNING = (
    "{name} draws random numbers, so gradlab cannot check that an example's loss does not depend "
    "on the other examples."
)
RULE = (
    '{name} must be a {said} over the examples, as batch_losses="{said}" says; its values for some '
    "examples and for their two halves are not. Received:"
)
OTHERS_RULE = (
    "{name} must give each example a loss that does not depend on the other examples of the "
    "batch; the sum of its values for some examples is not that of their two halves "
    "(gradlab.WholeBatch computes such a loss). Received:"
)
OWN_RULE = (
    "{name} must be a {said} over the examples, as the reduction says, but its values for some "
    "examples and for their two halves are not. Received:"
)
ROWS_RULE = (
    "{name} must have a row for each example that does not depend on the other examples; a sum "
    "over its rows for some examples is not that of their two halves. Received:"
)


class Comparison(NamedTuple):
    """What the numbers of some examples and of their halves show.

    Attributes:
        wrong: whether each number is not what it is said to be, shape (numbers,).
        tells: whether a mean and a sum differ in it, shape (numbers,).
        varies: whether it differs when it is computed once more, shape (numbers,).
        numbers: each one for all of the examples and for their halves, shape (numbers, 3).
    """

    wrong: tf.Tensor
    tells: tf.Tensor
    varies: tf.Tensor
    numbers: tf.Tensor


def compare(
    scalars: Callable[[slice | None, int], tf.Tensor],
    examples: tf.Tensor,
    is_mean: list[bool],
    near: Callable[[], list[float]],
    is_random: bool = False,
) -> Comparison:
    """Compares numbers with what they are said to be.

    Args:
        scalars: a function (rows, shift) -> the numbers of these examples, or of all for None, with
            random numbers that depend on the shift; shape (numbers,).
        examples: the number of examples.
        is_mean: whether each number is said to be a mean, otherwise a sum.
        near: a function () -> the relative rounding error to expect of each, asked for after them.
        is_random: whether they depend on random numbers.
    """
    repetitions = REPETITIONS if is_random else 2
    repeated = tf.stack([scalars(None, shift) for shift in range(repetitions)])
    middle = (examples + 1) // 2
    halves = slice(0, middle), slice(middle, examples)
    first, second = (scalars(rows, repetitions + i) for i, rows in enumerate(halves))
    whole = repeated[0]
    dtype = whole.dtype
    share = tf.cast(middle, dtype) / tf.cast(examples, dtype)
    mean = share * first + (1 - share) * second
    total = first + second
    said = tf.where(is_mean, mean, total)
    other = tf.where(is_mean, total, mean)
    numbers = tf.stack([whole, first, second], axis=1)
    margin = tf.constant(near(), dtype) * tf.reduce_max(tf.abs(numbers), axis=1)
    is_finite = tf.math.is_finite(whole)
    # A comparison with NaN, which the half of the examples may give, is false.
    is_said = tf.abs(whole - said) <= margin
    tells = is_finite & ~(is_said & (tf.abs(whole - other) <= margin))
    wrong = ~is_said & is_finite
    noise = tf.reduce_max(repeated, 0) - tf.reduce_min(repeated, 0)
    if is_random:
        wrong = CLEARLY * tf.maximum(tf.abs(whole - other), noise) < tf.abs(said - other)
    return Comparison(wrong, tells, is_finite & ~(noise <= margin), numbers)


def checks(wrong: tf.Tensor, numbers: tf.Tensor, rules: list[str]) -> list:
    """Operations that fail with a number's rule if it is wrong."""
    made = [tf.debugging.Assert(~wrong[i], [rule, numbers[i]]) for i, rule in enumerate(rules)]
    return [check for check in made if check is not None]


class LossCheck:
    """Compares the losses of a model with what they are said to be, in the first windows that tell."""

    def __init__(self):
        self._windows_seen: Any = None  # a variable, once it is built
        self._drawing: list[str] = []  # the names of losses that cannot be compared

    def build(self) -> None:
        """Creates the variable that counts the windows that told; with several replicas, call it in
        the strategy's scope."""
        if self._windows_seen is None:
            with tf.init_scope():
                self._windows_seen = tf.Variable(
                    0,
                    trainable=False,
                    # Each replica finds out by itself
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )

    def check(
        self, names: list[str], said: list[str], losses: "Halves", batch: tuple, size: Any
    ) -> tf.Tensor:
        """Fails when it is computed, if a loss is not what it is said to be. Those that draw random
        numbers, or differ when they are computed once more, are not compared.

        Args:
            names: the names of the losses.
            said: what each is said to be: "mean", "sum", or "rows" for the sum of one value for
                each example.
            losses: computes them.
            batch: (x, y, sample_weight).
            size: the examples of a micro-batch: the most that are looked at, or 2.

        Returns:
            What to `remember` of this window.
        """
        few = tf.minimum(examples_of(batch), tf.maximum(2, size))
        windows_seen = self._windows_seen.read_value()
        is_mean = [one == "mean" for one in said]
        rules = [
            OTHERS_RULE.format(name=name) if one == "rows" else RULE.format(name=name, said=one)
            for name, one in zip(names, said)
        ]

        def compared():
            part = spread_rows((*batch[:2], unequal_weights(batch[2])), few)
            of_part = losses(part)
            seen = compare(of_part(True), few, is_mean, losses.near)
            is_random = tf.constant(losses.is_random)
            of_rows = zip(names, said, losses.is_random)
            self._drawing = [name for name, one, draws in of_rows if draws and one == "rows"]
            # Where predictions that were moved tell nothing, those of the model may.
            as_it_is = tf.cond(
                tf.reduce_all(seen.tells | is_random),
                lambda: seen,
                lambda: compare(of_part(False), few, is_mean, losses.near),
            )
            # A loss may draw random numbers, or read a counter that it increments.
            varies = is_random | tf.where(seen.tells, seen.varies, as_it_is.varies)
            wrong = tf.where(seen.tells, seen.wrong, as_it_is.wrong) & ~varies
            checks(wrong, seen.numbers, rules)  # TensorFlow runs them with the branch
            tells = tf.reduce_all(seen.tells | as_it_is.tells | is_random)
            return windows_seen + tf.cast(tells, windows_seen.dtype)

        return tf.cond((windows_seen < WINDOWS) & (few > 1), compared, lambda: windows_seen)

    def remember(self, found: tf.Tensor) -> None:
        """Keeps what `check` found, once the window counts: one that is only tried, or fails, does
        not."""
        self._windows_seen.assign(found)

    def warnings(self) -> list[str]:
        """A warning for each loss with a value for each example that cannot be compared."""
        return [RANDOM_WARNING.format(name=name) for name in sorted(set(self._drawing))]


class CallCheck:
    """Compares what a loss of one's own returns with what it is said to be, in the first calls of
    each traced function.

    Args:
        names: the names of the numbers.
        dtypes: their types.
        is_mean: whether they are said to be means over the examples, otherwise sums.
        of_rows: for each number, whether it is the sum over an entry's rows, which is a sum over
            the examples.
        main: the position of the one that is differentiated: where it is 0, a call tells nothing.
        is_random: whether the loss draws random numbers.
    """

    def __init__(
        self,
        names: list[str],
        dtypes: list[tf.DType],
        is_mean: bool,
        of_rows: list[bool],
        main: int,
        is_random: bool,
    ):
        self._main = main
        self._is_random = is_random
        self._is_mean = [is_mean and not rows for rows in of_rows]
        self._near = [rounding(dtype) for dtype in dtypes]
        said = "mean" if is_mean else "sum"
        self._rules = [
            ROWS_RULE.format(name=name) if rows else OWN_RULE.format(name=name, said=said)
            for name, rows in zip(names, of_rows)
        ]

    def __call__(self, scalars: Callable, few: tf.Tensor) -> tf.Tensor:
        """Whether the numbers are what they are said to be, as far as is known: a boolean tensor.

        If they are not, computing it also fails with a sentence, unless XLA compiles it, which
        drops such checks.

        Args:
            scalars: the numbers, as for `compare`.
            few: the number of examples to look at; fewer than two tell nothing.
        """
        verdict = _variable()
        if verdict is None:  # eager code keeps nothing from one call to the next
            return tf.cond(few > 1, lambda: self._compared(scalars, few)[0], lambda: True)
        told = verdict.read_value()

        def compared():
            is_right, tells = self._compared(scalars, few)
            found = tf.where(is_right, told + tf.cast(tells, told.dtype), WRONG)
            verdict.assign(found)
            return found

        calls = RANDOM_CALLS if self._is_random else WINDOWS
        is_due = (told != WRONG) & (told < calls) & (few > 1)
        return tf.cond(is_due, compared, lambda: told) != WRONG

    def _compared(self, scalars: Callable, few: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the numbers are what they are said to be, and whether these examples tell."""
        found = compare(scalars, few, self._is_mean, lambda: self._near, self._is_random)
        with tf.control_dependencies(checks(found.wrong, found.numbers, self._rules)):
            is_right = ~tf.reduce_any(found.wrong)
            return is_right, tf.reduce_any(tf.abs(found.numbers[self._main]) > 0)


def _variable() -> tf.Variable | None:
    """A new variable for a verdict, which lives as long as the graph that is being traced; None in
    eager code."""
    if tf.executing_eagerly():
        return None
    found: list[tf.Variable] = []

    def create():
        with tf.init_scope():
            # TensorFlow keeps int32 variables on the CPU, where XLA on a GPU cannot read them
            found.append(tf.Variable(0, trainable=False, dtype=tf.int64))

    # Another thread is in the scope of no strategy: replicas, which are traced one after the other,
    # cannot create a variable together here.
    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    # The graph itself keeps only its handle
    tf.compat.v1.add_to_collection("gradlab", found[0])
    return found[0]


class Halves:
    """The losses of a batch and of parts of it.

    If layers add losses, each part has a forward pass of its own; it is traced once for all of
    them. Otherwise the parts share one forward pass, so it does not matter whether the model draws
    random numbers.

    Args:
        model: the model.
        objective: its loss.
        scope: a function (shift) -> a scope for a forward pass, whose random numbers depend on the
            integer.
        training: whether to train the model or to evaluate it.
        layers_add_losses: whether layers add losses.
        dtype: the type of the losses.

    Attributes:
        is_random: whether each loss depends on random numbers that differ from part to part; known
            once it was computed.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        scope: Callable,
        training: bool,
        layers_add_losses: bool,
        dtype: Any,
    ):
        self._model = model
        self._objective = objective
        self._scope = scope
        self._training = training
        self._layers_add_losses = layers_add_losses
        self._dtype = dtype
        self._near: list[float] = []
        self.is_random: list[bool] = []

    def near(self) -> list[float]:
        """The relative rounding error to expect of each loss."""
        return self._near

    def __call__(self, batch: tuple) -> Callable[[bool], Callable]:
        """A function (whether to change the predictions) -> the losses as `compare` asks for them."""
        if self._layers_add_losses:
            return self._of_passes(batch)
        with self._scope(0):
            y_pred = internals.outputs_of(self._model, batch[0], self._training)
        known = tensors_of(batch)[0].shape[0]

        def of_predictions(is_moved):
            predicted = moved(y_pred, is_moved)

            def scalars(rows, shift):
                part = _part(batch, rows)
                of_part = predicted if rows is None else _predictions(predicted, rows, known)

                # Only a graph shows what draws random numbers; of eager predictions, it shows none.
                is_eager = tf.executing_eagerly()
                of_model = [] if is_eager else tf.nest.flatten(of_part, expand_composites=True)

                def compute():
                    number = tf.constant(shift)
                    with self._scope(number):
                        found = self._objective.one_by_one(part, of_part, [])
                    return self._stacked(found, number, of_model)

                return tf.function(compute, autograph=False)() if is_eager else compute()

            return scalars

        return of_predictions

    def _of_passes(self, batch: tuple) -> Callable[[bool], Callable]:
        """The same, with a forward pass for each part."""

        # TensorFlow would copy the model to each of the eight places where it is called.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def losses(batch, is_moved, shift):
            with self._scope(shift) as scope:
                y_pred = internals.outputs_of(self._model, batch[0], self._training)
                found = self._objective.one_by_one(batch, moved(y_pred, is_moved), scope.losses)
            return self._stacked(found, shift)

        losses.get_concrete_function(
            map_tensors(spec_of, batch), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)
        )
        return lambda is_moved: (
            lambda rows, shift: losses(
                _part(batch, rows), tf.constant(is_moved), tf.constant(shift)
            )
        )

    def _stacked(self, found: list, shift: tf.Tensor, of_model: Sequence = ()) -> tf.Tensor:
        """The losses as one tensor; notes what is to be known of them. What the model itself draws,
        if all parts share its forward pass, is the same for them."""
        if not self._near:
            drawing = stateful_draws(tf.compat.v1.get_default_graph())
            draws = [output for operation in drawing for output in operation.outputs]
            depends = Dependence(
                [*draws, shift], until=[one for one in of_model if one is not None]
            )
            self.is_random = [depends(loss) for loss in found]
        self._near = [rounding(loss.dtype) for loss in found]
        return tf.stack([tf.cast(loss, self._dtype) for loss in found])


def rounding(dtype: tf.DType) -> float:
    """The relative error to expect of sums of this type."""
    is_tf32 = dtype == tf.float32 and _multiplies_in_tf32()
    return 1e-2 if is_tf32 else {tf.float16: 1e-2, tf.bfloat16: 6e-2}.get(dtype, 1e-4)


def _multiplies_in_tf32() -> bool:
    """Whether TensorFlow may round the factors of a product to TensorFloat-32, which has the ten
    bits of float16. It does so on GPUs, unless told otherwise."""
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    return on_gpu and tf.config.experimental.tensor_float_32_execution_enabled()


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

"""Whether scalars that a loss returns are the means, or the sums, over the examples that they are
said to be.

Of an entry with a row for each example, the scalar is the sum over its rows.
"""

import threading
from collections.abc import Callable

import tensorflow as tf

from gradlab.fit.losses.loss_check import both_halves, rounding

WRONG = -1
# Calls that must tell the same: one alone may have equal labels, or a factor that is still 0. One
# if the loss draws random numbers, because each comparison has a small chance to refuse a loss that
# is right.
CALLS = 3
RANDOM_CALLS = 1
REPETITIONS = 4
# A loss that draws random numbers is refused only if it is this many times closer to a sum than a
# sum is to a mean, or the other way around, and if the noise is as small.
CLEARLY = 4.0

RULE = (
    "{name} must be a {reduction} over the examples, as the reduction says, but its values for "
    "some examples and for their two halves are not. Received:"
)
ROWS_RULE = (
    "{name} must have a row for each example that does not depend on the other examples; a sum "
    "over its rows for some examples is not that of their two halves. Received:"
)


class ReductionCheck:
    """Compares the scalars of a few examples with those of their halves, in the first calls of each
    traced function.

    Args:
        names: the names of the scalars.
        dtypes: their types.
        is_mean: whether they are said to be means over the examples, otherwise sums.
        of_rows: for each scalar, whether it is the sum over an entry's rows, which is a sum over
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
        self._names = names
        self._of_rows = of_rows
        self._main = main
        self._is_random = is_random
        self._is_mean = [is_mean and not rows for rows in of_rows]
        self._near = [rounding(dtype) for dtype in dtypes]

    def __call__(self, scalars: Callable[[slice, int], tf.Tensor], few: tf.Tensor) -> tf.Tensor:
        """Whether the scalars are what they are said to be, as far as is known: a boolean tensor.

        If they are not, computing it also fails with a sentence, unless XLA compiles it, which
        drops such checks.

        Args:
            scalars: a function (rows, shift) -> the scalars of these examples, shape (scalars,),
                with random numbers that depend on the shift.
            few: the number of examples to look at; fewer than two tell nothing.
        """
        verdict = _variable()
        if verdict is None:  # eager code keeps nothing from one call to the next
            return tf.cond(few > 1, lambda: self._compare(scalars, few)[0], lambda: True)
        told = verdict.read_value()

        def compare():
            is_right, tells = self._compare(scalars, few)
            found = tf.where(is_right, told + tf.cast(tells, told.dtype), WRONG)
            verdict.assign(found)
            return found

        calls = RANDOM_CALLS if self._is_random else CALLS
        return tf.cond((told != WRONG) & (told < calls) & (few > 1), compare, lambda: told) != WRONG

    def _compare(self, scalars: Callable, few: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the scalars are what they are said to be, and whether these examples tell."""
        repeated = tf.stack([scalars(slice(0, few), shift) for shift in range(REPETITIONS)])
        first, second = (scalars(rows, REPETITIONS + i) for i, rows in enumerate(both_halves(few)))
        whole = repeated[0]
        dtype = repeated.dtype
        share = tf.cast((few + 1) // 2, dtype) / tf.cast(few, dtype)
        mean = share * first + (1 - share) * second
        total = first + second
        said = tf.where(self._is_mean, mean, total)
        other = tf.where(self._is_mean, total, mean)
        noise = tf.reduce_max(repeated, 0) - tf.reduce_min(repeated, 0)
        size = tf.reduce_max(tf.abs(tf.stack([whole, first, second])), 0)
        near = tf.constant(self._near, dtype) * size
        # A comparison with NaN, which the half of the examples may give, is false.
        wrong = ~(tf.abs(whole - said) <= near) & tf.math.is_finite(whole)
        if self._is_random:
            wrong = CLEARLY * tf.maximum(tf.abs(whole - other), noise) < tf.abs(said - other)
        checks = []
        for i, name in enumerate(self._names):
            reduction = "mean" if self._is_mean[i] else "sum"
            rule = (
                ROWS_RULE.format(name=name)
                if self._of_rows[i]
                else RULE.format(name=name, reduction=reduction)
            )
            numbers = tf.stack([whole[i], first[i], second[i]])
            checks.append(tf.debugging.Assert(~wrong[i], [rule, numbers]))
        with tf.control_dependencies([check for check in checks if check is not None]):
            return ~tf.reduce_any(wrong), size[self._main] > 0


def _variable() -> tf.Variable | None:
    """A new variable for a verdict, which lives as long as the graph that is being traced; None in
    eager code."""
    if tf.executing_eagerly():
        return None
    found: list[tf.Variable] = []

    def create():
        with tf.init_scope():
            found.append(tf.Variable(0, trainable=False))

    # Another thread is in the scope of no strategy: replicas, which are traced one after the other,
    # cannot create a variable together here.
    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    tf.compat.v1.add_to_collection("gradlab", found[0])  # the graph itself keeps only its handle
    return found[0]

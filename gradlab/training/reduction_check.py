"""Whether scalars that a loss returns are the means, or the sums, over the examples that they are said to be."""

import threading
from collections.abc import Callable

import tensorflow as tf

from gradlab.training.additivity import both_halves, rounding

UNKNOWN, RIGHT, WRONG = range(3)
REPETITIONS = 4
# A loss that draws random numbers is refused only if it is this many times closer to a sum than a sum is to a mean, or
# the other way around, and if the noise is as small.
CLEARLY = 4.0

RULE = (
    "{name} must be a {reduction} over the examples, as the reduction says, but its values for some examples and for "
    "their two halves are not. Received:"
)


class ReductionCheck:
    """Compares the scalars of a few examples with those of their halves, once for each traced function.

    Args:
        names: the names of the scalars.
        dtypes: their types.
        is_mean: whether they are said to be means over the examples, otherwise sums.
        is_random: whether the loss draws random numbers.
    """

    def __init__(self, names: list[str], dtypes: list[tf.DType], is_mean: bool, is_random: bool):
        self._names, self._is_mean, self._is_random = names, is_mean, is_random
        self._near = [rounding(dtype) for dtype in dtypes]

    def __call__(self, scalars: Callable[[slice, int], tf.Tensor], few: tf.Tensor) -> tf.Tensor:
        """Whether the scalars are what they are said to be, as far as is known: a boolean tensor.

        If they are not, computing it also fails with a sentence, unless XLA compiles it, which drops such checks.

        Args:
            scalars: a function (rows, shift) -> the scalars of these examples, shape (scalars,), with random numbers
                that depend on the shift.
            few: the number of examples to look at; fewer than two tell nothing.
        """
        verdict = _variable()
        if verdict is None:  # eager code keeps nothing from one call to the next
            return tf.cond(few > 1, lambda: self._compare(scalars, few), lambda: True)
        known = verdict.read_value()

        def compare():
            found = tf.where(self._compare(scalars, few), RIGHT, WRONG)
            verdict.assign(found)
            return found

        return tf.cond((known == UNKNOWN) & (few > 1), compare, lambda: known) != WRONG

    def _compare(self, scalars: Callable, few: tf.Tensor) -> tf.Tensor:
        repeated = tf.stack([scalars(slice(0, few), shift) for shift in range(REPETITIONS)])
        first, second = (scalars(rows, REPETITIONS + i) for i, rows in enumerate(both_halves(few)))
        whole, dtype = repeated[0], repeated.dtype
        share = tf.cast((few + 1) // 2, dtype) / tf.cast(few, dtype)
        mean, total = share * first + (1 - share) * second, first + second
        said, other = (mean, total) if self._is_mean else (total, mean)
        noise = tf.reduce_max(repeated, 0) - tf.reduce_min(repeated, 0)
        size = tf.reduce_max(tf.abs(tf.stack([whole, first, second])), 0)
        near = tf.constant(self._near, dtype) * size
        wrong = tf.abs(whole - said) > near
        if self._is_random:
            wrong = CLEARLY * tf.maximum(tf.abs(whole - other), noise) < tf.abs(said - other)
        checks = []
        for i, name in enumerate(self._names):
            rule = RULE.format(name=name, reduction="mean" if self._is_mean else "sum")
            numbers = tf.stack([whole[i], first[i], second[i]])
            checks.append(tf.debugging.Assert(~wrong[i], [rule, numbers]))
        with tf.control_dependencies([check for check in checks if check is not None]):
            return ~tf.reduce_any(wrong)


def _variable() -> tf.Variable | None:
    """A new variable for a verdict, which lives as long as the graph that is being traced; None in eager code."""
    if tf.executing_eagerly():
        return None
    found: list[tf.Variable] = []

    def create():
        with tf.init_scope():
            found.append(tf.Variable(UNKNOWN, trainable=False))

    # Another thread is in the scope of no strategy: replicas, which are traced one after the other, cannot create a
    # variable together here.
    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    tf.compat.v1.add_to_collection("gradlab", found[0])  # the graph itself keeps only its handle
    return found[0]

"""BatchRamp: batches that grow while training, and the learning rate that goes with them."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import keras
import tensorflow as tf

from gradlab import _checks

POWERS = {"linear": 1.0, "sqrt": 0.5}  # of the batch, in the learning rate


class BatchRamp:
    """Batch sizes that grow while training, by update.

    The batches are a dataset, and the learning rate is a schedule of Keras, so `fit` stays what it
    is. In a model of `gradlab.microbatched` the micro-batches keep their size, and a larger batch
    has more of them: it needs no more memory than its own examples take.

    Args:
        sizes: the sizes, in examples, by the number of the update from which on each holds. The
            first update is 0.

    Attributes:
        sizes: the same, as a dict.

    Raises:
        ValueError: fewer than two sizes, sizes that do not rise, or updates that do not rise from 0.

    Example:
        >>> ramp = BatchRamp({0: 2, 2: 4})
        >>> examples = tf.data.Dataset.range(5).repeat()
        >>> [batch.tolist() for batch in ramp.batches(examples).take(3).as_numpy_iterator()]
        [[0, 1], [2, 3], [4, 0, 1, 2]]
        >>> rate = ramp.learning_rate(0.1, "sqrt")
        >>> [round(float(rate(update)), 3) for update in range(4)]
        [0.1, 0.1, 0.141, 0.141]

    Source: Smith et al. 2018, https://arxiv.org/abs/1711.00489.
    """

    def __init__(self, sizes: Mapping[int, int]):
        if not isinstance(sizes, Mapping) or len(sizes) < 2:
            raise ValueError(
                "sizes must be a dict of two batch sizes or more, such as {0: 64, 1000: 128}. "
                f"Received: {sizes!r}"
            )
        for update, size in sizes.items():
            _checks.natural_number("sizes' updates", update)
            _checks.positive_integer("sizes' batch sizes", size)
        begins = list(sizes)
        if begins[0] != 0 or not _rise(begins):
            raise ValueError(f"sizes' updates must rise from 0. Received: {dict(sizes)}")
        if not _rise(sizes.values()):
            raise ValueError(f"sizes' batch sizes must rise. Received: {dict(sizes)}")
        self.sizes = dict(sizes)

    def batches(
        self, examples: tf.data.Dataset, optimizer: keras.optimizers.Optimizer | None = None
    ) -> tf.data.Dataset:
        """Joins examples to batches.

        Args:
            examples: single examples without an end, such as `dataset.shuffle(1000, seed=0).repeat()`.
            optimizer: begin at the update that it has reached, and leave out the examples before
                it. So a run that `keras.callbacks.BackupAndRestore` has restored, with a backup for
                each epoch, continues with the batches that come next, if the examples come in the
                same order: give `shuffle` a seed, and make the dataset anew, as a new process does.
                Updates that are skipped, as loss scaling may do, do not count. None: begin at
                update 0, as for `gradlab.Trainer`, which keeps its own position.

        Returns:
            The batches, without an end: `fit` needs `steps_per_epoch`.

        Raises:
            ValueError: examples that end.
        """
        endless = tf.data.INFINITE_CARDINALITY
        if not isinstance(examples, tf.data.Dataset) or examples.cardinality() != endless:
            raise ValueError(
                "examples must be a tf.data.Dataset without an end: call its repeat(). "
                f"Received: {examples!r}"
            )

        def reached() -> int:
            return 0 if optimizer is None else int(tf.convert_to_tensor(optimizer.iterations.value))

        # Called when an iteration begins, which is after callbacks have restored the optimizer. A
        # function of Python, because those of a dataset cannot read a variable of a GPU.
        def begin(_: tf.Tensor) -> tf.data.Dataset:
            update = tf.ensure_shape(tf.numpy_function(reached, [], tf.int64), [])
            return _batches(examples, self.sizes, update)

        batches = tf.data.Dataset.range(1).flat_map(begin)
        return batches.apply(tf.data.experimental.assert_cardinality(endless))

    def learning_rate(
        self, rate: float, rule: Literal["linear", "sqrt"]
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate that grows with the batch.

        Args:
            rate: that of the first size.
            rule: "linear": as many times larger as the batch, for SGD. "sqrt": the square root of
                that, for Adam.

        Returns:
            A schedule of Keras, for an optimizer that makes one update for each batch.

        Raises:
            ValueError: an argument out of range.
        """
        _checks.positive_number("rate", rate)
        _checks.one_of("rule", rule, POWERS)
        first, *later = self.sizes
        rates = [rate * (size / self.sizes[first]) ** POWERS[rule] for size in self.sizes.values()]
        # Keras' boundaries are the last updates of a value
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            [update - 1 for update in later], rates
        )


def _batches(
    examples: tf.data.Dataset, sizes: Mapping[int, int], first: tf.Tensor
) -> tf.data.Dataset:
    """The batches from an update on, without the examples before it."""
    begins = tf.constant([*sizes], tf.int64)
    ends = tf.concat([begins[1:], [tf.int64.max]], 0)
    by_begin = tf.constant([*sizes.values()], tf.int64)
    unit = math.gcd(*sizes.values())  # so many examples always stay together

    def units_of(update: tf.Tensor) -> tf.Tensor:
        place = tf.searchsorted(begins, [update], side="right")[0] - 1
        return tf.gather(by_begin, place) // unit

    def numbered(state: tuple, examples_of_unit: Any) -> tuple:
        update, units_before = state
        is_last = units_before + 1 == units_of(update)
        following = (
            update + tf.cast(is_last, tf.int64),
            tf.where(is_last, tf.zeros_like(units_before), units_before + 1),
        )
        return following, (update, examples_of_unit)

    def joined(update: tf.Tensor, units: tf.data.Dataset) -> tf.data.Dataset:
        return units.map(lambda _, examples_of_unit: examples_of_unit).rebatch(
            units_of(update) * unit
        )

    updates_of_size = tf.maximum(tf.minimum(first, ends) - begins, 0)  # that are over
    passed = tf.reduce_sum(by_begin * updates_of_size)
    units = examples.skip(passed).batch(unit, drop_remainder=True)
    return units.scan((first, tf.zeros_like(first)), numbered).group_by_window(
        lambda update, _: update, joined, window_size_func=units_of
    )


def _rise(numbers: Any) -> bool:
    return all(one < next_one for one, next_one in pairwise(numbers))

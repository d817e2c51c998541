"""What the logs of `fit` show of an epoch's updates beside losses and metrics: how many micro-batches
were left out, and the gradient noise scale."""

from typing import Any

import keras
import tensorflow as tf


class Skipped(keras.metrics.Sum):
    """The number of micro-batches that were left out."""

    def __init__(self):
        super().__init__(name="skipped")

    def update_state(self, outcome: Any) -> None:
        """Adds those of an update, from its `Outcome`."""
        super().update_state(outcome.skipped)


class EpochNoiseScale(keras.metrics.Metric):
    """The gradient noise scale over the updates of an epoch, in examples: the ratio of two means, as
    `gradlab.gradient_noise_scale` computes its value."""

    def __init__(self):
        super().__init__(name="noise_scale")
        self._variance = self.add_variable((), "zeros", name="variance")
        self._squared_gradient = self.add_variable((), "zeros", name="squared_gradient")

    def update_state(self, outcome: Any) -> None:
        """Adds the estimates of an update, from its `Outcome`. A window of a single micro-batch
        shows no noise, and one with a gradient that is not finite shows nothing."""
        weights = outcome.weights
        total = tf.reduce_sum(weights)
        others = tf.math.count_nonzero(weights, dtype=weights.dtype) - 1
        squares = tf.reduce_sum(weights * outcome.gradient_norms**2)
        small = tf.math.divide_no_nan(squares, total)
        big = outcome.window_gradient_norm**2
        shows = (others > 0) & tf.math.is_finite(small) & tf.math.is_finite(big)
        for sum_, above in (
            (self._variance, (small - big) * total),
            (self._squared_gradient, (others + 1) * big - small),
        ):
            sum_.assign_add(tf.where(shows, above / others, 0.0))

    def result(self) -> tf.Tensor:
        """The noise scale: inf if the mean estimate of the squared gradient is not above 0, NaN
        before the first window of two micro-batches."""
        variance = tf.convert_to_tensor(self._variance)
        squared_gradient = tf.convert_to_tensor(self._squared_gradient)
        is_known = (variance != 0) | (squared_gradient != 0)
        ratio = tf.where(squared_gradient > 0, variance / squared_gradient, float("inf"))
        return tf.where(is_known, ratio, float("nan"))

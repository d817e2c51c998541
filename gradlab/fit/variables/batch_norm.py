"""Batch normalization in a window: its moving averages are updated once, from the whole window's
statistics.

Limitation: in training, a BatchNormalization layer normalizes each micro-batch by that
micro-batch's own mean and variance. So the gradients differ from those of the large batch, and a
warning says so.

What is preserved: the moving averages, which evaluation uses. They are updated once per update,
with the mean and variance of all examples of the window on all replicas. If the layer's inputs do
not depend on another BatchNormalization, these are exactly the large batch's.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from gradlab.fit import keras_private as internals
from gradlab.fit.replicas import sum_over_replicas

WARNING = (
    "{layers} normalizes each micro-batch by its own statistics, so this update is not the large "
    "batch's: the smaller the micro-batch, the larger the difference. GroupNormalization and "
    "LayerNormalization do not depend on other examples. The moving averages are updated once per "
    "update, from the whole window."
)


class MovingAverages:
    """The moving averages of batch normalization layers over one window.

    The layers run with moving averages of 0, so that the values they would assign are (1 -
    momentum) times the micro-batch's own statistics. `add` joins these over the window's examples:
    the mean, and the sum of the squared distances from it, so that no variance is a small
    difference of large numbers (Chan, Golub and LeVeque, 1983).

    Args:
        layers: the layers that update their moving averages in training.
        calls: for each layer, how often the model calls it. A shared layer updates its averages at
            each call.
    """

    def __init__(self, layers: list, calls: list[int]):
        self._layers = layers
        self._decays = [layer.momentum**count for layer, count in zip(layers, calls)]
        self.variables = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]

    def zeros(self, dtype: Any) -> list:
        """The statistics of an empty window: the number of examples, then for each layer its mean
        and its squares."""
        return [
            tf.zeros([], dtype),
            *(tf.zeros(variable.shape, variable.dtype) for variable in self.variables),
        ]

    def add(self, statistics: list, scope: keras.StatelessScope, examples: tf.Tensor) -> list:
        """The statistics after one more micro-batch with a number of examples, which ran in that
        scope."""
        total = tf.cast(statistics[0], tf.float64)
        more = tf.cast(examples, tf.float64)
        share = tf.math.divide_no_nan(more, total + more)
        added = [statistics[0] + tf.cast(examples, statistics[0].dtype)]
        for i, (layer, decay) in enumerate(zip(self._layers, self._decays)):
            mean, squares = statistics[1 + 2 * i : 3 + 2 * i]
            own_mean = _undone(scope.get_current_value(layer.moving_mean), decay)
            variance = _undone(scope.get_current_value(layer.moving_variance), decay)
            distance = own_mean - mean
            added.append(mean + tf.cast(share, mean.dtype) * distance)
            between = tf.cast(share * total, mean.dtype) * distance**2
            added.append(squares + tf.cast(more, mean.dtype) * variance + between)
        return added

    def over_replicas(self, statistics: list) -> list:
        """The statistics over all replicas."""
        total, *moments = statistics
        if not moments or tf.distribute.get_replica_context().num_replicas_in_sync == 1:
            return statistics
        means = moments[::2]
        all_of_them, *sums = sum_over_replicas(
            [total, *(tf.cast(total, mean.dtype) * mean for mean in means)]
        )
        means_of_all = [
            tf.math.divide_no_nan(each, tf.cast(all_of_them, each.dtype)) for each in sums
        ]
        squares = sum_over_replicas(
            [
                own + tf.cast(total, own.dtype) * (mean - of_all) ** 2
                for own, mean, of_all in zip(moments[1::2], means, means_of_all)
            ]
        )
        return [all_of_them, *(tensor for pair in zip(means_of_all, squares) for tensor in pair)]

    def assign(self, statistics: list) -> None:
        """Updates each average once with the window's statistics; an empty window changes
        nothing."""
        total, *moments = statistics
        for i, (layer, decay) in enumerate(zip(self._layers, self._decays)):
            mean, squares = moments[2 * i : 2 * i + 2]
            count = tf.cast(total, mean.dtype)
            share = tf.where(count > 0, tf.constant(1 - decay, mean.dtype), tf.zeros_like(count))
            variance = tf.math.divide_no_nan(squares, count)
            layer.moving_mean.assign(layer.moving_mean.value * (1 - share) + share * mean)
            layer.moving_variance.assign(
                layer.moving_variance.value * (1 - share) + share * variance
            )


def _undone(average: tf.Tensor, decay: float) -> tf.Tensor:
    """The statistics of which a moving average that began at 0 has taken its share."""
    return average / tf.constant(1 - decay, average.dtype)


def normalizing_layers(layers: Iterable, assigned: dict[int, int]) -> tuple[list, list[int]]:
    """The batch normalization layers whose moving averages were assigned, and how often.

    Args:
        layers: any Keras layers.
        assigned: for each id(variable), how often a forward pass assigned to it.
    """
    found = [
        layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization) and id(layer.moving_mean) in assigned
    ]
    return found, [assigned[id(layer.moving_mean)] for layer in found]


def check(model: keras.Model, replicas: int) -> None:
    """Raises ValueError for a layer that cannot work inside a window on several replicas."""
    for layer in internals.layers_of(model):
        if (
            replicas > 1
            and isinstance(layer, keras.layers.BatchNormalization)
            and layer.synchronized
        ):
            raise ValueError(
                f"{layer.name} must not be synchronized: replicas would wait for each other in "
                "every micro-batch, and windows may differ in length. Use synchronized=False, "
                "GroupNormalization or LayerNormalization. Received: synchronized=True on "
                f"{replicas} replicas"
            )

"""Batch normalization in a window: its moving averages are updated once, from the whole window's statistics.

Limitation: in training, a BatchNormalization layer normalizes each micro-batch by that micro-batch's own mean and
variance. So the gradients differ from those of the large batch, and a warning says so.

What is preserved: the moving averages, which evaluation uses. They are updated once per update, with the mean and
variance of all examples of the window on all replicas. If the layer's inputs do not depend on another
BatchNormalization, these are exactly the large batch's.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from gradlab.training import _keras_internals as internals

WARNING = (
    "{layers} normalizes each micro-batch by its own statistics, so this update is not the large batch's: the smaller "
    "the micro-batch, the noisier. GroupNormalization and LayerNormalization do not depend on other examples. The "
    "moving averages are updated once per update, from the whole window."
)


class MovingAverages:
    """The moving averages of batch normalization layers over one window.

    The layers run with moving averages of 0, so that the values they would assign are (1 - momentum) times the
    micro-batch's own statistics. `add` sums these over the window's examples: the mean, and the second moment about the
    old moving average, which keeps the variance from being a small difference of large numbers.

    Args:
        layers: the layers that update their moving averages in training.
        calls: for each layer, how often the model calls it. A shared layer updates its averages at each call.
    """

    def __init__(self, layers: list, calls: list[int]):
        self._layers = layers
        self._decays = [layer.momentum**count for layer, count in zip(layers, calls)]
        self.variables = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]

    def zeros(self, dtype: Any) -> list:
        """The sums of an empty window: the number of examples, then one sum for each variable."""
        return [tf.zeros([], dtype), *(tf.zeros(variable.shape, variable.dtype) for variable in self.variables)]

    def add(self, sums: list, scope: keras.StatelessScope, examples: tf.Tensor) -> list:
        """The sums after one more micro-batch with a number of examples, which ran in that scope."""
        total, *moments = sums
        added = [total + tf.cast(examples, total.dtype)]
        for i, (layer, decay) in enumerate(zip(self._layers, self._decays)):
            mean = scope.get_current_value(layer.moving_mean) / (1 - decay) - layer.moving_mean.value
            second = scope.get_current_value(layer.moving_variance) / (1 - decay) + mean**2
            count = tf.cast(examples, mean.dtype)
            added += [moments[2 * i] + count * mean, moments[2 * i + 1] + count * second]
        return added

    def assign(self, sums: list) -> None:
        """Updates each average once with the window's statistics; an empty window changes nothing."""
        total, *moments = sums
        for i, (layer, decay) in enumerate(zip(self._layers, self._decays)):
            old = layer.moving_mean.value
            count = tf.cast(total, old.dtype)
            mean, second = (tf.math.divide_no_nan(moment, count) for moment in moments[2 * i : 2 * i + 2])
            share = tf.where(count > 0, tf.cast(1 - decay, old.dtype), tf.zeros_like(count))
            variance = second - mean**2
            layer.moving_mean.assign(old + share * mean)
            layer.moving_variance.assign(layer.moving_variance.value * (1 - share) + share * variance)


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
        if replicas > 1 and isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                f"{layer.name} must not be synchronized: replicas would wait for each other in every micro-batch, and "
                "windows need not be equally long. Use synchronized=False, GroupNormalization or LayerNormalization. "
                f"Received: synchronized=True on {replicas} replicas"
            )

"""The networks that are timed, as lists of layers, so that every framework builds the same network."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gradlab import runtime

with runtime.without_startup_noise():
    from gradlab.lab.experiments import models

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Network(NamedTuple):
    """A network for ten classes.

    Attributes:
        input_shape: height, width, channels.
        layers: ("conv", filters, size, padding), ("pool",), ("flatten",), ("dense", units), ("relu",) or
            ("dropout", rate), in order.
        model: the same network as a gradlab model.
    """

    input_shape: tuple[int, ...]
    layers: tuple[tuple, ...]
    model: models.Model


Run = Callable[[int], float | None]
"""A function (number of updates) that makes the updates.

It may return the seconds that the updates took. It does so if the call itself takes longer for unrelated reasons.
"""

Way = Callable[[Network, int, int, np.ndarray, np.ndarray], Run]
"""A way to make an update: a function (network, k, b, x, y) -> `Run`.

An update consists of k micro-batches of b examples each. x, the images, and y, the classes, hold k * b examples.
"""


def build(name: str) -> Network:
    """Builds the network called "lenet", "dense" or "vgg16"."""
    return {"lenet": _lenet, "dense": _dense, "vgg16": _vgg16}[name]()


def batch(network: Network, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and classes. The time of an update does not depend on their values.

    Args:
        network: the network that the images are for.
        examples: the number of images.

    Returns:
        The images, shape (examples, height, width, channels), and the classes, shape (examples,).
    """
    rng = np.random.default_rng(0)
    x = rng.random([examples, *network.input_shape], np.float32)
    return x, rng.integers(0, 10, examples).astype(np.int32)


def _lenet() -> Network:
    layers: list[tuple] = [("dropout", 0.2)]
    for filters in (6, 16):
        layers += [("conv", filters, 5, "valid"), ("relu",), ("pool",), ("dropout", 0.5)]
    layers += [("flatten",)]
    for units in (120, 84):
        layers += [("dense", units), ("relu",), ("dropout", 0.5)]
    return Network((28, 28, 1), (*layers, ("dense", 10), ("relu",)), models.lenet())


def _dense() -> Network:
    return Network((28, 28, 1), (("flatten",), ("dense", 128), ("relu",), ("dense", 10)), models.dense())


def _vgg16() -> Network:
    layers: list[tuple] = []
    for widths in VGG16:
        for filters in widths:
            layers += [("conv", filters, 3, "same"), ("relu",)]
        layers += [("pool",)]
    layers += [("flatten",), ("dense", 128), ("relu",), ("dropout", 0.5), ("dense", 10)]
    return Network((64, 64, 3), tuple(layers), models.vgg((64, 64, 3), VGG16))

"""The networks that are timed, as lists of layers, so that every framework builds the same one."""

from typing import NamedTuple

from gradlab.lab.experiments import models

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Network(NamedTuple):
    """A network for ten classes.

    Attributes:
        input_shape: height, width, channels.
        layers: ("conv", filters, size, padding), ("pool",), ("flatten",), ("dense", units), ("relu",) or
            ("dropout", rate), in order.
        model: the same for gradlab.
    """

    input_shape: tuple[int, ...]
    layers: tuple[tuple, ...]
    model: models.Model


def build(name: str) -> Network:
    """The network called "lenet", "dense" or "vgg16"."""
    return {"lenet": _lenet, "dense": _dense, "vgg16": _vgg16}[name]()


def _lenet() -> Network:
    layers = [("dropout", 0.2)]
    for filters in (6, 16):
        layers += [("conv", filters, 5, "valid"), ("relu",), ("pool",), ("dropout", 0.5)]
    layers += [("flatten",)]
    for units in (120, 84):
        layers += [("dense", units), ("relu",), ("dropout", 0.5)]
    return Network((28, 28, 1), (*layers, ("dense", 10), ("relu",)), models.lenet())


def _dense() -> Network:
    return Network((28, 28, 1), (("flatten",), ("dense", 128), ("relu",), ("dense", 10)), models.dense())


def _vgg16() -> Network:
    layers = []
    for widths in VGG16:
        for filters in widths:
            layers += [("conv", filters, 3, "same"), ("relu",)]
        layers += [("pool",)]
    layers += [("flatten",), ("dense", 128), ("relu",), ("dropout", 0.5), ("dense", 10)]
    return Network((64, 64, 3), tuple(layers), models.vgg((64, 64, 3), VGG16))

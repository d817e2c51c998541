"""The networks that are timed, as lists of layers, so that every framework builds the same
network."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gradlab import runtime

with runtime.without_startup_noise():
    from gradlab.lab.experiments import models

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
PADDING = 0  # the token that fills the end of a text
SHORTEST = 8  # the fewest tokens of a text that are not padding
EPSILON = 1e-3  # what normalization layers add to the variance


class Network(NamedTuple):
    """A network for ten classes.

    The layers of images and of all networks are ("dense", units), ("relu",), ("dropout", rate),
    ("flatten",), ("conv", filters, size, padding), ("pool",), ("group norm", groups) and ("mean of
    pixels",). The layers of texts are ("embedding", tokens, width), ("positions",), a learned
    vector for each position, ("attention", heads, size), ("layer norm",) and ("mean of tokens",).
    Attention and the mean ignore padding. ("residual", layers) adds the output of layers to their
    input.

    Attributes:
        input_shape: height, width, channels of an image, or the number of tokens of a text.
        layers: the layers, in order.
        model: the same network as a gradlab model, if there is one.
    """

    input_shape: tuple[int, ...]
    layers: tuple[tuple, ...]
    model: models.Model | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the inputs are texts, which consist of integers. Otherwise they are images."""
        return self.layers[0][0] == "embedding"


Run = Callable[[int], float | None]
"""A function (number of updates) that makes the updates.

It may return the seconds that the updates took. It does so if the call itself takes longer for unrelated reasons.
"""

Way = Callable[[Network, int, int, np.ndarray, np.ndarray], Run]
"""A way to make an update: a function (network, k, b, x, y) -> `Run`.

An update consists of k micro-batches of b examples each. x, the inputs, and y, the classes, hold k * b examples.
"""

Ways = dict[str, dict[str, Way]]
"""For each way by name, its variants by name, of which the fastest counts."""


def build(name: str) -> Network:
    """Builds the network called "lenet", "dense", "vgg16", "transformer" or "resnet"."""
    builders = {
        "lenet": _lenet,
        "dense": _dense,
        "vgg16": _vgg16,
        "transformer": _transformer,
        "resnet": _resnet,
    }
    return builders[name]()


def batch(network: Network, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and classes. The time of an update does not depend on their values.

    Args:
        network: the network that the inputs are for.
        examples: the number of inputs.

    Returns:
        The inputs, shape (examples, *input_shape), and the classes, shape (examples,). Images are
        float32 and classes int32. Texts are int32, and each has a random length, after which it is
        filled with padding.
    """
    rng = np.random.default_rng(0)
    if network.reads_tokens:
        [longest], tokens = network.input_shape, network.layers[0][1]
        x = rng.integers(PADDING + 1, tokens, (examples, longest), np.int32)
        lengths = rng.integers(SHORTEST, longest + 1, (examples, 1))
        x[np.arange(longest) >= lengths] = PADDING
    else:
        x = rng.random([examples, *network.input_shape], np.float32)
    return x, rng.integers(0, 10, examples).astype(np.int32)


def output_shape(layer: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a layer's output.

    Args:
        layer: a layer, as in `Network`.
        shape: the shape of one input of the layer, with the channels last.

    Returns:
        The shape of one output, with the channels last.
    """
    match layer:
        case "conv", filters, size, padding:
            lost = size - 1 if padding == "valid" else 0
            return shape[0] - lost, shape[1] - lost, filters
        case ("pool",):
            return shape[0] // 2, shape[1] // 2, shape[2]
        case ("flatten",):
            return (math.prod(shape),)
        case "dense", units:
            return (*shape[:-1], units)
        case "embedding", _, width:
            return (*shape, width)
        case ("mean of pixels",) | ("mean of tokens",):
            return shape[-1:]
    return shape


def _lenet() -> Network:
    layers: list[tuple] = [("dropout", 0.2)]
    for filters in (6, 16):
        layers += [("conv", filters, 5, "valid"), ("relu",), ("pool",), ("dropout", 0.5)]
    layers += [("flatten",)]
    for units in (120, 84):
        layers += [("dense", units), ("relu",), ("dropout", 0.5)]
    return Network((28, 28, 1), (*layers, ("dense", 10), ("relu",)), models.lenet())


def _dense() -> Network:
    return Network(
        (28, 28, 1), (("flatten",), ("dense", 128), ("relu",), ("dense", 10)), models.dense()
    )


def _vgg16() -> Network:
    layers: list[tuple] = []
    for widths in VGG16:
        for filters in widths:
            layers += [("conv", filters, 3, "same"), ("relu",)]
        layers += [("pool",)]
    layers += [("flatten",), ("dense", 128), ("relu",), ("dropout", 0.5), ("dense", 10)]
    return Network((64, 64, 3), tuple(layers), models.vgg((64, 64, 3), VGG16))


def _transformer() -> Network:
    attention = ("residual", (("layer norm",), ("attention", 4, 16)))
    feed_forward = ("residual", (("layer norm",), ("dense", 256), ("relu",), ("dense", 64)))
    blocks = (attention, feed_forward) * 2
    return Network(
        (64,),
        (("embedding", 1000, 64), ("positions",), *blocks, ("mean of tokens",), ("dense", 10)),
    )


def _resnet() -> Network:
    normed = ("group norm", 8), ("relu",)
    convolution = ("conv", 32, 3, "same")
    block = ("residual", (*normed, convolution) * 2)
    return Network(
        (32, 32, 3), (convolution, block, block, *normed, ("mean of pixels",), ("dense", 10))
    )

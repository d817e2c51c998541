"""The networks of the experiments, as pure functions of their weights.

A model consists of the shapes of its weights and a function (weights, images, dropout seed) ->
logits. The same network can therefore be used in a tf.compat.v1 static graph, once for each tower,
and in a compiled TensorFlow 2 function. The dropout seed is an input, so two methods that are given
the same seeds drop the same units.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab import _checks

CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A network for classification.

    Attributes:
        name: the name of the model.
        input_shape: the shape of one image.
        shapes: the names and shapes of the weights, in order. Names end in "/kernel" or "/bias".
        logits: a function (weights, images, dropout_seed) -> logits, shape (examples, classes).
            weights: a mapping from name to tensor; dropout_seed: two integers, or None for no
            dropout (evaluation). Models of `choices.SEVERAL_SEEDS` compute several seeds at once:
            images and weights then have a leading axis, the seeds, and biases have a second axis of
            length 1 for the examples.
    """

    name: str
    input_shape: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    logits: Callable

    @property
    def classes(self) -> int:
        """The number of classes."""
        return list(self.shapes.values())[-1][-1]

    def initial_weights(self, seed: int, dtype: Any = "float32") -> dict[str, np.ndarray]:
        """Glorot-uniform kernels (Glorot and Bengio 2010, equation 16), drawn with NumPy, and zero
        biases."""
        generator = np.random.default_rng(seed)
        return {
            name: (
                _glorot_uniform(generator, shape) if name.endswith("kernel") else np.zeros(shape)
            ).astype(dtype)
            for name, shape in self.shapes.items()
        }

    def losses(
        self, weights: Mapping, images: Any, labels: Any, dropout_seed: Any = None
    ) -> tf.Tensor:
        """The softmax cross-entropy of each example in nats, shape (examples,). Arguments as for
        `logits`."""
        logits = self.logits(weights, images, dropout_seed)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def build(name: str, input_shape: tuple[int, ...] = (28, 28, 1)) -> Model:
    """Builds a model.

    Args:
        name: "lenet", "dense" or "vgg".
        input_shape: height, width and channels of an image.

    >>> sum(math.prod(shape) for shape in build("lenet").shapes.values())
    44426
    """
    _checks.one_of("model", name, MODELS)
    return MODELS[name](input_shape)


def lenet(input_shape: tuple[int, ...] = (28, 28, 1), logit_relu: bool = True) -> Model:
    """The network of the published gradient-averaging experiment: two convolutions, three dense
    layers, dropout.

    Args:
        input_shape: height, width and channels of an image.
        logit_relu: whether the logits pass through a relu, so that no class can score below 0. The
            published network has this relu, and the published figures were made with it.
    """
    height, width, channels = input_shape
    pooled1 = (height - 4) // 2, (width - 4) // 2, 6
    pooled2 = (pooled1[0] - 4) // 2, (pooled1[1] - 4) // 2, 16
    flat = math.prod(pooled2)
    shapes = {
        **_layer("conv1", 5, 5, channels, 6),
        **_layer("conv2", 5, 5, 6, 16),
        **_layer("dense1", flat, 120),
        **_layer("dense2", 120, 84),
        **_layer("logits", 84, CLASSES),
    }

    dropped = (0.2, input_shape), (0.5, pooled1), (0.5, pooled2), (0.5, (120,)), (0.5, (84,))

    def logits(w, x, seed):
        masks = dropout_masks(seed, x, dropped)
        x = drop(x, masks[0])
        x = _max_pool(tf.nn.relu(_convolve(w, "conv1", x, "VALID")))
        x = drop(x, masks[1])
        x = _max_pool(tf.nn.relu(_convolve(w, "conv2", x, "VALID")))
        x = drop(x, masks[2])
        x = tf.nn.relu(_dense(w, "dense1", tf.reshape(x, [-1, flat])))
        x = drop(x, masks[3])
        x = tf.nn.relu(_dense(w, "dense2", x))
        x = drop(x, masks[4])
        x = _dense(w, "logits", x)
        return tf.nn.relu(x) if logit_relu else x

    return Model("lenet", tuple(input_shape), shapes, logits)


def dense(input_shape: tuple[int, ...] = (28, 28, 1), hidden: int = 128) -> Model:
    """One hidden layer of relu units: 784-128-10 for MNIST. It is fast, and without dropout all
    methods agree.

    Args:
        input_shape: height, width and channels of an image.
        hidden: the number of units in the hidden layer.
    """
    inputs = math.prod(input_shape)
    shapes = {**_layer("hidden", inputs, hidden), **_layer("logits", hidden, CLASSES)}

    def logits(w, x, seed):
        x = tf.reshape(x, tf.concat([tf.shape(x)[: -len(input_shape)], [inputs]], axis=0))
        return _dense(w, "logits", tf.nn.relu(_dense(w, "hidden", x)))

    return Model("dense", tuple(input_shape), shapes, logits)


def vgg(
    input_shape: tuple[int, ...] = (32, 32, 3),
    blocks: Sequence[Sequence[int]] = ((16, 16), (32, 32), (64, 64)),
) -> Model:
    """Blocks of 3x3 convolutions, each followed by a max-pool, then two dense layers. The default
    is a small network.

    Args:
        input_shape: height, width and channels of an image. Each block halves height and width.
        blocks: the number of filters of each convolution, by block. VGG-16 (Simonyan and Zisserman
            2015) has two convolutions with 64 filters, two with 128, and three each with 256, 512
            and 512.
    """
    height, width, channels = input_shape
    shapes: dict[str, tuple[int, ...]] = {}
    filters = channels
    convolutions = []
    for block, widths in enumerate(blocks, 1):
        convolutions.append([f"conv{block}{'abc'[i]}" for i in range(len(widths))])
        for name, wide in zip(convolutions[-1], widths):
            shapes |= _layer(name, 3, 3, filters, wide)
            filters = wide
    flat = height // 2 ** len(blocks) * (width // 2 ** len(blocks)) * filters
    shapes |= _layer("dense", flat, 128) | _layer("logits", 128, CLASSES)

    def logits(w, x, seed):
        for names in convolutions:
            for name in names:
                x = tf.nn.relu(_convolve(w, name, x, "SAME"))
            x = _max_pool(x)
        x = tf.nn.relu(_dense(w, "dense", tf.reshape(x, [-1, flat])))
        [mask] = dropout_masks(seed, x, [(0.5, (128,))])
        return _dense(w, "logits", drop(x, mask))

    return Model("vgg", tuple(input_shape), shapes, logits)


MODELS: dict[str, Callable[..., Model]] = {"lenet": lenet, "dense": dense, "vgg": vgg}


def _layer(name: str, *kernel: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": kernel, f"{name}/bias": kernel[-1:]}


def _glorot_uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    field = math.prod(shape[:-2])  # the pixels under a convolution's kernel; 1 for a dense layer
    limit = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
    return generator.uniform(-limit, limit, shape)


def _dense(w, name, x):
    return _add_bias(tf.matmul(x, w[f"{name}/kernel"]), w[f"{name}/bias"])


def _convolve(w, name, x, padding):
    return _add_bias(
        tf.nn.conv2d(x, w[f"{name}/kernel"], strides=1, padding=padding), w[f"{name}/bias"]
    )


def _add_bias(x, bias):
    # The gradient of bias_add is one operation; the gradient of + must first determine which axes
    # were broadcast.
    return tf.nn.bias_add(x, bias) if len(bias.shape) == 1 else x + bias


def _max_pool(x):
    return tf.nn.max_pool2d(x, ksize=2, strides=2, padding="VALID")


def dropout_masks(seed: Any, x: tf.Tensor, layers: Sequence[tuple[float, Sequence[int]]]) -> list:
    """Draws the dropout masks of a micro-batch.

    The masks depend only on the seed and on the number of examples. All layers are drawn at once,
    because for a micro-batch the overhead of many small draws is larger than the time of drawing.

    Args:
        seed: two integers, or None for no dropout.
        x: the micro-batch; its first axis is the examples.
        layers: for each layer its dropout rate and the shape of its units.

    Returns:
        For each layer a mask of 0 and 1 / (1 - rate), shape (examples, *units); or None if there is
        no seed.
    """
    if seed is None:
        return [None] * len(layers)
    sizes = [math.prod(shape) for _, shape in layers]
    rates = np.repeat(np.array([rate for rate, _ in layers], np.float32), sizes)
    # The generator Philox (Salmon et al. 2011) takes the first integer of the seed as its key and
    # the second as the upper half of its counter, so every pair gives different numbers.
    # tf.random.stateless_uniform would first scramble the pair, which takes eight more operations.
    key, counter = tf.split(tf.cast(seed, tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), counter], axis=0)
    shape = tf.stack([tf.shape(x)[0], sum(sizes)])
    kept = (
        tf.raw_ops.StatelessRandomUniformV2(shape=shape, key=key, counter=counter, alg=1) >= rates
    )
    masks = tf.split(tf.cast(kept, x.dtype) * (1 / (1 - rates)).astype(x.dtype.name), sizes, axis=1)
    return [tf.reshape(mask, [-1, *shape]) for mask, (_, shape) in zip(masks, layers)]


def drop(x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Multiplies units by a dropout mask; None leaves them unchanged."""
    if mask is None:
        return x

    # The gradient of * would handle broadcasting, because it does not know that both tensors have
    # the same shape.
    @tf.custom_gradient
    def product(x):
        return x * mask, lambda upstream: upstream * mask

    return product(x)

"""The networks of the experiments, as pure functions of their weights.

A model here is its weights' shapes and a function (weights, images, dropout seed) -> logits. That makes the very same
network usable in a tf.compat.v1 static graph, once a tower, and in a compiled TensorFlow 2 function; and it makes its
randomness an input, so that two methods which are given the same seeds drop the same units.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab import _checks

CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A network for classification.

    Attributes:
        name: what it is called.
        input_shape: the shape of one image.
        shapes: the weights' names and shapes, in order. Names end in "/kernel" or "/bias".
        logits: a function (weights, images, dropout_seed) -> logits (examples, classes). weights: a mapping from name
            to tensor; dropout_seed: two integers, or None for no dropout (evaluation).
        takes_seeds: whether the logits can be those of several seeds at once: images and weights then have one more
            axis in front, the seeds, and biases one of length 1 after it, for the examples.
    """

    name: str
    input_shape: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    logits: Callable
    takes_seeds: bool = False

    @property
    def classes(self) -> int:
        """How many classes the logits are for."""
        return list(self.shapes.values())[-1][-1]

    def initial_weights(self, seed: int, dtype="float32") -> dict[str, np.ndarray]:
        """Glorot-uniform kernels (Glorot and Bengio 2010, equation 16) and zero biases, drawn by NumPy."""
        generator = np.random.default_rng(seed)
        return {
            name: (_glorot_uniform(generator, shape) if name.endswith("kernel") else np.zeros(shape)).astype(dtype)
            for name, shape in self.shapes.items()
        }

    def losses(self, weights: Mapping, images, labels, dropout_seed=None):
        """The softmax cross-entropy of each example: shape (examples,), in nats."""
        logits = self.logits(weights, images, dropout_seed)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def build(name: str, input_shape: tuple[int, ...] = (28, 28, 1)) -> Model:
    """The model called name, for images of a shape.

    >>> sum(math.prod(shape) for shape in build("lenet").shapes.values())
    44426
    """
    _checks.one_of("model", name, MODELS)
    return MODELS[name](input_shape)


def lenet(input_shape: tuple[int, ...] = (28, 28, 1), logit_relu: bool = True) -> Model:
    """The network of the published gradient-averaging experiment: two convolutions, three dense layers, dropout.

    Args:
        input_shape: height, width and channels of an image.
        logit_relu: the published network passes its logits through a relu, so no class can score below 0. That quirk
            is on, because the published figures were made with it.
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
        masks = _dropout_masks(seed, x, dropped)
        x = _drop(x, masks[0])
        x = _max_pool(tf.nn.relu(_convolve(w, "conv1", x, "VALID")))
        x = _drop(x, masks[1])
        x = _max_pool(tf.nn.relu(_convolve(w, "conv2", x, "VALID")))
        x = _drop(x, masks[2])
        x = tf.nn.relu(_dense(w, "dense1", tf.reshape(x, [-1, flat])))
        x = _drop(x, masks[3])
        x = tf.nn.relu(_dense(w, "dense2", x))
        x = _drop(x, masks[4])
        x = _dense(w, "logits", x)
        return tf.nn.relu(x) if logit_relu else x

    return Model("lenet", tuple(input_shape), shapes, logits)


def dense(input_shape: tuple[int, ...] = (28, 28, 1), hidden: int = 128) -> Model:
    """One hidden layer of relu units: 784-128-10 for MNIST. Quick, and without dropout: every method agrees exactly."""
    inputs = math.prod(input_shape)
    shapes = {**_layer("hidden", inputs, hidden), **_layer("logits", hidden, CLASSES)}

    def logits(w, x, seed):
        x = tf.reshape(x, tf.concat([tf.shape(x)[: -len(input_shape)], [inputs]], axis=0))
        return _dense(w, "logits", tf.nn.relu(_dense(w, "hidden", x)))

    return Model("dense", tuple(input_shape), shapes, logits, takes_seeds=True)


def vgg(
    input_shape: tuple[int, ...] = (32, 32, 3), blocks: Sequence[Sequence[int]] = ((16, 16), (32, 32), (64, 64))
) -> Model:
    """Blocks of 3x3 convolutions, each with a max-pool after it, then two dense layers; small unless told otherwise.

    Args:
        input_shape: height, width and channels of an image; each block halves height and width.
        blocks: the filters of each block's convolutions. VGG-16 (Simonyan and Zisserman 2015) has 64 twice, 128 twice,
            then 256, 512 and 512, three times each.
    """
    height, width, channels = input_shape
    shapes, filters, convolutions = {}, channels, []
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
        [mask] = _dropout_masks(seed, x, [(0.5, (128,))])
        return _dense(w, "logits", _drop(x, mask))

    return Model("vgg", tuple(input_shape), shapes, logits)


MODELS = {"lenet": lenet, "dense": dense, "vgg": vgg}


def _layer(name: str, *kernel: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": kernel, f"{name}/bias": kernel[-1:]}


def _glorot_uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    field = math.prod(shape[:-2])  # a convolution's kernel is seen by a whole patch
    limit = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
    return generator.uniform(-limit, limit, shape)


def _dense(w, name, x):
    return _add_bias(tf.matmul(x, w[f"{name}/kernel"]), w[f"{name}/bias"])


def _convolve(w, name, x, padding):
    return _add_bias(tf.nn.conv2d(x, w[f"{name}/kernel"], strides=1, padding=padding), w[f"{name}/bias"])


def _add_bias(x, bias):
    # The gradient of bias_add is one operation; that of + must first find out which axes were stretched.
    return tf.nn.bias_add(x, bias) if len(bias.shape) == 1 else x + bias


def _max_pool(x):
    return tf.nn.max_pool2d(x, ksize=2, strides=2, padding="VALID")


def _dropout_masks(seed, x, layers: Sequence[tuple]) -> list:
    """For each (rate, shape of a layer's units) a mask to multiply with: 0, or 1 / (1 - rate).

    The masks depend on the seed and the number of examples alone, wherever and whenever they are drawn; they are drawn
    at once, because for a micro-batch many small draws cost more than the numbers. Without a seed: None.
    """
    if seed is None:
        return [None] * len(layers)
    sizes = [math.prod(shape) for _, shape in layers]
    rates = np.repeat(np.float32([rate for rate, _ in layers]), sizes)
    # Philox (Salmon and others 2011) with the seed's halves as its key and as the upper half of its counter: every
    # pair has numbers of its own. tf.random.stateless_uniform would first scramble them, in eight operations more.
    key, counter = tf.split(tf.cast(seed, tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), counter], axis=0)
    shape = tf.stack([tf.shape(x)[0], sum(sizes)])
    kept = tf.raw_ops.StatelessRandomUniformV2(shape=shape, key=key, counter=counter, alg=1) >= rates
    masks = tf.split(tf.cast(kept, x.dtype) * (1 / (1 - rates)).astype(x.dtype.name), sizes, axis=1)
    return [tf.reshape(mask, [-1, *shape]) for mask, (_, shape) in zip(masks, layers)]


def _drop(x, mask):
    if mask is None:
        return x

    @tf.custom_gradient
    def product(x):  # of two tensors of one shape, which the gradient of * cannot know
        return x * mask, lambda upstream: upstream * mask

    return product(x)

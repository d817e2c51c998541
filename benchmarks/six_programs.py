"""Six models whose batch does not fit, each as plain Keras and with the lines that gradlab changes.

Each program is a pair of functions: (side, microbatch_size or None) -> a compiled model, and (side,
examples, microbatch_size or None) -> the arguments of `fit` for one update. The side is that of the
images, or the length of the longest text.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import gradlab

layers = keras.layers


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def _semi_hard_triplets(y: Any, y_pred: Any) -> Any:
    unit = tf.math.l2_normalize(y_pred, axis=-1)
    distances = 2 - 2 * tf.matmul(unit, unit, transpose_b=True)
    same = tf.reshape(y, [-1, 1]) == tf.reshape(y, [1, -1])
    farther = ~same[:, tf.newaxis, :] & (distances[:, tf.newaxis, :] > distances[:, :, tf.newaxis])
    nearest = tf.reduce_min(tf.where(farther, distances[:, tf.newaxis, :], 4.0), axis=-1)
    pairs = tf.cast(same, unit.dtype) - tf.eye(tf.shape(unit)[0], dtype=unit.dtype)
    losses = pairs * tf.nn.relu(distances - nearest + 0.2)
    return tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(pairs), 1)


def _triplets(side: int, microbatch_size: int | None) -> keras.Model:
    vgg = keras.applications.VGG16(
        include_top=False, weights=None, input_shape=(side, side, 3), pooling="avg"
    )
    model = keras.Model(vgg.input, layers.Dense(64)(vgg.output))
    loss = _semi_hard_triplets
    if microbatch_size:
        model = gradlab.microbatched(model, microbatch_size, in_flight=1)
        loss = gradlab.WholeBatch(loss)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def _clip_loss(y: Any, y_pred: Any) -> Any:
    image, text = (tf.math.l2_normalize(tower, axis=-1) for tower in y_pred)
    similarities = tf.matmul(image, text, transpose_b=True) / 0.1
    right = tf.range(tf.shape(image)[0])
    by_image = tf.nn.sparse_softmax_cross_entropy_with_logits(right, similarities)
    by_text = tf.nn.sparse_softmax_cross_entropy_with_logits(right, tf.transpose(similarities))
    return tf.reduce_mean(by_image + by_text) / 2


class LossOfTowers(keras.Model):
    """A model whose loss sees both towers, as plain Keras needs it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return _clip_loss(y, y_pred)


def _attention_block(hidden: Any, width: int) -> Any:
    normed = layers.LayerNormalization()(hidden)
    hidden = layers.Add()([hidden, layers.MultiHeadAttention(4, width // 4)(normed, normed)])
    normed = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(hidden))
    return layers.Add()([hidden, layers.Dense(width)(normed)])


def _convolutions(hidden: Any, *filters: int, strides: int = 2) -> Any:
    for count in filters:
        hidden = layers.Conv2D(count, 3, strides=strides, padding="same", use_bias=False)(hidden)
        hidden = layers.Activation("relu")(layers.GroupNormalization(8)(hidden))
    return hidden


def _clip(side: int, microbatch_size: int | None) -> keras.Model:
    image, text = keras.Input([side, side, 3]), keras.Input([32], dtype="int32")
    seen = layers.GlobalAveragePooling2D()(
        _convolutions(_convolutions(image, 32, strides=1), 64, 128, 256)
    )
    words = layers.Embedding(5000, 128)(text)
    for _ in range(2):
        words = _attention_block(words, 128)
    towers = [layers.Dense(64)(seen), layers.Dense(64)(layers.GlobalAveragePooling1D()(words))]
    if not microbatch_size:
        model = LossOfTowers([image, text], towers)
        model.compile(keras.optimizers.SGD(0.01))
        return model
    model = gradlab.microbatched(keras.Model([image, text], towers), microbatch_size)
    model.compile(keras.optimizers.SGD(0.01), gradlab.WholeBatch(_clip_loss))
    return model


class _VAE(keras.Model):
    """A variational autoencoder with a train step of its own."""

    def __init__(self, side: int, microbatch_size: int | None):
        super().__init__()
        self.microbatch_size = microbatch_size
        image, code = keras.Input([side, side, 3]), keras.Input([16])
        pooled = layers.Flatten()(_convolutions(_convolutions(image, 32, strides=1), 64, 64, 64))
        self.encoder = keras.Model(image, layers.Dense(32)(pooled))
        hidden = layers.Reshape([side // 8, side // 8, 64])(layers.Dense(side * side, "relu")(code))
        for filters in (64, 64, 32):
            hidden = _convolutions(layers.UpSampling2D()(hidden), filters, strides=1)
        self.decoder = keras.Model(code, layers.Conv2D(3, 3, padding="same")(hidden))

    def losses_of(self, x: Any, noise: Any) -> dict:
        """The loss, and its parts."""
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
        error = tf.reduce_mean((x - decoded) ** 2)
        divergence = tf.reduce_mean(tf.exp(log_variance) + mean**2 - 1 - log_variance)
        return {"loss": error + 0.01 * divergence, "divergence": divergence}

    def train_step(self, data):
        noise = keras.random.normal([tf.shape(data)[0], 16], seed=1)
        variables = self.trainable_variables
        if self.microbatch_size:
            found, gradients = gradlab.value_and_gradients(
                self.losses_of, variables, (data, noise), self.microbatch_size
            )
        else:
            with tf.GradientTape() as tape:
                found = self.losses_of(data, noise)
            gradients = tape.gradient(found["loss"], [variable.value for variable in variables])
        self.optimizer.apply(gradients, variables)
        return found


def _vae(side: int, microbatch_size: int | None) -> keras.Model:
    model = _VAE(side, microbatch_size)
    model.compile(keras.optimizers.SGD(0.01))
    return model


class _GAN(keras.Model):
    """A generative adversarial network with a train step of its own, and two optimizers."""

    def __init__(self, side: int, microbatch_size: int | None):
        super().__init__()
        self.microbatch_size = microbatch_size
        latent, image = keras.Input([64]), keras.Input([side, side, 3])
        hidden = layers.Reshape([side // 8, side // 8, 64])(layers.Dense(side * side)(latent))
        for filters in (128, 64, 32):
            hidden = _convolutions(layers.UpSampling2D()(hidden), filters, strides=1)
        self.generator = keras.Model(
            latent, layers.Conv2D(3, 3, padding="same", activation="tanh")(hidden)
        )
        pooled = layers.Flatten()(_convolutions(_convolutions(image, 32, strides=1), 64, 128, 128))
        self.critic = keras.Model(image, layers.Dense(1)(pooled))
        self.of_generator, self.of_critic = keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)

    def critic_loss(self, real: Any, latent: Any) -> Any:
        """The critic's hinge loss."""
        return tf.reduce_mean(
            tf.nn.relu(1 - self.critic(real)) + tf.nn.relu(1 + self.critic(self.generator(latent)))
        )

    def generator_loss(self, latent: Any) -> Any:
        """The generator's loss."""
        return -tf.reduce_mean(self.critic(self.generator(latent)))

    def gradients(self, loss: Callable, variables: list, data: tuple) -> tuple:
        """A loss of a batch and its gradients."""
        if self.microbatch_size:
            return gradlab.value_and_gradients(loss, variables, data, self.microbatch_size)
        with tf.GradientTape() as tape:
            value = loss(*data)
        return value, tape.gradient(value, [variable.value for variable in variables])

    def train_step(self, data):
        latent = keras.random.normal([tf.shape(data)[0], 64], seed=1)
        variables = self.critic.trainable_variables
        critic, gradients = self.gradients(self.critic_loss, variables, (data, latent))
        self.of_critic.apply(gradients, variables)
        variables = self.generator.trainable_variables
        generator, gradients = self.gradients(self.generator_loss, variables, (latent,))
        self.of_generator.apply(gradients, variables)
        return {"critic": critic, "generator": generator}


def _gan(side: int, microbatch_size: int | None) -> keras.Model:
    model = _GAN(side, microbatch_size)
    model.compile()
    return model


def _text_transformer(side: int, microbatch_size: int | None) -> keras.Model:
    words = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(5000, 128, mask_zero=True)(words)
    for _ in range(2):
        hidden = _attention_block(hidden, 128)
    model = keras.Model(words, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))
    if microbatch_size:
        model = gradlab.microbatched(model, "given")
    model.compile(
        keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def _u_net(side: int, microbatch_size: int | None) -> keras.Model:
    image = keras.Input([side, side, 3])
    kept, hidden = [], image
    for filters in (32, 64, 128):
        hidden = _convolutions(hidden, filters, filters, strides=1)
        kept.append(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = _convolutions(hidden, 256, strides=1)
    for filters, skipped in zip((128, 64, 32), reversed(kept)):
        hidden = layers.Concatenate()([layers.UpSampling2D()(hidden), skipped])
        hidden = _convolutions(hidden, filters, filters, strides=1)
    model = keras.Model(image, layers.Conv2D(4, 1)(hidden))
    if microbatch_size:
        model = gradlab.microbatched(model, microbatch_size)
    model.compile(
        keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def _texts(side: int, examples: int, microbatch_size: int | None) -> dict:
    """Texts of up to `side` words, cut by tokens, or padded for plain Keras."""
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(side / 8), 1.0, examples), 1, side
    ).astype(int)
    lengths[0] = side
    words = tf.RaggedTensor.from_row_lengths(
        np.random.default_rng(1).integers(1, 5000, lengths.sum(), np.int32), lengths
    )
    dataset = tf.data.Dataset.from_tensor_slices((words, tf.cast(lengths % 2, tf.int32)))
    if microbatch_size:
        return {
            "x": gradlab.token_batches(dataset, tokens=microbatch_size * side, sort_within=examples)
        }
    dataset = dataset.map(lambda x, y: (tf.ensure_shape(x, [None]), y))
    return {"x": dataset.padded_batch(examples)}


def _images(side: int, examples: int, microbatch_size: int | None) -> dict:
    return {"x": _random(examples, side, side, 3), "batch_size": examples}


def _labeled(side: int, examples: int, microbatch_size: int | None) -> dict:
    return {**_images(side, examples, microbatch_size), "y": np.arange(examples) % 4}


def _captioned(side: int, examples: int, microbatch_size: int | None) -> dict:
    texts = np.random.default_rng(1).integers(0, 5000, [examples, 32], np.int32)
    return {"x": [_random(examples, side, side, 3), texts], "batch_size": examples}


def _segmented(side: int, examples: int, microbatch_size: int | None) -> dict:
    classes = np.random.default_rng(1).integers(0, 4, [examples, side, side], np.int32)
    return {**_images(side, examples, microbatch_size), "y": classes}


PROGRAMS = {
    "VGG-16 triplets": (_triplets, _labeled),
    "CLIP": (_clip, _captioned),
    "VAE": (_vae, _images),
    "GAN": (_gan, _images),
    "text transformer": (_text_transformer, _texts),
    "U-Net": (_u_net, _segmented),
}

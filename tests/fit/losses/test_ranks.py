"""Targets, weights and masks of a wrong rank: TensorFlow would pair a micro-batch's examples with
another dimension.

Keras fails, because its batch of 8 is no dimension of 4. Micro-batches of 4 would fit, and give a
wrong number.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import gradlab

GENERATOR = np.random.default_rng(0)
X, Y = (
    GENERATOR.normal(size=(8, 4, 3)).astype("float32"),
    GENERATOR.normal(size=(8, 4, 1)).astype("float32"),
)
TOKENS = GENERATOR.integers(0, 5, (8, 4))
WEIGHTS = GENERATOR.uniform(1, 2, 8).astype("float32")


def sequences():
    return keras.Sequential([keras.Input([4, 3]), layers.Dense(1)])


def several():
    return keras.Sequential([keras.Input([4, 3]), layers.Flatten(), layers.Dense(4)])


def masked():
    return keras.Sequential(
        [keras.Input([4], dtype="int32"), layers.Embedding(5, 3, mask_zero=True), layers.Dense(1)]
    )


def whole_text(y, y_pred):
    return tf.reduce_mean((y - y_pred) ** 2, axis=(1, 2))


def compiled(model, loss="mse", microbatch_size=None):
    if microbatch_size is not None:
        gradlab.microbatched(model, microbatch_size)
    # Without micro-batches the model is the reference, which takes longer to trace than to run.
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=microbatch_size is None)
    return model


FORMS = {
    "weights of texts": (
        sequences,
        "mse",
        X,
        Y,
        WEIGHTS,
        r"^sample_weight must have as many dimensions as the values of mse, whose shape is "
        r"\(None, 4\). "
        r"Received: a shape of \(None,\)$",
    ),
    "weights of positions": (
        several,
        "mse",
        X,
        Y[..., 0],
        np.ones((8, 4), "float32"),
        "sample_weight must have",
    ),
    "targets": (
        several,
        "mse",
        X,
        WEIGHTS,
        None,
        "The targets of mse must have as many dimensions",
    ),
    "targets of pairs": (
        several,
        "mae",
        X,
        Y.reshape(8, 1, 4),
        None,
        "The targets of mae must have",
    ),
    "mask": (
        masked,
        whole_text,
        TOKENS,
        Y,
        None,
        "mask must have as many dimensions as the values of whole_text",
    ),
}


@pytest.mark.parametrize(
    "build, loss, x, y, sample_weight, sentence", FORMS.values(), ids=FORMS.keys()
)
def test_a_wrong_rank_is_refused(build, loss, x, y, sample_weight, sentence):
    # Keras takes targets (8, 1, 4) silently, and pairs each with all others
    if build is not several or y.ndim != 3:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            compiled(build(), loss).fit(x, y, sample_weight=sample_weight, batch_size=8, verbose=0)
    model = compiled(build(), loss, 4)
    before = model.get_weights()
    for call in model.fit, model.evaluate:
        with pytest.raises(ValueError, match=sentence):
            call(x, y, sample_weight=sample_weight, batch_size=8, verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "y, sample_weight",
    [
        (Y, None),
        (Y, WEIGHTS[:, np.newaxis]),
        (Y, np.outer(WEIGHTS, [1, 0, 2, 1]).astype("float32")),
        # Keras drops the predictions' last dimension, and gives each text one value
        (Y[..., 0], None),
        (Y[..., 0], WEIGHTS),
    ],
    ids=["no weights", "of texts", "of positions", "flat targets", "flat targets, of texts"],
)
def test_the_right_ranks_count_as_in_keras(y, sample_weight):
    found = []
    for b in (None, 3):
        keras.utils.set_random_seed(1)
        model = compiled(sequences(), microbatch_size=b)
        losses = model.fit(
            X, y, sample_weight=sample_weight, batch_size=8, epochs=2, verbose=0
        ).history["loss"]
        found.append([losses, *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)

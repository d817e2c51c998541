"""Sequence to sequence with masks on both sides: the loss is the mean over the words that are
there."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(4)


def sentences(length):
    return np.where(
        np.arange(length) < rng.integers(1, length + 1, (20, 1)),
        rng.integers(1, 9, (20, length)),
        0,
    )


source, translated = sentences(5), sentences(4)
shifted = np.pad(translated, [[0, 0], [1, 0]])[:, :-1] + 1


def build():
    words, before = (
        keras.Input([5], dtype="int32", name="words"),
        keras.Input([4], dtype="int32", name="before"),
    )
    _, *state = layers.LSTM(4, return_state=True)(layers.Embedding(9, 3, mask_zero=True)(words))
    decoded = layers.LSTM(4, return_sequences=True)(
        layers.Embedding(10, 3, mask_zero=True)(before), initial_state=state
    )
    return keras.Model([words, before], layers.Dense(9)(decoded))


def run(model):
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.SGD(0.2), entropy, weighted_metrics=["accuracy"])
    return model.fit([source, shifted], translated, 8, epochs=2, shuffle=False, verbose=0).history

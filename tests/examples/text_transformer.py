"""A transformer block that classifies texts: embeddings of tokens and positions, and a mask for the
padding."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(2)
lengths = rng.integers(2, 9, (21, 1))
tokens = np.where(np.arange(8) < lengths, rng.integers(1, 12, (21, 8)), 0)
labels = rng.integers(0, 2, (21, 1))


class TokensAndPositions(layers.Layer):
    """The sum of an embedding of the token and one of its position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = (
            layers.Embedding(12, 6, mask_zero=True),
            layers.Embedding(8, 6),
        )

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(8))

    def compute_mask(self, x, mask=None):
        return self.tokens.compute_mask(x)


def build():
    inputs = keras.Input([8], dtype="int32")
    hidden = TokensAndPositions()(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 3)(hidden, hidden))
    hidden = layers.LayerNormalization()(hidden + layers.Dense(6)(layers.Dense(8, "relu")(hidden)))
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.GlobalAveragePooling1D()(hidden)))


def run(model):
    # With Adam, Keras squares the rows of repeated tokens one by one; see "What is equal and what
    # is not".
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", metrics=["accuracy", "auc"]
    )
    return model.fit(tokens, labels, 8, epochs=2, shuffle=False, verbose=0).history

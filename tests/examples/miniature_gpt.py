"""A miniature GPT: causal attention, two outputs of which one has no loss, weights for the
tokens."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(3)
texts = rng.integers(1, 15, (18, 7))
inputs, targets = texts[:, :-1], texts[:, 1:]
weights = (np.arange(6) < rng.integers(1, 7, (18, 1))).astype("float32")


def build():
    tokens = keras.Input([6], dtype="int32")
    hidden = layers.Embedding(15, 8)(tokens) + layers.Embedding(6, 8)(ops.arange(6))
    hidden = layers.LayerNormalization()(
        hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    )
    hidden = layers.LayerNormalization()(hidden + layers.Dense(8)(layers.Dense(12, "relu")(hidden)))
    return keras.Model(tokens, [layers.Dense(15, name="logits")(hidden), hidden])


def run(model):
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss=[entropy, None])
    fitted = model.fit(
        inputs, targets, 6, epochs=2, sample_weight=weights, shuffle=False, verbose=0
    )
    return fitted.history | {"logits": model.predict(inputs, batch_size=7, verbose=0)[0]}

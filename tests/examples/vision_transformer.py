"""A vision transformer: patches, attention, layer normalization, AdamW with a warm-up."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(1)
labels = rng.integers(0, 4, 24)
images = rng.normal(size=(24, 8, 8, 3)).astype("float32")


class Positions(layers.Layer):
    """Adds a trained vector to each patch."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, patches):
        return patches + self.table


def build():
    inputs = keras.Input([8, 8, 3])
    patches = Positions()(layers.Reshape([16, 8])(layers.Conv2D(8, 2, strides=2)(inputs)))
    normal = layers.LayerNormalization()(patches)
    # Biases of keys have a gradient of zero but for rounding, which AdamW would enlarge to steps of
    # its own.
    hidden = patches + layers.MultiHeadAttention(2, 4, use_bias=False)(normal, normal)
    mixed = layers.Dense(8)(layers.Dense(16, "gelu")(layers.LayerNormalization()(hidden)))
    pooled = ops.mean(layers.LayerNormalization()(hidden + mixed), axis=1)
    return keras.Model(inputs, layers.Dense(4)(pooled))


def run(model):
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 6, warmup_target=0.01, warmup_steps=2)
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2"), "accuracy"],
    )
    return model.fit(images, labels, 10, epochs=2, shuffle=False, verbose=0).history

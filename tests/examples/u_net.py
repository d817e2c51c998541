"""A small U-Net with batch normalization: equal only where one micro-batch holds the batch, as a
warning says."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(8)
images = rng.normal(size=(16, 8, 8, 1)).astype("float32")
masks = (images > 0.3).astype("int32")
NORMALIZES = True


def build():
    inputs = keras.Input([8, 8, 1])
    # Biases before a normalization have a gradient of zero but for rounding, which Adam would
    # enlarge.
    convolved = layers.Conv2D(3, 3, padding="same", use_bias=False)(inputs)
    high = layers.Activation("relu")(layers.BatchNormalization()(convolved))
    low = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(high)
    low = layers.Activation("relu")(layers.BatchNormalization()(low))
    up = layers.Conv2DTranspose(3, 3, strides=2, padding="same")(low)
    return keras.Model(inputs, layers.Conv2D(2, 1)(layers.Concatenate()([high, up])))


def run(model):
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), entropy, metrics=["accuracy"])
    fitted = model.fit(
        images, masks, 8, epochs=2, shuffle=False, verbose=0, validation_data=(images, masks)
    )
    return fitted.history

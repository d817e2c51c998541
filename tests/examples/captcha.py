"""Reading text from images: a layer adds the CTC loss, one number for each example, and the labels
are an input."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(9)
images = rng.normal(size=(14, 12, 6)).astype("float32")
texts = rng.integers(0, 5, (14, 3))
BATCH_LOSSES = "sum"  # what its layer adds, over the examples


class CTC(layers.Layer):
    """Adds the loss, and returns the predictions."""

    def call(self, texts, y_pred):
        examples = ops.shape(y_pred)[0]
        lengths = [tf.fill([examples], 12), tf.fill([examples], 3)]
        labels = ops.cast(texts, "int32")
        self.add_loss(
            ops.ctc_loss(labels, ops.log(y_pred + 1e-7), lengths[1], lengths[0], mask_index=5)
        )
        return y_pred


def build():
    image, text = keras.Input([12, 6], name="image"), keras.Input([3], name="text", dtype="int32")
    hidden = layers.Bidirectional(layers.GRU(4, return_sequences=True))(
        layers.Conv1D(5, 3, padding="same")(image)
    )
    return keras.Model([image, text], CTC()(text, layers.Dense(6, "softmax")(hidden)))


def run(model):
    model.compile(keras.optimizers.SGD(0.01, clipnorm=1.0))
    return model.fit(
        {"image": images, "text": texts}, batch_size=6, epochs=2, shuffle=False, verbose=0
    ).history

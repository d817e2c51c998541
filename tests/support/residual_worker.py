"""Trains, evaluates and predicts with two micro-batches in flight and with one, and prints whether
all is equal.

The network is residual. It is trained in a process of its own, because TensorFlow's fused kernel
crashes the process if gradlab does not keep TensorFlow from using it.
"""

import gradlab

gradlab.setup(threads=2)
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

if tf.config.list_physical_devices("GPU"):  # whose fastest kernels add in any order
    tf.config.experimental.enable_op_determinism()

rng = np.random.default_rng(0)
x, y = rng.random((64, 16, 16, 16), np.float32), rng.integers(0, 10, 64)


def trained(in_flight):
    keras.utils.set_random_seed(0)
    image = keras.Input([16, 16, 16])
    normal = keras.layers.GroupNormalization(4)(image)
    added = keras.layers.Add()([image, keras.layers.Conv2D(16, 3, padding="same")(normal)])
    model = keras.Model(image, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(added)))
    model = gradlab.microbatched(model, 8, in_flight=in_flight)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    many = np.concatenate([x] * 60), np.concatenate([y] * 60)
    model.fit(*many, batch_size=64, shuffle=False, verbose=0)
    loss = model.evaluate(*many, batch_size=64, verbose=0)
    return [*model.get_weights(), np.array(loss), model.predict(many[0], batch_size=64, verbose=0)]


print("equal", all((one == other).all() for one, other in zip(trained(2), trained(1))))

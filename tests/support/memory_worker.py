"""Print by how many MiB updates raise the peak memory of this process: python memory_worker.py
MICRO_BATCHES UPDATES

With 0 micro-batches, an update uses one example and no gradlab, for comparison.
"""

import sys

import gradlab

gradlab.setup(threads=1)
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from gradlab.measure.memory import MEBIBYTE, PeakMemory  # noqa: E402

k, updates = int(sys.argv[1]), int(sys.argv[2])
model = keras.applications.VGG16(
    weights=None, include_top=False, input_shape=(96, 96, 3), pooling="avg"
)
optimizer = keras.optimizers.SGD(0.0078125)
optimizer.build(model.trainable_variables)
x = tf.constant(np.random.default_rng(0).normal(size=(max(k, 1), 96, 96, 3)).astype("float32"))
y = tf.zeros((len(x), 512))


@tf.function
def one_example():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    optimizer.apply(
        tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables
    )


peak = PeakMemory()
before = peak.bytes()
trainer = gradlab.Trainer(model, optimizer, "mse", 1) if k else None
for _ in range(updates):
    trainer.step(x, y) if k else one_example()
growth = (peak.bytes() - before) / MEBIBYTE
parameters = sum(np.prod(weight.shape) for weight in model.trainable_weights) * 4 / 2**20
print(f"growth {growth:.1f} parameters {parameters:.1f}")

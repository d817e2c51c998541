"""Print by how many MiB one step of a model raises the peak memory: python evaluation_worker.py
STEP MICROBATCH_SIZE

STEP is evaluate, predict or fit (with validation data); a MICROBATCH_SIZE of 0 leaves the model as
it is.
"""

import sys

import gradlab

gradlab.setup(threads=1)
import keras  # noqa: E402
import numpy as np  # noqa: E402

from gradlab.measure.memory import MEBIBYTE, PeakMemory  # noqa: E402

step, microbatch_size = sys.argv[1], int(sys.argv[2])
layers = [keras.layers.Conv2D(24, 3, padding="same", activation="relu") for _ in range(4)]
model = keras.Sequential([keras.Input([96, 96, 3]), *layers, keras.layers.GlobalAveragePooling2D()])
if microbatch_size:
    gradlab.microbatched(model, microbatch_size)
model.compile("sgd", "mse")
x, y = np.ones([64, 96, 96, 3], "float32"), np.ones([64, 24], "float32")

peak = PeakMemory()
before = peak.bytes()
if step == "fit":
    model.fit(x, y, batch_size=64, validation_data=(x, y), verbose=0)
elif step == "predict":
    model.predict(x, batch_size=64, verbose=0)
else:
    model.evaluate(x, y, batch_size=64, verbose=0)
growth = (peak.bytes() - before) / MEBIBYTE
print(f"growth {growth:.1f}")

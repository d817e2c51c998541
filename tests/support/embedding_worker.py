"""Print by how many MiB an epoch with a large embedding raises the peak memory of this process:
python embedding_worker.py fit|rows|table THREADS [OPTIMIZER]"""

import sys

import gradlab

gradlab.setup(threads=int(sys.argv[2]))
import keras  # noqa: E402
import numpy as np  # noqa: E402

from gradlab.measure.memory import MEBIBYTE, PeakMemory  # noqa: E402

kind, optimizer = sys.argv[1], (sys.argv[3:] or ["sgd"])[0]
ROWS = 1_000_000
rng = np.random.default_rng(0)
ids = rng.integers(0, ROWS, [256, 4])
y = rng.normal(size=[256, 1])


def model(rows):
    items = keras.layers.Embedding(rows, 64)
    layers = [items, keras.layers.Flatten(), keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input([4], dtype="int32"), *layers])
    if kind != "fit":
        gradlab.microbatched(network, 16, sparse=[items] if kind == "rows" else [])
    network.compile(optimizer, "mse")
    return network


# What TensorFlow keeps for good is there before
model(100).fit(ids % 100, y, batch_size=128, verbose=0)
network = model(ROWS)
peak = PeakMemory()
before = peak.bytes()
network.fit(ids, y, batch_size=128, verbose=0)
print(f"growth {(peak.bytes() - before) / MEBIBYTE:.1f}")

"""Inputs and targets of several kinds, for tests of losses and metrics."""

import numpy as np

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(19, 4)).astype("float32")
CLASSES = _RNG.integers(0, 3, 19)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
NUMBERS = _RNG.uniform(0.1, 1, (19, 3)).astype("float32")

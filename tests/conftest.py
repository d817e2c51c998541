"""What every test starts from: three towers on any machine, and repeatable numbers."""

import os

# One worker pool, no GPU surprises in unit tests: set before TensorFlow is imported anywhere.
os.environ.setdefault("MPLBACKEND", "Agg")

import gradlab

gradlab.setup(towers=3, seed=0)

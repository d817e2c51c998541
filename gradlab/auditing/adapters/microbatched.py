"""gradlab.microbatched in train_on_batch: the micro-batches of a window come as one batch, and
gradlab cuts it."""

import gradlab
from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = gradlab.microbatched(small.build(problem), len(problem.epochs[0][0][0]))
    model.compile(small.optimizer(problem), small.loss(problem), jit_compile=False)
    history = []
    for window in windows(problem):
        model.train_on_batch(*window)
        history.append(small.read(problem, model))
    return history

"""gradlab.Trainer: each window is one call of step, and what is not finite is left out."""

import gradlab
from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw", "nonfinite")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model, size = small.build(problem), len(problem.epochs[0][0][0])
    optimizer, loss = small.optimizer(problem), small.loss(problem)
    trainer = gradlab.Trainer(model, optimizer, loss, size, skip_nonfinite=True)
    history = []
    for window in windows(problem):
        trainer.step(*window)
        history.append(small.read(problem, model))
    return history

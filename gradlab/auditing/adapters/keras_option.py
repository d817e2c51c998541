"""Keras' own option, gradient_accumulation_steps, in train_on_batch."""

from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model, updates, history = small.build(problem), 0, []
    model.compile(small.optimizer(problem, gradient_accumulation_steps=problem.k), small.loss(problem))
    for epoch in problem.epochs:
        for microbatch in epoch:
            model.train_on_batch(*microbatch)
            if int(model.optimizer.iterations) > updates:
                updates = int(model.optimizer.iterations)
                history.append(small.read(problem, model))
    return history

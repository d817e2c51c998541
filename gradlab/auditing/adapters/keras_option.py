"""Keras' own option, gradient_accumulation_steps, in train_on_batch."""

from itertools import chain

from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = small.build(problem)
    history = []
    optimizer = small.optimizer(problem, gradient_accumulation_steps=problem.k)
    model.compile(optimizer, small.loss(problem), jit_compile=False)
    for number, microbatch in enumerate(chain(*problem.epochs), start=1):
        model.train_on_batch(*microbatch)
        if number % problem.k == 0:  # Keras counts micro-batches across epochs
            history.append(small.read(problem, model))
    return history

"""gradlab.microbatched with a gradlab.WholeBatch loss in train_on_batch: a contrastive loss in two
passes."""

import numpy as np

import gradlab
from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("contrastive", "dropout")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    if problem.model != "pairs":
        raise NotImplementedError("it is for contrastive losses")
    model = gradlab.microbatched(small.build(problem), len(problem.epochs[0][0][0]))
    loss = gradlab.WholeBatch(small.contrastive_loss)
    model.compile(small.optimizer(problem), loss, jit_compile=False)
    history = []
    for x, y in windows(problem):
        model.train_on_batch(np.stack([x, y], axis=1), np.zeros(len(x)))
        history.append(small.read(problem, model))
    return history

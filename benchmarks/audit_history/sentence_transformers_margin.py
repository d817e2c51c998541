"""MegaBatchMarginLoss of sentence-transformers, which cuts its batch into micro-batches.

The audit has no margin loss, so its linear model is written as one: an example with the error e is
a pair of unit vectors whose cosine is 1 - SHARE * e**2, and the margins are such that only pairs
count.
"""

import math

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, losses

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("schedule", "momentum")
SHARE = 4e-7  # a cosine of at least -1 allows errors up to 2236


class Errors(torch.nn.Module):
    """Embeds an anchor as (1, 0), and its positive at an angle that grows with the error."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.small = small.Small(problem).double()

    def forward(self, features: dict, **more) -> dict:
        weights = self.small.weights
        error = (features["x"] @ weights["kernel"] + weights["bias"] - features["y"])[:, 0]
        half_angle = torch.arcsin(error * math.sqrt(SHARE / 2))
        angle = torch.where(features["is_anchor"], torch.zeros_like(error), 2 * half_angle)
        features["sentence_embedding"] = torch.stack([torch.cos(angle), torch.sin(angle)], dim=1)
        return features


def features(x: np.ndarray, y: np.ndarray, is_anchor: bool) -> dict[str, torch.Tensor]:
    """The examples of a window as features of anchors or of positives."""
    return {
        "x": torch.tensor(x).double(),
        "y": torch.tensor(y).double(),
        "is_anchor": torch.full([len(x)], is_anchor),
    }


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    if problem.model != "linear":
        raise NotImplementedError("a squared error can be written as a margin loss, others can't")
    errors = Errors(problem)
    model = SentenceTransformer(modules=[errors], device="cpu")
    loss = losses.MegaBatchMarginLoss(
        model,
        positive_margin=1.0,
        negative_margin=2.0,  # no cosine reaches it
        mini_batch_size=len(problem.epochs[0][0][0]),
    )
    optimizer = small.optimizer(problem, model)
    schedule = small.schedule(problem, optimizer)
    history = []
    for x, y in windows(problem):
        optimizer.zero_grad()
        loss([features(x, y, True), features(x, y, False)], torch.zeros(len(x))).backward()
        for weight in model.parameters():
            weight.grad /= SHARE
        optimizer.step()
        schedule.step()
        history.append(errors.small.read())
    return history

"""A loop in PyTorch, written by hand: each loss is multiplied by its share of the window before its
backward pass."""

import torch

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = small.Small(problem)
    optimizer = small.optimizer(problem, model)
    schedule = small.schedule(problem, optimizer)
    history = []
    for epoch in problem.epochs:
        for start in range(0, len(epoch), problem.k):
            window = epoch[start : start + problem.k]
            total = sum(problem.size(microbatch) for microbatch in window)
            for microbatch in window:
                loss = model(*small.tensors(microbatch)) * (problem.size(microbatch) / total)
                loss.backward()
            if problem.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), problem.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(model.read())
    return history

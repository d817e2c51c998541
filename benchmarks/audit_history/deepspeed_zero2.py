"""DeepSpeed's engine with ZeRO's second stage, which shards gradients and the optimizer's state."""

from gradlab.auditing.adapters import deepspeed
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = deepspeed.supports


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    return deepspeed.train(problem, zero_stage=2)

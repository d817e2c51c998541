"""fastai's GradientAccumulation callback, which counts examples: those of k full micro-batches make
an update."""

import torch
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ()


class Record(Callback):
    """Keeps the weights after each update, and leaves out the validation."""

    def __init__(self, model: small.Small):
        self.small, self.kept = model, []

    def after_step(self) -> None:
        self.kept.append(self.small.read())

    def before_validate(self) -> None:
        raise CancelValidException


def with_targets(microbatch: tuple) -> list[torch.Tensor]:
    """The inputs of the model, which are all, and the targets, whose rows fastai counts."""
    return [*small.tensors(microbatch), torch.as_tensor(microbatch[1])]


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    if len({len(microbatch[0]) for epoch in problem.epochs for microbatch in epoch}) > 1:
        raise NotImplementedError(
            "the callback counts examples, so micro-batches must have one size"
        )
    model = small.Small(problem)
    record, loader = Record(model), small.Epochs(problem, with_targets).loader()
    loaders = DataLoaders(loader, loader)
    learner = Learner(
        loaders, model, lambda loss, y: loss, SGD, problem.learning_rate(0), cbs=[record]
    )
    accumulation = GradientAccumulation(problem.k * len(problem.epochs[0][0][0]))
    with learner.no_bar(), learner.no_logging():
        learner.fit(len(problem.epochs), cbs=[accumulation])
    return record.kept

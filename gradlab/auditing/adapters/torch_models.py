"""The models of the audit in PyTorch, for the adapters of the libraries on top of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradlab.auditing.models import Weights
from gradlab.auditing.problem import EPSILON, MOMENTUM, Problem


class Small(nn.Module):
    """A model of the audit. Its forward pass returns the mean loss of a micro-batch."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.kind = problem.model
        made = {
            name: nn.Parameter(torch.tensor(value).float())
            for name, value in problem.weights.items()
        }
        self.weights = nn.ParameterDict(made)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        w = self.weights
        x = x.float() if x.is_floating_point() else x
        if self.kind in ("linear", "embedding"):
            x = w["embedding"][x].mean(1) if self.kind == "embedding" else x
            return nn.functional.mse_loss(x @ w["kernel"] + w["bias"], y.float())
        if self.kind == "two_layers":
            hidden = torch.tanh(x @ w["kernel_1"] + w["bias_1"])
            return nn.functional.cross_entropy(hidden @ w["kernel_2"] + w["bias_2"], y)
        logits = w["embedding"][x] @ w["kernel"] + w["bias"]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        counted = torch.ones_like(losses) if mask is None else mask.flatten().float()
        return (losses * counted).sum() / counted.sum()

    def read(self) -> Weights:
        """A copy of the weights."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.weights.items()}


class Labeled(nn.Module):
    """A model of the audit that computes its loss as the models of Hugging Face do.

    Positions with the label -100 do not count. If the sum of all labels of a window is given as
    num_items_in_batch, the loss is divided by it.
    """

    def __init__(self, problem: Problem):
        super().__init__()
        self.small = Small(problem)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **more: Any
    ) -> dict:
        counted = labels != -100
        loss = self.small(
            x, torch.where(counted, labels, 0), counted if self.small.kind == "tokens" else None
        )
        return {
            "loss": loss
            if num_items_in_batch is None
            else loss * counted.sum() / num_items_in_batch
        }


def optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with the rate of update 0."""
    weights = model.parameters()
    rate = problem.learning_rate(0)
    if problem.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(
            weights, rate, momentum=MOMENTUM if problem.optimizer == "momentum" else 0.0
        )
    if problem.optimizer == "adam":
        return torch.optim.Adam(weights, rate, eps=EPSILON)
    return torch.optim.AdamW(weights, rate, eps=EPSILON, weight_decay=problem.weight_decay)


def schedule(problem: Problem, made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning-rate schedule, to be stepped after each update."""
    first = problem.learning_rate(0)
    return torch.optim.lr_scheduler.LambdaLR(
        made, lambda update: problem.learning_rate(update) / first
    )


def tensors(microbatch: tuple) -> list[torch.Tensor]:
    """The arrays of a micro-batch as tensors."""
    return [torch.as_tensor(part) for part in microbatch]


def labeled(microbatch: tuple) -> dict[str, torch.Tensor]:
    """A micro-batch for `Labeled`."""
    x, y, *mask = tensors(microbatch)
    return {"x": x, "labels": torch.where(mask[0] > 0, y, -100) if mask else y}


class Epochs(torch.utils.data.Dataset):
    """The micro-batches of each epoch in their order, for a DataLoader that is iterated once per
    epoch.

    Args:
        problem: the training.
        convert: what makes tensors of the arrays of a micro-batch.
    """

    def __init__(self, problem: Problem, convert: Callable[[tuple], Any] = tensors):
        self._problem = problem
        self._convert = convert
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._problem.epochs[0])

    def __getitem__(self, number: int) -> Any:
        self._epoch += number == 0
        return self._convert(self._problem.epochs[self._epoch][number])

    def loader(self) -> torch.utils.data.DataLoader:
        """The DataLoader."""
        return torch.utils.data.DataLoader(self, batch_size=None)

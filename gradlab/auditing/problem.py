"""Problem: a small training that an adapter runs, so that the audit can compare what its loop
does."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradlab.auditing.models import SHAPES, Weights, loss_and_gradients

MOMENTUM = 0.9
BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class Problem:
    """A training of a small model, described without any framework.

    The models, with the weights by name:

    - "linear": x @ kernel + bias; x (examples, 4), y (examples, 1); the mean of the squared errors.
    - "two_layers": tanh(x @ kernel_1 + bias_1) @ kernel_2 + bias_2 are the logits of three classes;
      x (examples, 4), y (examples,), integers; the mean cross-entropy.
    - "tokens": embedding[x] @ kernel + bias are the logits of seven tokens at each position; x and
      y (texts, length), integers, mask (texts, length), 1 for a token and 0 for padding; the mean
      cross-entropy of the tokens.
    - "embedding": mean(embedding[x], axis=1) @ kernel + bias; x (examples, 5), integers, y
      (examples, 1); the mean of the squared errors.
    - "pairs": x and y (examples, 4), two views. exp(log_scale) * (x @ kernel_x) @ (y @ kernel_y).T
      are the logits of each x for the y of all pairs of the **window**; the mean cross-entropy of
      the own one.

    Attributes:
        model: "linear", "two_layers", "tokens", "embedding" or "pairs"; another name if the gradients come
            from a function beside the problem, as in `trajectory`.
        weights: the initial weights, a dict of float64 arrays.
        epochs: a list of epochs, each a list of micro-batches (x, y) or (x, y, mask), as a data
            loader gives them.
        k: accumulation_steps, the micro-batches behind one update. The last window of an epoch is
            what is left.
        optimizer: "sgd", "momentum", "adam" or "adamw", with momentum 0.9, betas 0.9 and 0.999,
            epsilon 1e-8.
        learning_rate: a function (update, counted from 0) -> the rate of that update.
        clip_norm: the limit of the global norm of an update's gradient, or None.
        weight_decay: the decay of AdamW: each update also subtracts rate * weight_decay * weight.
        average_over: "examples" or "tokens": over what the loss of a window is a mean.
        replicas: how many replicas share the micro-batches of a window, which then has k * replicas
            of them.
        masks: of "pairs", an array (2, 4), or None. Each forward pass of a micro-batch then draws a
            random number from 0 to 1, as your framework does it (one for x and y, or one for
            each), and multiplies its inputs by masks[0] if the number is below 0.5, or else by
            masks[1].
    """

    model: str
    weights: Weights
    epochs: list[list[tuple]]
    k: int
    optimizer: str = "sgd"
    learning_rate: Callable[[int], float] = lambda update: 0.1
    clip_norm: float | None = None
    weight_decay: float = 0.0
    average_over: str = "examples"
    replicas: int = 1
    masks: np.ndarray | None = None

    def gradients(self, weights: Weights, microbatch: tuple) -> tuple[float, Weights]:
        """The loss of a micro-batch and its gradients in NumPy, for loops without automatic
        differentiation. Of "pairs", give it the pairs of a whole window as one micro-batch.

        Returns:
            (the mean loss of the micro-batch, a dict with the mean gradient for each weight).
        """
        return loss_and_gradients(self.model, weights, microbatch)

    def size(self, microbatch: tuple) -> float:
        """How much a micro-batch counts in the mean of its window: its examples, or its tokens."""
        return (
            float(microbatch[2].sum())
            if self.average_over == "tokens"
            else float(len(microbatch[0]))
        )


def initial_weights(model: str, seed: int, scale: float = 0.5) -> Weights:
    """Random weights for a model."""
    generator = np.random.default_rng(seed)
    return {name: generator.normal(0, scale, shape) for name, shape in SHAPES[model].items()}


def windows(problem: Problem) -> list[tuple]:
    """The large batches: the micro-batches of each window, one after the other."""
    size = problem.k * problem.replicas
    cuts = [epoch[i : i + size] for epoch in problem.epochs for i in range(0, len(epoch), size)]
    return [tuple(map(np.concatenate, zip(*window))) for window in cuts]

"""The five small models of the audit: their losses and gradients in NumPy, in float64, written out
by hand."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]

# The shapes of each model's weights.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"kernel": (4, 1), "bias": (1,)},
    "two_layers": {"kernel_1": (4, 5), "bias_1": (5,), "kernel_2": (5, 3), "bias_2": (3,)},
    "tokens": {"embedding": (7, 4), "kernel": (4, 7), "bias": (7,)},
    "embedding": {"embedding": (9, 3), "kernel": (3, 1), "bias": (1,)},
    "pairs": {"kernel_x": (4, 3), "kernel_y": (4, 3), "log_scale": (1,)},
}


def loss_and_gradients(model: str, weights: Weights, microbatch: tuple) -> tuple[float, Weights]:
    """The mean loss of a micro-batch and its gradients.

    Args:
        model: the name of a model.
        weights: its weights.
        microbatch: (x, y) or (x, y, mask). The mean is over the examples, or over the tokens with a
            mask of 1.

    Returns:
        The mean loss, and a dict with the gradient of each weight.
    """
    x, y, *mask = microbatch
    counted = np.asarray(mask[0], float) if mask else np.ones(len(x))
    with np.errstate(invalid="ignore", over="ignore"):
        losses, gradients = _MODELS[model](weights, x, y, counted / counted.sum())
        return float(np.sum(losses * counted) / counted.sum()), gradients


def _linear(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, Weights]:
    """Squared error of x @ kernel + bias. x: (examples, 4), y: (examples, 1)."""
    error = x @ weights["kernel"] + weights["bias"] - y
    slope = 2 * error * shares[:, np.newaxis]
    return error[:, 0] ** 2, {"kernel": x.T @ slope, "bias": slope.sum(0)}


def _two_layers(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, Weights]:
    """Cross-entropy of tanh(x @ kernel_1 + bias_1) @ kernel_2 + bias_2. x: (examples, 4), y:
    (examples,), classes."""
    hidden = np.tanh(x @ weights["kernel_1"] + weights["bias_1"])
    losses, slope = _cross_entropy(hidden @ weights["kernel_2"] + weights["bias_2"], y, shares)
    before = slope @ weights["kernel_2"].T * (1 - hidden**2)
    return losses, {
        "kernel_1": x.T @ before,
        "bias_1": before.sum(0),
        "kernel_2": hidden.T @ slope,
        "bias_2": slope.sum(0),
    }


def _tokens(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, Weights]:
    """Cross-entropy of embedding[x] @ kernel + bias at each position. x and y: (texts, length),
    token numbers."""
    hidden = weights["embedding"][x]
    losses, slope = _cross_entropy(hidden @ weights["kernel"] + weights["bias"], y, shares)
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, x, slope @ weights["kernel"].T)
    return losses, {
        "embedding": embedding,
        "kernel": np.einsum("tle,tlc->ec", hidden, slope),
        "bias": slope.sum((0, 1)),
    }


def _embedding(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, Weights]:
    """Squared error of mean(embedding[x]) @ kernel + bias. x: (examples, 5), numbers below 9, y:
    (examples, 1)."""
    mean = weights["embedding"][x].mean(1)
    losses, gradients = _linear(weights, mean, y, shares)
    slope = 2 * (mean @ weights["kernel"] + weights["bias"] - y) * shares[:, np.newaxis]
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, x, (slope @ weights["kernel"].T / x.shape[1])[:, np.newaxis, :])
    return losses, {"embedding": embedding, **gradients}


def _cross_entropy(
    logits: np.ndarray, classes: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The cross-entropy of each position, and the gradients of its shares by the logits."""
    logits = logits - logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = np.eye(logits.shape[-1])[classes]
    losses = -np.sum(right * log_probabilities, -1)
    return losses, (np.exp(log_probabilities) - right) * shares[..., np.newaxis]


def _pairs(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, Weights]:
    """Cross-entropy of exp(log_scale) * (x @ kernel_x) @ (y @ kernel_y).T: which y belongs to each
    x? x and y: (examples, 4)."""
    slopes = pair_slopes(weights, x, y, shares, np.arange(len(x)))
    return slopes.losses, slopes.through(x, y)


class PairSlopes(NamedTuple):
    """What lies between the two passes of the model "pairs".

    Attributes:
        losses: the loss of each pair.
        by_x, by_y: the gradient by each embedding.
        by_scale: what each pair contributes to the gradient by log_scale.
    """

    losses: np.ndarray
    by_x: np.ndarray
    by_y: np.ndarray
    by_scale: np.ndarray

    def rows(self, rows: slice) -> "PairSlopes":
        """Those of some pairs."""
        return PairSlopes(*(each[rows] for each in self))

    def through(self, x: np.ndarray, y: np.ndarray) -> Weights:
        """The second pass: the gradient of each weight, from the inputs of these pairs."""
        return {
            "kernel_x": x.T @ self.by_x,
            "kernel_y": y.T @ self.by_y,
            "log_scale": self.by_scale.sum(keepdims=True),
        }


def pair_slopes(
    weights: Weights, x: np.ndarray, y: np.ndarray, shares: np.ndarray, labels: np.ndarray
) -> PairSlopes:
    """The first pass of the model "pairs" over the pairs of a whole window, and its loss.

    Args:
        weights: the weights.
        x: (examples, 4).
        y: (examples, 4).
        shares: of each pair in the mean.
        labels: for each x, the number of the y that is taken for its own.
    """
    points_x = x @ weights["kernel_x"]
    points_y = y @ weights["kernel_y"]
    products = points_x @ points_y.T
    scale = np.exp(weights["log_scale"])
    losses, slope = _cross_entropy(scale * products, labels, shares)
    by_scale = scale * np.sum(slope * products, axis=1)
    return PairSlopes(losses, scale * slope @ points_y, scale * slope.T @ points_x, by_scale)


_MODELS: dict[str, Callable] = {
    "linear": _linear,
    "two_layers": _two_layers,
    "tokens": _tokens,
    "embedding": _embedding,
    "pairs": _pairs,
}

"""The models of the audit in JAX, for the adapters of JAX and optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradlab.auditing.problem import EPSILON, MOMENTUM, Problem


def losses(model: str, weights: dict, x: Any, y: Any) -> Any:
    """The loss of each example, or of each position of a text."""
    if model in ("linear", "embedding"):
        x = weights["embedding"][x].mean(1) if model == "embedding" else x
        return jnp.square(x @ weights["kernel"] + weights["bias"] - y)[:, 0]
    if model == "two_layers":
        logits = (
            jnp.tanh(x @ weights["kernel_1"] + weights["bias_1"]) @ weights["kernel_2"]
            + weights["bias_2"]
        )
    else:
        logits = weights["embedding"][x] @ weights["kernel"] + weights["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def loss(problem: Problem) -> Callable[[dict, tuple], Any]:
    """A function (weights, micro-batch) -> its mean loss."""

    def mean(weights: dict, microbatch: tuple) -> Any:
        x, y, *mask = microbatch
        each = losses(problem.model, weights, x, y)
        return jnp.mean(each) if not mask else jnp.sum(each * mask[0]) / jnp.sum(mask[0])

    return mean


def optimizer(problem: Problem) -> Any:
    """The optimizer, with clipping and the schedule."""
    count = 2 + sum(map(len, problem.epochs))
    rates = jnp.asarray([problem.learning_rate(update) for update in range(count)])
    rate = lambda update: rates[update]  # noqa: E731
    made = {
        "sgd": lambda: optax.sgd(rate),
        "momentum": lambda: optax.sgd(rate, MOMENTUM),
        "adam": lambda: optax.adam(rate, eps=EPSILON),
        "adamw": lambda: optax.adamw(rate, eps=EPSILON, weight_decay=problem.weight_decay),
    }[problem.optimizer]()
    return (
        optax.chain(optax.clip_by_global_norm(problem.clip_norm), made)
        if problem.clip_norm
        else made
    )


def read(weights: dict) -> dict[str, np.ndarray]:
    """A copy of the weights."""
    return {name: np.array(jax.device_get(value)) for name, value in weights.items()}


def stacked(window: list[tuple]) -> tuple:
    """The micro-batches of a window as arrays of one shape, and a weight for each example or token;
    0 for padding."""
    rows = max(len(microbatch[0]) for microbatch in window)

    def fill(part):
        return np.concatenate([part, np.zeros((rows - len(part), *part.shape[1:]), part.dtype)])

    weights = [
        microbatch[2] if len(microbatch) > 2 else np.ones(len(microbatch[0]))
        for microbatch in window
    ]
    x, y = (np.stack([fill(microbatch[i]) for microbatch in window]) for i in range(2))
    return x, y, np.stack([fill(weight) for weight in weights])

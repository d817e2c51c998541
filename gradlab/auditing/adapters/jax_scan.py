"""A loop in JAX, written by hand: `lax.scan` adds up the losses of a window, each micro-batch by its size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradlab.auditing.adapters import jax_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def stacked(problem: Problem, window: list[tuple]) -> tuple:
    """The micro-batches of a window as arrays of one shape, and a weight for each example or token; 0 for padding."""
    rows = max(len(microbatch[0]) for microbatch in window)
    fill = lambda part: np.concatenate([part, np.zeros((rows - len(part), *part.shape[1:]), part.dtype)])  # noqa: E731
    weights = [microbatch[2] if len(microbatch) > 2 else np.ones(len(microbatch[0])) for microbatch in window]
    x, y = (np.stack([fill(microbatch[i]) for microbatch in window]) for i in range(2))
    return x, y, np.stack([fill(weight) for weight in weights])


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    optimizer, history = small.optimizer(problem), []
    weights = {name: jnp.asarray(value, "float32") for name, value in problem.weights.items()}
    state = optimizer.init(weights)
    total = lambda weights, x, y, size: jnp.sum(small.losses(problem.model, weights, x, y) * size)  # noqa: E731
    for epoch in problem.epochs:
        for start in range(0, len(epoch), problem.k):
            data = stacked(problem, epoch[start : start + problem.k])
            add = lambda sums, one: (jax.tree.map(jnp.add, sums, jax.grad(total)(weights, *one)), None)  # noqa: E731, B023
            sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), data)
            mean = jax.tree.map(lambda one: one / data[2].sum(), sums)  # noqa: B023
            changes, state = optimizer.update(mean, state, weights)
            weights = optax.apply_updates(weights, changes)
            history.append(small.read(weights))
    return history

"""A loop in JAX, written by hand: `lax.scan` adds up the losses of a window, each micro-batch by
its size."""

import jax
import jax.numpy as jnp
import optax

from gradlab.auditing.adapters import jax_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    optimizer = small.optimizer(problem)
    history = []
    weights = {name: jnp.asarray(value, "float32") for name, value in problem.weights.items()}
    state = optimizer.init(weights)
    total = lambda weights, x, y, size: jnp.sum(small.losses(problem.model, weights, x, y) * size)  # noqa: E731

    @jax.jit
    def update(weights, state, data):
        add = lambda sums, one: (jax.tree.map(jnp.add, sums, jax.grad(total)(weights, *one)), None)  # noqa: E731
        sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), data)
        mean = jax.tree.map(lambda one: one / data[2].sum(), sums)
        changes, state = optimizer.update(mean, state, weights)
        return optax.apply_updates(weights, changes), state

    for epoch in problem.epochs:
        for start in range(0, len(epoch), problem.k):
            weights, state = update(weights, state, small.stacked(epoch[start : start + problem.k]))
            history.append(small.read(weights))
    return history

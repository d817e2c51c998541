"""optax.MultiSteps around an optimizer."""

import jax
import optax

from gradlab.auditing.adapters import jax_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    steps = optax.MultiSteps(small.optimizer(problem), problem.k)
    weights = {name: jax.numpy.asarray(value, "float32") for name, value in problem.weights.items()}
    state = steps.init(weights)
    history = []
    gradients = jax.jit(jax.grad(small.loss(problem)))
    update = jax.jit(steps.update)
    for epoch in problem.epochs:
        for microbatch in epoch:
            changes, state = update(gradients(weights, microbatch), state, weights)
            weights = optax.apply_updates(weights, changes)
            if steps.has_updated(state):
                history.append(small.read(weights))
    return history

"""optax.microbatching: the gradient of a window, computed in micro-batches inside one compiled
function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradlab.auditing.adapters import jax_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    size = len(problem.epochs[0][0][0])
    optimizer = small.optimizer(problem)
    history = []
    microbatched = optax.microbatching.microbatch(
        lambda *arguments: jax.grad(small.loss(problem))(arguments[0], arguments[1:]),
        argnums=tuple(range(1, 1 + len(problem.epochs[0][0]))),
        microbatch_size=size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    weights = {name: jnp.asarray(value, "float32") for name, value in problem.weights.items()}
    state = optimizer.init(weights)
    microbatched = jax.jit(microbatched)
    for window in windows(problem):
        if len(window[0]) % size:
            raise NotImplementedError("optax.microbatching needs micro-batches of one size")
        # optax takes every n-th example of a batch into a micro-batch.
        parts = [
            np.stack(np.split(part, len(part) // size), 1).reshape(part.shape) for part in window
        ]
        changes, state = optimizer.update(microbatched(weights, *parts), state, weights)
        weights = optax.apply_updates(weights, changes)
        history.append(small.read(weights))
    return history

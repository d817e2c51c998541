"""optax's two ways in JAX: MultiSteps, with a call per micro-batch, and microbatching, a loop in one compiled call."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.networks import Network, Run, Way


def functions(network: Network) -> tuple[list[jax.Array], Callable]:
    """Builds the network.

    Args:
        network: the network.

    Returns:
        Its initial weights, and a function (weights, x, y, key) -> mean loss, where the key seeds the dropout masks.
    """
    weights = [jnp.asarray(value) for value in network.model.initial_weights(0).values()]

    def mean_loss(weights, x, y, key):
        left = list(weights)
        for number, (name, *sizes) in enumerate(network.layers):
            if name == "conv":
                kernel, bias = left.pop(0), left.pop(0)
                dimensions = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(x, kernel, (1, 1), sizes[2].upper(), dimension_numbers=dimensions)
                x = x + bias
            elif name == "pool":
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            elif name == "flatten":
                x = x.reshape(len(x), -1)
            elif name == "dense":
                x = x @ left.pop(0) + left.pop(0)
            elif name == "relu":
                x = jax.nn.relu(x)
            else:
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - sizes[0], x.shape)
                x = jnp.where(kept, x / (1 - sizes[0]), 0)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    return weights, mean_loss


def multi_steps(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: optax.MultiSteps, with one compiled call per micro-batch."""
    weights, mean_loss = functions(network)
    optimizer = optax.MultiSteps(optax.adam(1e-3), k)

    @jax.jit
    def step(weights, state, x, y, key):
        changes, state = optimizer.update(jax.grad(mean_loss)(weights, x, y, key), state, weights)
        return optax.apply_updates(weights, changes), state

    state, key = optimizer.init(weights), jax.random.key(0)
    microbatches = [(jnp.asarray(x[i : i + b]), jnp.asarray(y[i : i + b])) for i in range(0, k * b, b)]

    def run(updates):
        nonlocal weights, state
        for _ in range(updates):
            for microbatch in microbatches:
                weights, state = step(weights, state, *microbatch, key)
            jax.block_until_ready(weights)

    return run


def microbatching(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: optax.microbatching, with all micro-batches in one compiled call."""
    weights, mean_loss = functions(network)
    optimizer = optax.adam(1e-3)
    mean = optax.microbatching.AccumulationType.MEAN
    gradient = optax.microbatching.microbatch(jax.grad(mean_loss), argnums=(1, 2), microbatch_size=b, accumulator=mean)

    @jax.jit
    def step(weights, state, x, y, key):
        changes, state = optimizer.update(gradient(weights, x, y, key), state, weights)
        return optax.apply_updates(weights, changes), state

    state, key = optimizer.init(weights), jax.random.key(0)
    images, classes = jnp.asarray(x), jnp.asarray(y.astype(np.int32))

    def run(updates):
        nonlocal weights, state
        for _ in range(updates):
            weights, state = step(weights, state, images, classes, key)
            jax.block_until_ready(weights)

    return run


WAYS: dict[str, Way] = {"optax MultiSteps": multi_steps, "optax microbatching": microbatching}

"""optax's two ways in JAX: MultiSteps, with a call per micro-batch, and microbatching, a loop in
one compiled call."""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.networks import EPSILON, PADDING, Network, Run, Way, output_shape


def functions(network: Network) -> tuple[list[jax.Array], Callable]:
    """Builds the network.

    Args:
        network: the network.

    Returns:
        Its initial weights, in the order of the layers, and a function (weights, x, y, key) -> mean
        loss, where the key seeds the dropout masks. A layer's kernel or scale comes before its
        bias. Attention has one kernel of shape (width, 3 * heads * size) for query, key and value,
        and then the kernel of its output.
    """
    if network.model is None:
        initial = _initial(network.layers, network.input_shape, np.random.default_rng(0))
    else:
        initial = list(network.model.initial_weights(0).values())

    def mean_loss(weights, x, y, key):
        real = x != PADDING if network.reads_tokens else None
        logits = _forward(network.layers, iter(weights), x, real, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return [jnp.array(value) for value in initial], mean_loss


def _initial(
    layers: tuple[tuple, ...], shape: tuple[int, ...], rng: np.random.Generator
) -> list[np.ndarray]:
    """Glorot-uniform kernels, small uniform embeddings, scales of one and zero biases."""

    def kernel(*sizes):
        fans = math.prod(sizes[:-2]) * (sizes[-2] + sizes[-1])
        return rng.uniform(-1, 1, sizes) * math.sqrt(6 / fans), np.zeros(sizes[-1])

    weights: list[np.ndarray] = []
    for layer in layers:
        match layer:
            case "residual", inner:
                weights += _initial(inner, shape, rng)
            case "conv", filters, size, _:
                weights += kernel(size, size, shape[-1], filters)
            case "dense", units:
                weights += kernel(shape[-1], units)
            case "attention", heads, size:
                weights += kernel(shape[-1], 3 * heads * size) + kernel(heads * size, shape[-1])
            case ("layer norm",) | ("group norm", _):
                weights += [np.ones(shape[-1:]), np.zeros(shape[-1:])]
            case "embedding", tokens, width:
                weights.append(rng.uniform(-0.05, 0.05, (tokens, width)))
            case ("positions",):
                weights.append(rng.uniform(-0.05, 0.05, shape))
        shape = output_shape(layer, shape)
    return [value.astype(np.float32) for value in weights]


def _forward(
    layers: tuple[tuple, ...], left: Iterator[jax.Array], x: jax.Array, real, dropout_key
) -> jax.Array:
    """The layers' output. Takes their weights from left. real: which tokens are not padding, or
    None for images."""
    for number, layer in enumerate(layers):
        match layer:
            case "residual", inner:
                x = x + _forward(inner, left, x, real, jax.random.fold_in(dropout_key, number))
            case "conv", _, _, padding:
                dimensions = ("NHWC", "HWIO", "NHWC")
                kernel = next(left)
                x = jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), padding.upper(), dimension_numbers=dimensions
                )
                x = x + next(left)
            case ("pool",):
                x = jax.lax.reduce_window(
                    x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
                )
            case ("mean of pixels",):
                x = x.mean((1, 2))
            case ("flatten",):
                x = x.reshape(len(x), -1)
            case "dense", _:
                x = x @ next(left) + next(left)
            case ("relu",):
                x = jax.nn.relu(x)
            case "dropout", rate:
                kept = jax.random.bernoulli(
                    jax.random.fold_in(dropout_key, number), 1 - rate, x.shape
                )
                x = jnp.where(kept, x / (1 - rate), 0)
            case "group norm", groups:
                grouped = x.reshape(*x.shape[:3], groups, -1)
                x = jax.nn.standardize(grouped, (1, 2, 4), epsilon=EPSILON).reshape(x.shape) * next(
                    left
                ) + next(left)
            case ("layer norm",):
                x = jax.nn.standardize(x, epsilon=EPSILON) * next(left) + next(left)
            case "embedding", _, _:
                x = next(left)[x]
            case ("positions",):
                x = x + next(left)
            case "attention", heads, size:
                mixed = (x @ next(left) + next(left)).reshape(*x.shape[:2], 3, heads, size)
                query, key, value = jnp.moveaxis(mixed, 2, 0)
                x = jax.nn.dot_product_attention(query, key, value, mask=real[:, None, None])
                x = x.reshape(*x.shape[:2], heads * size) @ next(left) + next(left)
            case ("mean of tokens",):
                ones = real[..., None].astype(x.dtype)
                x = (x * ones).sum(1) / ones.sum(1)
            case _:
                raise ValueError(
                    f"layer must be one of those that Network lists. Received: {layer}"
                )
    return x


def multi_steps(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: optax.MultiSteps, with one compiled call per micro-batch."""
    weights, mean_loss = functions(network)
    optimizer = optax.MultiSteps(optax.adam(1e-3), k)
    microbatches = [
        (jnp.asarray(x[i : i + b]), jnp.asarray(y[i : i + b])) for i in range(0, k * b, b)
    ]
    return _run(optimizer, jax.grad(mean_loss), weights, microbatches)


def microbatching(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: optax.microbatching, with all micro-batches in one compiled call."""
    weights, mean_loss = functions(network)
    mean = optax.microbatching.AccumulationType.MEAN
    gradient = optax.microbatching.microbatch(
        jax.grad(mean_loss), argnums=(1, 2), microbatch_size=b, accumulator=mean
    )
    return _run(optax.adam(1e-3), gradient, weights, [(jnp.asarray(x), jnp.asarray(y))])


def _run(optimizer, gradient: Callable, weights: list[jax.Array], batches: list[tuple]) -> Run:
    """A run whose updates each call the optimizer once for each of the batches.

    The step is compiled ahead of time. Weights and state are donated: the step writes the new ones
    over the old ones.
    """
    state, key = optimizer.init(weights), jax.random.key(0)

    def step(weights, state, x, y, key):
        changes, state = optimizer.update(gradient(weights, x, y, key), state, weights)
        return optax.apply_updates(weights, changes), state

    compiled = (
        jax.jit(step, donate_argnums=(0, 1)).lower(weights, state, *batches[0], key).compile()
    )

    def run(updates):
        nonlocal weights, state
        for _ in range(updates):
            for batch in batches:
                weights, state = compiled(weights, state, *batch, key)
            jax.block_until_ready(weights)

    return run


WAYS: dict[str, dict[str, Way]] = {
    "optax MultiSteps": {"ahead of time, donated": multi_steps},
    "optax microbatching": {"ahead of time, donated": microbatching},
}

"""Marek et al. 2025: small batches for language models, if Adam forgets as slowly in tokens.

The paper says: a language model can be trained with a batch of one. Adam's beta_2 must then keep its
half-life in tokens, not in updates. For the same tokens, the small batch then reaches a loss as low
as large ones, its rate matters less, and even plain SGD comes close.

A transformer of one block, with 32 features, one head and 17,472 weights, learns to continue
Shakespeare's plays character by character: 524,288 characters, in texts of 32, from two seeds, in
batches of 1, 16 and 256 texts. The rate rises in the first 5% of the updates and falls to 0 like
a cosine, as in the paper; eight rates, each twice the one before, are trained at once. Adam has
beta_1 = 0.9, and beta_2 = 0.95 either in all batches, or in batches of 16 and with the same half-life
in characters in the others: 6,919 characters. The paper trains models of 30 million weights and more,
with batches of 1 to 4,096 texts; its best rates are those of its published configurations.

The rules were decided before the first whole run. Shorter runs had been seen by then, to choose the
grids of rates, the network and the number of characters.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "M. Marek, S. Lotfi, A. Somasundaram, A. G. Wilson and M. Goldblum 2025, Small Batch Size "
    "Training for Language Models: When Vanilla SGD Works, and Why Gradient Accumulation Is "
    "Wasteful, arXiv:2507.07101"
)
LENGTH = 32  # characters of a text
FEATURES = 32
CHARACTERS = 2**19  # of a run
SEEDS = 2
BATCHES = (1, 16, 256)
REFERENCE = 16  # the batch in which beta_2 is 0.95 by either rule
BETA_1 = 0.9
BETA_2 = 0.95
WARM_UP = 0.05  # of the updates
HELD_OUT = 1024  # texts
SGD, FIXED, HALF_LIFE = "sgd", "adam, beta_2 fixed", "adam, half-life fixed"
# The exponents of 2 of the lowest of eight rates, by the batch
SGD_RATES = {1: -5, 16: -4, 256: -4}
ADAM_RATES = {1: -12, 16: -11, 256: -9}
RATES = 8
NEAR = 1.05  # times the lowest loss: rates up to there count as good ones
PUBLISHED_GROWTH = 0.005 / 0.0017  # of the best rate from 1 to 256, in the paper's configurations


def study(quick: bool = False) -> Study:
    """Train the model in all ways.

    Args:
        quick: whether to train with 16,384 characters from one seed instead.
    """
    began = time.monotonic()
    characters, seeds = (2**14, 1) if quick else (CHARACTERS, SEEDS)
    rows = []
    for batch in BATCHES:
        rows += losses_of(SGD, batch, characters, seeds)
        fixed = losses_of(FIXED, batch, characters, seeds)
        if batch == REFERENCE:  # the same by either rule
            scaled = [row | {"way": HALF_LIFE} for row in fixed]
        else:
            scaled = losses_of(HALF_LIFE, batch, characters, seeds)
        rows += fixed + scaled
    claims = judge(rows)
    seconds = time.monotonic() - began
    return Study("half-life", PAPER, claims, rows, figure(rows), quick, seconds)


def beta_2_of(way: str, batch: int) -> float:
    """Adam's beta_2 for a batch: by the half-life, it is BETA_2 for REFERENCE texts.

    Example:
        >>> beta_2_of(FIXED, 1), round(beta_2_of(HALF_LIFE, 1), 4)
        (0.95, 0.9968)
    """
    return BETA_2 if way == FIXED else BETA_2 ** (batch / REFERENCE)


def rates_of(way: str, batch: int) -> np.ndarray:
    """The learning rates that are tried, shape (RATES,)."""
    lowest = (SGD_RATES if way == SGD else ADAM_RATES)[batch]
    return 2.0 ** np.arange(lowest, lowest + RATES)


def losses_of(way: str, batch: int, characters: int, seeds: int) -> list[dict[str, Any]]:
    """Train in one way: a row for each seed and rate, with the mean loss of the held-out texts."""
    text = datasets.shakespeare()
    rates = rates_of(way, batch)
    settings = [tf.constant(rates, "float32")]
    if way != SGD:
        settings.append(tf.constant(beta_2_of(way, batch), "float32"))
    starts = [_start(text.train, batch, characters, seed) for seed in range(seeds)]
    train = train_by_sgd if way == SGD else train_by_adam
    traced = train.get_concrete_function(*starts[0], *settings)
    # Side by side, because the operations of a small batch keep one core busy
    with ThreadPoolExecutor() as threads:
        ends = list(threads.map(lambda start: traced(*start, *settings), starts))
    places = np.arange(HELD_OUT) * (len(text.held_out) // HELD_OUT)
    held_out = tf.constant(texts_at(text.held_out, places))
    return [
        {"way": way, "batch": batch, "seed": seed, "rate": rate, "loss": float(f"{loss:.5g}")}
        for seed, weights in enumerate(ends)
        for rate, loss in zip(rates, mean_losses(weights, held_out).numpy())
    ]


def _start(numbers: np.ndarray, batch: int, characters: int, seed: int) -> list[tf.Tensor]:
    """The weights of all copies at the start, and the texts of each update."""
    rng = np.random.default_rng(seed)
    weights = np.tile(starting_weights(rng), [RATES, 1])
    places = rng.integers(len(numbers) - LENGTH, size=characters // LENGTH)
    texts = texts_at(numbers, places).reshape(-1, batch, LENGTH + 1)
    return [tf.constant(weights), tf.constant(texts)]


def texts_at(numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Texts of LENGTH characters and the next one, shape (starts, LENGTH + 1)."""
    return numbers[starts[:, np.newaxis] + np.arange(LENGTH + 1)]


# ---- the model: every weight of a copy in one vector, all copies at once ----

SHAPES = {
    "characters": (65, FEATURES),
    "places": (LENGTH, FEATURES),
    "queries, keys, values": (FEATURES, 3 * FEATURES),
    "attention": (FEATURES, FEATURES),
    "wide": (FEATURES, 4 * FEATURES),
    "narrow": (4 * FEATURES, FEATURES),
    "logits": (FEATURES, 65),
}
SIZES = [rows * columns for rows, columns in SHAPES.values()]


def starting_weights(rng: np.random.Generator) -> np.ndarray:
    """The weights of one copy, shape (sum(SIZES),): small features, and matrices that keep the
    variance."""
    drawn = []
    for name, (rows, columns) in SHAPES.items():
        deviation = 0.02 if name in ("characters", "places") else rows**-0.5
        drawn.append(rng.normal(0, deviation, rows * columns))
    return np.concatenate(drawn).astype("float32")


def mean_losses(weights: tf.Tensor, texts: tf.Tensor) -> tf.Tensor:
    """The mean loss of each copy over all characters of texts, in nats.

    Args:
        weights: shape (copies, sum(SIZES)).
        texts: the numbers of characters, shape (texts, LENGTH + 1).

    Returns:
        Shape (copies,).
    """
    copies = weights.shape[0]
    parts = tf.split(weights, SIZES, axis=1)
    matrices = {
        name: tf.reshape(part, [copies, *shape])
        for (name, shape), part in zip(SHAPES.items(), parts)
    }

    def product(features: tf.Tensor, name: str) -> tf.Tensor:
        rows = tf.reshape(features, [copies, -1, features.shape[-1]])
        shape = [copies, texts.shape[0], LENGTH, SHAPES[name][1]]
        return tf.reshape(rows @ matrices[name], shape)

    chosen = tf.one_hot(tf.tile(texts[tf.newaxis, :, :-1], [copies, 1, 1]), 65)
    x = product(chosen, "characters") + matrices["places"][:, tf.newaxis]
    queries, keys, values = tf.split(product(_scaled(x), "queries, keys, values"), 3, axis=-1)
    scores = tf.matmul(queries, keys, transpose_b=True) / FEATURES**0.5
    past = np.tril(np.ones([LENGTH, LENGTH], bool))
    attention = tf.nn.softmax(tf.where(past, scores, -1e9))
    x += product(attention @ values, "attention")
    x += product(tf.nn.relu(product(_scaled(x), "wide")), "narrow")
    logits = product(_scaled(x), "logits")
    following = tf.tile(texts[tf.newaxis, :, 1:], [copies, 1, 1])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
    return tf.reduce_mean(losses, axis=[1, 2])


def _scaled(x: tf.Tensor) -> tf.Tensor:
    """Features with a mean square of 1."""
    return x * tf.math.rsqrt(tf.reduce_mean(x * x, axis=-1, keepdims=True) + 1e-5)


# ---- training ----


@tf.function(jit_compile=True)
def train_by_sgd(weights: tf.Tensor, texts: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
    """Train each copy with its own rate by plain SGD.

    Args:
        weights: shape (copies, sum(SIZES)).
        texts: the texts of each update, shape (updates, batch, LENGTH + 1).
        rates: shape (copies,).

    Returns:
        The weights after the training.
    """
    updates = texts.shape[0]
    for update in tf.range(updates):
        gradient = _gradients(weights, texts[update])
        weights -= (rates * _schedule(update, updates))[:, tf.newaxis] * gradient
    return weights


@tf.function(jit_compile=True)
def train_by_adam(
    weights: tf.Tensor, texts: tf.Tensor, rates: tf.Tensor, beta_2: tf.Tensor
) -> tf.Tensor:
    """Train each copy with its own rate by Adam; the other arguments and the result are those of
    `train_by_sgd`."""
    updates = texts.shape[0]
    first = second = tf.zeros_like(weights)
    for update in tf.range(updates):
        gradient = _gradients(weights, texts[update])
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = beta_2 * second + (1 - beta_2) * gradient**2
        made = tf.cast(update + 1, tf.float32)
        mean = first / (1 - BETA_1**made)
        mean_square = second / (1 - beta_2**made)
        step = mean / (tf.sqrt(mean_square) + 1e-8)
        weights -= (rates * _schedule(update, updates))[:, tf.newaxis] * step
    return weights


def _gradients(weights: tf.Tensor, texts: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(mean_losses(weights, texts))  # each copy has its own term
    return tape.gradient(loss, weights)


def _schedule(update: tf.Tensor, updates: int) -> tf.Tensor:
    """What the rate is multiplied by: it rises from 0 to 1, and falls to 0 like a cosine."""
    warm = int(WARM_UP * updates)
    update = tf.cast(update, tf.float32)
    fallen = (update - warm) / (updates - warm)
    return tf.where(update < warm, update / max(warm, 1), 0.5 + 0.5 * tf.cos(np.pi * fallen))


# ---- the verdicts ----


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    smallest, largest = BATCHES[0], BATCHES[-1]
    growth = best_rate(rows, HALF_LIFE, largest) / best_rate(rows, HALF_LIFE, smallest)
    fixed = _losses(rows, FIXED, smallest).min(axis=1)
    scaled = _losses(rows, HALF_LIFE, smallest).min(axis=1)
    lowest = {batch: lowest_loss(rows, HALF_LIFE, batch) for batch in BATCHES}
    gaps = [
        lowest_loss(rows, SGD, batch)
        - min(lowest_loss(rows, FIXED, batch), lowest_loss(rows, HALF_LIFE, batch))
        for batch in (smallest, largest)
    ]
    widths = [good_rates(rows, HALF_LIFE, batch) for batch in (smallest, largest)]
    return [
        Claim(
            f"With a fixed half-life, the best rate grows by {PUBLISHED_GROWTH:.1f} from batch "
            f"{smallest} to {largest}, not by the square root, 16.",
            f"it grows by {PUBLISHED_GROWTH / 3:.1f} to {PUBLISHED_GROWTH * 3:.1f}",
            f"{growth:.1f}",
            PUBLISHED_GROWTH / 3 <= growth <= PUBLISHED_GROWTH * 3,
        ),
        Claim(
            f"In batches of {smallest}, a fixed half-life is better than a fixed beta_2.",
            "the lowest loss is lower for each seed",
            f"{_listed(scaled)} against {_listed(fixed)}",
            bool(np.all(scaled < fixed)),
        ),
        Claim(
            f"After the same tokens, batches of {smallest} are as good as larger ones, or better.",
            f"the lowest loss of batches of {smallest} is the lowest of all",
            ", ".join(f"{batch}: {loss:.3f}" for batch, loss in lowest.items()),
            lowest[smallest] == min(lowest.values()),
        ),
        Claim(
            f"In batches of {smallest}, plain SGD is nearly as good as Adam.",
            f"the lowest losses differ by less than half as much as in batches of {largest}",
            f"{gaps[0]:.3f} and {gaps[1]:.3f}",
            gaps[0] < gaps[1] / 2,
        ),
        Claim(
            "In small batches, the rate matters less.",
            f"the rates with a loss within 5% of the lowest span a wider range in batches of "
            f"{smallest} than in batches of {largest}",
            f"a factor of {widths[0]:.0f}, and of {widths[1]:.0f}",
            widths[0] > widths[1],
        ),
    ]


def lowest_loss(rows: list[dict[str, Any]], way: str, batch: int) -> float:
    """The lowest of the losses at the tried rates, each the mean over seeds."""
    return float(_losses(rows, way, batch).mean(axis=0).min())


def best_rate(rows: list[dict[str, Any]], way: str, batch: int) -> float:
    """The rate of `lowest_loss`."""
    return float(rates_of(way, batch)[_losses(rows, way, batch).mean(axis=0).argmin()])


def good_rates(rows: list[dict[str, Any]], way: str, batch: int) -> float:
    """The largest rate around the best one whose loss is at most NEAR times the lowest, divided by
    the smallest such rate. Between two tried rates, the loss is a line over the logarithm."""
    losses = _losses(rows, way, batch).mean(axis=0)
    limit = NEAR * losses.min()
    best = losses.argmin()
    below, above = losses[best::-1], losses[best:]
    return float(2 ** (_steps_to(below, limit) + _steps_to(above, limit)))


def _steps_to(losses: np.ndarray, limit: float) -> float:
    """How many steps from the first, lowest loss to where the limit is crossed, at most to the
    last."""
    over = np.flatnonzero(losses > limit)
    if not len(over):
        return len(losses) - 1
    last, first = losses[over[0] - 1], losses[over[0]]
    return over[0] - 1 + (limit - last) / (first - last)


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the losses of each way against the rate."""
    drawn, panels = picture.figure(3, size=(9.0, 3.4))
    names = ("plain SGD", "Adam, β₂ = 0.95", "Adam, half-life fixed")
    said = []
    for axes, way, name in zip(panels, (SGD, FIXED, HALF_LIFE), names):
        for batch, style in zip(BATCHES, STYLES):
            losses = _losses(rows, way, batch).mean(axis=0)
            rates = rates_of(way, batch)
            best = losses.argmin()
            axes.plot(rates, losses, label=f"batch {batch}", **style)
            axes.plot(
                rates[best], losses[best], "o", color=style["color"], markersize=10, alpha=0.4
            )
            said.append(f"{name}, batch {batch}: {losses[best]:.2f} at {rates[best]:.2g}")
        axes.set(xscale="log", xlabel="learning rate", title=name)
    lowest = min(row["loss"] for row in rows)
    for axes in panels:
        axes.set_ylim(lowest - 0.05, lowest + 1.2)
        plain_numbers(axes)
    panels[0].set_ylabel("held-out loss (nats)")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    drawn.set_label(
        "The held-out loss against the learning rate, one panel for each optimizer, one line for "
        f"each batch. The lowest losses: {'; '.join(said)}."
    )
    return drawn


def _losses(rows: list[dict[str, Any]], way: str, batch: int) -> np.ndarray:
    """The losses of a way and a batch, shape (seeds, RATES). In batches of REFERENCE, both ways of Adam
    are the same."""
    losses = [row["loss"] for row in rows if (row["way"], row["batch"]) == (way, batch)]
    # A run that diverged is worse than all others
    return np.nan_to_num(np.array(losses, float), nan=np.inf).reshape(-1, RATES)


def _listed(losses: np.ndarray) -> str:
    return " and ".join(f"{loss:.3f}" for loss in losses)

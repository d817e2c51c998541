"""Zhang et al. 2019: updates to a target loss against the batch, in the noisy quadratic model.

In the model, the loss is the sum of h[i] * w[i]**2 / 2 over 10,000 weights with the curvatures h[i]
= 1/i. The gradient of a batch of B examples is h[i] * w[i] plus noise with the variance h[i] / B.
All weights start with an expected square of 1, and the target is an expected loss of 0.01. Such a
model can be solved: after t updates, the expected loss is

    start(t) + noise(t) / B,

where both terms depend on the learning rate and the momentum only. They are computed here with
matrix powers, without training. For each batch, the learning rate and the momentum with the fewest
updates are chosen from a grid.

The rules below were decided before the first run. One of them compares the formula with gradlab: 20
weights are trained with windows of 4 micro-batches of 2, in 2,000 independent runs.
"""

import math
import time
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES
from gradlab.lab.reproduce.study import Claim, Study
from gradlab.window import Microbatch, accumulate

PAPER = (
    "G. Zhang, L. Li, Z. Nado, J. Martens, S. Sachdeva, G. E. Dahl, C. J. Shallue and R. Grosse "
    "2019, Which Algorithmic Choices Matter at Which Batch Sizes? Insights From a Noisy Quadratic "
    "Model, arXiv:1907.04164"
)
WEIGHTS = 10_000
TARGET = 0.01
BATCHES = tuple(2**power for power in range(18))
# the smallest learning rate / (1 - momentum), and how many rates lie in an octave
SLOWEST = 2.0**-11
STEPS = 3
# The largest learning rate that is tried: above it, no momentum keeps the loss finite
FASTEST = 4.0
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998)
LONGEST = 26  # the longest training has about 2 ** LONGEST updates
# of the training with gradlab
RUNS = 2000
UPDATES = 40
RATE = 0.25
MICROBATCH = 2
MICROBATCHES = 4


def study(quick: bool = False) -> Study:
    """Compute the updates to the target for each batch, and compare the formula with a training.

    Args:
        quick: whether to use a model with 30 weights and a coarse grid instead.
    """
    began = time.monotonic()
    curvatures = 1 / np.arange(1, 31 if quick else WEIGHTS + 1)
    rows = [
        row
        for momentum in (MOMENTA[:4:3] if quick else MOMENTA)
        for row in _updates(curvatures, momentum)
    ]
    found = simulate(100 if quick else RUNS)
    return Study(
        "noisy-quadratic",
        PAPER,
        judge(rows, *found),
        rows,
        figure(rows),
        quick,
        time.monotonic() - began,
    )


def expected_losses(
    curvatures: np.ndarray, rate: float, momentum: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two terms of the expected loss, at numbers of updates that grow by a quarter or less.

    Args:
        curvatures: h, shape (weights,).
        rate: learning rate / (1 - momentum).
        momentum: the factor of the velocity, 0 for plain SGD.

    Returns:
        updates, start and noise, each of shape (points,): after `updates`, the loss is start +
        noise / batch.

    Example:
        >>> updates, start, noise = expected_losses(np.array([1.0]), rate=0.5, momentum=0.0)
        >>> int(updates[2]), float(start[2]), round(float(noise[2]), 4)
        (3, 0.0078125, 0.1641)
    """
    # Where the learning rate is too large for the momentum
    with np.errstate(over="ignore", invalid="ignore"):
        return _expected_losses(curvatures, rate, momentum)


def _expected_losses(
    curvatures: np.ndarray, rate: float, momentum: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # One update of E[w * w], E[w * v] and E[v * v] without noise
    step = np.zeros([len(curvatures), 3, 3])
    learning_rate = rate * (1 - momentum)
    # W <- a * w - learning_rate * momentum * v;  v <- h * w + momentum * v
    a = 1 - learning_rate * curvatures
    b = -learning_rate * momentum
    step[:, 0] = np.stack([a * a, 2 * a * b, np.full_like(a, b * b)], axis=1)
    step[:, 1] = np.stack(
        [a * curvatures, a * momentum + b * curvatures, np.full_like(a, b * momentum)], axis=1
    )
    step[:, 2] = np.stack(
        [curvatures**2, 2 * momentum * curvatures, np.full_like(a, momentum**2)], axis=1
    )
    noise = curvatures[:, None] * np.array([learning_rate**2, -learning_rate, 1.0])
    found = []
    # And each of them times the powers of two: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20
    for first in (1, 3, 5, 7):
        power = np.linalg.matrix_power(step, first)
        total = _noise_after(step, noise, first)
        updates = first
        while updates <= 2**LONGEST:
            found.append((updates, curvatures @ power[:, 0, 0] / 2, curvatures @ total[:, 0] / 2))
            total = total + np.einsum("wij,wj->wi", power, total)
            power = power @ power
            updates = 2 * updates
    updates, start, rest = np.array(sorted(found)).T
    return updates, start, rest


def simulate(runs: int) -> tuple[float, float, float]:
    """Train a model of 20 weights with gradlab.

    Args:
        runs: the number of independent runs, which are trained together.

    Returns:
        The mean loss over the runs, its standard error, and the loss that the formula gives.
    """
    curvatures = 1 / np.arange(1, 21)
    h = tf.constant(curvatures, tf.float32)
    random = np.random.default_rng(0)
    values = tf.Variable(random.standard_normal([runs, 20]), dtype=tf.float32)

    def forward(noise, number, state):
        # Of each example, over all runs
        losses = tf.reduce_sum(h * values**2 / 2 + noise * values, axis=[1, 2])
        return Microbatch(tf.reduce_mean(losses), tf.cast(len(noise), tf.float32), state)

    @tf.function
    def update(noise):
        sums = accumulate(forward, [values], noise, MICROBATCH)
        values.assign_sub(RATE * sums.gradients[0] / sums.weight)

    batch = MICROBATCH * MICROBATCHES
    for _ in range(UPDATES):
        noise = random.standard_normal([batch, runs, 20]) * np.sqrt(curvatures)
        update(tf.constant(noise, tf.float32))
    losses = values.numpy() ** 2 @ curvatures / 2
    at, from_start, from_noise = expected_losses(curvatures, RATE, 0.0)
    [expected] = (from_start + from_noise / batch)[at == UPDATES]
    return float(losses.mean()), float(losses.std(ddof=1) / math.sqrt(runs)), float(expected)


def judge(rows: list[dict[str, Any]], mean: float, error: float, expected: float) -> list[Claim]:
    """Judge the paper's claims by the rows of `study` and the result of `simulate`."""
    plain = {row["batch"]: row for row in rows if row["momentum"] == 0}
    best = _best(rows)
    halved = [plain[batch]["updates"] / plain[2 * batch]["updates"] for batch in (1, 2, 4)]
    last = plain[2**14]["updates"] / plain[2**15]["updates"]
    gain = {batch: plain[batch]["updates"] / best[batch]["updates"] for batch in (1, 2**15)}
    slope = math.log(plain[8]["rate"] / plain[1]["rate"], 8)
    critical = [_critical(each) for each in (plain, best)]
    return [
        Claim(
            "Doubling a small batch halves the updates.",
            "SGD: 1.9 to 2.1 times as many updates for B as for 2B, for B = 1, 2 and 4",
            ", ".join(f"{each:.2f}" for each in halved),
            all(1.9 <= each <= 2.1 for each in halved),
        ),
        Claim(
            "Doubling a large batch gains nothing.",
            f"SGD: at most 1.02 times as many updates for B = {2**14:,} as for {2**15:,}",
            f"{last:.3f}",
            last <= 1.02,
        ),
        Claim(
            "For small batches, the best learning rate is proportional to the batch.",
            "SGD: the exponent from B = 1 to 8 is between 0.8 and 1.2",
            f"{slope:.2f}",
            0.8 <= slope <= 1.2,
        ),
        Claim(
            "Momentum helps large batches only.",
            "SGD needs at most 1.1 times as many updates at B = 1, and at least 3 times as many "
            f"at B = {2**15:,}",
            f"{gain[1]:.2f} and {gain[2**15]:.1f}",
            gain[1] <= 1.1 and gain[2**15] >= 3,
        ),
        Claim(
            "Momentum makes the critical batch larger.",
            "the smallest batch with at most twice the fewest updates is at least twice as large "
            "with momentum",
            f"{critical[0]:,} without, {critical[1]:,} with momentum",
            critical[1] >= 2 * critical[0],
        ),
        Claim(
            "The expected loss is start(t) + noise(t) / B. (A check of the formula above with "
            "gradlab.)",
            "the mean loss after 40 updates with 4 micro-batches of 2 is within 4 standard errors",
            f"{mean:.5f} ± {error:.5f}, formula {expected:.5f}",
            abs(mean - expected) <= 4 * error,
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the updates to the target against the batch."""
    drawn, axes = picture.figure()
    plain = {row["batch"]: row for row in rows if row["momentum"] == 0}
    series = {"SGD": plain, "the best momentum": _best(rows)}
    for (name, chosen), style in zip(series.items(), STYLES):
        axes.plot(list(chosen), [row["updates"] for row in chosen.values()], label=name, **style)
    first = plain[1]["updates"]
    axes.plot(BATCHES, [first / batch for batch in BATCHES], "k:", label="proportional to 1 / B")
    least = min(row["updates"] for row in series["the best momentum"].values())
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch B",
        ylabel="updates to the target",
        ylim=(least / 3, None),
    )
    axes.legend(frameon=False)
    ends = {
        name: (chosen[1]["updates"], chosen[BATCHES[-1]]["updates"])
        for name, chosen in series.items()
    }
    words = "; ".join(f"{name}: {a:,.0f} to {b:,.0f}" for name, (a, b) in ends.items())
    drawn.set_label(
        f"Updates to the target in the noisy quadratic model, from B = 1 to {BATCHES[-1]:,}. "
        f"{words}. Dotted: proportional to 1 / B."
    )
    return drawn


def _noise_after(step: np.ndarray, noise: np.ndarray, updates: int) -> np.ndarray:
    total = np.zeros_like(noise)
    for _ in range(updates):
        total = np.einsum("wij,wj->wi", step, total) + noise
    return total


def _updates(curvatures: np.ndarray, momentum: float) -> list[dict[str, Any]]:
    """For each batch, the fewest updates to the target over the learning rates."""
    fewest: dict[int, tuple[float, float]] = {batch: (math.inf, math.nan) for batch in BATCHES}
    octaves = math.log2(FASTEST / (1 - momentum) / SLOWEST)
    for rate in SLOWEST * 2.0 ** (np.arange(STEPS * octaves + 1) / STEPS):
        at, start, noise = expected_losses(curvatures, rate, momentum)
        for batch in BATCHES:
            fewest[batch] = min(fewest[batch], (_crossing(at, start + noise / batch), rate))
    return [
        {"momentum": momentum, "batch": batch, "updates": round(updates, 1), "rate": round(rate, 6)}
        for batch, (updates, rate) in fewest.items()
    ]


def _crossing(updates: np.ndarray, losses: np.ndarray) -> float:
    """Where the loss falls to the target, interpolated between the points; inf if it does not."""
    below = np.flatnonzero(losses <= TARGET)
    if not len(below):
        return math.inf
    last = below[0]
    if last == 0:
        return float(updates[0])
    pair = slice(last - 1, last + 1)
    x = np.log(updates[pair])
    y = np.log(losses[pair])
    return float(np.exp(np.interp(-math.log(TARGET), -y, x)))


def _best(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """For each batch the row with the fewest updates over all momenta."""
    return {
        batch: min((r for r in rows if r["batch"] == batch), key=lambda r: r["updates"])
        for batch in BATCHES
    }


def _critical(chosen: dict[int, dict[str, Any]]) -> int:
    """The smallest batch that needs at most twice the fewest updates."""
    least = min(row["updates"] for row in chosen.values())
    return min(batch for batch, row in chosen.items() if row["updates"] <= 2 * least)

"""Li et al. 2024: for optimizers that follow the signs of gradients, the best learning rate rises with
the batch, peaks, and falls.

One update follows the signs of the gradient of a batch, as Adam nearly does, in a quadratic loss with
the curvatures H, from a point with the true gradient G; each component has independent normal noise
with the variance 1 for each example. A sign then has the expectation s[i] = erf(sqrt(B / 2) |G[i]|),
with the sign of G[i], and the rate that lowers the expected loss most is, exactly,

    sum(G s) / (sum of H[i, i] + sum of H[i, j] s[i] s[j] over pairs of different weights).

The paper says: for batches B that are small enough, this is as large at B as at peak**2 / B, and it
peaks at pi / 2 times the first sum below the line, divided by the second one with G in place of s.

There are 100 weights. Every two of them have the curvature 0.3 together, each has 1 alone, and the
weights are normal around one value, so that the gradients do not cancel. The batches are the powers of
2 from 1 to 16,384. Everything is computed exactly; a measurement, with signs of gradients that are
drawn, stands beside it.

All rules were decided before the first run. Two statements are questions of ours: whether the peak is
the gradient noise scale with the curvatures (McCandlish et al. 2018, equation 2.8), and whether there
is one if the weights do not share curvature.
"""

import math
import time
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "S. Li, P. Zhao, H. Zhang, X. Sun, H. Wu, D. Jiao, W. Wang, C. Liu, Z. Fang, J. Xue, Y. Tao, B. Cui "
    "and D. Wang 2024, Surge Phenomenon in Optimal Learning Rate and Batch Size Scaling, "
    "arXiv:2405.14578"
)
WEIGHTS = 100
SHARED = 0.3  # curvature of two weights together
SIZE = 0.001  # of the weights
BATCHES = 2 ** np.arange(15)
DRAWS = 20_000
FALLS = 1.5  # the best rate at the peak, at least so many times that at either end
NEAR = 1.5  # how far the peak may be from the paper's formula: a factor
NEAR_NOISE_SCALE = 2  # and from the gradient noise scale
LIMIT = 4  # standard errors between a measured and an exact rate


class LossPoint(NamedTuple):
    """A point of the loss: its true gradient and the curvatures, which are the same everywhere."""

    gradient: np.ndarray
    curvatures: np.ndarray

    def best_rate(self, signs: np.ndarray) -> float:
        """The rate that lowers the expected loss most, if signs have these expectations."""
        own = np.trace(self.curvatures)
        pairs = signs @ self.curvatures @ signs - np.diag(self.curvatures) @ signs**2
        return float(self.gradient @ signs / (own + pairs))

    def peak(self) -> float:
        """The batch at which the best rate peaks, by the paper."""
        g, h = self.gradient, self.curvatures
        return float(math.pi / 2 * np.trace(h) / (g @ h @ g - np.diag(h) @ g**2))

    def noise_scale(self) -> float:
        """The gradient noise scale with the curvatures: tr(H) / (G H G), as the noise has the variance 1."""
        return float(np.trace(self.curvatures) / (self.gradient @ self.curvatures @ self.gradient))


def study(quick: bool = False) -> Study:
    """Compute the best rates for all batches, and measure them.

    Args:
        quick: whether to draw a tenth of the gradients.
    """
    began = time.monotonic()
    draws = DRAWS // 10 if quick else DRAWS
    rows = [row_of(int(batch), draws) for batch in BATCHES]
    claims = judge(rows)
    seconds = time.monotonic() - began
    return Study("surge", PAPER, claims, rows, figure(rows), quick, seconds)


def point(shared: float = SHARED, size: float = SIZE) -> LossPoint:
    """The point of the study, or one of other weights, or with other curvatures."""
    curvatures = np.full([WEIGHTS, WEIGHTS], shared)
    np.fill_diagonal(curvatures, 1.0)
    weights = size * (1 + np.random.default_rng(0).standard_normal(WEIGHTS))
    return LossPoint(curvatures @ weights, curvatures)


def expected_signs(gradient: np.ndarray, batch: int) -> np.ndarray:
    """The expected signs of the mean gradient of a batch."""
    return np.vectorize(math.erf)(math.sqrt(batch / 2) * gradient)


def row_of(batch: int, draws: int) -> dict[str, Any]:
    """The best rates for a batch: exact, measured with its standard error, later in training, with
    curvatures of single weights only, and of SGD."""
    here, later, alone = point(), point(size=SIZE / 2), point(shared=0.0)
    measured, error = measured_rate(here, batch, draws)
    # SGD: G G / (G H G + tr(H) / B)
    g, h = here
    of_sgd = g @ g / (g @ h @ g + np.trace(h) / batch)
    rates = {
        "rate": here.best_rate(expected_signs(g, batch)),
        "measured": measured,
        "standard_error": error,
        "later": later.best_rate(expected_signs(later.gradient, batch)),
        "alone": alone.best_rate(expected_signs(alone.gradient, batch)),
        "sgd": float(of_sgd),
    }
    return {"batch": batch} | {name: float(f"{rate:.6g}") for name, rate in rates.items()}


def measured_rate(here: LossPoint, batch: int, draws: int) -> tuple[float, float]:
    """The best rate by drawn gradients, and its standard error.

    With the signs s of a gradient, a rate lowers the loss by rate G s - rate**2 s H s / 2, whose
    means over the draws have their largest difference at mean(G s) / mean(s H s).
    """
    random = np.random.default_rng(batch)
    noise = random.standard_normal([draws, len(here.gradient)]) / math.sqrt(batch)
    signs = np.sign(here.gradient + noise)
    slopes = signs @ here.gradient
    bends = np.sum(signs @ here.curvatures * signs, axis=1)
    rate = slopes.mean() / bends.mean()
    residual = slopes - rate * bends  # of a ratio of means
    return float(rate), float(residual.std(ddof=1) / math.sqrt(draws) / bends.mean())


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    batches = [row["batch"] for row in rows]
    rates, later, alone, of_sgd = (
        np.array([row[name] for row in rows]) for name in ("rate", "later", "alone", "sgd")
    )
    peak, peak_later = batches[int(rates.argmax())], batches[int(later.argmax())]
    ends = rates.max() / rates[[0, -1]]
    formula, noise_scale = point().peak(), point().noise_scale()
    distances = np.array([(row["measured"] - row["rate"]) / row["standard_error"] for row in rows])
    return [
        Claim(
            "The best rate rises with the batch, and falls after a peak.",
            f"at its peak at least {FALLS} times that of the smallest and of the largest batch",
            f"{ends[0]:.1f} and {ends[1]:.1f} times",
            bool(ends.min() >= FALLS),
        ),
        Claim(
            "The peak is where the paper's formula has it.",
            f"the best of the batches is within a factor of {NEAR}",
            f"{peak}, by the formula {formula:.0f}",
            _within(peak, formula, NEAR),
        ),
        Claim(
            "As training progresses, the peak moves to larger batches.",
            "larger with half the weights",
            f"{peak_later} in place of {peak}",
            peak_later > peak,
        ),
        Claim(
            "The best rate of SGD does not fall.",
            "no batch has a lower rate than a smaller batch",
            f"from {of_sgd[0]:.2g} to {of_sgd[-1]:.2g}",
            bool((np.diff(of_sgd) >= 0).all()),
        ),
        Claim(
            "The peak is at the gradient noise scale with the curvatures. (A question of ours.)",
            f"within a factor of {NEAR_NOISE_SCALE}",
            f"{peak}, the noise scale is {noise_scale:.0f}, and without the curvatures "
            f"{WEIGHTS / np.sum(point().gradient ** 2):.0f}",
            _within(peak, noise_scale, NEAR_NOISE_SCALE),
        ),
        Claim(
            "Weights without common curvature have no peak. (A question of ours.)",
            "no batch has a lower rate than a smaller batch",
            f"from {alone[0]:.2g} to {alone[-1]:.2g}",
            bool((np.diff(alone) >= 0).all()),
        ),
        Claim(
            "The exact rates are those of drawn gradients. (A check.)",
            f"each within {LIMIT} standard errors",
            f"the largest distance is {np.abs(distances).max():.1f}",
            bool(np.abs(distances).max() <= LIMIT),
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the best rates against the batch, each as a part of its largest."""
    drawn, axes = picture.figure(size=(7, 4.0))
    batches = [row["batch"] for row in rows]
    names = {
        "rate": "signs",
        "later": "signs, half the weights",
        "alone": "signs, no common curvature",
        "sgd": "SGD",
    }
    for (name, label), style in zip(names.items(), STYLES):
        rates = np.array([row[name] for row in rows])
        axes.plot(batches, rates / rates.max(), label=label, **style)
    here = point()
    axes.axvline(here.peak(), linestyle=":", color="black", label="the paper's formula")
    axes.axvline(here.noise_scale(), linestyle="--", color="black", label="the noise scale")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="best rate / its largest")
    axes.set_ylim(0.02, 1.3)
    ticks = 10 ** np.arange(5)
    axes.set_xticks(ticks, labels=[f"{batch:,}" for batch in ticks])
    plain_numbers(axes)
    drawn.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    ends = {name: [row[name] / max(r[name] for r in rows) for row in rows] for name in names}
    drawn.set_label(
        "The best learning rate against the batch, as a part of its largest. "
        + "; ".join(
            f"{label}: {ends[name][0]:.2g} at 1, {ends[name][-1]:.2g} at {batches[-1]:,}"
            for name, label in names.items()
        )
        + "."
    )
    return drawn


def _within(found: float, expected: float, factor: float) -> bool:
    return expected / factor <= found <= expected * factor

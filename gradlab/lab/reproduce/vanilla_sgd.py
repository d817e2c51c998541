"""Marek et al. 2025: with small batches, SGD does not need momentum.

The paper shows it in a problem of two weights, x**2 + 10 y**2, from (-1, 1). Each component of the
gradient has normal noise of its own size / sqrt(B), where B is the batch in units of the critical
one. The large batch has B = 25 and 10 updates, the small one B = 0.09 and 100 updates, which are
far fewer examples. Momentum is an exponential mean with the factor 0.4. Rates and factor are those
of the paper's program.

The rules of the first two claims were decided after a single trial, that of the third before any
run. It asks whether the finding rests on the rates that were chosen: each setting gets the best of
31 rates. A median is that of 10,000 runs, and what is given behind it are the least and the largest
of ten groups of 1,000.
"""

import time
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, line
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "M. Marek, S. Lotfi, A. Somasundaram, A. G. Wilson and M. Goldblum 2025, Small Batch Size "
    "Training for Language Models: When Vanilla SGD Works, and Why Gradient Accumulation Is "
    "Wasteful, arXiv:2507.07101"
)
CURVATURES = np.array([2.0, 20.0])
START = np.array([-1.0, 1.0])
MOMENTUM = 0.4
GROUPS = 10
RUNS = 1_000  # of a group
RATES = np.geomspace(0.003, 0.3, 31)
HELPS = 5  # so many times lower is the loss of the large batch with momentum
HELPS_AT_BEST = 2  # with the best rates
SAME = 1.2  # at most so many times lower is that of the small batch


class Setting(NamedTuple):
    """A batch in units of the critical one, its updates, momentum, and the paper's rate."""

    name: str
    batch: float
    updates: int
    momentum: float
    rate: float


SETTINGS = (
    Setting("large batch, SGD", 25.0, 10, 0.0, 0.09),
    Setting("large batch, momentum", 25.0, 10, MOMENTUM, 0.12),
    Setting("small batch, SGD", 0.09, 100, 0.0, 0.012),
    Setting("small batch, momentum", 0.09, 100, MOMENTUM, 0.012),
)


def study(quick: bool = False) -> Study:
    """Run all settings with the paper's rate and with all others.

    Args:
        quick: whether to make 100 runs in place of 1,000 in each group.
    """
    began = time.monotonic()
    runs = 100 if quick else RUNS
    rows = [
        row_of(setting, float(rate), runs)
        for setting in SETTINGS
        for rate in (setting.rate, *RATES)
    ]
    claims = judge(rows)
    seconds = time.monotonic() - began
    return Study("vanilla-sgd", PAPER, claims, rows, figure(rows), quick, seconds)


def row_of(setting: Setting, rate: float, runs: int) -> dict[str, Any]:
    """The median of the last losses of a setting with a rate, and those of its groups."""
    groups = last_losses(setting, rate, runs)
    medians = np.median(groups, axis=1)
    return {
        "setting": setting.name,
        "rate": float(f"{rate:.6g}"),
        "median_loss": float(f"{np.median(groups):.6g}"),
        "least_of_groups": float(f"{medians.min():.6g}"),
        "largest_of_groups": float(f"{medians.max():.6g}"),
    }


def last_losses(setting: Setting, rate: float, runs: int) -> np.ndarray:
    """The last loss of each run, shape (GROUPS, runs). All settings of a batch share their noise."""
    random = np.random.default_rng(0)
    weights = np.broadcast_to(START, [GROUPS, runs, 2])
    mean = np.zeros([GROUPS, runs, 2])
    for _ in range(setting.updates):
        true = CURVATURES * weights
        noise = np.abs(true) * random.standard_normal(true.shape) / np.sqrt(setting.batch)
        mean = setting.momentum * mean + (1 - setting.momentum) * (true + noise)
        weights = weights - rate * mean
    return weights**2 @ CURVATURES / 2


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    of_paper, best = {}, {}
    for setting in SETTINGS:
        first, *others = (row for row in rows if row["setting"] == setting.name)
        of_paper[setting.name] = first
        best[setting.name] = min(others, key=lambda row: row["median_loss"])
    large, large_momentum, small, small_momentum = (setting.name for setting in SETTINGS)
    large_helps, small_helps = (
        of_paper[plain]["median_loss"] / of_paper[other]["median_loss"]
        for plain, other in ((large, large_momentum), (small, small_momentum))
    )
    large_at_best, small_at_best = (
        best[plain]["median_loss"] / best[other]["median_loss"]
        for plain, other in ((large, large_momentum), (small, small_momentum))
    )
    rates = ", ".join(f"{best[setting.name]['rate']:.2g}" for setting in SETTINGS)
    return [
        Claim(
            "With large batches, momentum lowers the loss.",
            f"the median with momentum is at least {HELPS} times lower",
            f"{large_helps:.3g} times: {_of(of_paper[large])} and {_of(of_paper[large_momentum])}",
            large_helps >= HELPS,
        ),
        Claim(
            "With small batches, SGD without momentum is as good.",
            f"the median with momentum is at most {SAME} times lower",
            f"{small_helps:.3g} times: {_of(of_paper[small])} and {_of(of_paper[small_momentum])}",
            small_helps <= SAME,
        ),
        Claim(
            "Both hold at the best rate of each setting. (A question of ours.)",
            f"at least {HELPS_AT_BEST} times lower for large batches, at most {SAME} for small ones",
            f"{large_at_best:.3g} and {small_at_best:.3g} times, at rates of {rates}",
            large_at_best >= HELPS_AT_BEST and small_at_best <= SAME,
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the median loss of each setting against the rate, the paper's as markers."""
    drawn, axes = picture.figure(size=(7, 3.8))
    said = []
    for setting, style in zip(SETTINGS, STYLES):
        first, *others = (row for row in rows if row["setting"] == setting.name)
        rates = [row["rate"] for row in others]
        losses = [row["median_loss"] for row in others]
        axes.plot(rates, losses, label=setting.name, **line(style))
        marker = {"marker": style["marker"], "color": style["color"]}
        axes.plot(first["rate"], first["median_loss"], markersize=9, **marker)
        said.append(
            f"{setting.name}: {first['median_loss']:.2g} at the paper's rate, "
            f"{min(losses):.2g} at the best"
        )
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="median of the last loss")
    axes.set_ylim(1e-5, 10)
    rate_ticks, loss_ticks = [0.003, 0.01, 0.03, 0.1, 0.3], 10.0 ** np.arange(-5, 2)
    axes.set_xticks(rate_ticks, labels=[f"{rate:g}" for rate in rate_ticks])
    axes.set_yticks(loss_ticks, labels=[f"{loss:g}" for loss in loss_ticks])
    axes.minorticks_off()
    drawn.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    drawn.set_label(
        "The median of the last loss against the learning rate, for large and small batches, with "
        f"and without momentum. {'; '.join(said)}."
    )
    return drawn


def _of(row: dict[str, Any]) -> str:
    return "{median_loss:.3g} ({least_of_groups:.3g} to {largest_of_groups:.3g})".format(**row)

"""The lab's figure of a training under way. Pyplot is not touched, so threads may draw."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradlab.lab.training import Update

# From the Okabe-Ito palette, which colour-blind readers can tell apart; every line differs in style or width as well.
SKY, BLUE, VERMILION, GREY = "#56B4E9", "#0072B2", "#D55E00", "#767676"


def training_figure(
    updates: Sequence[Update], total: int, label: str = "", earlier: Sequence[Update] = (), hint: str = ""
) -> Figure:
    """Draws a training: micro-batch losses (faint), window means (bold), and the test accuracy.

    Args:
        updates: the updates so far; may be empty.
        total: how many there will be: the horizontal axes do not move while it trains.
        label: what is being trained, for the title.
        earlier: an earlier training's updates, drawn dashed and grey for comparison.
        hint: what to say where there is nothing to draw yet.

    Returns:
        A figure of 960 x 380 pixels, with its text alternative as `figure.get_label()`.
    """
    figure = Figure(figsize=(9.6, 3.8), dpi=100, layout="constrained")
    figure.set_label(describe(updates, total))
    figure.suptitle(label, fontsize=11)
    losses, accuracies = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_losses(losses, updates, earlier)
    _draw_accuracies(accuracies, updates, earlier)
    for axes in (losses, accuracies):
        axes.set_xlim(0, max(total, 1))
        axes.set_xlabel("updates")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if not updates and hint:
        losses.text(0.5, 0.5, hint, transform=losses.transAxes, ha="center", va="center", color=GREY, fontsize=12)
    return figure


def _draw_losses(axes, updates: Sequence[Update], earlier: Sequence[Update]) -> None:
    axes.set_title("training loss", fontsize=10, loc="left")
    axes.set_ylabel("loss (nats)")
    if earlier:
        axes.plot(*_window_means(earlier), color=GREY, linestyle="--", linewidth=1, label="window mean, run before")
    if updates:
        axes.plot(*_microbatches(updates), ".", color=SKY, markersize=2.5, alpha=0.5, label="micro-batch")
        axes.plot(*_window_means(updates), color=BLUE, linewidth=1.8, label="window mean")
    # The scale is that of the first losses, so that one wild micro-batch does not flatten everything else.
    first = [update.loss for update in [*updates[:3], *earlier[:3]] if np.isfinite(update.loss)]
    axes.set_ylim(0, 1.25 * max(first, default=2.4))
    if earlier or updates:
        axes.legend(loc="upper right", fontsize=8, frameon=False, markerscale=3)


def _draw_accuracies(axes, updates: Sequence[Update], earlier: Sequence[Update]) -> None:
    axes.set_title("test accuracy", fontsize=10, loc="left")
    axes.set_ylabel("test images recognised (%)")
    _, measured = _accuracies([*updates, *earlier])
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(max(low for low in (0, 50, 80) if low <= min(measured, default=0)), 100)
    if earlier:
        axes.plot(*_accuracies(earlier), color=GREY, linestyle="--", marker="x", markersize=4, linewidth=1)
    if updates:
        axes.plot(*_accuracies(updates), color=VERMILION, marker="o", markersize=4, linewidth=1.8, clip_on=False)
        _, ours = _accuracies(updates)
        if len(ours):
            axes.set_title(f"test accuracy: {ours[-1]:.1f} %", fontsize=10, loc="left")


def _microbatches(updates: Sequence[Update]) -> tuple[np.ndarray, np.ndarray]:
    """The micro-batches' losses, each at its place within its update."""
    places = [u.number - 1 + (np.arange(len(u.losses)) + 0.5) / len(u.losses) for u in updates]
    return np.concatenate(places), np.concatenate([u.losses for u in updates])


def _window_means(updates: Sequence[Update]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([u.number - 0.5 for u in updates]), np.array([u.loss for u in updates])


def _accuracies(updates: Sequence[Update]) -> tuple[np.ndarray, np.ndarray]:
    measured = [u for u in updates if u.accuracy is not None]
    return np.array([u.number for u in measured]), np.array([100 * u.accuracy for u in measured])


def describe(updates: Sequence[Update], total: int) -> str:
    """The figure in words, for readers who do not see it."""
    if not updates:
        return "Two empty plots: training loss and test accuracy against updates."
    words = (
        f"Training after {updates[-1].number} of {total} updates. The window's loss went from {updates[0].loss:.2f} "
        f"to {updates[-1].loss:.2f} nats"
    )
    _, accuracies = _accuracies(updates)
    return words + (f"; the test accuracy is {accuracies[-1]:.1f} %." if len(accuracies) else ".")

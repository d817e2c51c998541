"""The lab's live views: small figures of the run under way, beside the runs that were pinned."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import plots
from gradlab.lab.figures.style import FAINT, GREY, STYLES, against_k, plain_numbers, to_png
from gradlab.lab.widget import toy

MEBIBYTE = 2**20
SIZE = (3.8, 2.9)  # inches of 100 pixels


@dataclass(frozen=True)
class Point:
    """What a run left for the views against k."""

    experiment: Experiment
    window: float  # standard deviations of the loss, in nats
    law: float
    microbatch: float
    milliseconds: float  # of an update, median
    mebibytes: float

    @classmethod
    def of(cls, result: Result) -> "Point":
        """The point of a run."""
        seconds = result.update_seconds[np.isfinite(result.update_seconds)]
        return cls(
            result.experiment,
            *plots.noise_of(result),
            1000 * float(np.median(seconds)),
            float(np.max(result.peak_memory_bytes)) / MEBIBYTE,
        )


@dataclass(frozen=True)
class Shown:
    """What the views draw.

    Attributes:
        experiment: what the controls say.
        name: of the run under way.
        result: that run so far, or None.
        window: the losses of the micro-batches shown so far of a window that is watched.
        pinned: (name, result) of the runs to compare with.
        points: of the runs that ended, this one not among them.
        against: what accuracies are drawn against: "updates", "examples" or "seconds".
    """

    experiment: Experiment
    name: str
    result: Result | None = None
    window: np.ndarray = field(default_factory=lambda: np.zeros(0))
    pinned: Sequence[tuple[str, Result]] = ()
    points: Sequence[Point] = ()
    against: str = "updates"

    @property
    def series(self) -> list[tuple]:
        """(result, name, style) of the run under way and of those that are pinned."""
        runs = [(self.result, self.name)] if self.result is not None else []
        styles = [STYLES[0], *STYLES[1:] * (1 + len(self.pinned) // (len(STYLES) - 1))]
        runs += [(result, name) for name, result in self.pinned]
        styles = styles if self.result is not None else styles[1:]
        return [(result, name, style) for (result, name), style in zip(runs, styles)]


def losses(shown: Shown) -> Figure:
    """Micro-batch losses of the first seed (faint), and the window's mean over seeds with its band."""
    figure, axes = _panel("training loss: micro-batches, window means")
    axes.set_xlim(0, shown.experiment.updates or None)
    words = []
    if shown.result is not None:
        first, updates = shown.result.losses[0], shown.result.updates[0]
        k = first.shape[1]
        places = np.arange(first.shape[0])[:, None] + (np.arange(k) + 0.5) / k
        many = max(1, updates * k // 1500)  # more dots than that are one stain, and slow
        axes.plot(places.ravel()[::many], first.ravel()[::many], ".", color=FAINT, markersize=2.5, alpha=0.5)
    for number, loss in enumerate(shown.window):
        place = (shown.result.updates[0] if shown.result is not None else 0) + (number + 0.5) / len(shown.window)
        axes.plot([place], [loss], "o", color=STYLES[1]["color"], markersize=5)
    if shown.series:
        words = plots.draw_losses(axes, shown.series, smoothing=0.0)
        start = max(np.nanmean(result.window_losses[:, 0]) for result, *_ in shown.series)
        axes.set_ylim(0, 1.25 * start if np.isfinite(start) else 3)
    axes.set_xlim(0, shown.experiment.updates or None)
    axes.set_ylabel("loss (nats)")
    return _done(figure, axes, words)


def accuracy(shown: Shown) -> Figure:
    """Test accuracy against updates, examples or seconds, on one axis for all runs."""
    figure, axes = _panel("test accuracy")
    words = plots.draw_accuracy(axes, shown.series, shown.against)
    axes.set(xlabel=plots.X_AXES[shown.against], ylabel="recognised (%)")
    measured = [100 * np.nanmin(r.accuracies) for r, *_ in shown.series if np.isfinite(r.accuracies).any()]
    axes.set_ylim(max(low for low in (0, 50, 80, 90) if low <= min(measured, default=0)), 100)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return _done(figure, axes, words)


def noise(shown: Shown) -> Figure:
    """The loss's noise against k, a point a run, with what 1 / sqrt(k) predicts from the last run's micro-batches."""
    figure, axes = _panel("noise of the window's loss against k")
    now = [Point.of(shown.result)] if shown.result is not None and min(shown.result.updates) > 7 else []
    alike = [p for p in shown.points if p.experiment.microbatch_size == shown.experiment.microbatch_size]
    words, k = [], np.array([1, 2, 5, 10, 20, 50])
    axes.set(yscale="log", ylabel="standard deviation (nats)")
    against_k(axes, k)
    axes.set_xlim(0.85, max(60, shown.experiment.accumulation_steps))
    for points, style in ((alike, {"marker": "o", "mfc": "none", "color": GREY}), (now, {**STYLES[0], "ms": 8})):
        if points:
            steps = [point.experiment.accumulation_steps * point.experiment.towers for point in points]
            axes.plot(steps, [point.window for point in points], **style | {"linestyle": ""})
    for point in (now or alike)[-1:]:
        axes.plot(k, point.microbatch / np.sqrt(k), color="black", linestyle=(0, (8, 2)), linewidth=1)
        axes.set_ylim(point.microbatch / 12, point.microbatch * 2)
        axes.text(1.05, point.microbatch / 9, "(– –) one micro-batch's / √k", fontsize=7.5)
        words = [f"k = {point.experiment.accumulation_steps}: {point.window:.3f} nats, the law says {point.law:.3f}"]
    return _done(figure, axes, words)


def scale(shown: Shown) -> Figure:
    """The gradient noise scale along training; dotted: the effective batch."""
    figure, axes = _panel("gradient noise scale; dotted: effective batch")
    series = [(r, name, style) for r, name, style in shown.series if r.losses.shape[2] > 1]
    words = plots.draw_noise_scale(axes, series, smoothing=0.95) if series else []
    axes.set(xlabel="updates", ylabel="examples", yscale="log")
    axes.set_xlim(0, shown.experiment.updates or None)
    plain_numbers(axes)
    if shown.experiment.accumulation_steps * shown.experiment.towers == 1:
        axes.text(0.5, 0.5, "needs k of 2 or more", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
    return _done(figure, axes, words)


def cost(shown: Shown) -> Figure:
    """Milliseconds of an update against k, and the process's peak memory."""
    figure = Figure(figsize=SIZE, dpi=100)
    axes = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.16, right=0.97, bottom=0.15, top=0.91, hspace=0.12)
    now = [Point.of(shown.result)] if shown.result is not None else []
    words = []
    for points, style in ((shown.points, {"marker": "o", "mfc": "none", "color": GREY}), (now, {**STYLES[0], "ms": 8})):
        steps = [point.experiment.accumulation_steps for point in points]
        axes[0].plot(steps, [point.milliseconds for point in points], **style | {"linestyle": ""})
        axes[1].plot(steps, [point.mebibytes for point in points], **style | {"linestyle": ""})
    axes[0].set_ylabel("ms an update", fontsize=8)
    axes[1].set_ylabel("peak MiB", fontsize=8)
    for each in axes:
        each.set_ylim(0, 1.2 * max((line.get_ydata().max(initial=0) for line in each.get_lines()), default=1) or 1)
        against_k(each, [1, 2, 5, 10, 20, 50])
        each.set_xlim(0.85, max(60, shown.experiment.accumulation_steps))
    axes[0].set_xlabel("")
    axes[0].set_title("time and memory against k", fontsize=9, loc="left")
    for point in now:
        words = [f"an update takes {point.milliseconds:.1f} ms; the process held at most {point.mebibytes:.0f} MiB"]
    return _done(figure, axes[0], words, *axes)


def picture(name: str, shown: Shown) -> tuple[bytes, str]:
    """A view as PNG, and what it shows in words."""
    if name == "toy":
        steps = shown.experiment.accumulation_steps * shown.experiment.towers
        return _scene().picture(toy.descend(min(steps, 200)))
    figure = _FIGURES[name](shown)
    return to_png(figure, compression=1), figure.get_label()


@functools.cache
def _scene() -> toy.Scene:
    return toy.Scene(SIZE)


_FIGURES: dict[str, Callable[[Shown], Figure]] = {
    "losses": losses,
    "accuracy": accuracy,
    "noise": noise,
    "scale": scale,
    "cost": cost,
}
VIEWS = (*_FIGURES, "toy")


def _panel(title: str) -> tuple[Figure, object]:
    figure = Figure(figsize=SIZE, dpi=100)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.16, right=0.96, bottom=0.16, top=0.91)  # a layout engine takes twice the time
    axes.set_title(title, fontsize=9, loc="left")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4))  # each tick costs time
    return figure, axes


def _done(figure: Figure, axes, words: Sequence[str], *more) -> Figure:
    for each in more or (axes,):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
        for label in (each.xaxis.label, each.yaxis.label):
            label.set_size(9)
    handles = axes.get_legend_handles_labels()
    if len(handles[0]) > 1:
        axes.legend(*handles, fontsize=7.5, frameon=False, loc="best" if len(handles[0]) < 4 else "upper right")
    title = axes.get_title(loc="left")
    figure.set_label(f"{title}. {'. '.join(words)}." if words else f"{title}: nothing drawn yet.")
    return figure

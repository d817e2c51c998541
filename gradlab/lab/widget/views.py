"""The live views of the lab: small figures of the current run, together with the pinned runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import curves, plots
from gradlab.lab.figures.style import FAINT, GREY, STYLES, against_k, plain_numbers, to_png
from gradlab.lab.widget.chart_rows import SMOOTHING
from gradlab.lab.widget.toy import DOTS, SIZE
from gradlab.measure.memory import MEBIBYTE

POINT_UPDATES = 8  # a run needs this many updates for a point in the views against k


@dataclass(frozen=True)
class Point:
    """The numbers of one run that the views against k show.

    Attributes:
        experiment: the experiment of the run.
        window: the standard deviation of the window's loss, in nats.
        law: the same as predicted from the micro-batches by 1 / sqrt(k), in nats.
        microbatch: the standard deviation of a micro-batch's loss, in nats.
        milliseconds: the median time of an update.
        mebibytes: the peak memory of the process.
    """

    experiment: Experiment
    window: float
    law: float
    microbatch: float
    milliseconds: float
    mebibytes: float

    @property
    def steps(self) -> int:
        """The micro-batches of a window, on all towers."""
        return self.experiment.towers * self.experiment.accumulation_steps

    @classmethod
    def of(cls, result: Result) -> "Point":
        """The point of a run with this result."""
        noise = curves.noise_of(result)
        return cls(
            experiment=result.experiment,
            window=float(noise.window),
            law=float(noise.law),
            microbatch=float(noise.microbatch),
            milliseconds=1000 * float(np.nanmedian(result.update_seconds)),
            mebibytes=float(np.max(result.peak_memory_bytes)) / MEBIBYTE,
        )


@dataclass(frozen=True)
class Shown:
    """The data that the views draw.

    Attributes:
        experiment: the experiment of the current run or, without one, of the controls.
        name: the name of the current run.
        result: the result of the current run so far, or None.
        window: the losses of the micro-batches shown so far, if a window is shown micro-batch by
            micro-batch.
        window_at: the number of updates before that window.
        pinned: (name, result) of the pinned runs.
        points: the points of earlier runs.
        against: the horizontal axis of the accuracy: "updates", "examples" or "seconds".
    """

    experiment: Experiment
    name: str
    result: Result | None = None
    window: np.ndarray = field(default_factory=lambda: np.zeros(0))
    window_at: int = 0
    pinned: Sequence[tuple[str, Result]] = ()
    points: Sequence[Point] = ()
    against: str = "updates"

    @property
    def series(self) -> list[tuple]:
        """(result, name, style) of the current run and of the pinned runs."""
        runs = [(self.result, self.name)] if self.result is not None else []
        styles = [STYLES[0], *STYLES[1:] * (1 + len(self.pinned) // (len(STYLES) - 1))]
        runs += [(result, name) for name, result in self.pinned]
        styles = styles if self.result is not None else styles[1:]
        return [(result, name, style) for (result, name), style in zip(runs, styles)]


def losses(shown: Shown) -> Figure:
    """The losses of the first seed's micro-batches as dots, and the windows' mean over seeds with
    its band."""
    figure, axes = _panel("training loss (nats)")
    axes.set_xlim(0, shown.experiment.updates or None)
    words = []
    if shown.result is not None:
        first = shown.result.losses[0]
        updates = shown.result.updates[0]
        k = first.shape[1]
        places = np.arange(first.shape[0])[:, None] + (np.arange(k) + 0.5) / k
        # More dots merge into one another, and take longer to draw
        many = max(1, updates * k // 1500)
        axes.plot(
            places.ravel()[::many],
            first.ravel()[::many],
            ".",
            color=FAINT,
            markersize=2.5,
            alpha=0.5,
        )
    for number, loss in enumerate(shown.window):
        axes.plot(
            [shown.window_at + (number + 0.5) / len(shown.window)],
            [loss],
            "o",
            color=STYLES[1]["color"],
            markersize=5,
        )
    if shown.series:
        words = plots.draw_losses(axes, shown.series, smoothing=0.0)
        start = max(np.nanmean(result.window_losses[:, 0]) for result, *_ in shown.series)
        axes.set_ylim(0, 1.25 * start if np.isfinite(start) else 3)
    axes.set_xlim(0, shown.experiment.updates or None)
    axes.set_ylabel("")
    return _done(figure, axes, words)


def accuracy(shown: Shown) -> Figure:
    """The test accuracy of all runs against updates, examples or seconds."""
    figure, axes = _panel("test accuracy (%)")
    words = plots.draw_accuracy(axes, shown.series, shown.against)
    axes.set(xlabel=plots.X_AXES[shown.against], ylabel="")
    measured = [
        100 * np.nanmin(r.accuracies) for r, *_ in shown.series if np.isfinite(r.accuracies).any()
    ]
    axes.set_ylim(max(low for low in (0, 50, 80, 90) if low <= min(measured, default=0)), 100)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return _done(figure, axes, words)


def noise(shown: Shown) -> Figure:
    """The noise of the window's loss against k: one point per run, and the law 1 / sqrt(k) for the
    last run.

    Earlier runs are shown if their micro-batches are of the same size.
    """
    figure, axes = _panel("noise of the loss (nats)")
    result = shown.result
    now = [Point.of(result)] if result is not None and min(result.updates) >= POINT_UPDATES else []
    alike = [
        p for p in shown.points if p.experiment.microbatch_size == shown.experiment.microbatch_size
    ]
    words = []
    k = np.array([1, 2, 5, 10, 20, 50])
    axes.set(yscale="log")
    against_k(axes, k)
    axes.set_xlim(0.85, max(60, shown.experiment.accumulation_steps))
    for points, style in (
        (alike, {"marker": "o", "mfc": "none", "color": GREY}),
        (now, {**STYLES[0], "ms": 8}),
    ):
        if points:
            axes.plot(
                [point.steps for point in points],
                [point.window for point in points],
                **style | {"linestyle": ""},
            )
    for point in (now or alike)[-1:]:
        axes.plot(
            k, point.microbatch / np.sqrt(k), color="black", linestyle=(0, (8, 2)), linewidth=1
        )
        axes.set_ylim(point.microbatch / 12, point.microbatch * 2)
        axes.text(1.05, point.microbatch / 9, "(– –) noise of a micro-batch / √k", fontsize=7.5)
        measured = f"k = {point.steps}: {point.window:.3f} nats measured"
        words = [f"{measured}, {point.law:.3f} predicted by 1/√k"]
    return _done(figure, axes, words)


def scale(shown: Shown) -> Figure:
    """The gradient noise scale during training. Dotted: the effective batch."""
    figure, axes = _panel("noise scale (examples); dotted: batch")
    series = [(r, name, style) for r, name, style in shown.series if r.losses.shape[2] > 1]
    words = plots.draw_noise_scale(axes, series, SMOOTHING) if series else []
    axes.set(xlabel="updates", ylabel="", yscale="log")
    axes.set_xlim(0, shown.experiment.updates or None)
    plain_numbers(axes)
    if shown.experiment.accumulation_steps * shown.experiment.towers == 1:
        axes.text(
            0.5,
            0.5,
            "needs k of 2 or more",
            transform=axes.transAxes,
            ha="center",
            color=GREY,
            fontsize=9,
        )
    return _done(figure, axes, words)


def cost(shown: Shown) -> Figure:
    """The median time of an update and the peak memory of the process against k."""
    figure = Figure(figsize=SIZE, dpi=DOTS)
    axes = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.18, right=0.97, bottom=0.18, top=0.9, hspace=0.12)
    now = [Point.of(shown.result)] if shown.result is not None else []
    words = []
    for points, style in (
        (shown.points, {"marker": "o", "mfc": "none", "color": GREY}),
        (now, {**STYLES[0], "ms": 8}),
    ):
        steps = [point.steps for point in points]
        axes[0].plot(steps, [point.milliseconds for point in points], **style | {"linestyle": ""})
        axes[1].plot(steps, [point.mebibytes for point in points], **style | {"linestyle": ""})
    axes[0].set_ylabel("ms", fontsize=8)
    axes[1].set_ylabel("MiB", fontsize=8)
    for each in axes:
        each.set_ylim(
            0,
            1.2 * max((line.get_ydata().max(initial=0) for line in each.get_lines()), default=1)
            or 1,
        )
        against_k(each, [1, 2, 5, 10, 20, 50])
        each.set_xlim(0.85, max(60, shown.experiment.accumulation_steps))
    axes[0].set_xlabel("")
    axes[0].set_title("cost of an update", fontsize=9, loc="left")
    for point in now:
        words = [
            f"an update takes {point.milliseconds:.1f} ms; peak memory of the process: "
            f"{point.mebibytes:.0f} MiB"
        ]
    return _done(figure, axes[0], words, *axes)


def picture(name: str, shown: Shown) -> tuple[bytes, str]:
    """A view as a PNG image, and its text alternative.

    Args:
        name: one of `PICTURES`.
        shown: what to draw.
    """
    figure = _FIGURES[name](shown)
    return to_png(figure, compression=1), str(figure.get_label())


_FIGURES: dict[str, Callable[[Shown], Figure]] = {
    "losses": losses,
    "accuracy": accuracy,
    "noise": noise,
    "scale": scale,
    "cost": cost,
}
PICTURES = tuple(_FIGURES)
VIEWS = ("toy", *PICTURES)  # the browser draws the toy


def _panel(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, dpi=DOTS)
    axes = figure.subplots()
    # A layout engine doubles the drawing time
    figure.subplots_adjust(left=0.13, right=0.96, bottom=0.18, top=0.9)
    axes.set_title(title, fontsize=9, loc="left")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4))  # each tick takes time to draw
    return figure, axes


def _done(figure: Figure, axes: Axes, words: Sequence[str], *more: Axes) -> Figure:
    """Add grid, label sizes, legend and text alternative. `more` are all axes, if there are
    several."""
    for each in more or (axes,):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
        for label in (each.xaxis.label, each.yaxis.label):
            label.set_fontsize(9)
    handles = axes.get_legend_handles_labels()
    if len(handles[0]) > 1:
        axes.legend(
            *handles,
            fontsize=7.5,
            frameon=False,
            loc="best" if len(handles[0]) < 4 else "upper right",
        )
    title = axes.get_title(loc="left")
    figure.set_label(f"{title}. {'. '.join(words)}." if words else f"{title}: no data yet.")
    return figure

"""Figures of results. They are made without pyplot, so several threads may draw at the same time.

The text alternative of each figure is `figure.get_label()`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import curves
from gradlab.lab.figures.shown import X_AXES, labels
from gradlab.lab.figures.style import STYLES, against_k, line, plain_numbers, to_png

__all__ = [
    "accuracy",
    "accuracy_table",
    "cost",
    "labels",
    "loss_noise",
    "losses",
    "noise_scale",
    "to_png",
]


def losses(results: Sequence[Result], smoothing: float = 0.9) -> Figure:
    """The window's loss during training: the mean over seeds, and a band of one standard deviation
    around it.

    Args:
        results: the results, one line each.
        smoothing: the smoothing of each seed's running mean, from 0 (none) to below 1.
    """
    figure, axes = _figure(results)
    ends = draw_losses(axes, _series(results), smoothing)
    smoothed = f"running mean (smoothing {smoothing:g}), " if smoothing else ""
    return _finished(
        figure,
        axes,
        f"Training loss: {smoothed}band ± 1 standard deviation over seeds",
        ends,
        results,
    )


def draw_losses(axes: Axes, series: Sequence[tuple], smoothing: float) -> list[str]:
    """Draw `losses` for series of (result, label, style), and return a sentence for each."""
    ends = []
    for result, label, style in series:
        smooth = np.array([curves.smooth(values, smoothing) for values in result.window_losses])
        mean, deviation = curves.mean_and_deviation(smooth)
        x = np.arange(1, len(mean) + 1)
        axes.plot(x, mean, label=label, **line(style))
        axes.fill_between(
            x, mean - deviation, mean + deviation, color=style["color"], alpha=0.2, linewidth=0
        )
        ends.append(f"{label}: from {mean[0]:.2f} to {mean[-1]:.2f} nats")
    axes.set(xlabel="updates", ylabel="window's loss (nats)", xlim=(0, None), ylim=(0, None))
    return ends


def accuracy(results: Sequence[Result], against: str = "updates") -> Figure:
    """The test accuracy during training, to compare runs at equal updates, equal work or equal
    time.

    Args:
        results: the results, one line each, with a band of one standard deviation over seeds.
        against: the horizontal axis: "updates", "examples" or "seconds".

    Raises:
        ValueError: `against` is none of these.
    """
    if against not in X_AXES:
        raise ValueError(f"against must be one of {', '.join(X_AXES)}. Received: {against!r}")
    figure, axes = _figure(results)
    ends = draw_accuracy(axes, _series(results), against)
    return _finished(
        figure, axes, "Test accuracy: band ± 1 standard deviation over seeds", ends, results
    )


def draw_accuracy(axes: Axes, series: Sequence[tuple], against: str) -> list[str]:
    """Draw `accuracy` for series of (result, label, style), and return a sentence for each that has
    been measured."""
    ends = []
    for result, label, style in series:
        measured = np.isfinite(result.accuracies).any(axis=0)
        if not measured.any():
            continue
        mean, deviation = curves.mean_and_deviation(100 * result.accuracies[:, measured])
        x = curves.mean_and_deviation(curves.horizontal(result, against)[:, measured])[0]
        axes.plot(x, mean, label=label, markersize=4, markevery=max(1, len(x) // 10), **style)
        axes.fill_between(
            x, mean - deviation, mean + deviation, color=style["color"], alpha=0.2, linewidth=0
        )
        # Rounded to four digits; `g` alone would print 24000 as 2.4e+04
        work = float(f"{x[-1]:.4g}")
        ends.append(f"{label}: {mean[-1]:.1f} % after {work:,.10g} {against}")
    axes.set(xlabel=X_AXES[against], ylabel="test accuracy (%)", xlim=(0, None))
    return ends


def loss_noise(results: Sequence[Result]) -> Figure:
    """The standard deviation of the loss against k on logarithmic axes, and its prediction by the 1
    / sqrt(k) law.

    Each point is a root mean square over updates and seeds, from which the trend of the loss itself
    is removed.

    Args:
        results: the results, one point each, with the same micro-batch size and different k.
    """
    results = sorted(results, key=lambda result: result.experiment.accumulation_steps)
    figure, axes = _figure(results)
    steps = np.array([result.experiment.accumulation_steps for result in results])
    noises = [curves.noise_of(result) for result in results]
    windows, predicted, alone = (
        [getattr(n, name) for n in noises] for name in ("window", "law", "microbatch")
    )
    for (values, label), style in zip(
        (
            (alone, "micro-batch"),
            (predicted, "micro-batch / √k: the law"),
            (windows, "window of k, measured"),
        ),
        (STYLES[0], STYLES[6] | {"marker": ""}, STYLES[1]),
    ):
        axes.plot(steps, values, label=label, markersize=6, **style)
    axes.set(yscale="log", ylabel="standard deviation of the loss (nats)")
    against_k(axes, steps)
    words = [
        f"k = {k}: measured {w:.3f}, law {p:.3f} nats" for k, w, p in zip(steps, windows, predicted)
    ]
    return _finished(figure, axes, "Noise of the loss along training", words, results)


def accuracy_table(
    rows: Sequence[str], series: Mapping[str, Sequence[tuple[float, float]]], title: str = ""
) -> Figure:
    """A table of accuracies, drawn as dots with intervals.

    Args:
        rows: the name of each row, from top to bottom.
        series: for the name of each series, (mean, standard deviation) in percent for each row.
        title: the title of the figure. "": "Test accuracy".
    """
    figure = Figure(
        figsize=(8, 1.4 + 0.13 * len(rows) * (len(series) + 1)), dpi=100, layout="constrained"
    )
    axes = figure.subplots()
    words = []
    for number, (name, values) in enumerate(series.items()):
        style = STYLES[number]
        y = np.arange(len(rows)) + 0.8 * ((number + 0.5) / len(series) - 0.5)
        mean, deviation = np.array(values).T
        axes.errorbar(
            mean,
            y,
            xerr=deviation,
            label=name,
            fmt=style["marker"],
            color=style["color"],
            capsize=3,
            ms=6,
        )
        words.append(
            f"{name}: " + ", ".join(f"{r} {m:.2f} ± {s:.2f} %" for r, (m, s) in zip(rows, values))
        )
    axes.set_yticks(range(len(rows)), labels=rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("test accuracy (%), mean ± 1 standard deviation over seeds")
    return _finished(figure, axes, title or "Test accuracy", words)


def noise_scale(results: Sequence[Result], smoothing: float = 0.99) -> Figure:
    """The gradient noise scale during training. Dotted: the effective batch.

    The noise scale is a ratio; its numerator and its denominator are each averaged over the seeds
    that finished.

    Args:
        results: the results, one line each, with k of 2 or more.
        smoothing: as in `gradlab.gradient_noise_scale`.
    """
    figure, axes = _figure(results)
    words = draw_noise_scale(axes, _series(results), smoothing)
    return _finished(
        figure, axes, "Gradient noise scale; dotted: the effective batch", words, results
    )


def draw_noise_scale(axes: Axes, series: Sequence[tuple], smoothing: float) -> list[str]:
    """Draw `noise_scale` for series of (result, label, style), and return a sentence for each."""
    words = []
    for result, label, style in series:
        scales = result.noise_scale(smoothing)
        if not scales:
            words.append(f"{label}: no seed finished")
            continue
        # With a budget of seconds, seeds differ in length
        length = min(len(scale.along) for scale in scales)
        above = np.mean([scale.variance[:length] for scale in scales], axis=0)
        below = np.mean([scale.squared_gradient[:length] for scale in scales], axis=0)
        along = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)
        axes.plot(np.arange(1, length + 1), along, label=label, **line(style))
        axes.axhline(
            result.experiment.effective_batch, color=style["color"], linestyle=":", linewidth=1
        )
        values = np.array([scale.value for scale in scales])
        words.append(
            f"{label}: {np.median(values):.0f} examples over all updates (median over seeds)"
        )
    axes.set(
        xlabel="updates", ylabel="gradient noise scale (examples)", yscale="log", xlim=(0, None)
    )
    plain_numbers(axes)
    return words


def cost(results: Sequence[Result]) -> Figure:
    """Time and memory against k: the median time of an update with its quartiles, and the peak
    memory of the process.

    Args:
        results: the results, one point each.
    """
    results = sorted(results, key=lambda result: result.experiment.accumulation_steps)
    figure, (times, memory) = _figure(results, columns=2)
    steps = np.array([result.experiment.accumulation_steps for result in results])
    points = [curves.Point.of(result) for result in results]
    middle = np.array([point.milliseconds for point in points])
    low, high = np.array(
        [1000 * np.nanquantile(result.update_seconds, (0.25, 0.75)) for result in results]
    ).T
    times.errorbar(steps, middle, yerr=[middle - low, high - middle], capsize=3, **STYLES[0])
    together = max(
        each.get("seeds_together", 1) for result in results for each in result.environments
    )
    times.set(
        yscale="log",
        ylabel="time of an update" + (f" of {together} seeds" * (together > 1)) + " (ms)",
    )
    times.set_title("Time: median and quartiles", fontsize=10, loc="left")
    peaks = np.array([point.mebibytes for point in points])
    if np.isfinite(peaks).any():
        memory.plot(steps, peaks, **STYLES[1])
        memory.set_ylim(0, 1.1 * np.nanmax(peaks))
    else:
        memory.text(
            0.5, 0.5, "not available on this system", transform=memory.transAxes, ha="center"
        )
    memory.set_ylabel("peak memory of the process (MiB)")
    memory.set_title("Memory", fontsize=10, loc="left")
    for axes in (times, memory):
        against_k(axes, steps)
    words = [f"k = {k}: {t:.1f} ms, {m:.0f} MiB" for k, t, m in zip(steps, middle, peaks)]
    return _finished(figure, times, "", words, results)


def speed(cells: Sequence[Mapping[str, Any]], network: str = "lenet") -> Figure:
    """The time of an update of one network, relative to one large batch: a line for each way, a
    tick for each k x b.

    Args:
        cells: the measurements of benchmarks/, each with the keys "network", "way", "k", "b" and
            "ratio".
        network: the network to draw.

    Raises:
        ValueError: the network has not been measured.
    """
    cells = [cell for cell in cells if cell["network"] == network]
    if not cells:
        raise ValueError(f"cells must hold some of the network. Received: none of {network!r}")
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    shapes = list(dict.fromkeys((cell["k"], cell["b"]) for cell in cells))
    # there are more ways than styles
    words = []
    again = [{}, {"markerfacecolor": "white"}, {"color": "grey"}]
    for number, way in enumerate(dict.fromkeys(cell["way"] for cell in cells)):
        own = {(cell["k"], cell["b"]): cell["ratio"] for cell in cells if cell["way"] == way}
        look = STYLES[number % len(STYLES)] | again[number // len(STYLES)]
        axes.plot([shapes.index(shape) for shape in own], list(own.values()), label=way, **look)
        words.append(
            f"{way}: " + ", ".join(f"{k} x {b} {ratio:.2f}" for (k, b), ratio in own.items())
        )
    axes.set(yscale="log", xlabel="k x b", ylabel="time of an update / time with one large batch")
    axes.set_xticks(range(len(shapes)), labels=[f"{k} x {b}" for k, b in shapes])
    plain_numbers(axes)
    return _finished(figure, axes, f"Speed of an update, {network}; one large batch is 1", words)


def _series(results: Sequence[Result]) -> list[tuple[Result, str, dict]]:
    names = labels([result.experiment for result in results])
    return [
        (result, name, STYLES[i % len(STYLES)])
        for i, (result, name) in enumerate(zip(results, names))
    ]


def _figure(results: Sequence[Result], columns: int = 1) -> tuple[Figure, Any]:
    if not results or not all(isinstance(result, Result) for result in results):
        raise ValueError(f"a figure needs a list of results, at least one. Received: {results!r}")
    figure = Figure(figsize=(8, 4.2), dpi=100, layout="constrained")
    return figure, figure.subplots(1, columns)


def _finished(
    figure: Figure, axes: Axes, title: str, words: Sequence[str], results: Sequence[Result] = ()
) -> Figure:
    """Add title, legend, grid, a note of seeds that did not finish, and the text alternative."""
    gone = [ending for result in results for ending in result.endings if ending != "finished"]
    total = sum(len(result.endings) for result in results)
    faults = [
        f"{gone.count(name)} of {total} seeds {name}"
        for name in ("diverged", "stopped")
        if name in gone
    ]
    if title:
        axes.set_title("; ".join([title, *faults]), fontsize=10, loc="left")
    named = axes.get_legend_handles_labels()
    if named[0]:
        figure.legend(
            *named,
            loc="outside lower center",
            ncols=min(3, len(named[0])),
            fontsize=9,
            frameon=False,
        )
    for each in figure.axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.set_label(". ".join([title or "Time and memory against k", *faults, *words]) + ".")
    return figure

"""The lab's views as one figure, for saved pages and for files.

On a page that has a kernel, the browser draws them (plots.js, one_update.js): the same numbers on the
same axes, described by the same words.
"""

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from matplotlib.ticker import AutoLocator, MaxNLocator, NullLocator

from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import curves, plots, toy
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.shown import VIEWS, Shown
from gradlab.lab.figures.style import GREY, STYLES, against_k

DOTS = 1500  # more merge into one another
LOWEST = 3e-3  # of the toy's losses that is drawn
STEPS = (1, 2, 5, 10, 20, 50)  # ticks of k


def series_of(shown: Shown) -> list[tuple[Result, str, dict]]:
    """(result, name, style) of the current run and of the pinned runs, whose styles do not depend
    on whether there is a current run."""
    runs = [(shown.name, shown.result), *shown.pinned]
    styles = [STYLES[0], *STYLES[1:] * len(runs)]
    return [(r, name, style) for (name, r), style in zip(runs, styles) if r is not None]


def _toy(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The path, the negative gradients of one window as thin arrows, their mean as a thick arrow,
    and the loss."""
    valley, losses = panel
    descent = toy.descend(min(shown.steps, toy.MOST), start=shown.start)
    path_color = STYLES[0]["color"]
    floor = {"color": STYLES[1]["color"], "linestyle": "--", "linewidth": 1.2}
    ellipses = [(level, {"color": "#cccccc", "linewidth": 0.8}) for level in (0.5, 2, 6)]
    for level, look in [*ellipses, (descent.floor, floor)]:
        valley.add_patch(
            Ellipse((0, 0), *(2 * np.sqrt(2 * level / toy.CURVATURE)), fill=False, **look)
        )
    looked_at = descent.looked_at
    at = descent.path[looked_at]
    valley.plot(*descent.path[looked_at:].T, color=path_color, linewidth=0.8, alpha=0.4)
    valley.plot(*descent.path[: looked_at + 1].T, color=path_color, linewidth=1.5)
    valley.plot(*descent.path[0], "o", markeredgecolor=path_color, color="white", markersize=7)
    arrows = {"angles": "xy", "scale_units": "xy", "scale": 2.0, "zorder": 3}
    tails = np.tile(at, [len(descent.gradients), 1])
    valley.quiver(
        *tails.T, *-descent.gradients.T, color=path_color, alpha=0.5, width=0.005, **arrows
    )
    valley.quiver(*at, *-descent.mean, color="black", width=0.011, **arrows)
    valley.set(xlim=(-6.5, 5.5), ylim=(-3.5, 3.5))
    valley.set_axis_off()
    losses.plot(np.maximum(descent.losses, LOWEST), color=path_color, linewidth=1)
    losses.axhline(descent.floor, **floor)
    losses.set(yscale="log", xlim=(0, toy.UPDATES), ylim=(LOWEST, 20), xticks=[])
    losses.set_yticks([0.1, 10], labels=["0.1", "10"])
    losses.yaxis.set_minor_locator(NullLocator())
    losses.set_xlabel("thick: mean · dashed: noise floor", loc="left")
    return [toy.describe(descent).removesuffix(".")]


def _losses(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The losses of the first seed's micro-batches as dots, and the windows' mean over seeds with
    its band."""
    [axes] = panel
    if shown.result is not None:
        losses = shown.result.losses[0, : shown.result.updates[0]]
        k = losses.shape[1]
        skip = max(1, losses.size // DOTS)
        axes.plot(
            ((np.arange(losses.size) + 0.5) / k)[::skip],
            losses.ravel()[::skip],
            ".",
            color=STYLES[0]["color"],
            alpha=0.35,
            markersize=2.5,
            markeredgewidth=0,
        )
    if len(shown.window):
        places = shown.window_at + (np.arange(len(shown.window)) + 0.5) / len(shown.window)
        axes.plot(places, shown.window, "o", color=STYLES[1]["color"], markersize=5)
    words = plots.draw_losses(axes, series_of(shown), smoothing=0.0)
    means = [curves.mean_and_deviation(r.window_losses)[0] for r, *_ in series_of(shown)]
    highest = 1.25 * max(
        (_highest(each) for each in means if np.isfinite(each[:1]).all()), default=2.4
    )
    axes.set(xlim=(0, shown.experiment.updates or None), ylim=(0, highest))
    return words


def _highest(losses: np.ndarray) -> float:
    """The largest loss, at most four times the first one."""
    return min(np.nanmax(losses), 4 * losses[0])


def _accuracy(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The test accuracy of all runs against updates, examples or seconds."""
    [axes] = panel
    words = plots.draw_accuracy(axes, series_of(shown), shown.against)
    lowest = min((float(np.min(line.get_ydata())) for line in axes.get_lines()), default=0)
    axes.set_ylim(max(low for low in (0, 50, 80, 90) if low <= lowest), 100)
    if shown.against == "updates":
        axes.set_xlim(0, shown.experiment.updates or None)
    return words


def _noise(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The noise of the window's loss against k, one point for each run with micro-batches of this
    size, and the law 1 / sqrt(k) for the last run."""
    [axes] = panel
    size = shown.experiment.microbatch_size
    earlier = [point for point in shown.points if point.experiment.microbatch_size == size]
    now = [point for point in shown.now if np.isfinite(point.window)]
    axes.set(yscale="log", ylim=(0.01, 1))
    _draw_points(axes, shown, earlier, now, "window")
    for point in (now or earlier)[-1:]:
        k = np.array([0.85, 1000])
        axes.plot(
            k, point.microbatch / np.sqrt(k), color="black", linestyle=(0, (7, 3)), linewidth=1.2
        )
        axes.set_ylim(point.microbatch / 12, point.microbatch * 2)
        _note(axes, "– –  noise of a micro-batch / √k")
    return [
        f"windows of {point.steps}: {point.window:.3f} nats measured, {point.law:.3f} predicted by 1/√k"
        for point in now
    ]


def _scale(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The gradient noise scale during training, and the effective batch."""
    [axes] = panel
    series = [each for each in series_of(shown) if each[0].losses.shape[2] > 1]
    words = plots.draw_noise_scale(axes, series, curves.SMOOTHING)
    drawn = np.concatenate([[], *(line.get_ydata() for line in axes.get_lines())])
    drawn = drawn[drawn > 0]
    axes.set(
        xlim=(0, shown.experiment.updates or None),
        ylim=(drawn.min() / 1.3, drawn.max() * 1.3) if len(drawn) else (10, 1000),
    )
    _note(axes, "needs k of 2 or more" if shown.steps == 1 else "···  effective batch")
    return words


def _cost(panel: Sequence[Axes], shown: Shown) -> list[str]:
    """The median time of an update against k."""
    [axes] = panel
    now = shown.now
    _draw_points(axes, shown, shown.points, now, "milliseconds")
    values = [point.milliseconds for point in (*shown.points, *now)]
    axes.set_ylim(0, 1.2 * np.fmax.reduce(values, initial=0) or 1)
    return [f"an update takes {point.milliseconds:.1f} ms" for point in now]


_Draw = Callable[[Sequence[Axes], Shown], list[str]]
# name: title, the heights of its axes, and the function that draws on them and returns sentences
_VIEWS: dict[str, tuple[str, tuple[float, ...], _Draw]] = {
    "toy": ("one update", (3, 1), _toy),
    "losses": ("training loss (nats)", (1,), _losses),
    "noise": ("noise of the loss (nats)", (1,), _noise),
    "accuracy": ("test accuracy (%)", (1,), _accuracy),
    "scale": ("noise scale (examples)", (1,), _scale),
    "cost": ("time of an update (ms)", (1,), _cost),
}


def lab_views(shown: Shown, names: Sequence[str] = VIEWS) -> Figure:
    """The lab's views, three in a row, with a legend of the runs.

    Args:
        shown: what to draw.
        names: some of `VIEWS`.

    Returns:
        The figure. Its label is its text alternative, which describes each view in a sentence.
    """
    columns = max(1, min(3, len(names)))
    rows = max(1, -(-len(names) // columns))
    runs = {textwrap.fill(name, 40): style for _, name, style in series_of(shown)}
    legend = -(-len(runs) // columns) * max((1 + name.count("\n") for name in runs), default=0)
    height = 2.6 * rows + 0.2 * legend
    layout = ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.07)
    figure = Figure(figsize=(3.4 * columns, height), dpi=130, layout=layout)
    grid = figure.add_gridspec(rows, columns)
    said = []
    for place, name in enumerate(names):
        title, heights, draw = _VIEWS[name]
        cell = grid[place].subgridspec(len(heights), 1, height_ratios=heights)
        panel = list(cell.subplots(squeeze=False)[:, 0])
        words = draw(panel, shown)
        _finish(panel, title)
        said.append(f"{title}. {'. '.join(words)}." if words else f"{title}: no data yet.")
    if runs:
        figure.legend(
            handles=[Line2D([], [], label=name, ms=5, **style) for name, style in runs.items()],
            loc="outside lower center",
            ncols=min(columns, len(runs)),
            fontsize=8,
            frameon=False,
        )
    figure.set_label(" ".join(said))
    return figure


def _draw_points(
    axes: Axes, shown: Shown, earlier: Sequence[Point], now: Sequence[Point], name: str
) -> None:
    """Draw a number of earlier runs as hollow points, and that of the current run."""
    for points, look in (
        (earlier, {"marker": "o", "markerfacecolor": "none", "color": GREY, "markersize": 5}),
        (now, {**STYLES[0], "markersize": 8}),
    ):
        numbers = [getattr(point, name) for point in points]
        axes.plot([point.steps for point in points], numbers, **look | {"linestyle": ""})
    against_k(axes, STEPS)
    axes.set_xlabel("micro-batches of an update")  # on all towers
    axes.set_xlim(0.85, max(60, shown.steps))


def _note(axes: Axes, text: str, top: bool = False) -> None:
    axes.annotate(
        text,
        (0.02, 0.97 if top else 0.03),
        xycoords="axes fraction",
        va="top" if top else "bottom",
        fontsize=7.5,
        color=GREY,
    )


def _finish(panel: Sequence[Axes], title: str) -> None:
    """Give a view its title, and its axes the look of the page."""
    for axes in panel:
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(labelsize=8, colors=GREY, length=2)
        axes.xaxis.label.set(fontsize=8, color=GREY)
        axes.set_ylabel("")
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), AutoLocator):
                axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    panel[0].set_title(title, fontsize=9, fontweight="bold", loc="left")

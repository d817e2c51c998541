"""Pictures and tables of the experiments of `BugLab`."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradlab.lab.figures.picture import Picture, figure
from gradlab.lab.figures.style import GREY, STYLES
from gradlab.lab.widget.course.bug_loops import EXAMPLES, Evidence, experiment
from gradlab.lab.widget.course.bugs import BUGS


def draw(evidence: Evidence) -> Picture:
    """Draw the weight of the loop and of the large batch after each window, or the texts that they
    hold in memory."""
    drawn, axes = figure(size=(5.6, 2.7))
    _lines(axes, evidence)
    if evidence.measure == "weight":
        axes.set(xlabel="window", ylabel="weight", xticks=range(len(evidence.large)))
    else:
        axes.set(xlabel="forward and backward passes of a window", ylabel="texts in memory")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9)
    return Picture(drawn, alt=verdict(evidence))


def draw_large(evidence: Evidence) -> Picture:
    """Draw the weight of the large batch alone, for the time before the first experiment."""
    drawn, axes = figure(size=(5.6, 2.7))
    axes.plot(evidence.large, label="large batch", markersize=4, **STYLES[0])
    axes.set(xlabel="window", ylabel="weight", xticks=range(len(evidence.large)))
    axes.legend(frameon=False, fontsize=9)
    return Picture(
        drawn, alt=f"The large batch alone: its weight ends at {evidence.large[-1]:.3f}."
    )


def verdict(evidence: Evidence) -> str:
    """What an experiment shows, in a sentence."""
    if evidence.measure == "memory":
        return (
            f"The loop holds at most {evidence.loop.max()} texts in memory, the large batch "
            f"{evidence.large.max()}. A micro-batch has {EXAMPLES}."
        )
    if evidence.equal:
        return "The loop and the large batch agree after every window."
    first = int(np.argmax(~np.isclose(evidence.loop, evidence.large, rtol=0, atol=1e-5)))
    return (
        f"The loop and the large batch differ from window {first} on. At the end, the loop's "
        f"weight is {evidence.loop[-1]:.3f}, and the large batch's is {evidence.large[-1]:.3f}."
    )


def rows(evidence: Evidence) -> list[list[str]]:
    """The cells of an experiment's table. The first row has the headings."""
    if evidence.measure == "memory":
        most = [["loop", str(evidence.loop.max())], ["large batch", str(evidence.large.max())]]
        return [["", "texts in memory at most"], *most]
    cells = [["window", "micro-batches", "large batch", "loop", "difference"]]
    for window, (loop, large) in enumerate(zip(evidence.loop, evidence.large)):
        parts = str(evidence.micro_batches[window - 1]) if window else "-"
        cells.append([str(window), parts, f"{large:.4f}", f"{loop:.4f}", f"{loop - large:z.4f}"])
    return cells


def table(evidence: Evidence) -> str:
    """An experiment as a table in plain text. Two or more spaces separate the columns."""
    cells = rows(evidence)
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells
    )


def draw_all(seed: int = 0) -> Picture:
    """The weight after each window under each of the eight bugs, beside that of the large batch,
    each with the settings that show it."""
    drawn = Figure(figsize=(9.0, 4.6), dpi=90, layout="constrained")
    grid = drawn.subplots(2, 4, sharex=True, sharey=True)
    ends = []
    for axes, (name, bug) in zip(grid.flat, BUGS.items()):
        evidence = experiment(bug.shown_by, bug=name, seed=seed)
        _lines(axes, evidence)
        axes.set_title(f"{bug.name}\n{bug.shown_by}", fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        ends.append(f"{bug.name} {evidence.loop[-1]:.2f}, {evidence.large[-1]:.2f}")
    held = (
        experiment(BUGS["in_flight"].shown_by, "memory", "in_flight", seed).loop.max() // EXAMPLES
    )
    rises = evidence.loop[-1] > 0  # of the last bug; both begin at 0
    grid[1, 3].annotate(
        f"{held} micro-batches in\nmemory instead of 1",
        (0.05, 0.92 if rises else 0.08),
        xycoords="axes fraction",
        va="top" if rises else "bottom",
        fontsize=9,
    )
    grid[0, 0].legend(frameon=False, fontsize=8)
    for axes in grid[1]:
        axes.set_xlabel("window")
    for axes in grid[:, 0]:
        axes.set_ylabel("weight")
    alt = f"The weight at the end, of the loop and of the large batch: {'; '.join(ends)}."
    return Picture(drawn, alt=alt)


def _lines(axes: Axes, evidence: Evidence) -> None:
    for name, values, style in (
        ("large batch", evidence.large, STYLES[0]),
        ("loop", evidence.loop, STYLES[1]),
    ):
        axes.plot(values, label=name, markersize=4, **style)
    if evidence.measure == "weight":
        for window, parts in enumerate(evidence.micro_batches, start=1):
            if parts < max(evidence.micro_batches):
                axes.axvspan(window - 1, window, color=GREY, alpha=0.15, linewidth=0)

"""Pinned runs, which stay for comparison: their table, and exports to text, CSV and Python code."""

import html
import pathlib
from collections.abc import Callable

import ipywidgets as widgets
import numpy as np

from gradlab import runtime
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import curves

COLUMNS = ("effective batch", "seeds", "updates", "test accuracy (%)", "noise of the loss (nats)", "ms per update")
_CELL = '<span style="display: inline-block; width: {}px; white-space: nowrap">{}</span>'
# On the page the columns have shorter names, and these widths in pixels.
_HEADS = {"effective batch": 115, "seeds": 50, "updates": 65, "accuracy (%)": 105, "noise (nats)": 95, "ms": 50}


class Pins:
    """The pinned runs and their table. Each row has a name that can be edited and a button that removes the run.

    Args:
        changed: called after each change.

    Attributes:
        view: the table.
    """

    def __init__(self, changed: Callable[[], None]):
        self._changed = changed
        self._rows: list[tuple[widgets.Text, Result, widgets.Box]] = []
        head = "".join(_CELL.format(width, f"<b>{name}</b>") for name, width in _HEADS.items())
        self._head = widgets.HTML(_CELL.format(178, "<b>pinned run</b>") + head)
        self.view = widgets.VBox([], layout={"overflow": "auto"})
        self.view.add_class("gradlab-pins")

    @property
    def runs(self) -> list[tuple[str, Result]]:
        """(name, result) of each pinned run."""
        return [(name.value, result) for name, result, _ in self._rows]

    def add(self, name: str, result: Result) -> None:
        """Pin a run. A name that is already taken gets a number."""
        taken = {name for name, _ in self.runs}
        plain, number = name, 2
        while name in taken:
            name, number = f"{plain} ({number})", number + 1
        text = widgets.Text(name, layout={"width": "170px"}, tooltip="Name of the run in the table and the plots.")
        text.continuous_update = False
        text.observe(lambda change: self._changed(), names="value")
        button = widgets.Button(icon="trash", tooltip=f"Remove {name}.", layout={"width": "36px"})
        button.add_class("gradlab-remove")
        cells = "".join(_CELL.format(width, html.escape(cell)) for width, cell in zip(_HEADS.values(), summary(result)))
        row = widgets.HBox([text, widgets.HTML(cells), button])
        entry = (text, result, row)
        button.on_click(lambda _: self._remove(entry))
        self._rows.append(entry)
        self._show()

    def _remove(self, entry: tuple[widgets.Text, Result, widgets.Box]) -> None:
        if entry in self._rows:  # a second click on the button may arrive before the row is gone
            self._rows.remove(entry)
            self._show()

    def _show(self) -> None:
        self.view.children = [self._head, *(row for *_, row in self._rows)] if self._rows else []
        self._changed()


def summary(result: Result) -> list[str]:
    """The cells of a run in the table, one for each of `COLUMNS`. Accuracy: mean ± standard deviation over seeds."""
    e = result.experiment
    shape = " × ".join(map(str, [e.towers] * (e.towers > 1) + [e.accumulation_steps, e.microbatch_size]))
    accuracies = 100 * result.last_accuracies[np.isfinite(result.last_accuracies)]
    deviation = f" ± {accuracies.std(ddof=1):.2f}" if len(accuracies) > 1 else ""
    noise = curves.noise_of(result).window
    return [
        f"{shape} = {e.effective_batch}",
        str(len(result.seeds)),
        str(int(result.updates.max())),
        f"{accuracies.mean():.2f}{deviation}" if len(accuracies) else "–",
        f"{noise:.3f}" if np.isfinite(noise) else "–",
        f"{1000 * np.nanmedian(result.update_seconds):.1f}",
    ]


def table(runs: list[tuple[str, Result]]) -> str:
    """The runs, given as (name, result), as a table in plain text."""
    rows = [("run", *COLUMNS), *((name, *summary(result)) for name, result in runs)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def to_csv(runs: list[tuple[str, Result]], folder: pathlib.Path) -> pathlib.Path:
    """Write every micro-batch of the runs to a new CSV file, and return its path. The first column names the run."""
    import pandas as pd

    frames = []
    for name, result in runs:
        frame = result.to_frame()
        frame.insert(0, "run", name)
        frames.append(frame)
    path = new_file(folder, "gradlab-runs", "csv")
    pd.concat(frames).to_csv(path, index=False)
    return path


def new_file(folder: pathlib.Path, name: str, ending: str) -> pathlib.Path:
    """A path in the folder that is not taken yet: the name, with a number if necessary."""
    path, number = folder / f"{name}.{ending}", 2
    while path.exists():
        path, number = folder / f"{name}-{number}.{ending}", number + 1
    return path


def code(experiment: Experiment) -> str:
    """The Python code that repeats a run of the experiment."""
    default = Experiment()
    fields = [f"    {name}={value!r},\n" for name, value in vars(experiment).items() if value != getattr(default, name)]
    setup = runtime.arguments() or {"seed": 0}
    arguments = ", ".join(f"{name}={value!r}" for name, value in setup.items())
    return (
        "import gradlab\n\n"
        f"gradlab.setup({arguments})\n"
        f"experiment = gradlab.Experiment(\n{''.join(fields)})\n"
        "result = gradlab.run(experiment)\n"
        "print(result.summary())\n"
    )

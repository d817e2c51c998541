"""Pinned runs, which stay for comparison: their names, and exports to text, CSV and Python code."""

import pathlib

import numpy as np

from gradlab import runtime
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import curves

COLUMNS = (
    "effective batch",
    "seeds",
    "updates",
    "test accuracy (%)",
    "noise of the loss (nats)",
    "ms per update",
)


class Pins:
    """The pinned runs, in the order in which they were pinned. No two have the same name."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, Result]] = []

    @property
    def runs(self) -> list[tuple[str, Result]]:
        """(name, result) of each pinned run."""
        return list(self._runs)

    def add(self, name: str, result: Result) -> None:
        """Pin a run. A name that is already taken gets a number."""
        self._runs.append((self._free(name), result))

    def rename(self, result: object, name: str) -> None:
        """Give a pinned run another name, which gets a number if it is taken. Without letters,
        nothing changes."""
        if not name.strip():
            return
        for place, (_, pinned) in enumerate(self._runs):
            if pinned is result:
                del self._runs[place]
                self._runs.insert(place, (self._free(name), pinned))

    def remove(self, result: object) -> None:
        """Remove a pinned run, if it is still there."""
        self._runs = [(name, pinned) for name, pinned in self._runs if pinned is not result]

    def _free(self, name: str) -> str:
        taken = {name for name, _ in self._runs}
        name = plain = " ".join(name.split())  # two spaces separate the cells of the table
        number = 2
        while name in taken:
            name = f"{plain} ({number})"
            number = number + 1
        return name


def summary(result: Result) -> list[str]:
    """The cells of a run in the table, one for each of `COLUMNS`. Accuracy: mean ± standard
    deviation over seeds."""
    e = result.experiment
    shape = " × ".join(
        map(str, [e.towers] * (e.towers > 1) + [e.accumulation_steps, e.microbatch_size])
    )
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
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def csv(runs: list[tuple[str, Result]]) -> str:
    """Every micro-batch of the runs as CSV. The first column names the run."""
    import pandas as pd

    frames = []
    for name, result in runs:
        frame = result.to_frame()
        frame.insert(0, "run", name)
        frames.append(frame)
    return pd.concat(frames).to_csv(index=False)


def write_new_file(folder: pathlib.Path, name: str, ending: str, content: bytes) -> pathlib.Path:
    """Write a new file, with a number in its name if there is one of this name, and return its
    path.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    path = folder / f"{name}.{ending}"
    number = 2
    while path.exists():
        path = folder / f"{name}-{number}.{ending}"
        number = number + 1
    try:
        path.write_bytes(content)
    except OSError:
        path.unlink(missing_ok=True)  # half a file on a disk that is full
        raise
    return path


def code(experiment: Experiment) -> str:
    """The Python code that repeats a run of the experiment."""
    default = Experiment()
    fields = [
        f"    {name}={value!r},\n"
        for name, value in vars(experiment).items()
        if value != getattr(default, name)
    ]
    setup = runtime.arguments() or {"seed": 0}
    arguments = ", ".join(f"{name}={value!r}" for name, value in setup.items())
    return (
        "import gradlab\n\n"
        f"gradlab.setup({arguments})\n"
        f"experiment = gradlab.Experiment(\n{''.join(fields)})\n"
        "result = gradlab.run(experiment)\n"
        "print(result.summary())\n"
    )

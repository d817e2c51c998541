"""The leaderboard of notebook 12: settings are trained for a few seconds, and a table keeps the
reader's best results.

The table is a CSV file in gradlab's cache folder. It has one row for each combination of settings:
training the same settings again replaces their row, so that repeating a training until chance helps
does not improve the table.
"""

import csv
import html
import io
import pathlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gradlab.lab.experiments import result_file
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.cache import Cache
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.progress import Stop

SECONDS = 5.0  # the budget of a training
KEPT = 10  # rows in the file
FILE = "leaderboard.csv"
SETTINGS = ("microbatch_size", "accumulation_steps", "optimizer", "learning_rate")
NOTE = "Seconds of different machines cannot be compared, so compare only results of this machine."
_HEADINGS = {
    "rank": "rank",
    "microbatch_size": "b",
    "accumulation_steps": "k",
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "updates": "updates",
    "seconds": "seconds",
    "accuracy_percent": "test accuracy (%)",
    "new": "",
}


@dataclass(frozen=True)
class Row:
    """A training of the network "dense" on MNIST.

    Attributes:
        microbatch_size, accumulation_steps, optimizer, learning_rate: the settings, as in
            `gradlab.Experiment`.
        updates: the number of updates made.
        seconds: the training time, without the time of measuring the accuracy.
        accuracy_percent: the test accuracy after the last update.
    """

    microbatch_size: int
    accumulation_steps: int
    optimizer: str
    learning_rate: float
    updates: int
    seconds: float
    accuracy_percent: float

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy_percent <= 100:
            raise ValueError(
                f"accuracy_percent must be from 0 to 100. Received: {self.accuracy_percent}"
            )

    @property
    def settings(self) -> tuple:
        """The values of `SETTINGS`."""
        return tuple(getattr(self, name) for name in SETTINGS)


def train(settings: Mapping[str, Any]) -> Row:
    """Train for `SECONDS` seconds and return the result.

    Args:
        settings: a value for each of `SETTINGS`.

    Raises:
        ValueError: a value is invalid, a single update takes longer than the budget, or the
            training diverged.
    """
    chosen = {name: settings[name] for name in SETTINGS}
    experiment = Experiment(
        model="dense", method="microbatched", seconds=SECONDS, seeds=1, eval_every=10**9, **chosen
    )
    # Compiles the update, so that the time of compiling counts neither in the budget nor for the
    # limit below.
    run(replace(experiment, microbatch_size=1, accumulation_steps=1, seconds=None, updates=1))
    stop = Stop()
    limit = threading.Timer(2 * SECONDS, stop.set)  # an update may have any number of micro-batches
    limit.start()
    try:
        result = run(experiment, stop=stop)
    finally:
        limit.cancel()
    updates = int(result.updates[0])
    if result.endings == ("stopped",):
        raise ValueError(
            f"an update must take less than the {SECONDS:g} seconds of the training. Received: "
            f"{experiment.accumulation_steps} micro-batches of {experiment.microbatch_size} "
            "examples"
        )
    if result.endings == ("diverged",):
        raise ValueError(
            f"the training must not diverge: its loss was no longer finite after {updates} "
            f"updates. Received: learning_rate {experiment.learning_rate:g} with "
            f"{experiment.optimizer!r}"
        )
    seconds = round(float(result.update_seconds[0, :updates].sum()), 2)
    accuracy = round(100 * float(result.last_accuracies[0]), 2)
    used = {name: getattr(experiment, name) for name in SETTINGS}
    return Row(**used, updates=updates, seconds=seconds, accuracy_percent=accuracy)


class Table:
    """The file of the best results.

    Raises:
        ValueError: the cache folder does not exist and cannot be created.
    """

    def __init__(self) -> None:
        try:
            self.path: pathlib.Path = Cache().folder / FILE
        except OSError as error:
            raise ValueError(f"the results cannot be kept: {error}") from None

    def rows(self) -> list[Row]:
        """Read the rows, best first. There are none if there is no file.

        Raises:
            ValueError: the file cannot be read, or is not a table that `add` wrote. It is left as
                it is.
        """
        try:
            lines = list(csv.reader(io.StringIO(self.path.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, csv.Error) as error:
            raise ValueError(self._unreadable(str(error))) from None
        if not lines or lines[0] != [field.name for field in fields(Row)]:
            raise ValueError(self._unreadable("its first line is not the one that gradlab writes"))
        rows = []
        for number, line in enumerate(lines[1:], 2):
            try:
                rows.append(
                    Row(
                        *(
                            _TYPES[field.type](text)
                            for field, text in zip(fields(Row), line, strict=True)
                        )
                    )
                )
            except ValueError as error:
                raise ValueError(self._unreadable(f"line {number}: {error}")) from None
        return _ordered(rows)

    def add(self, row: Row) -> "Standing":
        """Add a row to the file, which keeps the `KEPT` best, and return the table with this row
        marked.

        Raises:
            ValueError: the file cannot be read or written.
        """
        rows = _ordered([*(kept for kept in self.rows() if kept.settings != row.settings), row])
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in rows[:KEPT])
        try:
            with result_file.replacing(self.path) as file:
                file.write(text.getvalue().encode())
        except OSError as error:
            raise ValueError(
                f"the table {self.path} could not be written ({error.strerror})"
            ) from None
        return Standing(rows, row)

    def _unreadable(self, reason: str) -> str:
        return f"the table {self.path} cannot be read ({reason}): repair it, or delete it to begin a new one"


class Standing:
    """The table with one row marked, as text and as HTML."""

    def __init__(self, rows: Sequence[Row], new: Row) -> None:
        self._cells = [list(_HEADINGS.values())]
        for rank, row in enumerate(rows, 1):
            values: dict[str, Any] = asdict(row) | {
                "rank": rank,
                "new": "<- this run" if row is new else "",
            }
            values["learning_rate"] = f"{row.learning_rate:g}"
            values["accuracy_percent"] = f"{row.accuracy_percent:.2f}"
            values["seconds"] = f"{row.seconds:.2f}"
            self._cells.append([str(values[name]) for name in _HEADINGS])

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._cells)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in self._cells
        ]
        return "\n".join([*(line.rstrip() for line in lines), NOTE])

    def _repr_html_(self) -> str:
        rows = []
        for number, row in enumerate(self._cells):
            tag = "td" if number else "th"
            style = ' style="font-weight: bold"' if row[-1] and number else ""
            rows.append(
                f"<tr{style}>"
                + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
                + "</tr>"
            )
        head, *body = rows
        return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table><p>{NOTE}</p>"


_TYPES: dict[Any, Any] = {int: int, float: float, str: str}


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Order rows by accuracy, the best first. Of equal rows the earlier one stays ahead."""
    return sorted(rows, key=lambda row: -row.accuracy_percent)

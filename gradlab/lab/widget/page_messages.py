"""Answers the page, which requests new numbers of the runs when it is ready to draw them.

Every message is sent by the thread that handles the page's request or runs the notebook's cell,
because some hosts drop messages from other threads.
"""

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.shown import Shown
from gradlab.lab.widget import pins
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows
from gradlab.lab.widget.layout import Layout
from gradlab.lab.widget.live_run import Run, State, Status
from gradlab.lab.widget.runner import Runner

# Milliseconds until the page asks again: by state; SOON in other states and during the first
# updates.
ASK_AGAIN = {State.RUNNING: 100, State.PAUSED: 100}
SOON = 30
# while a run waits for a worker, which many labs may share: at most, and for each second so far
QUEUED = 1000
QUEUED_EACH = 250
HOLD_SECONDS = 0.05  # An answer waits at most this long for the first update of a run.
PAGES = 4  # `push` sends to the last pages that asked, at most this many.
# The current run's point in the views against k takes at most this share of the time.
POINT_SHARE = 0.01


class PageMessages:
    """Answers the page, and shows how far the current run is.

    Args:
        layout: the widgets to update.
        runner: has the current run and a lock. The lock is needed because JupyterLab may deliver
            two messages on two threads.
        shown: a function from a run, or None, to what the views draw of it and of all others.

    Attributes:
        refusal: why the values of the controls cannot be run, or "". While set, the status line of
            a run that is still ending does not replace it.
    """

    def __init__(self, layout: Layout, runner: Runner, shown: Callable[[Run | None], Shown]):
        self._layout = layout
        self._runner = runner
        self._shown = shown
        self._said: tuple[Run, Status] | None = None  # the last status that was shown
        self._broken: Run | None = None  # the run that could not be shown
        # For the id of each run and of each pinned result
        self._chart_rows: dict[int, tuple[object, ChartRows]] = {}
        self._cells: dict[int, list[str]] = {}  # the same for their rows in the table
        # Of the current run, and when it is due again
        self._point: tuple[Run, dict | None, float] | None = None
        # For each page, the next request that would get only new numbers
        self._pages: dict[str, dict] = {}
        self._points: Sequence[Point] = ()  # the points of earlier runs that were sent last
        self._revision = 0  # counts the changes of these points
        self.refusal = ""

    def tell(self) -> None:
        """Show the current run's progress, and tell the page that there are new numbers."""
        self.show_counters()
        self._layout.charts.news += 1

    def show_counters(self) -> None:
        """Show the progress, narration and status of the current run.

        A status is shown once, so that it does not replace a sentence that the lab has shown since
        then.
        """
        with self._runner.guard:
            run = self._runner.current
            if run is None:
                return
            self._layout.progress.value = run.progress
            self._layout.narrate(run.narration)
            said = run, run.status()
            if not self.refusal and said != self._said and run is not self._broken:
                self._layout.show_status(said[1])
                self._said = said

    def answer(self, asked: Mapping[str, Any]) -> None:
        """Send a page what it does not have yet.

        Args:
            asked: "ask", the page's name; "have", the updates by seed that it has of each run;
                "revision", that of the earlier runs' points that it has.
        """
        run = self._runner.current
        if run is not None and run.state is State.STARTING:  # the first point is worth waiting for
            run.begun.wait(HOLD_SECONDS)  # without the lock, which its worker needs
        with self._runner.guard:
            try:
                self._send(asked)
                self.show_counters()  # after the numbers, so that a run called finished is drawn
            except Exception as error:
                sentence = f"{type(error).__name__}: {error}"
                self._layout.show_status(Status("not shown", sentence, traceback.format_exc()))
                self._layout.charts.send({"to": asked["ask"], "fault": sentence})
                if (run := self._runner.current) is not None:
                    self._broken = run
                    run.stop.set()

    def push(self) -> None:
        """Send the pages their new numbers: while a cell waits for a run, the kernel may not read
        their requests."""
        self.show_counters()
        for asked in list(self._pages.values()):
            self.answer(asked)

    def result_of(self, number: object) -> object:
        """The run or the pinned result that the page knows by this number, or None."""
        return next(
            (key for key, chart_rows in self._chart_rows.values() if chart_rows.number == number),
            None,
        )

    def _send(self, asked: Mapping[str, Any]) -> None:
        run = self._runner.current
        over = run is None or run.over.is_set()  # read first, so that what is sent is complete
        shown = self._shown(run)
        have = asked.get("have") or {}
        runs = []
        buffers = []
        for chart_rows, name, experiment, cells in self._runs(run, shown):
            known = have.get(str(chart_rows.number), [0])
            first = chart_rows.first_new(known)
            first_dot = min(known[0], chart_rows.counts[0])
            buffers += [chart_rows.rows(first).tobytes(), chart_rows.dots(first_dot).tobytes()]
            sent = {
                "number": chart_rows.number,
                "name": name,
                "counts": list(chart_rows.counts),
                "cells": cells,
            }
            sent |= {
                "first": first,
                "firstDot": first_dot,
                "perUpdate": chart_rows.dots(0).shape[1],
            }
            runs.append(sent | facts(experiment))
        if shown.points is not self._points:
            self._points = shown.points
            self._revision = self._revision + 1
        new_points = asked.get("revision") != self._revision
        content = {
            "to": asked["ask"],
            "runs": runs,
            "now": run is not None,  # whether the first of the runs is the current one
            "columns": list(COLUMNS),
            "cells": list(pins.COLUMNS),
            "revision": self._revision,
            "points": [plain(point) for point in shown.points] if new_points else None,
            "point": None if run is None else self._current_point(run, over),
            "window": [_finite(loss) for loss in shown.window],
            "windowAt": shown.window_at,
            "against": shown.against,
            "experiment": facts(shown.experiment),
            "again": None if over or run is None else _pause(run),
        }
        self._layout.charts.send(content, buffers)
        sent_counts = {str(each["number"]): each["counts"] for each in runs}
        self._pages.pop(asked["ask"], None)
        self._pages = dict(list(self._pages.items())[1 - PAGES :])
        self._pages[asked["ask"]] = {
            "ask": asked["ask"],
            "have": sent_counts,
            "revision": self._revision,
        }

    def _runs(
        self, run: Run | None, shown: Shown
    ) -> list[tuple[ChartRows, str, Experiment, list[str]]]:
        """Chart rows, name, experiment and row in the table of the current run, which has no row,
        and of the pinned runs."""
        kept = self._chart_rows
        self._chart_rows = {}
        found: list[tuple[ChartRows, str, Experiment, list[str]]] = []

        def chart_rows_of(key: object, make: Callable[[], ChartRows]) -> ChartRows:
            # The key is kept alive, so nothing else gets its id
            made = kept.get(id(key)) or (key, make())
            self._chart_rows[id(key)] = made
            return made[1]

        if run is not None:
            chart_rows = chart_rows_of(run, partial(ChartRows, run.experiment))
            chart_rows.grow(run.shown_updates())
            found.append((chart_rows, shown.name, run.experiment, []))
        for name, result in shown.pinned:
            chart_rows = chart_rows_of(result, partial(ChartRows.of, result))
            if id(result) not in kept:
                self._cells[id(result)] = pins.summary(result)
            found.append((chart_rows, name, result.experiment, self._cells[id(result)]))
        self._cells = {key: cells for key, cells in self._cells.items() if key in self._chart_rows}
        return found

    def _current_point(self, run: Run, over: bool) -> dict | None:
        """The point of the current run; while it runs, computed so rarely that it takes little
        time."""
        before, point, due = self._point or (None, None, 0.0)
        if before is not run or time.monotonic() >= due or (over and due < math.inf):
            began = time.monotonic()
            result = run.result()
            point = None
            if result is not None:
                point = plain(Point.of(result))
            ended = time.monotonic()
            self._point = (
                run,
                point,
                math.inf if over else ended + max(0.5, (ended - began) / POINT_SHARE),
            )
        return point


def facts(e: Experiment) -> dict[str, Any]:
    """What the page must know of an experiment."""
    return {
        "k": e.towers * e.accumulation_steps,
        "b": e.microbatch_size,
        "batch": e.effective_batch,
        "updates": e.updates,
        "kind": f"{e.model} {e.dataset} {e.optimizer} {e.learning_rate:g}",
    }


def plain(point: Point) -> dict[str, Any]:
    """A point as the page gets it: numbers that are not finite are None, which JSON can say."""
    drawn = ("window", "law", "microbatch", "milliseconds")
    return facts(point.experiment) | {name: _finite(getattr(point, name)) for name in drawn}


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _pause(run: Run) -> int:
    """The milliseconds after which a page asks again."""
    if run.queued_seconds:
        return min(QUEUED, SOON + round(QUEUED_EACH * run.queued_seconds))
    if run.young and run.state is not State.PAUSED:
        return SOON
    return ASK_AGAIN.get(run.state, SOON)

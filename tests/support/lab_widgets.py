"""Use an AccumulationLab as a reader of the page does: find its widgets by their CSS classes, and
watch its threads."""

import json
import threading
from collections.abc import Sequence

import numpy as np
from events import wait_until

from gradlab import AccumulationLab
from gradlab.lab.widget.live_run import State


def widgets(lab: AccumulationLab, name: str) -> list:
    """The widgets on the page that have the CSS class "gradlab-" followed by the name."""
    found, waiting = [], [lab.view]
    while waiting:
        widget = waiting.pop(0)
        if f"gradlab-{name}" in widget._dom_classes:
            found.append(widget)
        waiting[:0] = getattr(widget, "children", ())
    return found


def widget(lab: AccumulationLab, name: str):
    """The only widget with that name."""
    [found] = widgets(lab, name)
    return found


def click(lab: AccumulationLab, name: str) -> None:
    """Press a button."""
    widget(lab, name).click()


def updates_made(lab: AccumulationLab) -> int:
    """The number of updates of the first seed in the current run."""
    result = lab.result
    return 0 if result is None else int(result.updates[0])


def run_to_the_end(lab: AccumulationLab, **changes) -> None:
    """Run the lab with these changes, and wait until the run is finished and shown."""
    lab.run(**changes)
    assert lab.wait() is State.FINISHED


def wait_for_pause(lab: AccumulationLab, narration: str = "") -> None:
    """Wait until the run waits for a step, and until the page shows this part of a narration."""
    wait_until(lambda: narration in lab.narration and lab.state is State.PAUSED)


def lab_threads() -> list[str]:
    """The names of the threads of all labs."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradlab")]


class Page:
    """A page that shows a lab: it asks as charts.js does, and keeps what the lab sends.

    Attributes:
        rows: for each run that is shown, by name, its rows, shape (updates, columns).
        last: the last answer.
    """

    def __init__(self, lab: AccumulationLab, name: str = "page"):
        self._lab, self._name, self.last = lab, name, {}
        self._rows: dict[str, np.ndarray] = {}
        self._counts: dict[str, list] = {}
        self._points: list = []
        self._charts = widget(lab, "charts")
        self._send, self._charts.send = self._charts.send, self._take

    def ask(self) -> dict:
        """Ask for what is new, and return the answer."""
        self.say(ask=self._name, have=dict(self._counts), revision=self.last.get("revision"))
        return self.last

    def say(self, **message) -> None:
        """Send a message, as it arrives in the kernel."""
        self._charts._handle_custom_msg(json.loads(json.dumps(message)), [])

    @property
    def rows(self) -> dict[str, np.ndarray]:
        return {run["name"]: self._rows[str(run["number"])] for run in self.last["runs"]}

    @property
    def points(self) -> list[dict]:
        """The points of earlier runs."""
        return self._points

    def number(self, name: str) -> int:
        """The number of a run with this name."""
        return next(run["number"] for run in self.last["runs"] if run["name"] == name)

    def _take(self, content: dict, buffers: Sequence = ()) -> None:
        self._send(content, buffers)
        if content["to"] != self._name:
            return
        self.last = json.loads(json.dumps(content, allow_nan=False))
        if "fault" in content:
            return
        for run, rows in zip(self.last["runs"], buffers[::2]):
            number, first = str(run["number"]), run["first"]
            new = np.frombuffer(rows, np.float32).reshape(-1, len(self.last["columns"]))
            before = self._rows.get(number, new[:0])
            assert first <= len(before), "rows between are missing"
            self._rows[number] = np.concatenate([before[:first], new])
            self._counts[number] = run["counts"]
        self._points = self._points if self.last["points"] is None else self.last["points"]

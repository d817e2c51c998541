"""The state of a lab and its reactions: what happens when a control, a switch or a button is used.

A controller runs on the threads that handle the page's messages and the cells: the kernel's main
thread and, in JupyterLab, others beside it. It reads the controls, decides which run is the current
one, and leaves the training to the `Runner` and the answers to the page to the `PageMessages`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.cluster import Cluster
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.shown import Shown
from gradlab.lab.widget import controls, pins, presets
from gradlab.lab.widget.layout import Layout
from gradlab.lab.widget.live_run import Pace, Run, State, Status
from gradlab.lab.widget.page import call_after_cell
from gradlab.lab.widget.page_messages import PageMessages
from gradlab.lab.widget.runner import CLOSE_SECONDS, Runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Debounce: a slider that is dragged changes again within this time, so values it passes through
# start no training. The first change after a while starts one at once: most often it is the only
# one.
DRAG_SECONDS = 0.06
QUIET_SECONDS = 0.25
STOP_SECONDS = 0.05  # in which most runs stop
SHOW_SECONDS = 0.2  # between two pictures of a run for which a cell waits
POINTS = 200  # earlier runs that stay in the views against k
Names = Sequence[str]
FIRST = "press Run, or change a control"
HELD = "the first run begins when a page shows the lab and its cell has ended"


class LabController:
    """The widgets of a lab, its current run, and the reactions that connect them.

    Args:
        experiment: the initial experiment, to which `reset` returns.
        seed: the first of the seeds.
        hide: names of controls, buttons and views to hide.
        lock: names of controls that cannot be changed.
        rerun: whether a changed control, or a page that shows the lab for the first time, starts a
            run.
        against: the horizontal axis of the accuracy plot at first.
        cluster: trains the runs in its workers; or None, to train in this process.

    Attributes:
        preset: the initial experiment.
        experiment: the experiment that the controls describe.
        runner: trains the current run.
        controls: the controls.
        pins: the pinned runs.
        layout: all other widgets.
    """

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        hide: Names,
        lock: Names,
        rerun: bool,
        against: str,
        cluster: Cluster | None,
    ):
        self.preset = self.experiment = experiment
        self._seed = seed
        self.cluster = cluster
        self._points: list[Point] = []  # of the runs before the current one
        self._writing = False  # True while the lab itself changes its controls
        self.runner = Runner()
        self.controls = controls.build(experiment, self._control_changed, hide, lock)
        self.pins = pins.Pins()
        self.layout = Layout(self.controls, rerun, against, hide)
        self._page_messages = PageMessages(self.layout, self.runner, self._shown)
        self._begun = False  # whether it has trained, or was told to wait
        self._changed_at = -math.inf  # when a control was changed
        self._held = self._asked = False
        self._show_experiment()
        self.say(FIRST)

    def connect(self, actions: Mapping[str, Callable[[], object]]) -> None:
        """Connect the buttons and switches.

        Args:
            actions: for the name of each button, the function to call when it is pressed.
        """
        layout = self.layout
        for name, action in actions.items():
            layout.buttons[name].on_click(lambda _, action=action: action())
        layout.switches["pause"].observe(
            lambda change: self._change_pace(paused=change["new"]), names="value"
        )
        layout.switches["slow"].observe(
            lambda change: self._change_pace(slow=change["new"]), names="value"
        )
        layout.switches["code"].observe(lambda change: self._list_code(), names="value")
        layout.switches["more"].observe(
            lambda change: layout.show_more(change["new"]), names="value"
        )
        layout.against.observe(lambda change: self._page_messages.tell(), names="value")
        layout.charts.on_msg(lambda _, message, buffers: self._hear(message))

    @property
    def state(self) -> State:
        """The state of the current run, or IDLE."""
        return self.runner.current.state if self.runner.current else State.IDLE

    @property
    def result(self) -> Result | None:
        """The result of the current run so far, or None."""
        return self.runner.current.result() if self.runner.current else None

    @property
    def runs(self) -> list[tuple[str, Result]]:
        """(name, result) of the current run, if it has a result, and of the pinned runs."""
        result = self.result
        return ([("this run", result)] if result is not None else []) + self.pins.runs

    def start(self, paused: bool = False, delay: float = 0.0) -> None:
        """Start a run of what the controls describe, in place of the current one.

        Args:
            paused: whether the run waits for steps; otherwise its pace is that of the switch
                "slow".
            delay: seconds to wait before training starts.
        """
        if not self._read():
            return
        self._show_experiment()
        if self._held and threading.current_thread() is not threading.main_thread():
            self._asked = True
            return
        self._held = False
        pace = Pace(paused=True) if paused else Pace(slow=self.layout.switches["slow"].value)
        with self.runner.guard:
            if self.runner.current is not None:
                self.runner.stop()
                self._keep_point(self.runner.current)
            self._show_pause(paused)
            self._begun = True
            self.runner.start(Run(self.experiment, pace, delay=delay, cluster=self.cluster))
            self._page_messages.tell()

    def hold(self) -> None:
        """Let runs that the page starts wait until the cell that is running has ended, because it may
        set TensorFlow up after it has shown the lab. The cell itself may start one."""
        self._held = call_after_cell(self._release)
        if self._held:
            self.layout.show_status(Status("waiting", HELD))

    def _release(self) -> None:
        self._held = False
        if self._asked:
            self.start()

    def step(self, update: bool) -> None:
        """Pause, and show one more micro-batch, or the rest of its window. If no run is under way,
        start one."""
        if self.runner.current is None or self.runner.current.over.is_set():
            self.start(paused=True)
        elif not self.runner.current.pace.paused:
            self.runner.current.pace.set(paused=True)
        self._show_pause(True)
        if self.runner.current is not None:
            self.runner.current.pace.step(update)
        self._page_messages.tell()

    def stop(self) -> None:
        """Stop the current run."""
        if self.runner.current is not None:
            self.runner.stop()
            self.runner.current.over.wait(STOP_SECONDS)
            self._page_messages.tell()

    def reset(self) -> None:
        """Stop the run, restore the controls and plots to their initial state, except for the pinned
        runs, and train again where a changed control does."""
        self.stop()
        with self.runner.guard:
            self.runner.forget()
            self._page_messages.refusal = ""
            self.experiment = self.preset
            self._points = []
            self._begun = True
            self._changed_at = -math.inf
            self.write(self.preset)
            self._show_pause(False)
            self.layout.progress.value = 0
            self.layout.narrate("")
            self.say(FIRST)
            if self.layout.one_update is not None:
                self.layout.one_update.reset()
        self._show_experiment()
        self._page_messages.tell()
        if self.layout.rerun.value:
            self.start()

    def write(self, experiment: Experiment) -> None:
        """Set the controls to an experiment, without the reactions to their changes."""
        with self._quietly():
            self.controls.write(experiment)

    def say(self, sentence: str) -> None:
        """Show a sentence on the status line, after the state."""
        self.layout.show_status(Status(self.state.value, sentence))

    def pin(self, name: str, result: Result) -> None:
        """Keep a result for comparison."""
        self.pins.add(name, result)
        self._page_messages.tell()

    def figure(self) -> "Figure":
        """The views that are not hidden, drawn from the present numbers."""
        from gradlab.lab.figures.lab_figure import lab_views  # here: see figures/shown.py

        run = self.runner.current
        shown = replace(self._shown(run), result=None if run is None else run.result())
        names = self.layout.charts.shown
        if (toy := self.layout.one_update) is not None:
            shown = replace(shown, start=toy.start)
            names = ["toy", *names]
        return lab_views(shown, names)

    def show(self) -> None:
        """Show how far the current run is."""
        self._page_messages.show_counters()

    def wait(self, timeout: float) -> None:
        """Wait until the current run is over and shown, at most `timeout` seconds."""
        end = time.monotonic() + timeout
        while (run := self.runner.current) is not None and not run.over.wait(
            min(SHOW_SECONDS, timeout)
        ):
            self._page_messages.push()
            if time.monotonic() > end:
                return
        self._page_messages.push()

    def end(self) -> None:
        """Stop the run. A page that first sees the lab now starts no other."""
        self._begun = True
        self.runner.stop()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self.runner.join(CLOSE_SECONDS)

    def _hear(self, message: Mapping) -> None:
        """React to a message from the page's views."""
        if "ask" in message:
            self._page_messages.answer(message)
            return
        with self.runner.guard:
            if "seen" in message and not self._begun and self.layout.rerun.value:
                self.start()
            elif "rename" in message:
                self.pins.rename(
                    self._page_messages.result_of(message["rename"]), str(message["name"])
                )
            elif "remove" in message:
                self.pins.remove(self._page_messages.result_of(message["remove"]))
            self._page_messages.tell()

    def _control_changed(self) -> None:
        if self._writing or not self._read():
            return
        if self.layout.rerun.value:
            # At once: the old run would compete with what follows for the processor
            self.runner.stop()
        before = self._changed_at
        self._changed_at = time.monotonic()
        self._show_experiment()
        if self.layout.rerun.value:
            self.start(delay=DRAG_SECONDS if self._changed_at - before < QUIET_SECONDS else 0.0)
        else:
            self.say("the controls have changed: press Run")
        self._list_code()

    def _read(self) -> bool:
        """Take over the values of the controls. If they cannot be run, say why and stop the current
        run."""
        try:
            self.experiment = self.controls.read(self.experiment, self._seed)
        except ValueError as error:
            with self.runner.guard:
                self._page_messages.refusal = str(error)
                self.stop()
                self.layout.show_status(Status("not run", self._page_messages.refusal))
                self.layout.refuse(self._page_messages.refusal)
            return False
        self._page_messages.refusal = ""
        return True

    def _keep_point(self, run: Run) -> None:
        """Keep the point of a run that came to its end: the noise of the first updates is not that
        of a whole run."""
        result = run.result()
        if run.progress < 1 or result is None:
            return
        point = Point.of(result)
        if np.isfinite(point.window):
            self._points = [*self._points[1 - POINTS :], point]

    def _change_pace(self, paused: bool | None = None, slow: bool | None = None) -> None:
        if self.runner.current is not None and not self._writing:
            self.runner.current.pace.set(paused, slow)
            self._page_messages.tell()

    def _show_pause(self, paused: bool) -> None:
        """Set the switch "pause" without changing the pace."""
        with self.runner.guard, self._quietly():
            self.layout.switches["pause"].value = paused

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Ignore the change events that the lab itself causes."""
        before = self._writing
        self._writing = True
        try:
            yield
        finally:
            self._writing = before

    def _list_code(self) -> None:
        self.layout.list_code(
            pins.code(self.experiment) if self.layout.switches["code"].value else ""
        )

    def _show_experiment(self) -> None:
        with self.runner.guard:
            self.layout.show_batch(self.experiment)

    def _shown(self, run: Run | None) -> Shown:
        """What the views draw of a run and of all others, without its result."""
        experiment = run.experiment if run is not None else self.experiment
        return Shown(
            experiment,
            name=f"now: {presets.name(experiment, self.preset)}",
            window=np.zeros(0) if run is None else run.window(),
            window_at=0 if run is None else run.window_at,
            pinned=self.pins.runs,
            points=self._points,
            against=self.layout.against.value,
        )

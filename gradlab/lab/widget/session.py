"""The state of a lab and its reactions: what happens when a control, a switch or a button is used.

A session runs on the kernel's main thread. It reads the controls, decides which run is the current one, and leaves the
training to the `Runner` and the display to the `Publisher`.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ipywidgets

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.widget import controls, pins, presets, views
from gradlab.lab.widget.live_run import Pace, Run, State, Status
from gradlab.lab.widget.panel import Panel
from gradlab.lab.widget.publisher import Publisher
from gradlab.lab.widget.runner import CLOSE_SECONDS, Runner

# Debounce: a slider that is dragged changes again within this time, so values it passes through start no training.
DRAG_SECONDS = 0.06
POINTS = 200  # earlier runs that stay in the views against k


class Session:
    """The widgets of a lab, its current run, and the reactions that connect them.

    Args:
        experiment: the initial experiment, to which `reset` returns.
        seed: the first of the seeds.
        hide: names of controls, buttons and views to hide.
        lock: names of controls that cannot be changed.
        rerun: whether a changed control starts a new run.
        against: the horizontal axis of the accuracy plot at first.

    Attributes:
        preset: the initial experiment.
        experiment: the experiment that the controls describe.
        runner: trains the current run.
        controls: the controls.
        pins: the pinned runs.
        panel: all other widgets.
    """

    def __init__(
        self, experiment: Experiment, seed: int, hide: Sequence[str], lock: Sequence[str], rerun: bool, against: str
    ):
        self.preset = self.experiment = experiment
        self._seed = seed
        self._points: list[views.Point] = []  # of the runs before the current one
        self._writing = False  # True while the lab itself changes its controls
        self.runner = Runner()
        self.controls = controls.build(experiment, self._control_changed, hide, lock)
        self.pins = pins.Pins(self.repaint)
        self.panel = Panel(self.controls, self.pins.view, rerun, against, hide)
        if (view := self.panel.one_update) is not None:
            steps = self.controls.widgets["accumulation_steps"]
            view.accumulation_steps = steps.value
            ipywidgets.jslink((steps, "value"), (view, "accumulation_steps"))
        self._publisher = Publisher(self.panel, self.runner, self._shown)
        self._show_experiment()
        self.say("press Run, or change a control")
        self.repaint()

    def connect(self, actions: Mapping[str, Callable[[], object]]) -> None:
        """Connect the buttons and switches.

        Args:
            actions: for the name of each button, the function to call when it is pressed.
        """
        panel = self.panel
        for name, action in actions.items():
            panel.buttons[name].on_click(lambda _, action=action: action())
        panel.switches["pause"].observe(lambda change: self._change_pace(paused=change["new"]), names="value")
        panel.switches["slow"].observe(lambda change: self._change_pace(slow=change["new"]), names="value")
        panel.switches["code"].observe(lambda change: self._list_code(), names="value")
        panel.switches["more"].observe(lambda change: panel.show_more(change["new"]), names="value")
        panel.against.observe(lambda change: self.repaint("accuracy"), names="value")

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
            paused: whether the run waits for steps; otherwise its pace is that of the switch "slow".
            delay: seconds to wait before training starts.
        """
        if not self._read():
            return
        self._show_experiment()
        pace = Pace(paused=True) if paused else Pace(slow=self.panel.switches["slow"].value)
        with self.runner.guard:
            if self.runner.current is not None:
                self.runner.stop()
                self._keep_point(self.runner.current)
            self._show_pause(paused)
            self.runner.start(Run(self.experiment, pace, news=self._publisher.news, delay=delay))
            self._publisher.wake()

    def step(self, update: bool) -> None:
        """Pause, and show one more micro-batch, or the rest of its window. If no run is under way, start one."""
        if self.runner.current is None or self.runner.current.over.is_set():
            self.start(paused=True)
        elif not self.runner.current.pace.paused:
            self.runner.current.pace.set(paused=True)
        self._show_pause(True)
        if self.runner.current is not None:
            self.runner.current.pace.step(update)
        self._publisher.wake()

    def stop(self) -> None:
        """Stop the current run."""
        if self.runner.current is not None:
            self.runner.stop()
            self._publisher.wake()

    def reset(self) -> None:
        """Stop the run, and restore the controls and plots to their initial state, except for the pinned runs."""
        self.stop()
        with self.runner.guard:
            self.runner.forget()
            self._publisher.refusal, self.experiment = "", self.preset
            self._points = []
            self.write(self.preset)
            self._show_pause(False)
            self.panel.progress.value = 0
            self.panel.narrate("")
            self.say("press Run, or change a control")
            if self.panel.one_update is not None:
                self.panel.one_update.reset()
        self._show_experiment()
        self.repaint()

    def write(self, experiment: Experiment) -> None:
        """Set the controls to an experiment, without the reactions to their changes."""
        with self._quietly():
            self.controls.write(experiment)

    def say(self, sentence: str) -> None:
        """Show a sentence on the status line, after the state."""
        self.panel.show_status(Status(self.state.value, sentence))

    def report(self, write: Callable[[], pathlib.Path]) -> None:
        """Write a file, and show its path or why it could not be written."""
        try:
            self.say(f"written: {write().resolve()}")
        except (OSError, ValueError) as error:
            self.say(f"not written: {error}")

    def repaint(self, *names: str) -> None:
        """Redraw these views, or all of them if none is named."""
        shown = self._shown(self.runner.current)
        for name in self.panel.shown:
            if not names or name in names:
                self._publisher.paint(shown, name)

    def wait(self, timeout: float) -> None:
        """Wait until the current run is over and shown, at most `timeout` seconds."""
        self._publisher.join(timeout)

    def end(self) -> None:
        """Stop the run and the drawing."""
        self._publisher.close()
        self.runner.stop()

    def join(self) -> None:
        """Wait until the threads have ended."""
        self.runner.join(CLOSE_SECONDS)
        self._publisher.join(CLOSE_SECONDS)

    def _control_changed(self) -> None:
        if self._writing or not self._read():
            return
        if self.panel.rerun.value:
            self.runner.stop()  # at once: the old run would compete with what follows for the processor
        self._show_experiment()
        if self.panel.rerun.value:
            self.start(delay=DRAG_SECONDS)
        else:
            self.say("the controls have changed: press Run")
        self._list_code()

    def _read(self) -> bool:
        """Take over the values of the controls. If they cannot be run, say why and stop the current run."""
        try:
            self.experiment = self.controls.read(self.experiment, self._seed)
        except ValueError as error:
            with self.runner.guard:
                self._publisher.refusal = str(error)
                self.stop()
                self.panel.show_status(Status("not run", self._publisher.refusal))
            return False
        self._publisher.refusal = ""
        return True

    def _keep_point(self, run: Run) -> None:
        """Keep the point of a run that came to its end: the noise of the first updates is not that of a whole run."""
        if run.progress < 1:
            return
        result = run.result()
        if result is not None and min(result.updates) >= views.POINT_UPDATES:
            self._points = [*self._points[1 - POINTS :], views.Point.of(result)]

    def _change_pace(self, paused: bool | None = None, slow: bool | None = None) -> None:
        if self.runner.current is not None and not self._writing:
            self.runner.current.pace.set(paused, slow)
            self._publisher.wake()

    def _show_pause(self, paused: bool) -> None:
        """Set the switch "pause" without changing the pace."""
        with self.runner.guard, self._quietly():
            self.panel.switches["pause"].value = paused

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Ignore the change events that the lab itself causes."""
        before, self._writing = self._writing, True
        try:
            yield
        finally:
            self._writing = before

    def _list_code(self) -> None:
        self.panel.list_code(pins.code(self.experiment) if self.panel.switches["code"].value else "")

    def _show_experiment(self) -> None:
        with self.runner.guard:
            self.panel.show_batch(self.experiment)

    def _shown(self, run: Run | None) -> views.Shown:
        experiment = run.experiment if run is not None else self.experiment
        return views.Shown(
            experiment,
            name=f"now: {presets.name(experiment, self.preset)}",
            result=run.result() if run is not None else None,
            **({} if run is None else {"window": run.window()}),
            pinned=self.pins.runs,
            points=self._points,
            against=self.panel.against.value,
        )

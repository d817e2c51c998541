"""AccumulationLab: controls that rerun a real training, and views that follow it.

Who does what, so that the notebook never freezes and nothing old is ever drawn over something new:

    the kernel's main thread   hears the controls, and says which run is the current one
    the worker thread          trains the current run and keeps its updates; it touches no widget
    the publisher thread       shows the current run: counters about 5 times a second, the plots about twice

A run that is no longer the current one is cancelled, and what it still has to say is not shown.
"""

import atexit
import pathlib
import threading
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from gradlab import _checks, runtime
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import plots
from gradlab.lab.widget import controls, pins, presets, views
from gradlab.lab.widget.live_run import Pace, Run, State
from gradlab.lab.widget.panel import Panel
from gradlab.lab.widget.publisher import Publisher, start_thread

DRAG_SECONDS = 0.06  # a slider on its way is moved again within so long; what it passes by is not begun
CLOSE_SECONDS = 60  # the worker ends within a micro-batch, the publisher within a picture; a machine can be slow


class AccumulationLab:
    """Controls that rerun a real training whenever they move, and live views of loss, noise, accuracy and cost.

    Args:
        seed: the first of the seeds: the same seed shows the same run again.
        hide: names of controls, buttons and views not to show.
        lock: names of controls that cannot be changed.
        rerun: whether a moved control starts a new run at once.
        against: what accuracies are drawn against at first: "updates", "examples" or "seconds".
        **preset: any field of `Experiment`; the controls start there.

    Raises:
        ValueError: a preset that is no field of `Experiment`, or a value that it does not take.

    Example:
        >>> lab = AccumulationLab(accumulation_steps=10, updates=3, seeds=2, hide=("toy",))
        >>> lab
        AccumulationLab: microbatched, dense on mnist, effective batch 1 x 10 x 20 = 200
        >>> lab.run()
        >>> lab.wait().value
        'finished'
        >>> lab.result.losses.shape     # seed, update, micro-batch
        (2, 3, 10)
        >>> AccumulationLab(**lab.to_dict()).experiment == lab.experiment
        True
    """

    def __init__(
        self,
        seed: int = 0,
        hide: Sequence[str] = (),
        lock: Sequence[str] = (),
        rerun: bool = True,
        against: str = "updates",
        **preset,
    ):
        self._preset = self._experiment = presets.experiment(seed, preset)
        self._hide, self._locked = presets.names(hide, lock)
        _checks.one_of("against", against, plots.X_AXES)
        runtime.tower_devices(self._experiment.towers)
        self._seed = seed
        self._guard = threading.RLock()  # which run is current, the threads, and every change of a widget
        self._current: Run | None = None
        self._points: list[views.Point] = []  # of the runs before
        self._writing = False  # the lab itself moves the controls
        self._worker: threading.Thread | None = None
        self._working = False  # a thread that has decided to end is still alive for a moment
        self._controls = controls.build(self._experiment, self._moved, self._hide, self._locked)
        self._pins = pins.Pins(self._repaint)
        self._panel = Panel(self._controls.view, self._pins.view, rerun, against, self._hide)
        self._publisher = Publisher(self._panel, self._guard, lambda: self._current, self._shown)
        self.view = self._panel.view
        self._connect()
        self._say_batch()
        self._panel.say("idle", "press Run, or move a control")
        self._repaint()
        _LABS.add(self)

    @property
    def experiment(self) -> Experiment:
        """What the controls say."""
        return self._experiment

    @property
    def result(self) -> Result | None:
        """What the current run gave so far; None before its first update."""
        return self._current.result() if self._current else None

    @property
    def state(self) -> State:
        """Where the lab is."""
        return self._current.state if self._current else State.IDLE

    @property
    def pinned(self) -> list[tuple[str, Result]]:
        """(name, result) of the runs that were pinned."""
        return self._pins.runs

    def run(self, **changes) -> None:
        """Trains what the controls say, from the beginning. A run that is under way is cancelled.

        Args:
            **changes: fields of `Experiment`; their controls are set to them first.
        """
        if changes:
            if set(changes) & set(controls.BUDGETS):
                changes = dict.fromkeys(controls.BUDGETS) | changes  # one budget takes the place of another
            with self._quietly():
                self._controls.write(replace(self._experiment, **changes))
        self._start(Pace(slow=self._panel.switches["slow"].value))

    def stop(self) -> None:
        """Ends the run within a micro-batch; its plots stay."""
        if self._current is not None:
            self._current.stop.set()
            self._publisher.wake()

    def pause(self, paused: bool = True) -> None:
        """Holds the run before its next update, or lets it go on."""
        self._panel.switches["pause"].value = paused

    def step(self, update: bool = False) -> None:
        """Shows one micro-batch more, or the rest of its window, and then waits. Without a run it begins one."""
        if self._current is None or self._current.over.is_set():
            self._start(Pace(paused=True))
        elif not self._current.pace.paused:
            self._current.pace.set(paused=True)
        self._set_pause(True)
        if self._current is not None:
            self._current.pace.step(update)
        self._publisher.wake()

    def reset(self) -> None:
        """Ends the run, and makes controls and plots what they were at first; pinned runs stay."""
        self.stop()
        with self._guard:
            self._current, self._publisher.refusal, self._experiment = None, "", self._preset
            self._points = []
            with self._quietly():
                self._controls.write(self._preset)
            self._set_pause(False)
            self._panel.progress.value = 0
            self._panel.narrate("")
            self._panel.say("idle", "press Run, or move a control")
        self._say_batch()
        self._repaint()

    def pin(self, name: str | None = None) -> None:
        """Keeps the run in the plots and in the table, to compare others with."""
        result = self.result
        if result is None:
            self._panel.say(self.state.value, "there is no run to pin yet: press Run")
            return
        self._pins.add(name or presets.name(result.experiment, self._preset), result)

    def to_csv(self, folder: str | pathlib.Path = ".") -> pathlib.Path:
        """Writes every micro-batch of this run and of the pinned ones to a CSV file; returns its path."""
        if not self._runs():
            raise ValueError("there is nothing to write yet: press Run. Received: a lab without a run")
        return pins.to_csv(self._runs(), pathlib.Path(folder))

    def to_png(self, folder: str | pathlib.Path = ".") -> pathlib.Path:
        """Writes the views, as they are, to a PNG file; returns its path."""
        path = pins.new_file(pathlib.Path(folder), "gradlab-views", "png")
        path.write_bytes(self._panel.picture())
        return path

    def code(self) -> str:
        """The Python that repeats what the controls say."""
        return pins.code(self._experiment)

    def to_dict(self) -> dict:
        """The lab as a preset: AccumulationLab(**lab.to_dict()) begins where this one is now."""
        values = {name: value for name, value in asdict(self._experiment).items() if value is not None}
        values |= {"seeds": len(self._experiment.seed_numbers), "seed": self._seed}
        own = {"hide": list(self._hide), "lock": list(self._locked)}
        return values | own | {"rerun": self._panel.rerun.value, "against": self._panel.against.value}

    def wait(self, timeout: float = 600) -> State:
        """Waits until the run is over and shown, at most so many seconds. Returns its state."""
        if self._current is None:
            raise RuntimeError("AccumulationLab.wait needs a run: call run() first")
        self._publisher.join(timeout)
        return self.state

    def close(self) -> None:
        """Stops the run, waits for its threads to end, and takes the widgets off the page."""
        self._end()
        self._join()
        self.view.close()

    def _end(self) -> None:
        self._publisher.close()
        if self._current is not None:
            self._current.stop.set()

    def _join(self) -> None:
        if (worker := self._worker) is not None:
            worker.join(CLOSE_SECONDS)
        self._publisher.join(CLOSE_SECONDS)

    def __repr__(self) -> str:
        e = self._experiment
        return (
            f"AccumulationLab: {e.method}, {e.model} on {e.dataset}, effective batch "
            f"{e.towers} x {e.accumulation_steps} x {e.microbatch_size} = {e.effective_batch}"
        )

    def _repr_mimebundle_(self, **kwargs) -> dict:
        """The widgets; and where there are none, as on a page that shows a saved notebook, a picture and a table."""
        bundle = dict(self.view._repr_mimebundle_(**kwargs)) | {"text/plain": repr(self)}
        if self._runs():
            bundle |= {"image/png": self._panel.picture(), "text/plain": f"{self!r}\n\n{pins.table(self._runs())}"}
        return bundle

    # The main thread's part: the controls.

    def _connect(self) -> None:
        panel = self._panel
        actions = {
            "run": self.run,
            "stop": self.stop,
            "step_microbatch": self.step,
            "step_update": lambda: self.step(update=True),
            "reset": self.reset,
            "pin": self.pin,
            "csv": lambda: self._written(self.to_csv),
            "png": lambda: self._written(self.to_png),
        }
        for name, action in actions.items():
            panel.buttons[name].on_click(lambda _, action=action: action())
        panel.switches["pause"].observe(lambda change: self._paced(paused=change["new"]), names="value")
        panel.switches["slow"].observe(lambda change: self._paced(slow=change["new"]), names="value")
        panel.switches["code"].observe(lambda change: self._list_code(), names="value")
        panel.against.observe(lambda change: self._repaint("accuracy"), names="value")

    def _moved(self) -> None:
        if self._writing:
            return
        if self._read():
            if self._current is not None and self._panel.rerun.value:
                self._current.stop.set()  # what it would still compute is in the way
            self._say_batch()
            if "toy" in self._panel.shown:
                self._publisher.paint(self._shown(None), "toy")  # what answers at once comes first
            if self._panel.rerun.value:
                self._start(Pace(slow=self._panel.switches["slow"].value), patience=DRAG_SECONDS)
            else:
                self._panel.say(self.state.value, "the controls were moved: press Run")
            self._list_code()

    def _read(self) -> bool:
        """Takes over what the controls say; what cannot be run is said, and ends the run before."""
        try:
            self._experiment = self._controls.read(self._experiment, self._seed)
        except ValueError as error:
            with self._guard:
                self._publisher.refusal = str(error)
                self.stop()
                self._panel.say("not run", self._publisher.refusal)
            return False
        self._publisher.refusal = ""
        return True

    def _start(self, pace: Pace, patience: float = 0.0) -> None:
        if not self._read():
            return
        self._say_batch()
        with self._guard:
            if self._current is not None:
                self._current.stop.set()
                self._keep_point(self._current)
            self._set_pause(pace.paused)
            self._current = Run(self._experiment, pace, news=self._publisher.news, patience=patience)
            if not self._working:
                self._working, self._worker = True, start_thread(self._work, "gradlab-worker")
            self._publisher.wake()

    def _keep_point(self, run: Run) -> None:
        result = run.result()
        if result is not None and min(result.updates) > 7:
            self._points = [*self._points[-199:], views.Point.of(result)]

    def _paced(self, **pace) -> None:
        if self._current is not None and not self._writing:
            self._current.pace.set(**pace)
            self._publisher.wake()

    def _set_pause(self, paused: bool) -> None:
        """Shows the switch as it is, without switching."""
        with self._guard, self._quietly():
            self._panel.switches["pause"].value = paused

    @contextmanager
    def _quietly(self):
        """The lab itself moves its controls: nobody is to react."""
        before, self._writing = self._writing, True
        try:
            yield
        finally:
            self._writing = before

    def _written(self, write) -> None:
        try:
            self._panel.say(self.state.value, f"written: {write().resolve()}")
        except (OSError, ValueError) as error:
            self._panel.say(self.state.value, f"not written: {error}")

    def _list_code(self) -> None:
        self._panel.list_code(self.code() if self._panel.switches["code"].value else "")

    def _say_batch(self) -> None:
        with self._guard:
            self._panel.say_batch(self._experiment)

    def _shown(self, run: Run | None) -> views.Shown:
        experiment = run.experiment if run is not None else self._experiment
        seen = {} if run is None else {"result": run.result(), "window": run.window()}
        name = f"now: {presets.name(experiment, self._preset)}"
        against = self._panel.against.value
        return views.Shown(experiment, name, **seen, pinned=self._pins.runs, points=self._points, against=against)

    def _repaint(self, *names: str) -> None:
        """Draws these views anew, or all."""
        shown = self._shown(self._current)
        for name in self._panel.shown:
            if not names or name in names:
                self._publisher.paint(shown, name)

    def _runs(self) -> list[tuple[str, Result]]:
        result = self.result
        return ([("this run", result)] if result is not None else []) + self._pins.runs

    # The worker's part: it computes, and touches no widget.

    def _work(self) -> None:
        while True:
            with self._guard:
                run = self._current
                if run is None or run.over.is_set():  # and no newer one came
                    self._working = False
                    return
            run.work()


_LABS: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Python must not end under a training: TensorFlow's threads would be cut off in the middle of an operation."""
    for lab in list(_LABS):
        lab._end()
    for lab in list(_LABS):
        lab._join()

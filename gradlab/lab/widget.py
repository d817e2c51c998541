"""AccumulationLab: sliders that rerun a real training, and plots that follow it.

Who does what, so that the notebook never freezes and nothing old is ever drawn over something new:

    the kernel's main thread   hears the controls, and says which run is the current one
    the worker thread          trains the current run and keeps its updates; it touches no widget
    the publisher thread       shows the current run: counters about 5 times a second, the plot about twice

A run that is no longer the current one is cancelled, and what it still has to say is not shown.
"""

import atexit
import html
import threading
import time
import traceback
import weakref
from dataclasses import fields

import ipywidgets as widgets

from gradlab import checks, runtime
from gradlab.lab import controls, live_plot, plots
from gradlab.lab.experiment import Experiment
from gradlab.lab.training import Update
from gradlab.lab.training_run import Run, State

COUNTER_SECONDS = 0.2
PLOT_SECONDS = 0.5

# A short run of a small network: it answers while the hand is still on the slider.
DEFAULTS = {"model": "dense", "method": "microbatched", "updates": 300, "eval_every": 25}


class AccumulationLab:
    """Sliders that rerun a real training whenever they move, and live plots of its losses and test accuracy.

    Args:
        seed: chooses first weights, order and dropout masks: the same seed shows the same run again.
        **preset: any field of `Experiment`; the controls start there.

    Raises:
        ValueError: a preset that is no field of `Experiment`, or a value that it does not take.

    Example:
        >>> lab = AccumulationLab(accumulation_steps=10, updates=3)
        >>> lab
        AccumulationLab: microbatched, dense on mnist, effective batch 1 x 10 x 20 = 200
        >>> lab.run()
        >>> lab.wait().value
        'finished'
        >>> len(lab.updates)
        3
    """

    def __init__(self, seed: int = 0, **preset):
        known = [f.name for f in fields(Experiment)]
        for name in preset:
            if name not in known:
                raise ValueError(f"AccumulationLab takes seed, {', '.join(known)}. Received: {name}")
        checks.natural_number("seed", seed)
        self._experiment = Experiment(**DEFAULTS | preset)
        runtime.tower_devices(self._experiment.towers)
        self._seed = seed
        self._lock = threading.RLock()  # guards which run is current, the threads, and every change of a widget
        self._current: Run | None = None
        self._earlier: list[Update] = []
        self._refusal = ""  # why the controls' values cannot be run
        self._worker: threading.Thread | None = None
        self._publisher: threading.Thread | None = None
        self._build()
        _LABS.add(self)

    @property
    def experiment(self) -> Experiment:
        """What the controls say."""
        return self._experiment

    @property
    def updates(self) -> list[Update]:
        """The updates of the current run so far."""
        return list(self._current.updates) if self._current else []

    def run(self) -> None:
        """Trains what the controls say, from the beginning. A run that is under way is cancelled."""
        try:
            self._experiment = controls.read(self._controls, self._experiment)
        except ValueError as error:
            with self._lock:
                self._refusal = str(error)
                self.stop()
                self._say("not run", self._refusal)
            return
        with self._lock:
            self._refusal = ""
            if self._current is not None:
                self._current.cancel.set()
                # A run that was cut off at once, by a slider on its way, is nothing to compare with.
                if len(self._current.updates) >= self._current.experiment.updates / 10:
                    self._earlier = self._current.updates
            self._current = Run(self._experiment, self._seed)
            self._worker = self._worker or _start(self._work)
            self._publisher = self._publisher or _start(self._publish)

    def stop(self) -> None:
        """Ends the run after the update that is being made; its plot stays."""
        if self._current is not None:
            self._current.cancel.set()

    def wait(self, timeout: float = 600) -> State:
        """Waits until the run is over and shown, at most so many seconds. Returns its state."""
        if self._current is None:
            raise RuntimeError("AccumulationLab.wait needs a run: call run() first")
        end = time.monotonic() + timeout
        while (publisher := self._publisher) is not None and time.monotonic() < end:
            publisher.join(end - time.monotonic())
        return self._current.state

    def close(self) -> None:
        """Stops the run, waits for its threads to end, and takes the widgets off the page."""
        self.stop()
        for thread in (self._worker, self._publisher):
            if thread is not None:
                thread.join(10)
        self.view.close()

    def __repr__(self) -> str:
        e = self._experiment
        return (
            f"AccumulationLab: {e.method}, {e.model} on {e.dataset}, effective batch "
            f"{e.towers} x {e.accumulation_steps} x {e.microbatch_size} = {e.effective_batch}"
        )

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return self.view._repr_mimebundle_(**kwargs) | {"text/plain": repr(self)}

    # The main thread's part: the controls.

    def _build(self) -> None:
        e = self._experiment
        self._controls = controls.build(e)
        for control in self._controls.values():
            control.observe(lambda change: self._moved(), names="value")

        self._run_button = widgets.Button(description="Run", icon="play", tooltip="Train from the beginning.")
        self._stop_button = widgets.Button(
            description="Stop", icon="stop", tooltip="End the run; what was drawn stays.", disabled=True
        )
        self._run_button.add_class("gradlab-run").on_click(lambda button: self.run())
        self._stop_button.add_class("gradlab-stop").on_click(lambda button: self.stop())
        self._progress = widgets.IntProgress(min=0, max=e.updates, layout={"width": "200px"})
        self._progress.add_class("gradlab-progress")
        self._batch = widgets.HTML()
        self._status = widgets.HTML()
        self._status.add_class("gradlab-status")
        self._image = widgets.Image(format="png", width=960, height=380, layout={"max_width": "100%", "height": "auto"})
        self._image.add_class("gradlab-plot")
        self._words = widgets.HTML().add_class("gradlab-words")
        self.view = widgets.VBox(
            [
                widgets.Box([*self._controls.values(), self._batch], layout={"flex_flow": "row wrap"}),
                widgets.HBox([self._run_button, self._stop_button, self._progress]),
                self._status,
                self._image,
                self._words,
            ]
        ).add_class("gradlab-lab")
        self._say_batch()
        self._say("ready", "press Run, or move a slider")
        self._paint(None, live_plot.training_figure([], e.updates, _title(e), hint="Press Run, or move a slider"))

    def _moved(self) -> None:
        self.run()
        self._say_batch()

    # The worker's part: it computes, and touches no widget.

    def _work(self) -> None:
        while True:
            with self._lock:
                run = self._current
                if run.over.is_set():  # and no newer one came
                    self._worker = None
                    return
            run.work()

    # The publisher's part: it shows the current run.

    def _publish(self) -> None:
        shown, painted = None, 0.0
        while True:
            with self._lock:
                run = self._current
            over = run.over.is_set()  # asked first: the updates read after it are then all there will be
            try:
                if over or run is not shown or time.monotonic() - painted > PLOT_SECONDS:
                    self._show_plot(run)
                    shown, painted = run, time.monotonic()
                self._show_counters(run)  # after the plot: what is called finished is drawn
            except Exception as error:
                traceback_text = traceback.format_exc()
                self._say("not shown", f"{type(error).__name__}: {error}", traceback_text)
                run.cancel.set()
            with self._lock:
                if over and run is self._current:
                    self._publisher = None
                    return
            run.over.wait(COUNTER_SECONDS)

    def _show_counters(self, run: Run) -> None:
        with self._lock:
            if run is not self._current:
                return
            self._progress.max = run.experiment.updates
            self._progress.value = len(run.updates)
            self._progress.bar_style = {State.FINISHED: "success", State.FAILED: "danger"}.get(run.state, "")
            self._stop_button.disabled = run.over.is_set()
            if not self._refusal:  # a run that ends meanwhile does not talk over it
                self._say(*run.words())

    def _show_plot(self, run: Run) -> None:
        e = run.experiment
        self._paint(run, live_plot.training_figure(list(run.updates), e.updates, _title(e), self._earlier))

    def _paint(self, run: Run | None, figure) -> None:
        png = plots.to_png(figure)
        with self._lock:
            if run is self._current:
                self._image.value = png
                # Read by screen readers, not seen. (An Image with a tooltip is not shown at all by ipywidgets 8.1.)
                self._words.value = f'<span style="{_HIDDEN}">{html.escape(figure.get_label())}</span>'

    def _say(self, state: str, text: str, details: str = "") -> None:
        folded = f"<details><summary>details</summary><pre>{html.escape(details)}</pre></details>" if details else ""
        with self._lock:
            self._status.value = f'<div role="status"><b>{state}</b>: {html.escape(text)}{folded}</div>'

    def _say_batch(self) -> None:
        e = self._experiment
        factors = [e.towers] * (e.towers > 1) + [e.accumulation_steps, e.microbatch_size]
        product = " × ".join(str(factor) for factor in factors)
        with self._lock:
            self._batch.value = f"effective batch {product} = <b>{e.effective_batch}</b> examples an update"


_HIDDEN = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)"


def _title(e: Experiment) -> str:
    return f"{e.method}: {e.model} on {e.dataset}, k = {e.accumulation_steps}, b = {e.microbatch_size}"


def _start(target) -> threading.Thread:
    thread = threading.Thread(target=target, name=f"gradlab-{target.__name__}", daemon=True)
    thread.start()
    return thread


_LABS: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Python must not end under a training: TensorFlow's threads would be cut off in the middle of an operation."""
    for lab in list(_LABS):
        lab.stop()
    for lab in list(_LABS):
        for thread in (lab._worker, lab._publisher):
            if thread is not None:
                thread.join(10)

"""The thread that shows the lab's current run: counters about five times a second, plots about twice."""

import threading
import time
import traceback
from collections.abc import Callable

from gradlab.lab.widget import views
from gradlab.lab.widget.live_run import Run, Status
from gradlab.lab.widget.panel import Panel
from gradlab.lab.widget.runner import Runner, start_thread

COUNTER_SECONDS = 0.2
PLOT_SECONDS = {"losses": 0.5, "accuracy": 0.5}
OTHER_PLOT_SECONDS = 1.5


class Publisher:
    """Shows the progress of the current run on a thread of its own, which ends with the run.

    Args:
        panel: the widgets to update.
        runner: has the current run, and the lock to hold while a widget is changed.
        shown: a function from a run to what the views draw.

    Attributes:
        news: an event that makes the thread update at once instead of at its next turn.
        refusal: why the values of the controls cannot be run, or "". While set, the status line of a run that is
            still ending does not replace it.
    """

    def __init__(self, panel: Panel, runner: Runner, shown: Callable[[Run], views.Shown]):
        self._panel, self._runner, self._shown = panel, runner, shown
        self._thread: threading.Thread | None = None
        self._awake = False  # False once the thread has decided to end, a moment before it is dead
        self._closed = False
        self._said: tuple[Run, Status] | None = None  # the last status that was shown
        self.news = threading.Event()
        self.refusal = ""

    def wake(self) -> None:
        """Show a new current run, or news of it, without delay."""
        with self._runner.guard:
            self._closed = False
            if not self._awake:
                self._awake, self._thread = True, start_thread(self._publish, "gradlab-publisher")
        self.news.set()

    def join(self, timeout: float) -> None:
        """Wait until the current run is over and shown, at most `timeout` seconds."""
        end = time.monotonic() + timeout
        while (thread := self._thread) is not None and thread.is_alive() and time.monotonic() < end:
            thread.join(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Stop drawing. The thread still ends with the run."""
        self._closed = True
        self.news.set()

    def paint(self, shown: views.Shown, name: str, run: Run | None = None) -> None:
        """Draw a view, unless it belongs to a run that is no longer the current one.

        Args:
            shown: what to draw.
            name: the view, one of `views.PICTURES`.
            run: the run it belongs to. None: it belongs to no run and is always shown.
        """
        png, description = views.picture(name, shown)
        with self._runner.guard:
            if run is None or run is self._runner.current:
                self._panel.paint(name, png, description)

    def show_counters(self, run: Run) -> None:
        """Show the progress, narration and status of a run, unless it is no longer the current one.

        A status is shown once, so that it does not replace a sentence that the lab has shown since then.
        """
        with self._runner.guard:
            if run is not self._runner.current:
                return
            self._panel.progress.value = run.progress
            self._panel.narrate(run.narration)
            said = run, run.status()
            if not self.refusal and said != self._said:
                self._panel.show_status(said[1])
                self._said = said

    def _publish(self) -> None:
        painted: dict[str, float] = {}
        before = None
        while True:
            self.news.clear()
            with self._runner.guard:
                run = self._runner.current
                over = run is None or run.over.is_set()  # read first, so that what is drawn below is complete
            if run is not None and not self._closed:
                try:
                    if run.stop.is_set():
                        self.show_counters(run)  # a stop is confirmed before the plots are drawn
                    stage = run, bool(run.updates), run.narration
                    self._paint_due(run, over, stage != before, painted)
                    before = stage
                    self.show_counters(run)  # after the plots, so that a run called finished is drawn
                except Exception as error:
                    with self._runner.guard:
                        sentence = f"{type(error).__name__}: {error}"
                        self._panel.show_status(Status("not shown", sentence, traceback.format_exc()))
                    run.stop.set()
            with self._runner.guard:
                if over and run is self._runner.current:
                    self._awake = False
                    return
            self.news.wait(COUNTER_SECONDS)

    def _paint_due(self, run: Run, over: bool, news: bool, painted: dict[str, float]) -> None:
        """Draw the views that are due; all of them when the run is over."""
        if not (over or run.updates):
            return  # the views keep showing the run before until this one has an update
        shown = None
        for name in self._panel.shown:
            pause = PLOT_SECONDS.get(name, OTHER_PLOT_SECONDS)
            due = over or time.monotonic() - painted.get(name, 0.0) > pause or (news and name == "losses")
            if not due or run is not self._runner.current:
                continue
            if self._closed:
                return
            if name != "losses" and not over and run.young:
                continue  # the other views have nothing to show yet, and would delay the first point of this one
            shown = shown or self._shown(run)
            self.paint(shown, name, run)
            painted[name] = time.monotonic()

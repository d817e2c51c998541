"""The thread that shows the lab's current run: counters about five times a second, plots about twice."""

import threading
import time
import traceback
from collections.abc import Callable

from gradlab.lab.widget import views
from gradlab.lab.widget.live_run import Run
from gradlab.lab.widget.panel import Panel

COUNTER_SECONDS = 0.2
PLOT_SECONDS = {"losses": 0.5, "accuracy": 0.5}
OTHER_PLOT_SECONDS = 1.5


class Publisher:
    """Shows what the current run has to say, as long as there is one; its thread ends with the run.

    Args:
        panel: the widgets to change.
        guard: held while one is changed, and while another run becomes the current one.
        current: gives the current run, or None.
        shown: a function from a run to what the views are to draw.
    """

    def __init__(self, panel: Panel, guard, current: Callable[[], Run | None], shown: Callable[[Run], views.Shown]):
        self._panel, self._guard, self._current, self._shown = panel, guard, current, shown
        self._thread: threading.Thread | None = None
        self._awake = False  # a thread that has decided to end is still alive for a moment
        self._closed = False
        self.news = threading.Event()  # set when there is something that should not wait
        self.refusal = ""  # why the controls' values cannot be run: a run that ends meanwhile does not talk over it

    def wake(self) -> None:
        """There is a new current run, or news of it."""
        with self._guard:
            self._closed = False
            if not self._awake:
                self._awake, self._thread = True, start_thread(self._publish, "gradlab-publisher")
        self.news.set()

    def join(self, timeout: float) -> None:
        """Waits until the current run is over and shown, at most so many seconds."""
        end = time.monotonic() + timeout
        while (thread := self._thread) is not None and thread.is_alive() and time.monotonic() < end:
            thread.join(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """From now on nothing more is drawn; the thread still ends with the run."""
        self._closed = True
        self.news.set()

    def paint(self, shown: views.Shown, name: str, run: Run | None = None) -> None:
        """Draws a view; when it is a run's, only as long as that run is the current one."""
        png, words = views.picture(name, shown)
        with self._guard:
            if run is None or run is self._current():
                self._panel.paint(name, png, words)

    def show_counters(self, run: Run) -> None:
        """Shows the run's progress and its words."""
        with self._guard:
            if run is not self._current():
                return
            self._panel.progress.value = run.progress
            self._panel.narrate(run.narration)
            if not self.refusal:
                self._panel.say(*run.words())

    def _publish(self) -> None:
        painted: dict[str, float] = {}
        before = None
        while True:
            self.news.clear()
            with self._guard:
                run = self._current()
                over = run is None or run.over.is_set()  # asked first: what is read after it is then all there will be
            if run is not None and not self._closed:
                try:
                    if run.stop.is_set():
                        self.show_counters(run)  # who stops a run wants to know at once that it has stopped
                    stage = run, bool(run.updates), run.narration
                    self._paint_due(run, over, stage != before, painted)
                    before = stage
                    self.show_counters(run)  # after the plots: what is called finished is drawn
                except Exception as error:
                    with self._guard:
                        self._panel.say("not shown", f"{type(error).__name__}: {error}", traceback.format_exc())
                    run.stop.set()
            with self._guard:
                if over and run is self._current():
                    self._awake = False
                    return
            self.news.wait(COUNTER_SECONDS)

    def _paint_due(self, run: Run, over: bool, news: bool, painted: dict[str, float]) -> None:
        """Paints the views whose time has come; all of them when the run is over."""
        if not (over or run.updates):
            return  # nothing to show yet: the run before stays until there is
        shown = None
        for name in self._panel.shown:
            pause = PLOT_SECONDS.get(name, OTHER_PLOT_SECONDS)
            due = over or time.monotonic() - painted.get(name, 0.0) > pause or (news and name == "losses")
            if not due or name == "toy" or run is not self._current():  # the toy follows the controls, not the run
                continue
            if self._closed:
                return
            if name != "losses" and not over and run.young:
                continue  # a first update has one thing to show, and soon
            shown = shown or self._shown(run)
            self.paint(shown, name, run)
            painted[name] = time.monotonic()


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts a thread that does not keep Python alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread

"""The thread that trains the lab's current run, and the orderly end of all the lab's threads."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from gradlab.lab.widget.live_run import Run

CLOSE_SECONDS = 60  # the worker ends within a micro-batch; a machine can be slow


class Runner:
    """Trains the current run on a worker thread. The thread ends with the run, and the next run
    starts a new one.

    Attributes:
        guard: the lock to hold while the current run, a thread or a widget is changed.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._current: Run | None = None
        self._worker: threading.Thread | None = None
        # False once the thread has decided to end, a moment before it is dead
        self._working = False

    @property
    def current(self) -> Run | None:
        """The current run, or None. It stays current after its end, until another run takes its
        place."""
        return self._current

    def start(self, run: Run) -> None:
        """Make a run the current one, stop the run before it, and train."""
        with self.guard:
            self.stop()
            self._current = run
            if not self._working:
                self._working = True
                self._worker = start_thread(self._work, "gradlab-worker")

    def stop(self) -> None:
        """Stop the current run, if there is one. It ends within a micro-batch."""
        if self._current is not None:
            self._current.stop.set()

    def forget(self) -> None:
        """Stop the current run, after which there is none."""
        with self.guard:
            self.stop()
            self._current = None

    def join(self, timeout: float) -> None:
        """Wait until the worker thread has ended, at most `timeout` seconds."""
        if (worker := self._worker) is not None:
            worker.join(timeout)

    def _work(self) -> None:
        while True:
            with self.guard:
                run = self._current
                if run is None or run.over.is_set():  # no newer run took its place
                    self._working = False
                    return
            run.work()


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread, which does not keep Python alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class Closeable(Protocol):
    """An owner of threads that can be ended in two stages."""

    def end(self) -> None:
        """Tell the threads to end."""

    def join(self) -> None:
        """Wait until they have ended."""


_OPEN: weakref.WeakSet[Closeable] = weakref.WeakSet()


def end_at_exit(owner: Closeable) -> None:
    """End the owner's threads before Python exits."""
    _OPEN.add(owner)


@atexit.register
def _end_all() -> None:
    """Python must not exit during a training: it would cut off TensorFlow's threads in the middle
    of an operation."""
    owners = list(_OPEN)
    for owner in owners:
        owner.end()
    for owner in owners:
        owner.join()

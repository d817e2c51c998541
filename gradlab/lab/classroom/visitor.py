"""A visitor's side of a classroom: an executor whose jobs the hub trains."""

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from typing import Any

HUB = "GRADLAB_HUB"  # the environment variable "host port key listen", by which a lab finds the hub


class Waiting(concurrent.futures.Future):
    """A run at the hub.

    Attributes:
        place: its place in the queue; 0 when a trainer has it, None before the hub answered.
    """

    place: int | None = None

    def __init__(self, forget: Callable[[], None]):
        super().__init__()
        self._forget = forget
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Takes the run out of the queue. One that a trainer has ends when its lab listens no
        more."""
        if not self.done():
            self._forget()
        return False


class Visitor:
    """Has its jobs trained by a hub. A new job takes the place of one that waits.

    Args:
        address: (host, port) of the hub.
        key: what the hub wants to be told.
        listen: this machine's address as trainers see it, where they send the updates.

    Attributes:
        reads_ahead: labs receive a run as it is trained, also while they are paused: a trainer
            waits for nobody.
        on_idle: called with the seconds without a run, after which the hub releases this visitor.

    Raises:
        OSError: there is no hub.
    """

    reads_ahead = True

    def __init__(self, address: tuple[str, int], key: bytes, listen: str = "127.0.0.1"):
        self.listen = listen
        self.on_idle: Callable[[float], None] = lambda seconds: None
        self._line = multiprocessing.connection.Client(address, authkey=key)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._jobs: dict[int, Waiting] = {}
        threading.Thread(target=self._listen, name="gradlab-visitor", daemon=True).start()

    def submit(self, function: Callable, *work: Any) -> Waiting:
        """Asks the hub for a run.

        Args:
            function: `train_and_send`, the only function that a trainer runs.
            *work: its arguments.
        """
        number = next(self._numbers)
        job = self._jobs[number] = Waiting(lambda: self._send("forget", number, ()))
        self._send("run", number, work)
        return job

    def shutdown(self) -> None:
        """Gives the place in the classroom and in the queue to others."""
        self._send("leave", 0, ())

    def _send(self, *message: Any) -> None:
        with self._lock:
            try:
                self._line.send(message)
            except OSError:
                self._lose_all()

    def _listen(self) -> None:
        """Hears the hub. When it is gone, all runs that wait have failed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, number, content = self._line.recv()
                if kind == "closed":
                    break
                if kind == "idle":
                    self.on_idle(content)
                job = self._jobs.get(number)
                if job is None:
                    continue
                if kind == "place":
                    job.place = content
                    continue
                self._jobs.pop(number, None)
                job.set_result(None) if content is None else job.set_exception(content)
        self._line.close()
        self._lose_all()

    def _lose_all(self) -> None:
        for number in list(self._jobs):
            if (job := self._jobs.pop(number, None)) is not None:
                job.set_exception(
                    ConnectionError(
                        "the classroom's server is gone: reload the page when it is back"
                    )
                )


def executor() -> Visitor | None:
    """The hub of the classroom in which this process runs, as an executor; None outside of a
    classroom."""
    named = os.environ.get(HUB)
    return _executor(named) if named else None


@functools.cache
def _executor(named: str) -> Visitor:
    host, port, key, listen = named.split()
    return Visitor((host, int(port)), bytes.fromhex(key), listen)

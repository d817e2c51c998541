"""What a training gives while it runs, an `Update` after another, and how it is told to end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from gradlab.fit.records import WindowRecord


@dataclass(frozen=True)
class Update(WindowRecord):
    """The record of one update of a training.

    Losses and gradient norms are computed before the update. Losses are in nats; a micro-batch's
    weight is its number of examples.

    Attributes:
        number: the number of the update, counted from 1.
        accuracy: the share of test images classified correctly after the update, or None if it was
            not measured.
        seconds: the time of the update, without the time of measuring the accuracy.
        progress: the share of the budget that is used up; 1 after the last update.
    """

    number: int
    accuracy: float | None
    seconds: float
    progress: float

    @property
    def loss(self) -> float:
        """The mean loss of the window: the loss of the large batch."""
        return float(np.average(self.losses, weights=self.weights))

    @property
    def diverged(self) -> bool:
        """Whether a loss or a gradient norm is not finite."""
        return not np.isfinite([*self.losses, *self.gradient_norms]).all()


class Stop:
    """Stops a training, from any thread, within a micro-batch. The running update is not completed.

    >>> stop = Stop()
    >>> with stop.calling(lambda: print("the method ends")):
    ...     stop.set()
    the method ends
    >>> stop.is_set()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._cancels: list[Callable] = []

    def set(self) -> None:
        """Requests the stop."""
        with self._lock:
            self._set = True
            for cancel in self._cancels:
                cancel()

    def is_set(self) -> bool:
        """Whether the stop was requested."""
        return self._set

    @contextmanager
    def calling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A context in which `set` calls a function. If the stop was requested before, the function
        is called at once.

        Args:
            cancel: the function, usually `Method.cancel`.
        """
        with self._lock:
            self._cancels.append(cancel)
            if self._set:
                cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancels.remove(cancel)

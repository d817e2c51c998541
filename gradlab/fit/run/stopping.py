"""Signals that end a training run after the current update, such as those of a scheduler that takes
the machine."""

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf

# What SLURM sends before it takes a machine; Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopSignals:
    """A context in which these signals are noted instead of ending the process at once.

    A signal for which the program has a handler of its own is left to that handler. Outside of the
    main thread, where Python allows no handlers, nothing is noted.

    If a signal has come and nobody has acted upon it, the end of the context raises SystemExit.

    Args:
        strategy: the strategy of tf.distribute. With several workers they all stop after the same
            update.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._received = 0
        self._replaced: list = []
        self._agreed = _largest_of_all_workers(strategy)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._note)
                    self._replaced.append(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in self._replaced:
            signal.signal(number, signal.SIG_DFL)
        self._replaced = []
        if self._received and error is None:
            raise SystemExit(128 + self._received)

    def received(self) -> int:
        """The number of the signal that one of the workers has received, or 0. All workers must
        call this together."""
        return self._agreed(self._received)

    def _note(self, number: int, frame: Any) -> None:
        self._received = number


def sentence(number: int, windows: int) -> str:
    """What a user should know when a signal ends the training run after so many windows."""
    name = signal.Signals(number).name
    return f"\ngradlab: {name} ends this run after update {windows}; the next one continues from its checkpoint"


def _largest_of_all_workers(strategy: tf.distribute.Strategy) -> Callable[[int], int]:
    """A function (number) -> the largest number that a worker gave."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return lambda number: number

    def gathered(number):
        return tf.distribute.get_replica_context().all_gather(tf.reshape(number, [1]), axis=0)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def on_all(number):
        return strategy.run(gathered, args=(number,))

    def largest(number):
        found = strategy.experimental_local_results(on_all(tf.constant(number, tf.int64)))[0]
        return int(tf.reduce_max(found))

    return largest

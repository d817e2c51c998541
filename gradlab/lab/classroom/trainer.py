"""What trains the runs of a classroom: processes of the hub, or the workers of a Dask cluster."""

import contextlib
import multiprocessing
import multiprocessing.connection
from typing import Any, Protocol

from gradlab.lab.experiments import worker
from gradlab.lab.experiments.cluster import Cluster
from gradlab.lab.experiments.stream import train_and_send


class LostTrainer(Exception):
    """A trainer ended in the middle of a run."""


class RunTrainer(Protocol):
    """Trains one run after another."""

    def train(self, work: tuple) -> None:
        """Calls `train_and_send` with these arguments, and returns when the run is over.

        Raises:
            LostTrainer: the trainer ended. The next call goes to a new one.
            ConnectionError: there is no trainer now.
        """

    def close(self) -> None:
        """Ends the trainer."""


class TrainerProcess:
    """A process of its own on this machine, set up at once: the first run need not wait for
    TensorFlow.

    Args:
        setup: the arguments of `gradlab.setup` for the process.
    """

    def __init__(self, setup: dict[str, Any]):
        self._setup = setup
        self._start()

    def train(self, work: tuple) -> None:
        try:
            self._line.send(work)
            self._line.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            self._start()
            raise LostTrainer from error

    def close(self) -> None:
        self._line.close()

    def _start(self) -> None:
        # TensorFlow does not work in a fork of a process that started it
        spawn = multiprocessing.get_context("spawn")
        self._line, there = spawn.Pipe()
        self._process = spawn.Process(target=_live, args=(there, self._setup), daemon=True)
        self._process.start()
        there.close()


def _live(line: multiprocessing.connection.Connection, setup: dict[str, Any]) -> None:
    """The life of a trainer's process: one run after another, until the hub has ended."""
    worker.begin(setup)
    with contextlib.suppress(EOFError, OSError):
        while True:
            train_and_send(*line.recv())
            line.send("free")


class DaskTrainer:
    """A share of a Dask cluster: one run at a time. Dask itself repeats the run of a lost worker.

    Args:
        cluster: the cluster.
        setup: the arguments of `gradlab.setup` for the workers.
    """

    def __init__(self, cluster: Cluster, setup: dict[str, Any]):
        self._cluster = cluster
        self._setup = setup

    def train(self, work: tuple) -> None:
        client = self._cluster.client()
        try:
            client.submit(train_and_send, *work[:-1], self._setup, pure=False).result()
        except Exception as error:
            raise LostTrainer from error

    def close(self) -> None:
        pass

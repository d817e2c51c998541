"""A Dask cluster that trains the runs of labs. Importing this module imports neither Dask nor
TensorFlow."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gradlab.lab.experiments.experiment import Experiment

# The environment variable with the address of a scheduler, for labs without an executor
DASK = "GRADLAB_DASK"
SECONDS = 10.0  # in which a scheduler must answer


class Cluster:
    """A cluster, to which this process connects again when its scheduler has been restarted.

    Args:
        address: the scheduler's address, such as "tcp://node1:8786".
        client: a Dask client of the cluster. None: one is made when it is needed.

    Attributes:
        check: called with an experiment before its run is sent. Returns the most seconds for which
            it may train, or None; raises ValueError if it may not.
    """

    def __init__(self, address: str, client: Any = None):
        self._address = address
        self._client = client
        self._is_own = client is None
        self._lock = threading.Lock()
        self.check: Callable[[Experiment], float | None] = lambda experiment: None
        self._active = 0
        self._ended: float | None = None

    def begin(self) -> None:
        """Counts a run that was sent."""
        with self._lock:
            self._active += 1

    def end(self) -> None:
        """Counts a run that is over for the workers, whether or not its lab has shown it."""
        with self._lock:
            self._active -= 1
            self._ended = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """The seconds since the last run was over; 0 while there is one, or before the first."""
        with self._lock:
            if self._active or self._ended is None:
                return 0.0
            return time.monotonic() - self._ended

    def client(self) -> Any:
        """A Dask client that is connected.

        Raises:
            ConnectionError: the scheduler does not answer.
        """
        from distributed import Client

        with self._lock:
            if self._is_own and (self._client is None or self._client.status != "running"):
                if self._client is not None:
                    with contextlib.suppress(TimeoutError):
                        self._client.close(timeout=1)
                try:
                    self._client = Client(self._address, timeout=SECONDS, set_as_default=False)
                except (OSError, ValueError) as error:
                    raise ConnectionError(
                        f"there must be a Dask scheduler at {self._address}: it does not answer. "
                        f"Received: {error}"
                    ) from error
            return self._client


def cluster_of(executor: Any) -> Cluster | None:
    """The cluster of a Dask client; without one, that of the environment variable, if it is set.

    Raises:
        ValueError: it is no Dask client.
    """
    if executor is None:
        address = os.environ.get(DASK)
        return cluster_at(address) if address else None
    if not hasattr(executor, "scheduler_info"):
        raise ValueError(
            "executor must be a Dask client or None; Client(LocalCluster(n_workers=2)) trains in "
            f"two processes of this machine. Received: {executor!r}"
        )
    return Cluster(executor.scheduler.address, executor)


@functools.cache  # the labs of a notebook share one connection
def cluster_at(address: str) -> Cluster:
    """The cluster with a scheduler at this address."""
    return Cluster(address)

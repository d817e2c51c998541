"""A Dask cluster by its scheduler's address. Importing this module imports neither Dask nor
TensorFlow."""

import contextlib
import functools
import os
import threading
from typing import Any

# The environment variable with the address of a scheduler, for labs without an executor
DASK = "GRADLAB_DASK"
SECONDS = 10.0  # in which a scheduler must answer


class Cluster:
    """An executor for labs that reconnects when its scheduler has been restarted.

    Args:
        address: the scheduler's address, such as "tcp://node1:8786".
    """

    def __init__(self, address: str):
        self._address = address
        self._lock = threading.Lock()
        self._client = None

    @property
    def listen(self) -> str:
        """This machine's address as the cluster's workers see it."""
        from distributed.comm import get_address_host
        from distributed.utils import get_ip

        return get_ip(get_address_host(self._address))

    def client(self) -> Any:
        """A Dask client that is connected.

        Raises:
            ConnectionError: the scheduler does not answer.
        """
        from distributed import Client

        with self._lock:
            if self._client is None or self._client.status != "running":
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

    def get_executor(self, **options: Any) -> Any:
        """As `distributed.Client.get_executor`."""
        return self.client().get_executor(**options)


def cluster_of_environment() -> Cluster | None:
    """The cluster that `gradlab lab --dask ADDRESS` named; None without one."""
    address = os.environ.get(DASK)
    return _cluster(address) if address else None


@functools.cache  # the labs of a notebook share one connection
def _cluster(address: str) -> Cluster:
    return Cluster(address)

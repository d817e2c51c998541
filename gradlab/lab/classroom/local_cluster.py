"""The workers of a classroom's own cluster. Dask calls `dask_setup` in each when it starts."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from gradlab.lab.experiments.jobs import worker
from gradlab.lab.experiments.jobs.cluster import DASK

# `gradlab.lab.classroom.lab` sets a process that trains by itself up alike
SETUP = {"towers": 2, "seed": 0}
FAILURES = 1  # lost workers after which a run begins again
TLS = "DASK_DISTRIBUTED__COMM__TLS__"  # how Dask's settings begin as environment variables


def dask_setup(worker_of_dask: Any) -> None:
    """Prepares a worker before its first run, which then does not wait for TensorFlow."""
    worker.prepare(SETUP)


@contextlib.contextmanager
def workers_on_this_machine(number: int) -> Iterator[None]:
    """A cluster of processes that train one run each, for labs whose processes start within this
    context.

    Who reaches a scheduler can run code. So it listens on this machine only, and to those only who
    have the key: the processes that inherit this one's environment.
    """
    import dask
    from distributed import LocalCluster, Security

    # Dask gives a lost worker up for good if no new one has come after 15 seconds. On a busy machine,
    # a process needs longer to import TensorFlow.
    patience = {"distributed.deploy.lost-worker-timeout": "1 day"}
    security = Security.temporary()
    cluster = LocalCluster(
        n_workers=number,
        threads_per_worker=1,
        security=security,
        dashboard_address="127.0.0.1:0",
        preload=__name__,
        memory_limit=0,
        scheduler_kwargs={"allowed_failures": FAILURES},
    )
    settings = {
        DASK: cluster.scheduler_address,
        f"{TLS}CA_FILE": security.tls_ca_file,
        f"{TLS}CLIENT__KEY": security.tls_client_key,
        f"{TLS}CLIENT__CERT": security.tls_client_cert,
    }
    with dask.config.set(patience), cluster:
        os.environ.update(settings)
        yield

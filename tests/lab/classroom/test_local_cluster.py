"""A classroom's own cluster: who gets in, and whom nobody keeps out."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.parse

import dask
import pytest
from distributed import Client, Security
from events import LIMIT, wait_until

from gradlab import AccumulationLab
from gradlab.lab.classroom import local_cluster
from gradlab.lab.experiments.jobs.cluster import DASK
from gradlab.lab.experiments.jobs.run import run

pytestmark = pytest.mark.slow

LAB = """
import sys
import gradlab
lab = gradlab.AccumulationLab(updates=20, seeds=2)
lab.run()
assert lab.wait().value == "finished", lab.status
assert "tensorflow" not in sys.modules
print(lab.result.losses.tolist())
"""


@pytest.fixture
def address(monkeypatch):
    """The address of a cluster with one worker, which the environment names. A new worker takes longer
    than Dask would wait for it, as on a busy machine."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}),
        local_cluster.workers_on_this_machine(1),
    ):
        yield os.environ[DASK]


def losses_of_a_lab() -> str:
    """What a lab in a process with this environment trains."""
    done = subprocess.run(
        [sys.executable, "-c", LAB], capture_output=True, text=True, env=os.environ, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_labs_with_the_key_get_in_and_nobody_else(address):
    expected = str(run(AccumulationLab(updates=20, seeds=2).experiment).losses.tolist())
    assert losses_of_a_lab() == expected
    host = urllib.parse.urlsplit(address).netloc
    for wrong in (f"tls://{host}", f"tcp://{host}"):  # this process has no key
        with pytest.raises((OSError, TypeError)):
            Client(wrong, timeout=5, set_as_default=False)
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            name, port = host.split(":")
            silent.enter_context(socket.create_connection((name, int(port))))
        assert losses_of_a_lab() == expected


@pytest.mark.timeout(300)  # a worker that stays lost would be waited for without end
def test_a_run_whose_workers_are_lost_begins_again_once(address):
    names = ("CA_FILE", "CLIENT__KEY", "CLIENT__CERT")
    keys = [os.environ[local_cluster.TLS + name] for name in names]
    key = Security(
        require_encryption=True,
        tls_ca_file=keys[0],
        tls_client_key=keys[1],
        tls_client_cert=keys[2],
    )

    def kill_worker():
        wait_until(lambda: any(client.processing().values()))
        [pid] = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)

    with Client(address, security=key, set_as_default=False) as client:
        lab = AccumulationLab(executor=client, updates=10**6, seeds=1)
        lab.run()
        wait_until(lambda: lab.result is not None)
        kill_worker()
        wait_until(lambda: "a worker was lost: another repeats the run" in lab.status)
        kill_worker()
        assert lab.wait().value == "failed"
        assert "each worker that began this run was lost: press Run to try again" in lab.status
        lab.close()


def test_it_listens_on_this_machine_only(address):
    assert urllib.parse.urlsplit(address).hostname == "127.0.0.1"

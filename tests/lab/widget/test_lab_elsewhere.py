"""Labs whose runs are trained by the workers of a Dask cluster: the same numbers, and what happens
when one side is lost."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from dask_processes import DaskProcesses
from distributed import Client, Event, LocalCluster
from events import LIMIT, wait_until
from jupyter_client.manager import start_new_kernel
from lab_widgets import Page, click, run_to_the_end, updates_made, wait_for_pause

import gradlab
from gradlab.lab.experiments.jobs import stream
from gradlab.lab.experiments.jobs.cluster import DASK, cluster_at, cluster_of
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.progress import Stop
from gradlab.lab.widget import page_messages
from gradlab.lab.widget.live_run import State

# Labs of other processes find it, too
QUIET = dict(dashboard_address="127.0.0.1:0", protocol="tcp://", host="127.0.0.1")


@pytest.fixture
def pool():
    """A cluster of one worker, which is a thread of this process."""
    with (
        LocalCluster(1, threads_per_worker=1, processes=False, **QUIET) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def is_free(client, **where):
    """Waits until a worker takes a job."""
    assert client.submit(int, pure=False, **where).result(timeout=LIMIT) == 0


@pytest.mark.parametrize(
    "preset",
    [
        dict(updates=40),
        dict(updates=None, examples=1000, seeds=1),
        dict(model="lenet", method="placeholders", towers=2),
        dict(optimizer="sgd", learning_rate=1e5),  # diverges
    ],
)
def test_the_same_numbers_to_the_bit(preset, make, pool):
    lab, here = make(executor=pool, hide=(), **preset), make(**preset)
    run_to_the_end(lab)
    run_to_the_end(here)
    assert lab.result == here.result == run(lab.experiment)
    assert lab.status.split(":")[0] == here.status.split(":")[0]
    assert lab.result.environments[0]["tensorflow"] and lab.result.peak_memory_bytes[0] > 0


def test_stop_ends_the_training(make, pool):
    lab = make(executor=pool, updates=10**6, accumulation_steps=1)
    lab.run()
    wait_until(lambda: updates_made(lab) > 5)
    click(lab, "stop")
    assert lab.wait() is State.FINISHED and lab.status.startswith("stopped: ")
    is_free(pool)  # the only worker


def test_stop_within_a_micro_batch(make, pool):
    lab = make(
        executor=pool,
        method="microbatched",
        microbatch_size=1,
        accumulation_steps=20_000,
        updates=2,
        seeds=1,
    )
    lab.run()
    wait_until(lambda: "waiting" not in lab.status)
    lab.stop()
    assert lab.wait() is State.FINISHED and lab.result is None
    is_free(pool)


def test_pause_and_steps(make, pool):
    lab = make(executor=pool, accumulation_steps=3, seeds=1)
    lab.step()
    wait_for_pause(lab, "micro-batch 1 of 3")
    lab.step(update=True)
    wait_for_pause(lab, "applied once, as update 1")
    lab.pause(False)
    assert lab.wait() is State.FINISHED
    assert lab.result == run(lab.experiment)


def test_a_lab_that_is_paused_holds_no_worker(make, pool):
    lab = make(executor=pool, updates=100, accumulation_steps=3, seeds=1)
    lab.step()
    wait_for_pause(lab, "micro-batch 1 of 3")
    is_free(pool)
    wait_for_pause(lab, "micro-batch 1 of 3")
    lab.pause(False)
    assert lab.wait() is State.FINISHED
    assert lab.result == run(lab.experiment)


def test_a_new_run_takes_the_place_of_one_under_way(make, pool):
    lab = make(executor=pool, updates=10**6)
    for steps in (2, 3, 4):
        lab.run(accumulation_steps=steps)
    run_to_the_end(lab, updates=5)
    assert lab.result == run(lab.experiment) and lab.experiment.accumulation_steps == 4


def test_what_fails_in_a_worker_is_said(make, pool):
    lab = make(executor=pool, method="towers")
    lab.run(towers=7)
    assert lab.wait() is State.FAILED
    assert "ValueError: towers must be at most 3" in lab.status and lab.status.endswith(
        "Received: 7"
    )


def test_the_longest_time_of_a_run(make, pool, monkeypatch):
    cluster = cluster_of(pool)
    cluster.check = lambda experiment: 0.2
    endless = gradlab.Experiment(model="dense", updates=10**9, seeds=1)
    with pytest.raises(stream.Failed, match=r"ended after 0\.2 seconds, the longest run here"):
        list(stream.stream(endless, Stop(), cluster))
    is_free(pool)


def test_what_the_cluster_does_not_allow_is_not_sent(pool):
    def refuse(experiment):
        raise ValueError(f"k must be 1. Received: {experiment.accumulation_steps}")

    cluster = cluster_of(pool)
    cluster.check = refuse
    with pytest.raises(stream.Failed, match=r"k must be 1\. Received: 5"):
        list(stream.stream(gradlab.Experiment(), Stop(), cluster))
    assert not pool.who_has()


@pytest.fixture
def queued(pool):
    """The same cluster, whose worker is busy until the event is set."""
    free = Event("free", pool)
    busy = pool.submit(lambda: Event("free").wait(), pure=False)
    wait_until(lambda: any(pool.processing().values()))
    yield free
    free.set()
    busy.result(timeout=LIMIT)


def test_a_page_asks_less_often_the_longer_it_waits(make, pool, queued):
    lab = make(executor=pool, hide=())
    page = Page(lab)
    lab.run()
    wait_until(lambda: page.ask()["again"] > 4 * page_messages.SOON)
    assert "waiting for a worker" in lab.status
    queued.set()
    run_to_the_end(lab)
    assert lab.result == run(lab.experiment)


def test_stop_while_a_run_waits(make, pool, queued):
    lab = make(executor=pool)
    lab.run()
    wait_until(lambda: "waiting for a worker" in lab.status)
    click(lab, "stop")
    assert lab.wait() is State.FINISHED and lab.status.startswith("stopped: before the first")
    queued.set()
    is_free(pool)


def jobs(dask_scheduler):
    return len(dask_scheduler.tasks)


def test_who_asked_first_comes_first(make, pool, queued, monkeypatch):
    trained = []
    train = stream._train

    def record(send, experiment, *rest):
        trained.append(experiment.accumulation_steps)
        train(send, experiment, *rest)

    monkeypatch.setattr(stream, "_train", record)
    order = [4, 1, 3, 2, 5]
    labs = [make(executor=pool, updates=3, accumulation_steps=k) for k in order]
    for number, lab in enumerate(labs, start=2):  # the first job keeps the worker busy
        lab.run()
        wait_until(lambda number=number: pool.run_on_scheduler(jobs) == number)
    queued.set()
    assert [lab.wait() for lab in labs] == [State.FINISHED] * len(labs)
    assert trained == order


def test_refusals(make):
    for wrong in (4, "dask", concurrent.futures.ThreadPoolExecutor(1)):
        with pytest.raises(ValueError, match="^executor must be a Dask client or None; Client"):
            make(executor=wrong)


KERNEL = """
import sys
import gradlab
from distributed import Client
lab = gradlab.AccumulationLab(executor=Client(ADDRESS), updates=50, seeds=2)
display(lab)
lab.run()
assert lab.wait().value == "finished", lab.status
print(lab.result.losses.tolist())
print("tensorflow" in sys.modules)
"""


def test_a_kernel_stays_small_and_never_imports_tensorflow(pool):
    manager, client = start_new_kernel()
    try:
        said = []
        reply = client.execute_interactive(
            f"ADDRESS = {pool.scheduler.address!r}\n{KERNEL}",
            timeout=LIMIT,
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        status = pathlib.Path(f"/proc/{manager.provisioner.pid}/status").read_text()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    losses, imported = "".join(said).strip().splitlines()[-2:]
    assert imported == "False"
    assert int(status.split("VmHWM:")[1].split()[0]) / 1024 < 150  # MiB, at the peak
    way = gradlab.AccumulationLab(updates=50, seeds=2).experiment
    assert losses == str(run(way).losses.tolist())


@pytest.fixture
def cluster():
    with (
        LocalCluster(2, threads_per_worker=1, **QUIET) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_repeats_the_run(make, cluster):
    lab = make(executor=cluster, updates=3000, seeds=1, eval_every=1000)
    pids = cluster.run(os.getpid)
    lab.run()
    wait_until(lambda: updates_made(lab) > 5)
    [busy] = [address for address, keys in cluster.processing().items() if keys]
    os.kill(pids[busy], signal.SIGKILL)
    wait_until(lambda: "a worker was lost: another repeats the run, and goes on" in lab.status)
    assert lab.wait() is State.FINISHED
    assert lab.result == run(lab.experiment)


@pytest.mark.slow
def test_a_cluster_by_its_address_loses_a_worker_and_its_scheduler(make, tmp_path, monkeypatch):
    """As in a notebook that `gradlab lab --dask ADDRESS` opened."""
    cluster = DaskProcesses(tmp_path, workers=2)
    monkeypatch.setenv(DASK, cluster.address)
    try:
        lab = make(updates=3000, seeds=1, eval_every=1000)
        lab.run()
        wait_until(lambda: updates_made(lab) > 5)
        with Client(cluster.address, set_as_default=False) as client:
            [busy] = [address for address, keys in client.processing().items() if keys]
            name = client.scheduler_info()["workers"][busy]["name"]
        cluster.workers[int(name)].kill()
        wait_until(lambda: "a worker was lost: another repeats the run, and goes on" in lab.status)
        assert lab.wait() is State.FINISHED
        assert lab.result == run(lab.experiment)
        client = cluster_at(cluster.address).client()
        cluster.stop()
        wait_until(lambda: client.status != "running")
        lab.run()
        assert lab.wait() is State.FAILED
        assert (
            f"there must be a Dask scheduler at {cluster.address}: it does not answer" in lab.status
        )
        cluster.start()
        lab.run(updates=40)
        assert lab.wait() is State.FINISHED and lab.result == run(lab.experiment)
    finally:
        cluster.stop()


LAB = """
import sys
import time
import gradlab
from distributed import Client
from gradlab.lab.widget.live_run import State
lab = gradlab.AccumulationLab(executor=Client(sys.argv[1]), updates=10**6, seeds=1, rerun=False)
lab.run()
while lab.result is None and lab.state in (State.STARTING, State.RUNNING):
    time.sleep(0.05)
print("trains" if lab.result else lab.status, flush=True)
lab.wait(10**6)
"""


@pytest.mark.slow
def test_a_lab_that_is_killed_leaves_no_training_behind(cluster):
    command = [sys.executable, "-c", LAB, cluster.scheduler.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "trains\n"
        assert any(cluster.processing().values())
        job.kill()
    for worker in cluster.run(os.getpid):  # each worker has one thread, which is free again
        is_free(cluster, workers=[worker])

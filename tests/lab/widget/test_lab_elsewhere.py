"""Labs whose runs are trained by an executor's workers: the same numbers, and what happens when one
side is lost."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from dask_processes import DaskProcesses
from events import LIMIT, wait_until
from jupyter_client.manager import start_new_kernel
from lab_widgets import Page, click, run_to_the_end, updates_made, wait_for_pause

import gradlab
from gradlab.lab.experiments import stream
from gradlab.lab.experiments.cluster import DASK, cluster_of_environment
from gradlab.lab.experiments.run import run
from gradlab.lab.experiments.sweep import processes
from gradlab.lab.widget import page_messages
from gradlab.lab.widget.live_run import State


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def queue():
    """An executor that never trains, and tells the run's place."""

    class Job(concurrent.futures.Future):
        place = 0

    class Queue:
        job = None

        def submit(self, *work):
            self.job = Job()
            return self.job

    return Queue()


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
    pool.submit(int).result(timeout=LIMIT)  # the only worker is free again


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
    pool.submit(int).result(timeout=LIMIT)


def test_pause_and_steps(make, pool):
    lab = make(executor=pool, accumulation_steps=3, seeds=1)
    lab.step()
    wait_for_pause(lab, "micro-batch 1 of 3")
    lab.step(update=True)
    wait_for_pause(lab, "applied once, as update 1")
    lab.pause(False)
    assert lab.wait() is State.FINISHED
    assert lab.result == run(lab.experiment)


def test_a_worker_waits_for_a_lab_that_shows_nothing(pool):
    key, endless = b"key", gradlab.Experiment(model="dense", updates=10**9, seeds=1)
    with multiprocessing.connection.Listener(("127.0.0.1", 0), authkey=key) as listener:
        work = pool.submit(stream.train_and_send, listener.address, key, endless.to_json(), None)
        with listener.accept() as line:
            assert line.recv()[0] == "about"
            assert [line.recv()[0] for _ in range(stream.AHEAD)] == ["updates"] * stream.AHEAD
            assert not line.poll(1)  # seconds, in which a worker that did not wait would send more
            line.send("more")
            assert line.recv()[0] == "updates"
    work.result(timeout=LIMIT)  # the line is closed, and the training ends


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


def test_a_run_that_the_executor_cancels_says_so(make):
    class Cancels:
        def submit(self, *work):
            cancelled = concurrent.futures.Future()
            cancelled.cancel()
            return cancelled

    lab = make(executor=Cancels())
    lab.run()
    assert lab.wait() is State.FAILED
    assert lab.status.startswith(
        "failed: the executor has cancelled it, as Dask does when it loses its scheduler"
    )


def test_a_page_asks_less_often_the_longer_the_queue(make, queue):
    lab = make(executor=queue, hide=())
    page = Page(lab)
    lab.run()
    wait_until(lambda: queue.job is not None)
    for place, again in ((9, 1000), (2, 500), (1, 250), (0, page_messages.SOON)):
        queue.job.place = place
        wait_until(lambda again=again: page.ask()["again"] == again)
        assert f"place {place or 1} in the queue" in lab.status
    click(lab, "stop")
    assert lab.wait() is State.FINISHED


def test_stop_in_a_queue_does_not_wait_for_the_next_look_at_the_place(make, queue, monkeypatch):
    monkeypatch.setattr(stream, "QUEUE_SECONDS", 2 * LIMIT)
    lab = make(executor=queue)
    lab.run()
    wait_until(lambda: queue.job is not None)
    click(lab, "stop")
    wait_until(lambda: lab.state is State.FINISHED)


def test_callers_without_the_key_are_turned_away(make, pool):
    class Attacked:
        def submit(self, function, address, key, *rest):
            with pytest.raises(multiprocessing.AuthenticationError):
                multiprocessing.connection.Client(address, authkey=b"guessed")
            return pool.submit(function, address, key, *rest)

    lab = make(executor=Attacked())
    run_to_the_end(lab)
    assert lab.result == run(lab.experiment)


def test_refusals(make):
    for wrong in (4, "dask"):
        with pytest.raises(
            ValueError,
            match="^executor must be a concurrent.futures.Executor, a Dask client or None",
        ):
            make(executor=wrong)
    forks = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    with forks, pytest.raises(ValueError, match="^executor must spawn its processes"):
        make(executor=forks)


KERNEL = """
import sys
import gradlab
from gradlab.lab.experiments.sweep import processes
pool = processes(1, towers=3, seed=0)
lab = gradlab.AccumulationLab(executor=pool, updates=50, seeds=2)
display(lab)
lab.run()
assert lab.wait().value == "finished", lab.status
print(lab.result.losses.tolist())
print("tensorflow" in sys.modules)
pool.shutdown()
"""


def test_a_kernel_stays_small_and_never_imports_tensorflow():
    manager, client = start_new_kernel()
    try:
        said = []
        reply = client.execute_interactive(
            KERNEL,
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


@pytest.mark.slow
def test_a_pool_that_lost_its_worker_says_so(make):
    with processes(1) as pool:
        lab = make(executor=pool, updates=10**6)
        lab.run()
        wait_until(lambda: updates_made(lab) > 5)
        multiprocessing.active_children()[0].kill()
        assert lab.wait() is State.FAILED
        assert (
            "BrokenProcessPool: the executor has lost a worker and takes no more jobs: make a new "
            "one" in lab.status
        )
        assert updates_made(lab) > 5  # what was seen stays


@pytest.fixture
def cluster():
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_repeats_the_run(make, cluster):
    lab = make(executor=cluster, updates=3000, seeds=1, eval_every=1000)
    pids = cluster.run(os.getpid)
    lab.run()
    wait_until(lambda: updates_made(lab) > 5)
    lab.pause()  # else the run may be over before the worker is killed
    [busy] = [address for address, keys in cluster.processing().items() if keys]
    os.kill(pids[busy], signal.SIGKILL)
    lab.pause(False)
    wait_until(lambda: "a worker was lost: another repeats the run, and goes on" in lab.status)
    assert lab.wait() is State.FINISHED
    assert lab.result == run(lab.experiment)


@pytest.mark.slow
def test_a_cluster_by_its_address_loses_a_worker_and_its_scheduler(make, tmp_path, monkeypatch):
    """As in a notebook that `gradlab lab --dask ADDRESS` opened."""
    from distributed import Client

    cluster = DaskProcesses(tmp_path, workers=2)
    monkeypatch.setenv(DASK, cluster.address)
    try:
        lab = make(updates=3000, seeds=1, eval_every=1000)
        lab.run()
        wait_until(lambda: updates_made(lab) > 5)
        lab.pause()  # else the run may be over before the worker is killed
        with Client(cluster.address, set_as_default=False) as client:
            [busy] = [address for address, keys in client.processing().items() if keys]
            name = client.scheduler_info()["workers"][busy]["name"]
        cluster.workers[int(name)].kill()
        lab.pause(False)
        wait_until(lambda: "a worker was lost: another repeats the run, and goes on" in lab.status)
        assert lab.wait() is State.FINISHED
        assert lab.result == run(lab.experiment)
        client = cluster_of_environment().client()
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
import gradlab
from distributed import Client
lab = gradlab.AccumulationLab(executor=Client(sys.argv[1]), updates=10**9, seeds=1, rerun=False)
lab.run()
while lab.result is None:
    pass
print("trains", flush=True)
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
        cluster.submit(int, workers=[worker], pure=False).result(timeout=LIMIT)


def test_a_worker_that_calls_where_another_run_listens_now_trains_nothing():
    with multiprocessing.connection.Listener(("127.0.0.1", 0), authkey=b"another run") as listener:

        def refuse():
            with pytest.raises(multiprocessing.AuthenticationError):
                listener.accept()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            refused = pool.submit(refuse)
            stream.train_and_send(listener.address, b"a stopped run", "no experiment", None)
            refused.result()

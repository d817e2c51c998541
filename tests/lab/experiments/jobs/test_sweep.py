"""Sweeps: over processes, threads and a Dask cluster; interrupted, killed, damaged, and
continued."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings

import pytest
from events import LIMIT, is_running, wait_until

import gradlab
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import run as run_module
from gradlab.lab.experiments.jobs.cache import Cache
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.jobs.seed_jobs import jobs_of
from gradlab.lab.experiments.jobs.sweep import processes, sweep
from gradlab.lab.experiments.result import Result

WAY = Experiment(model="dense", microbatch_size=7, accumulation_steps=3, updates=4, seeds=2)
TOGETHER = dataclasses.replace(WAY, method="microbatched")
# A job that is under way until its process is ended
ENDLESS = dataclasses.replace(WAY, updates=10**9, seeds=1)


@pytest.fixture
def counted(monkeypatch):
    """The jobs that were trained in this process, not read from the cache."""
    trained, original = [], run_module.run_job

    def counting(job, *arguments):
        trained.append(job)
        return original(job, *arguments)

    monkeypatch.setattr(run_module, "run_job", counting)
    return trained


def test_a_sweep_gives_what_runs_give_and_keeps_them(tmp_path, counted):
    # The last is one job of the first
    experiments = [WAY, TOGETHER, dataclasses.replace(WAY, seeds=1)]
    found = sweep(experiments, cache=tmp_path, progress=False)
    assert counted == [WAY.of_seeds(0), WAY.of_seeds(1), TOGETHER]
    assert found == [run(experiment) for experiment in experiments]
    counted.clear()
    assert sweep(experiments, cache=tmp_path, progress=False) == found
    assert counted == []
    sweep([dataclasses.replace(WAY, seeds=3)], cache=tmp_path, progress=False)
    assert counted == [WAY.of_seeds(2)]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADLAB_CACHE", str(tmp_path / "here"))
    sweep([WAY.of_seeds(0)], progress=False)
    assert len(list((tmp_path / "here").glob("variables-dense-3x7-*.npz"))) == 1


def test_another_version_does_not_take_the_kept_run(tmp_path, monkeypatch):
    first = Cache(tmp_path).path(WAY)
    monkeypatch.setattr(gradlab, "__version__", "9.9")
    assert Cache(tmp_path).path(WAY) != first


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"the cache must be a folder that exists or can be created \(.*\): .*file"
    ):
        sweep([WAY], cache=tmp_path / "file", progress=False)


def test_a_damaged_file_is_trained_again_and_said(tmp_path, counted):
    [expected] = sweep([WAY], cache=tmp_path, progress=False)
    path = Cache(tmp_path).path(WAY.of_seeds(1))
    path.write_bytes(path.read_bytes()[:1000])
    counted.clear()
    with pytest.warns(
        UserWarning, match="a cached run cannot be read and is trained again: .*" + path.name
    ):
        assert sweep([WAY], cache=tmp_path, progress=False) == [expected]
    assert counted == [WAY.of_seeds(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sweep([WAY], cache=tmp_path, progress=False) == [expected]


def test_a_run_that_cannot_be_kept_is_not_lost(tmp_path, monkeypatch):
    def full(result, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Result, "save", full)
    with pytest.warns(
        UserWarning,
        match="a finished run could not be cached; the sweep continues: .*No space left",
    ):
        [found] = sweep([WAY], cache=tmp_path, progress=False)
    assert found == run(WAY)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, counted):
    counting = run_module.run_job

    def failing(job, *arguments):
        if job.seed_numbers == (0,):
            raise OSError("the network is down")
        return counting(job, *arguments)

    monkeypatch.setattr(run_module, "run_job", failing)
    sentence = "1 of 2 runs failed. The others are cached, .*: variables 3x7, seed 0: OSError: the network is down"
    with pytest.raises(RuntimeError, match=sentence):
        sweep([WAY], cache=tmp_path, progress=False)
    assert counted == [WAY.of_seeds(1)]
    monkeypatch.setattr(run_module, "run_job", counting)
    sweep([WAY], cache=tmp_path, progress=False)
    assert counted == [WAY.of_seeds(1), WAY.of_seeds(0)]


def test_threads_are_an_executor_too(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert sweep([WAY, TOGETHER], pool, tmp_path, progress=False) == [run(WAY), run(TOGETHER)]


def test_the_bar_counts_up_to_all(tmp_path, capsys):
    sweep([WAY.of_seeds(0)], cache=tmp_path)
    sweep([WAY], cache=tmp_path)
    said = capsys.readouterr().err
    assert "100 %" in said and "2.0 of 2" in said and "left" in said


@pytest.mark.slow
def test_processes_give_the_same_and_a_killed_one_loses_nothing_finished(tmp_path):
    """Of two processes, one finishes a job and then, like the other, is at a job without end when
    one is killed."""
    pool, thread = processes(2), concurrent.futures.ThreadPoolExecutor(1)
    experiments = [WAY.of_seeds(0), dataclasses.replace(ENDLESS, seeds=2), WAY.of_seeds(1)]
    try:
        submitted = thread.submit(sweep, experiments, pool, tmp_path, False)
        wait_until(lambda: list(tmp_path.glob("*.npz")))
        multiprocessing.active_children()[0].kill()
        with pytest.raises(
            RuntimeError, match="3 of 4 runs failed. The others are cached, .*BrokenProcessPool"
        ):
            submitted.result(timeout=LIMIT)
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown()
    [kept] = tmp_path.glob("*.npz")
    written = kept.stat().st_mtime_ns
    with processes(1) as pool:
        found = sweep([WAY], pool, tmp_path, progress=False)
    assert found == [run(WAY)]
    assert kept.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_goes_on_and_leaves_no_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            if __name__ == "__main__":
                import dataclasses, gradlab, os
                from gradlab.lab.experiments.jobs.sweep import processes
                gradlab.setup(seed=0)
                way = gradlab.Experiment.from_json({WAY.of_seeds(0).to_json()!r})
                endless = gradlab.Experiment.from_json({ENDLESS.to_json()!r})
                pool = processes(1)
                print(pool.submit(os.getpid).result(), flush=True)
                gradlab.sweep([way, endless], pool, {str(tmp_path)!r}, progress=False)
            """
        )
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as job:
        job.stdout.readline()  # what setup says
        child = int(job.stdout.readline())
        wait_until(lambda: list(tmp_path.glob("*.npz")), job)
        job.kill()
    wait_until(lambda: not is_running(child))
    [kept] = tmp_path.glob("*.npz")
    written = kept.stat().st_mtime_ns
    assert sweep([WAY], cache=tmp_path, progress=False) == [run(WAY)]
    assert kept.stat().st_mtime_ns == written


@pytest.mark.slow
def test_two_sweeps_at_once_share_a_cache(tmp_path):
    """Two processes sweep the same experiments at the same time; what they leave can be read, and
    is right."""
    way = dataclasses.replace(WAY, seeds=6)
    program = tmp_path / "program.py"
    program.write_text(
        "import gradlab\n"
        "gradlab.setup(towers=3, seed=0)\n"
        f"way = gradlab.Experiment.from_json({way.to_json()!r})\n"
        "print('ready', flush=True)\n"
        "input()\n"
        f"gradlab.sweep([way], cache={str(tmp_path)!r}, progress=False)\n"
    )
    command = [sys.executable, "-W", "error::UserWarning", program]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    jobs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for job in jobs:
        assert [job.stdout.readline() for _ in range(2)][1] == "ready\n"
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    for job in jobs:
        job.communicate(timeout=LIMIT)
    assert [job.returncode for job in jobs] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Cache(tmp_path)
        assert all(kept.read(job) is not None for job in jobs_of(way))
        assert sweep([way], cache=tmp_path, progress=False) == [run(way)]
    assert len(list(tmp_path.iterdir())) == 7  # no temporary file is left


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_finishes_the_sweep(tmp_path):
    """A real local cluster with two worker processes. Both have started a job when one of them is
    killed."""
    from distributed import Client, LocalCluster

    started, go = tmp_path / "started", tmp_path / "go"
    started.mkdir()

    class Held:
        """The cluster's executor, with jobs that begin by telling their process and then wait for
        the file `go`."""

        def __init__(self, executor):
            self.executor = executor

        def submit(self, function, *arguments):
            def held():
                import os
                import time

                (started / str(os.getpid())).touch()
                while not go.exists():
                    time.sleep(0.02)
                return function(*arguments)

            return self.executor.submit(held)

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        try:
            going = thread.submit(
                sweep,
                [WAY, TOGETHER],
                Held(client.get_executor(pure=False)),
                tmp_path / "cache",
                False,
            )
            wait_until(lambda: len(list(started.iterdir())) == 2)
            os.kill(int(next(started.iterdir()).name), signal.SIGKILL)
        finally:
            go.touch()
        found = going.result(timeout=LIMIT)
    assert found == [run(WAY), run(TOGETHER)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["lenet"],), "an experiment must be a gradlab.Experiment. Received: 'lenet'"),
        (
            ([WAY], 4),
            "executor must be a concurrent.futures.Executor, a Dask client or None. Received: 4",
        ),
        (
            ([dataclasses.replace(WAY, towers=7)],),
            r"towers must be at most 3, .*setup\(towers=7\).* Received: 7",
        ),
    ],
)
def test_bad_input_gets_one_sentence_before_anything_is_trained(
    arguments, sentence, tmp_path, counted
):
    with pytest.raises(ValueError, match=sentence):
        sweep(*arguments, cache=tmp_path)
    assert counted == []


def test_processes_that_fork_are_refused(tmp_path):
    forking = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    with forking, pytest.raises(ValueError, match="executor must spawn its processes, ") as caught:
        sweep([WAY], forking, tmp_path)
    [line] = re.findall("`(.*)`", str(caught.value))
    names = {}
    exec(line, names)  # a user can do what the message says
    assert names["processes"] is processes
    with pytest.raises(ValueError, match="processes must be a positive integer. Received: 0"):
        processes(0)

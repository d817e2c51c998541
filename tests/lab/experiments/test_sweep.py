"""Sweeps: over processes, threads and a Dask cluster; interrupted, killed, damaged, and gone on with."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest

from gradlab.lab.experiments import sweep as sweep_module
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.sweep import Cache, parts, processes, run, sweep

WAY = Experiment(model="dense", microbatch_size=7, accumulation_steps=3, updates=4, seeds=2)
TOGETHER = dataclasses.replace(WAY, method="microbatched")


@pytest.fixture
def counted(monkeypatch):
    """The parts that were really trained, in this process."""
    trained, original = [], sweep_module.run_part

    def counting(part, *arguments):
        trained.append(part)
        return original(part, *arguments)

    monkeypatch.setattr(sweep_module, "run_part", counting)
    return trained


def test_a_sweep_gives_what_runs_give_and_keeps_them(tmp_path, counted):
    experiments = [WAY, TOGETHER, dataclasses.replace(WAY, seeds=1)]  # the last is a part of the first
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
    monkeypatch.setattr(sweep_module.gradlab, "__version__", "9.9")
    assert Cache(tmp_path).path(WAY) != first


def test_a_damaged_file_is_trained_again_and_said(tmp_path, counted):
    [expected] = sweep([WAY], cache=tmp_path, progress=False)
    path = Cache(tmp_path).path(WAY.of_seeds(1))
    path.write_bytes(path.read_bytes()[:1000])
    counted.clear()
    with pytest.warns(UserWarning, match="a kept run cannot be read and is trained again: .*" + path.name):
        assert sweep([WAY], cache=tmp_path, progress=False) == [expected]
    assert counted == [WAY.of_seeds(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sweep([WAY], cache=tmp_path, progress=False) == [expected]


def test_a_run_that_cannot_be_kept_is_not_lost(tmp_path, monkeypatch):
    def full(result, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(sweep_module.Result, "save", full)
    with pytest.warns(UserWarning, match="a finished run could not be kept, and the sweep goes on: .*No space left"):
        [found] = sweep([WAY], cache=tmp_path, progress=False)
    assert found == run(WAY)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, counted):
    counting = sweep_module.run_part

    def failing(part, *arguments):
        if part.seed_numbers == (0,):
            raise OSError("the network is down")
        return counting(part, *arguments)

    monkeypatch.setattr(sweep_module, "run_part", failing)
    sentence = "1 of 2 runs failed, the others are kept .*: variables 3x7, seed 0: OSError: the network is down"
    with pytest.raises(RuntimeError, match=sentence):
        sweep([WAY], cache=tmp_path, progress=False)
    assert counted == [WAY.of_seeds(1)]
    monkeypatch.setattr(sweep_module, "run_part", counting)
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
    way = dataclasses.replace(WAY, seeds=4, updates=400)
    pool = processes(2)
    with pool, pytest.raises(RuntimeError, match="runs failed, the others are kept .*BrokenProcessPool"):
        submitted = concurrent.futures.ThreadPoolExecutor(1).submit(sweep, [way], pool, tmp_path, False)
        while not list(tmp_path.glob("*.npz")):
            time.sleep(0.05)
        os.kill(next(iter(pool._processes)), signal.SIGKILL)
        submitted.result(timeout=120)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    assert 1 <= len(kept) < 4
    with processes(1) as pool:
        found = sweep([way], pool, tmp_path, progress=False)
    assert found == [run(way)]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_goes_on_and_leaves_no_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            if __name__ == "__main__":
                import gradlab
                from gradlab.lab.experiments.sweep import processes
                gradlab.setup(seed=0)
                way = gradlab.Experiment(model="dense", microbatch_size=7, accumulation_steps=3, updates=400, seeds=4)
                pool = processes(1)
                pool.submit(int).result()
                print(*pool._processes, flush=True)
                gradlab.sweep([way], pool, {str(tmp_path)!r}, progress=False)
            """
        )
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as job:
        job.stdout.readline()
        [child] = map(int, job.stdout.readline().split())
        while not list(tmp_path.glob("*.npz")):
            time.sleep(0.02)
        job.kill()
    kept = set(tmp_path.glob("*.npz"))
    assert 1 <= len(kept) < 4
    began = time.monotonic()
    while os.path.exists(f"/proc/{child}") and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")
    way = dataclasses.replace(WAY, updates=400, seeds=4)
    times = {path: path.stat().st_mtime_ns for path in kept}
    assert sweep([way], cache=tmp_path, progress=False) == [run(way)]
    assert {path: path.stat().st_mtime_ns for path in kept} == times


@pytest.mark.slow
def test_two_sweeps_at_once_share_a_cache(tmp_path):
    """Two processes sweep the same experiments at the same time; what they leave can be read, and is right."""
    program = tmp_path / "program.py"
    program.write_text(
        "import gradlab, sys\n"
        "gradlab.setup(towers=3, seed=0)\n"
        'way = gradlab.Experiment(model="dense", microbatch_size=7, accumulation_steps=3, updates=4, seeds=6)\n'
        f"gradlab.sweep([way], cache={str(tmp_path)!r}, progress=False)\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-W", "error::UserWarning", program]) for _ in range(2)]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way = dataclasses.replace(WAY, seeds=6)
        kept = Cache(tmp_path)
        assert all(kept.read(part) is not None for part in parts(way))
        assert sweep([way], cache=tmp_path, progress=False) == [run(way)]
    assert len(list(tmp_path.iterdir())) == 7  # nothing half-written is left


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_finishes_the_sweep(tmp_path):
    """A real local cluster with two worker processes, one of which is killed while it trains."""
    from distributed import Client, LocalCluster

    way = dataclasses.replace(WAY, seeds=6, updates=300)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        going = thread.submit(sweep, [way, TOGETHER], client.get_executor(), tmp_path, False)
        while not list(tmp_path.glob("*.npz")):
            time.sleep(0.05)
        pids = client.run(os.getpid)
        assert len(pids) == 2
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        found = going.result(timeout=300)
    assert found == [run(way), run(TOGETHER)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["lenet"],), "an experiment must be a gradlab.Experiment. Received: 'lenet'"),
        (([WAY], 4), "executor must be a concurrent.futures.Executor or None. Received: 4"),
        (([dataclasses.replace(WAY, towers=7)],), r"towers must be at most 3, .*setup\(towers=7\).* Received: 7"),
    ],
)
def test_bad_input_gets_one_sentence_before_anything_is_trained(arguments, sentence, tmp_path, counted):
    with pytest.raises(ValueError, match=sentence):
        sweep(*arguments, cache=tmp_path)
    assert counted == []


def test_processes_that_fork_are_refused(tmp_path):
    forking = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    with forking, pytest.raises(ValueError, match=r"executor must spawn its processes, .*processes\(workers\)"):
        sweep([WAY], forking, tmp_path)
    with pytest.raises(ValueError, match="processes must be a positive integer. Received: 0"):
        processes(0)

"""Clusters of real worker processes on the loopback interface, some of which are killed or
interrupted."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
from paths import SUPPORT

from gradlab import cluster, runtime
from gradlab.__main__ import main

WORKER = str(SUPPORT / "cluster_worker.py")


def run(mode, out, workers, expected=0, command=forked.command):
    """Run the worker script as a cluster or alone, and return its output.

    Args:
        mode, out: its arguments.
        workers: the number of its processes.
        expected: the status.
        command: a function (*arguments) -> the command that runs `python *arguments`.
    """
    out.mkdir(exist_ok=True)
    if workers == 1:
        done = forked.run(WORKER, mode, out)
        status, output = done.returncode, done.stdout + done.stderr
    else:
        stream = io.StringIO()
        status = cluster.launch(command(WORKER, mode, str(out)), workers, stream)
        output = stream.getvalue()
    assert status == expected, output[-3000:]
    return output


def python(*arguments):
    """The command of processes that are started, not forked: those that are killed, and those that
    come after them."""
    return [sys.executable, *arguments]


def weights(out):
    with np.load(out / "weights.npz") as saved:
        return list(saved.values())


@pytest.mark.slow
def test_two_workers_with_uneven_shards_and_one_all_reduce_per_window(tmp_path):
    output = run("step", tmp_path / "two", 2)
    run("step", tmp_path / "one", 1)
    for one, other in zip(weights(tmp_path / "one"), weights(tmp_path / "two")):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert sorted(
        re.findall(r"\[worker (\d)\] update 1: loss .*, (\d+) micro-batches", output)
    ) == [
        ("0", "3"),
        ("1", "10"),
    ]
    # Read from the graph of the whole update, which is the only one with collectives: it has one
    # all-reduce, although the workers have 3 and 10 micro-batches.
    assert set(re.findall("collectives: .*", output)) == {"collectives: [['CollectiveReduceV2']]"}


@pytest.mark.slow
def test_workers_agree_on_the_size_that_memory_allows_on_each_and_see_the_whole_batch(tmp_path):
    output = run("auto", tmp_path / "two", 2)
    run("auto", tmp_path / "one", 1)
    for one, other in zip(weights(tmp_path / "one"), weights(tmp_path / "two")):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert "[worker 1] refused: memory must be at least" in output
    refused = "on each worker. Received: a worker on which it does not"
    assert f"[worker 0] refused: memory must hold a micro-batch of one example {refused}" in output
    said = re.findall(
        r"\[worker (\d)\] loss (.*), gradlab: micro-batches of (\d+), 1 in flight: (.*)", output
    )
    assert len(said) == 4 and {size for _, _, size, _ in said} == {"4"}
    assert len({loss for _, loss, *_ in said}) == 2  # both workers name the loss of both
    for worker, *_, reason in said:
        if worker == "0":
            assert reason.startswith("the whole batch, which fits in ")
            assert reason.endswith(
                "half of what is available for 2 workers on this machine, on the worker that "
                "allows least; here 9"
            )
        else:
            assert re.fullmatch(r"the largest that fits in \d+ MiB", reason)


@pytest.mark.slow  # six TensorFlow processes, of which four import it
def test_a_job_whose_worker_was_killed_resumes_and_ends_with_the_same_bits(tmp_path):
    undisturbed = run("fit", tmp_path / "undisturbed", 2)
    assert "updates: [1, 2, 3, 4, 5, 6, 7, 8]" in undisturbed
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "die").touch()
    run("fit", tmp_path / "killed", 2, expected=128 + signal.SIGKILL, command=python)
    assert not (tmp_path / "killed" / "weights.npz").exists()
    resumed = run("fit", tmp_path / "killed", 2, command=python)
    assert "updates: [4, 5, 6, 7, 8]" in resumed  # from the checkpoint after the third update
    for one, other in zip(weights(tmp_path / "undisturbed"), weights(tmp_path / "killed")):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_all_after_the_same_update(tmp_path):
    (tmp_path / "stop").touch()
    output = run("fit", tmp_path, 2, expected=128 + signal.SIGTERM)
    assert "updates:" not in output
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-3.npz", "checkpoint-5.npz", "lock"]
    assert run("fit", tmp_path, 2).count("updates: [6, 7, 8]") == 2


def test_the_fit_of_keras_is_refused_on_several_workers(tmp_path):
    output = run("keras", tmp_path, 2, expected=1)
    assert (
        "ValueError: Keras' fit works on one machine: train on several workers with "
        "gradlab.Trainer. Rec" in output
    )


def gone(pid):
    """Whether a process has ended; a zombie has ended too."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def wait_until(condition):
    """Wait for an event. The limit only ends a test that has already failed: no test takes nearly
    as long."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def interrupt_launch(number, script, tmp_path):
    """Send a signal to `gradlab launch` when both workers have written their process number, and
    check all ended."""
    command = [
        sys.executable,
        "-m",
        "gradlab",
        "launch",
        "--workers",
        "2",
        "--",
        script,
        "wait",
        str(tmp_path),
    ]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(
        lambda: (
            launcher.poll() is not None or all(file.exists() and file.read_text() for file in files)
        )
    )
    assert launcher.poll() is None, launcher.communicate()[0].decode()
    pids = [int(file.read_text()) for file in files]
    launcher.send_signal(number)
    launcher.communicate()
    assert launcher.returncode == 128 + number
    wait_until(lambda: all(gone(pid) for pid in pids))


WAIT = """
import json, os, signal, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with open(os.path.join(sys.argv[2], f"pid{index}"), "w") as file:
    file.write(str(os.getpid()))
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_leaves_no_process_behind(number, tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    interrupt_launch(number, str(tmp_path / "wait.py"), tmp_path)


@pytest.mark.slow  # the same with workers that train
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_ends_workers_that_train(number, tmp_path):
    interrupt_launch(number, WORKER, tmp_path)


# Every worker starts a process that would outlive it. Worker 1 fails when all have done so.
FAILS = """
import json, os, signal, subprocess, sys, time
index, folder = json.loads(os.environ["TF_CONFIG"])["task"]["index"], sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
open(os.path.join(folder, str(index)), "w").close()
if index == 1:
    while len(os.listdir(folder)) < 3:
        time.sleep(0.02)
    print("about to fail")
    sys.exit(7)
signal.pause()
"""


def test_if_one_worker_fails_the_others_end_with_the_processes_that_they_started(tmp_path):
    output = io.StringIO()
    assert cluster.launch([sys.executable, "-c", FAILS, str(tmp_path)], 3, output) == 7
    assert "[worker 1] about to fail\n" in output.getvalue()
    children = [int(pid) for pid in re.findall(r"child (\d+)", output.getvalue())]
    assert len(children) == 3
    wait_until(lambda: all(gone(pid) for pid in children))


# Worker 1 ignores SIGTERM, and worker 0 fails as soon as it does.
IGNORES = """
import json, os, signal, sys, time
file = os.path.join(sys.argv[1], "pid")
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    while not os.path.exists(file):
        time.sleep(0.02)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
open(file, "w").close()
while True:
    signal.pause()
"""


def test_a_worker_that_ignores_termination_is_killed(tmp_path):
    output = io.StringIO()
    assert cluster.launch([sys.executable, "-c", IGNORES, str(tmp_path)], 2, output, grace=0.5) == 3
    [pid] = re.findall(r"pid (\d+)", output.getvalue())
    wait_until(lambda: gone(int(pid)))


DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_killed_worker_is_no_success():
    assert cluster.launch([sys.executable, "-c", DIES], 2, io.StringIO()) == 128 + signal.SIGKILL


SHOW = "import os; print(os.environ['TF_CONFIG'])"


def test_every_worker_knows_the_cluster_and_its_place():
    output = io.StringIO()
    assert cluster.launch([sys.executable, "-c", SHOW], 3, output) == 0
    found = sorted(re.findall(r"\[worker (\d)\] (.*)", output.getvalue()))
    configs = [json.loads(config) for _, config in found]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": i} for i in range(3)
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3 and all(
        config["cluster"]["worker"] == addresses for config in configs
    )
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_the_command_line_passes_arguments_to_the_script(capfd, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('got', sys.argv[1:])")
    assert main(["launch", "--workers", "2", "--", str(script), "--workers", "9", "a b"]) == 0
    assert capfd.readouterr().out.count("got ['--workers', '9', 'a b']") == 2
    assert main(["launch", "--workers", "0", "--", str(script)]) == 2
    assert "workers must be a positive integer. Received: 0" in capfd.readouterr().err
    with pytest.raises(ValueError, match="^launch needs a command to run. Received: none$"):
        cluster.launch([], 2)


def test_the_strategy_over_towers():
    assert cluster.strategy() is cluster.strategy()
    assert (
        type(cluster.strategy()).__name__ == "MirroredStrategy"
        and cluster.strategy().num_replicas_in_sync == 3
    )


CHOSEN = """
import gradlab
gradlab.setup()
strategy = gradlab.cluster.strategy()
print(type(strategy).__name__, strategy.num_replicas_in_sync, getattr(strategy.cluster_resolver, "task_id", None))
"""
# The ports follow from the number of the job: two test runs on one machine need different ones.
SLURM = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()),
}  # fmt: skip


def test_the_strategy_for_one_device():
    done = forked.run("-c", CHOSEN)
    assert "_DefaultDistributionStrategy 1 None" in done.stdout, done.stderr


def test_the_strategy_on_slurm():
    """Two processes with the environment variables of SLURM's tasks find each other by TensorFlow's
    resolver."""
    tasks = [
        forked.start(
            "-c",
            CHOSEN,
            env={**os.environ, **SLURM, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
        )
        for i in range(2)
    ]
    for i, task in enumerate(tasks):
        task.wait()
        output = task.stdout() + task.stderr()
        assert re.search(rf"(CollectiveAllReduce|MultiWorkerMirrored)Strategy 2 {i}", output), (
            output
        )


def test_the_strategy_must_come_before_tensorflow_starts(tmp_path):
    config = {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 0},
    }
    script = (
        "import tensorflow as tf; tf.zeros([]); from gradlab import cluster; cluster.strategy()"
    )
    done = forked.run("-c", script, env={**os.environ, "TF_CONFIG": json.dumps(config)})
    assert (
        "RuntimeError: gradlab.cluster.strategy must run before TensorFlow starts its devices"
        in done.stderr
    )


def test_workers_are_counted(monkeypatch):
    assert runtime.workers() == 1
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}}),
    )
    assert runtime.workers() == 3


def test_workers_on_this_machine_are_counted(monkeypatch):
    assert runtime.workers_here() == 1
    cluster = {"chief": ["a:1"], "worker": ["b:1", "a:2", "b:2", "b:3"]}
    for kind, index, expected in (("chief", 0, 2), ("worker", 0, 3), ("worker", 1, 2)):
        task = {"type": kind, "index": index}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        assert runtime.workers_here() == expected
    monkeypatch.delenv("TF_CONFIG")
    for tasks, expected in (("3", 3), ("2(x3),1", 2), ("1,4(x2)", 4)):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        assert runtime.workers_here() == expected

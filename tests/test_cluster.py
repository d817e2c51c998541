"""Clusters: real worker processes on the loopback interface, killed and interrupted for real."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from paths import SUPPORT

from gradlab import cluster, runtime
from gradlab.__main__ import main

WORKER = str(SUPPORT / "cluster_worker.py")


def run(mode, out, workers, expected=0):
    """Runs the worker script as a cluster, or alone; gives what it printed."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, WORKER, mode, str(out)]
    if workers == 1:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        status, said = done.returncode, done.stdout + done.stderr
    else:
        said = io.StringIO()
        status = cluster.launch(command, workers, said)
        said = said.getvalue()
    assert status == expected, said[-3000:]
    return said


def weights(out):
    with np.load(out / "weights.npz") as saved:
        return list(saved.values())


def test_two_workers_with_uneven_shards_and_one_all_reduce_a_window(tmp_path):
    said = run("step", tmp_path / "two", 2)
    run("step", tmp_path / "one", 1)
    for one, other in zip(weights(tmp_path / "one"), weights(tmp_path / "two")):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert re.findall(r"\[worker (\d)\] update 1: loss .*, (\d+) micro-batches", said) in (
        [("0", "3"), ("1", "10")],
        [("1", "10"), ("0", "3")],
    )
    # Read from the graph of the whole update: one all-reduce, for any number of micro-batches.
    assert set(re.findall("collectives: .*", said)) == {"collectives: ['CollectiveReduceV2']"}


def test_a_killed_worker_s_job_is_restarted_and_ends_with_the_same_bits(tmp_path):
    calm = run("fit", tmp_path / "calm", 2)
    assert "updates: [1, 2, 3, 4, 5, 6, 7, 8]" in calm
    (tmp_path / "hit").mkdir()
    (tmp_path / "hit" / "die").touch()
    run("fit", tmp_path / "hit", 2, expected=128 + signal.SIGKILL)
    assert not (tmp_path / "hit" / "weights.npz").exists()
    again = run("fit", tmp_path / "hit", 2)
    assert "updates: [4, 5, 6, 7, 8]" in again  # from the checkpoint after the third
    for one, other in zip(weights(tmp_path / "calm"), weights(tmp_path / "hit")):
        np.testing.assert_array_equal(one, other)


def test_keras_fit_on_several_workers_is_refused_in_a_sentence(tmp_path):
    said = run("keras", tmp_path, 2, expected=1)
    assert "ValueError: Keras' fit works on one machine: train on several workers with gradlab.Trainer. Rec" in said


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie has ended too; its parent has not asked yet.
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" if Path(f"/proc/{pid}/stat").exists() else False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_leaves_no_process_behind(number, tmp_path):
    command = [sys.executable, "-m", "gradlab", "launch", "--workers", "2", "--", WORKER, "slow", str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert all(gone(pid) for pid in pids)


FAILS = """
import json, os, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid)
if index == 1:
    print("about to fail")
    sys.exit(7)
time.sleep(600)
"""


def test_when_one_worker_fails_the_others_end_with_all_that_they_started():
    said, begun = io.StringIO(), time.monotonic()
    assert cluster.launch([sys.executable, "-c", FAILS], 3, said) == 7
    assert time.monotonic() - begun < 60
    assert "[worker 1] about to fail\n" in said.getvalue()
    children = [int(pid) for pid in re.findall(r"child (\d+)", said.getvalue())]
    assert children and all(gone(pid) for pid in children)


STUBBORN = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(3 if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0 else time.sleep(600))
"""


def test_a_worker_that_does_not_listen_is_killed(tmp_path):
    (tmp_path / "go").touch()
    assert cluster.launch([sys.executable, "-c", STUBBORN, str(tmp_path / "go")], 2, io.StringIO(), grace=0.5) == 3


SHOW = "import os; print(os.environ['TF_CONFIG'])"


def test_every_worker_knows_the_cluster_and_its_place():
    said = io.StringIO()
    assert cluster.launch([sys.executable, "-c", SHOW], 3, said) == 0
    found = sorted(re.findall(r"\[worker (\d)\] (.*)", said.getvalue()))
    configs = [json.loads(config) for _, config in found]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3 and all(config["cluster"]["worker"] == addresses for config in configs)
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_the_command_line(capfd, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('got', sys.argv[1:])")
    assert main(["launch", "--workers", "2", "--", str(script), "--workers", "9", "a b"]) == 0
    assert capfd.readouterr().out.count("got ['--workers', '9', 'a b']") == 2
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--workers", "0", "--", str(script)])
    assert "workers must be a positive integer. Received: 0" in capfd.readouterr().err
    with pytest.raises(ValueError, match="^launch needs a command to run. Received: none$"):
        cluster.launch([], 2)


def test_the_strategy_over_towers():
    assert cluster.strategy() is cluster.strategy()
    assert type(cluster.strategy()).__name__ == "MirroredStrategy" and cluster.strategy().num_replicas_in_sync == 3


CHOSEN = """
import gradlab
gradlab.setup({})
strategy = gradlab.cluster.strategy()
print(type(strategy).__name__, strategy.num_replicas_in_sync, getattr(strategy.cluster_resolver, "task_id", None))
"""
SLURM = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "1",
}  # fmt: skip


def test_the_strategy_for_one_device():
    done = subprocess.run([sys.executable, "-c", CHOSEN.format("")], capture_output=True, text=True, check=False)
    assert "_DefaultDistributionStrategy 1 None" in done.stdout, done.stderr


def test_the_strategy_on_slurm():
    """Two processes with what SLURM tells its tasks; TensorFlow's resolver finds the other."""
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", CHOSEN.format("")],
            env={**os.environ, **SLURM, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    said = [task.communicate(timeout=60)[0] for task in tasks]
    for i in range(2):
        assert f"CollectiveAllReduceStrategy 2 {i}" in said[i] or f"MultiWorkerMirroredStrategy 2 {i}" in said[i], said[
            i
        ]


def test_the_strategy_must_come_before_tensorflow_starts(tmp_path):
    config = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    script = "import tensorflow as tf; tf.zeros([]); from gradlab import cluster; cluster.strategy()"
    env = {**os.environ, "TF_CONFIG": json.dumps(config)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "RuntimeError: gradlab.cluster.strategy must run before TensorFlow starts its devices" in done.stderr


def test_workers_are_counted(monkeypatch):
    assert runtime.workers() == 1
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}})
    )
    assert runtime.workers() == 3

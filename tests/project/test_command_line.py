"""The command line, run as its user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gradlab.__main__ import OPTIONS, main
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result

QUICK = ["--model", "dense", "--microbatch-size", "7", "--accumulation-steps", "3", "--updates", "4"]


@pytest.fixture
def gradlab(tmp_path):
    def call(*arguments, status=0, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "gradlab", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "GRADLAB_CACHE": str(tmp_path / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stderr
        return done

    return call


def test_the_options_are_the_experiment_s_fields():
    from dataclasses import fields

    assert list(OPTIONS) == [field.name for field in fields(Experiment)]


def test_help_is_quick_and_names_every_command(gradlab):
    began = time.monotonic()
    said = gradlab("--help").stdout
    assert time.monotonic() - began < 2  # TensorFlow alone takes longer
    for command in ("run", "sweep", "reproduce", "plot", "devices", "doctor", "launch"):
        assert re.search(rf"(?m)^    {command}\b", said)


@pytest.mark.slow
def test_run_then_plot(gradlab, tmp_path, capsys):
    done = gradlab("run", *QUICK, "--seeds", 2, "--out", "a.npz")
    assert "Result: variables, dense on mnist, k = 3, b = 7; 2 finished" in done.stdout
    assert "last accuracy percent" in done.stdout
    kept = Result.load(tmp_path / "a.npz")
    assert kept.seeds == (0, 1)
    again = json.loads(gradlab("run", *QUICK, "--seeds", 2, "--json").stdout)
    assert again[0]["endings"] == ["finished", "finished"] and again == [kept.summary()]
    for kind in ("losses", "accuracy", "loss_noise", "noise_scale", "cost"):
        path = str(tmp_path / f"{kind}.png")
        assert main(["plot", str(tmp_path / "a.npz"), "--kind", kind, "--out", path]) == 0
        assert capsys.readouterr().out.startswith(f"{path}: ")
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    said = json.loads(gradlab("plot", "a.npz", "--kind", "accuracy", "--against", "seconds", "--json").stdout)
    assert said["file"] == "figure.png" and "seconds" in said["text"]


@pytest.mark.slow
def test_sweep_over_processes(gradlab, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        '[all]\nmodel = "dense"\nupdates = 3\nseeds = 2\n[grid]\naccumulation_steps = [1, 2]'
    )
    done = gradlab("sweep", "sweep.toml", "--processes", 2, "--out", "results", "--json")
    assert [each["experiment"]["accumulation_steps"] for each in json.loads(done.stdout)] == [1, 2]
    files = sorted(file.name for file in (tmp_path / "results").iterdir())
    assert files == ["00-variables-1x20.npz", "01-variables-2x20.npz"]
    assert "WARNING" not in done.stderr and "oneDNN" not in done.stderr  # start-up noise, of workers too


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_finished(tmp_path):
    """In this process and in several: the status is that of Ctrl-C, nothing half-written is left, no process stays."""
    for processes in ("1", "2"):
        cache = tmp_path / processes
        command = [sys.executable, "-m", "gradlab", "run", *QUICK[:-1], "800", "--seeds", "6"]
        command += ["--processes", processes, "--cache", str(cache)]
        job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        began = time.monotonic()
        while not list(cache.glob("*.npz")) and time.monotonic() - began < 120:
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to all of them
        said = job.communicate(timeout=60)[1]
        assert job.returncode == 130, said
        assert "interrupted; the runs that were finished are kept" in said
        kept = list(cache.iterdir())
        assert 1 <= len(kept) < 6 and all(Result.load(file).endings == ("finished",) for file in kept)
        with pytest.raises(ProcessLookupError):
            for _ in range(200):
                os.killpg(job.pid, 0)
                time.sleep(0.05)


@pytest.mark.slow
def test_reproduce_quick(gradlab, tmp_path):
    began = time.monotonic()
    done = gradlab("reproduce", "--quick", "--out", "here")
    assert "not to be compared with the published ones" in done.stdout
    assert "20 x 5" in done.stdout and "95.2 ± 0.30" in done.stdout
    assert len(list((tmp_path / "here").iterdir())) == 5
    print(f"reproduce --quick took {time.monotonic() - began:.0f} s")
    rows = json.loads(gradlab("reproduce", "--quick", "--json").stdout)  # from the cache
    assert len(rows) == 24 and not (tmp_path / "data").exists()


def test_devices(gradlab):
    found = json.loads(gradlab("devices", "--json").stdout)
    assert found["towers"] and found["device"] and found["processor"]


@pytest.mark.slow
def test_doctor(gradlab, tmp_path):
    findings = json.loads(gradlab("doctor", "--json").stdout)
    names = ["Python", "packages", "data", "devices", "training", "cache", "JupyterLab", "kernel", "widgets"]
    assert [finding["name"] for finding in findings] == names
    assert all(finding["good"] and finding["found"] and not finding["mend"] for finding in findings)
    (tmp_path / "a file").write_text("")
    said = gradlab("doctor", status=1, GRADLAB_CACHE=str(tmp_path / "a file")).stdout
    assert "  BAD  cache: " in said and "mend: set GRADLAB_CACHE to a folder that you may write to" in said


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["run", "--model", "resnet"], 2, "model must be one of lenet, dense, vgg. Received: 'resnet'"),
        (["run", "--updates", "0"], 2, "updates must be a positive integer. Received: 0"),
        (
            ["run", "--seeds", "0"],
            2,
            "seeds must be different integers of 0 or more, or a positive integer. Received: 0",
        ),
        (["run", "--processes", "0"], 2, "processes must be a positive integer. Received: 0"),
        (["run", "--processes", "2", "--dask", "tcp://x"], 2, "give --processes or --dask. Received: both"),
        (["run", "--updates", "many"], 2, "argument --updates: invalid int value: 'many'"),
        (["sweep", "none.toml"], 1, "No such file or directory: 'none.toml'"),
        (["plot", "none.npz"], 1, "No such file or directory: 'none.npz'"),
        (["fly"], 2, "invalid choice: 'fly'"),
        ([], 2, "required: COMMAND"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, status, sentence, capsys):
    try:
        found = main(arguments)
    except SystemExit as end:  # how argparse ends
        found = end.code
    assert found == status and sentence in capsys.readouterr().err


def test_bad_input_ends_with_its_status_and_no_traceback(gradlab):
    said = gradlab("run", "--model", "resnet", status=2).stderr
    assert "model must be one of lenet, dense, vgg. Received: 'resnet'" in said and "Traceback" not in said

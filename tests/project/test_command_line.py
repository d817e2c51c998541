"""The command line, as its user meets it. Most tests call `main` in this process, which spares
TensorFlow's start."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import types
from dataclasses import fields, replace

import forked
import numpy as np
import pytest
from events import LIMIT, is_running, wait_until
from paths import ROOT

import gradlab
from gradlab import runtime
from gradlab.__main__ import EXTRAS, OPTIONS, main
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import sweep_file
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.result import Result

QUICK = [
    "--model",
    "dense",
    "--microbatch-size",
    "7",
    "--accumulation-steps",
    "3",
    "--updates",
    "4",
]
# A job that is finished at once, and then jobs that are under way until their process is ended.
ENDLESS = '[all]\nmodel = "dense"\n[[run]]\nupdates = 4\nseeds = 1\n[[run]]\nupdates = 1_000_000_000\nseeds = 2\n'
COMMANDS = ("lab", "run", "sweep", "reproduce", "plot", "devices", "doctor", "launch")


@pytest.fixture
def python(tmp_path):
    """Runs Python in a process of its own, in an empty folder."""

    def call(*arguments, status=0, **environment):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "GRADLAB_CACHE": str(tmp_path / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == status, done.stderr
        return done

    return call


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Calls `main` in this process, in an empty folder; returns what it printed, after a check of
    its status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADLAB_CACHE", str(tmp_path / "cache"))
    # It ran when the tests began
    monkeypatch.setattr(runtime, "setup", lambda **_: runtime.current())

    def calling(*arguments, status=0):
        found = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert found == status, said
        return said

    return calling


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved result of two seeds."""
    path = tmp_path_factory.mktemp("saved") / "a.npz"
    run(
        Experiment(model="dense", microbatch_size=7, accumulation_steps=3, updates=4, seeds=2)
    ).save(path)
    return path


def test_the_options_are_the_fields_of_experiments():
    assert list(OPTIONS) == [field.name for field in fields(Experiment)]
    for name, (kind, _, words) in OPTIONS.items():
        for default in re.findall(r"\(default: ([\w.]+)(?:\)| if)", words):
            assert kind(default) == getattr(Experiment(), name)
    for name, known in {
        "dataset": datasets.TRAINING_EXAMPLES,
        "model": models.MODELS,
        "method": methods.METHODS,
        "optimizer": optimizers.OPTIMIZERS,
    }.items():
        assert set(re.split(r", | or ", OPTIONS[name][2].split(" (")[0])) == set(known)


def test_help_is_quick_and_names_every_command(python):
    done = python("-X", "importtime", "-m", "gradlab", "--help")
    # Its import alone takes seconds
    assert "gradlab.runtime" in done.stderr and "tensorflow" not in done.stderr
    assert done.stdout.startswith("usage: python -m gradlab ")
    for command in COMMANDS:
        assert re.search(rf"(?m)^    {command}\b", done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, call):
    assert f"gradlab {command} " in call(command, "--help").out


def test_the_console_command_is_called_gradlab(python):
    """What pip installs for [project.scripts] is these lines."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["gradlab"]
    module, function = entry.split(":")
    program = f"import sys; from {module} import {function}; sys.argv[0] = 'gradlab'; sys.exit({function}())"
    assert python("-c", program, "--help").stdout.startswith("usage: gradlab ")
    assert python("-c", program, "--version").stdout == f"gradlab {gradlab.__version__}\n"
    assert "gradlab: error: " in python("-c", program, "fly", status=2).stderr


def test_run_in_a_process_of_its_own(python, tmp_path):
    done = python("-m", "gradlab", "run", *QUICK, "--seeds", 2, "--out", "a.npz")
    assert "Result: variables, dense on mnist, k = 3, b = 7; 2 finished" in done.stdout
    # What TensorFlow says when it starts
    assert "WARNING" not in done.stderr and "oneDNN" not in done.stderr
    assert Result.load(tmp_path / "a.npz").seeds == (0, 1)


def test_run_then_plot(call, tmp_path):
    arguments = [
        "run",
        "--model",
        "dense",
        "--microbatch-size",
        7,
        "--accumulation-steps",
        3,
        "--updates",
        60,
    ]
    said = call(*arguments, "--seeds", 2, "--out", "a.npz").out
    for line in (
        r"Result: variables, dense on mnist, k = 3, b = 7; 2 finished",
        r"    last accuracy: \d\d\.\d\d ± \d+\.\d\d %",
        r"    best accuracy: \d\d\.\d\d ± \d+\.\d\d %",
        r"    last loss: \d\.\d{3} ± \d\.\d{3} nats",
        r"    median time per update: \d+\.\d\d ms",
        r"    gradient noise scale: [\d,]+(\.\d+)? ± [\d,]+(\.\d+)? examples",
    ):
        assert re.search(rf"(?m)^{line}$", said), (line, said)
    kept = Result.load(tmp_path / "a.npz")
    assert (np.isfinite(kept.accuracies).sum(axis=1) >= 10).all()  # a curve, not a dot
    again = json.loads(call(*arguments, "--seeds", 2, "--json").out)
    assert again[0]["endings"] == ["finished", "finished"] and again == [kept.summary()]
    one = call(*arguments, "--seeds", 1).out
    assert "±" not in one and "mean" not in one  # a single run has no deviation
    for kind in ("losses", "accuracy", "loss_noise", "noise_scale", "cost"):
        assert call("plot", "a.npz", "--kind", kind, "--out", f"{kind}.png").out.startswith(
            f"{kind}.png: "
        )
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(
        call("plot", "a.npz", "--kind", "accuracy", "--against", "seconds", "--json").out
    )
    assert found["file"] == "figure.png" and "seconds" in found["text"]


def test_numbers_for_people():
    from gradlab.lab.experiments.summary import text

    summary = {
        "endings": ["finished", "finished", "diverged"],
        "last_accuracy_percent": [88.3, 0.028],
        "best_accuracy_percent": [100.0, 0.0],
        "last_loss_nats": [1234.5, 0.4],
        "median_update_milliseconds": 1234.5,
        "gradient_noise_scale_examples": [24_012.3, 1_234.5],
    }
    assert text(summary).splitlines() == [
        "    mean ± standard deviation of 3 seeds:",
        "    last accuracy: 88.30 ± 0.03 %",
        "    best accuracy: 100.00 ± 0.00 %",
        "    last loss: 1,234.500 ± 0.400 nats",
        "    median time per update: 1,234.50 ms",
        "    gradient noise scale: 24,000 ± 1,200 examples",
    ]
    alone = summary | {"endings": ["finished"], "gradient_noise_scale_examples": [3.456, 0.0]}
    assert "    last accuracy: 88.30 %" in text(alone) and "noise scale: 3.5 examples" in text(
        alone
    )
    none = summary | {"last_loss_nats": None, "gradient_noise_scale_examples": None}
    assert "last loss: not measured" in text(none) and "noise scale: not measured" in text(none)


def test_large_numbers_of_examples_are_plain_numbers(call, saved):
    result = Result.load(saved)
    replace(result, weights=1000 * result.weights).save("a.npz")
    said = call("plot", "a.npz", "--kind", "accuracy", "--against", "examples").out
    assert "% after 84,000 examples" in said


def test_sweep(call, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        '[all]\nmodel = "dense"\nupdates = 3\nseeds = 1\n[grid]\ntowers = [1, 2]'
    )
    said = call("sweep", "sweep.toml", "--out", "new/results").out
    assert said.count("Result: variables, dense on mnist, k = 5, b = 20; 1 finished") == 2
    assert len(list((tmp_path / "new" / "results").iterdir())) == 2
    assert len(json.loads(call("sweep", "sweep.toml", "--json").out)) == 2


@pytest.mark.slow
def test_sweep_over_processes(python, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        '[all]\nmodel = "dense"\nupdates = 3\nseeds = 2\n[grid]\naccumulation_steps = [1, 2]'
    )
    done = python(
        "-m", "gradlab", "sweep", "sweep.toml", "--processes", 2, "--out", "results", "--json"
    )
    assert [each["experiment"]["accumulation_steps"] for each in json.loads(done.stdout)] == [1, 2]
    files = sorted(file.name for file in (tmp_path / "results").iterdir())
    assert files == ["00-variables-1x20.npz", "01-variables-2x20.npz"]
    # What TensorFlow says, in workers too
    assert "WARNING" not in done.stderr and "oneDNN" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_keeps_what_was_finished(processes, tmp_path):
    """The status is that of Ctrl-C, the finished job is kept, no temporary file is left, and no
    process stays."""
    cache, file = tmp_path / "cache", tmp_path / "sweep.toml"
    file.write_text(ENDLESS)
    command = [
        sys.executable,
        "-m",
        "gradlab",
        "sweep",
        file,
        "--processes",
        str(processes),
        "--cache",
        cache,
    ]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        # One job is finished, and the next has no end
        wait_until(lambda: list(cache.glob("*.npz")), job)
        group = members(job.pid)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to all of them
        said = job.communicate(timeout=LIMIT)[1]
        assert job.returncode == 130, said
        assert (
            "interrupted; finished runs are cached, and the same command continues with the others"
            in said
        )
        [kept] = cache.iterdir()
        assert Result.load(kept).endings == ("finished",)
        assert len(group) > 1 or processes == 1
        wait_until(lambda: not any(map(is_running, group)))
    finally:
        if group := members(job.pid):
            os.killpg(job.pid, signal.SIGKILL)
    assert not group


def members(group: int) -> list[int]:
    """The running processes of a process group."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [pid for pid, of in pairs if of == group and is_running(pid)]


@pytest.mark.slow
def test_reproduce_quick(python, call, tmp_path):
    done = python("-m", "gradlab", "reproduce", "--quick", "--out", "here")
    assert "cannot be compared with the published ones" in done.stdout
    assert "20 x 5" in done.stdout and "95.2 ± 0.30" in done.stdout
    assert len(list((tmp_path / "here").iterdir())) == 5
    rows = json.loads(call("reproduce", "--quick", "--json").out)  # from the cache
    assert len(rows) == 24 and not (tmp_path / "data").exists()


@pytest.mark.slow
def test_reproduce_another_paper(call, tmp_path):
    claims = json.loads(
        call("reproduce", "noisy-quadratic", "--quick", "--json", "--out", "here").out
    )
    assert len(claims) == 6 and all(claim["holds"] is None and claim["found"] for claim in claims)
    assert sorted(path.suffix for path in (tmp_path / "here").iterdir()) == [
        ".csv",
        ".json",
        ".png",
    ]


@pytest.mark.slow
def test_doctor(python, tmp_path):
    findings = json.loads(python("-m", "gradlab", "doctor", "--json").stdout)
    names = [
        "Python",
        "packages",
        "data",
        "devices",
        "training",
        "cache",
        "JupyterLab",
        "kernel",
        "widgets",
    ]
    assert [finding["name"] for finding in findings] == names
    assert all(finding["good"] and finding["found"] and not finding["fix"] for finding in findings)
    (tmp_path / "a file").write_text("")
    said = python(
        "-m", "gradlab", "doctor", status=1, GRADLAB_CACHE=str(tmp_path / "a file")
    ).stdout
    assert (
        "  BAD  cache: " in said
        and "fix: set GRADLAB_CACHE to a folder that you may write to" in said
    )


def test_lab_opens_the_course(call, monkeypatch):
    opened = []
    course = types.SimpleNamespace(open_course=lambda *arguments: opened.append(arguments) or 3)
    monkeypatch.setitem(sys.modules, "gradlab.lab.course", course)
    call("lab", status=3)  # the exit status is JupyterLab's
    call("lab", "my course", "--port", "9000", "--no-browser", status=3)
    assert opened == [("gradlab-course", 8888, True, None), ("my course", 9000, False, None)]


def without(packages, *arguments):
    """A program that runs a command where these packages are not installed."""
    missing = "; ".join(f"sys.modules[{name!r}] = None" for name in packages)
    return (
        "-c",
        f"import sys; {missing}; from gradlab.__main__ import main; "
        f"sys.exit(main({list(arguments)!r}))",
    )


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("matplotlib", "lab", ["plot", "a.npz"]),
        ("jupyterlab", "lab", ["lab"]),
        ("tqdm", "lab", ["run", *QUICK]),
        ("distributed", "cluster", ["run", *QUICK, "--dask", "tcp://127.0.0.1:1"]),
    ],
)
def test_a_missing_extra_is_named(package, extra, arguments, python):
    assert package in EXTRAS[extra] and package in (ROOT / "pyproject.toml").read_text()
    said = python(*without([package], *arguments), status=1).stderr
    assert f'needs the extra "{extra}": pip install "gradlab[{extra}]". Received: no module' in said
    assert package in said and "Traceback" not in said


def test_devices_and_launch_need_no_extra(python, tmp_path):
    # TensorFlow itself needs that
    packages = {name for names in EXTRAS.values() for name in names} - {"packaging"}
    done = forked.run(*without(packages, "devices", "--json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["towers"] and found["device"] and found["processor"]
    (tmp_path / "script.py").write_text("import sys; print('hello', *sys.argv[1:])")
    launch = ["launch", "--workers", "1", "--", "script.py", "--json"]
    assert python(*without(packages, *launch)).stdout == "[worker 0] hello --json\n"


def test_the_extras_are_complete():
    """Every package that the lab imports, except for those that gradlab itself depends on, belongs
    to an extra."""
    imported = set()
    for file in (ROOT / "gradlab" / "lab").rglob("*.py"):
        imported |= set(re.findall(r"(?m)^ *(?:from|import) (\w+)", file.read_text()))
    core = {"gradlab", "tensorflow", "keras", "numpy"} | sys.stdlib_module_names
    listed = {name for names in EXTRAS.values() for name in names}
    installed = {name for name in imported - core if importlib.util.find_spec(name) is not None}
    assert installed <= listed


NO_RESULT = "RESULT must be a file that run --out or sweep --out wrote. Received: "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "--model", "resnet"],
            "model must be one of lenet, dense, vgg. Received: 'resnet'",
        ),
        (["run", "--updates", "0"], "updates must be a positive integer. Received: 0"),
        (
            ["run", "--seeds", "0"],
            "seeds must be different integers of 0 or more, or a positive integer. Received: 0",
        ),
        (["run", "--processes", "0"], "processes must be a positive integer. Received: 0"),
        (
            ["run", "--processes", "2", "--dask", "tcp://x"],
            "give --processes or --dask. Received: both",
        ),
        (
            ["reproduce", "noise-scale", "--processes", "2"],
            "--processes, --dask and --cache are for averaging only. Received: NAME noise-scale",
        ),
        (["reproduce", "everything"], "argument NAME: invalid choice: 'everything'"),
        (["run", "--updates", "many"], "argument --updates: invalid int value: 'many'"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: COMMAND"),
        (["plot", "nothing.npz"], NO_RESULT + "nothing.npz, which does not exist"),
        (["plot", "folder"], NO_RESULT + "folder, which is a folder"),
        (["plot", "notes.txt"], NO_RESULT + "notes.txt, which is a file of another kind"),
        (["plot", "arrays.npz"], NO_RESULT + "arrays.npz, which is a file of another kind"),
        (
            ["plot", "half.npz"],
            NO_RESULT + "half.npz, which is damaged (BadZipFile: File is not a zip file)",
        ),
        (["plot", "whole.npz", "--out", "folder"], "Received: folder, which is a folder"),
        (
            ["plot", "whole.npz", "--out", "no/a.png"],
            "Received: no/a.png, but there is no folder no",
        ),
        (
            ["sweep", "none.toml"],
            "FILE must be a TOML file that describes a sweep. Received: none.toml, which does not",
        ),
        (
            ["sweep", "folder"],
            "FILE must be a TOML file that describes a sweep. Received: folder, which is a folder",
        ),
        (["sweep", "half.npz"], "a sweep file must be TOML. Received: half.npz"),
        (
            ["launch", "none.py"],
            "SCRIPT must be a Python script. Received: none.py, which does not exist",
        ),
        (["lab", "notes.txt"], "FOLDER must be a folder. Received: notes.txt, which is a file"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence, call, saved, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "whole.npz").write_bytes(saved.read_bytes())
    (tmp_path / "half.npz").write_bytes(saved.read_bytes()[:2000])
    np.savez(tmp_path / "arrays.npz", losses=np.zeros(3))
    said = call(*arguments, status=2).err
    assert sentence in said
    assert not any(word in said for word in ("Errno", "pickle", "Traceback"))
    # Before these, argparse shows the usage
    if not sentence.startswith(("argument", "invalid", "required")):
        assert said.startswith("gradlab: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "--out", "no/a.npz"],
            "--out must be a file in an existing folder. Received: no/a.npz, but there is no",
        ),
        (
            ["run", "--out", "folder"],
            "--out must be a file in an existing folder. Received: folder, which is a folder",
        ),
        (
            ["run", "--cache", "file"],
            "--cache must be a folder that exists or can be created. Received: file (",
        ),
        (
            ["sweep", "sweep.toml", "--out", "file"],
            "--out must be a folder that exists or can be created. Received: fi",
        ),
        (
            ["reproduce", "--out", "file/a"],
            "--out must be a folder that exists or can be created. Received: file/a (",
        ),
    ],
)
def test_a_path_that_cannot_be_written_to_is_said_before_the_training(
    arguments, sentence, call, tmp_path, monkeypatch
):
    from gradlab.lab.experiments.jobs import sweep

    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: pytest.fail("the training began"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "sweep.toml").touch()
    assert sentence in call(*arguments, status=2).err


def test_what_fails_is_said_without_a_number(call, monkeypatch):
    def full(result, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Result, "save", full)
    with pytest.warns(UserWarning, match="could not be cached"):
        said = call("run", *QUICK, "--seeds", "1", "--out", "a.npz", status=1)
    assert said.err.endswith("gradlab: No space left on device: a.npz\n")
    assert "last accuracy" in said.out  # the numbers are not lost


def test_interrupted(call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    from gradlab.lab.experiments.jobs import sweep

    monkeypatch.setattr(sweep, "sweep", interrupted)
    monkeypatch.setattr(gradlab.cluster, "launch", interrupted)
    said = call("run", *QUICK, status=130).err
    assert (
        said
        == "gradlab: interrupted; finished runs are cached, and the same command continues with "
        "the others\n"
    )
    assert call("launch", __file__, status=130).err == "gradlab: interrupted\n"


def test_bad_input_ends_with_its_status_and_no_traceback(python):
    said = python("-m", "gradlab", "run", "--processes", "0", status=2).stderr
    assert said == "gradlab: processes must be a positive integer. Received: 0\n"


def test_help_names_modules_that_exist(call):
    said = " ".join(call("sweep", "--help").out.split())
    [name] = re.findall(r"help\(([\w.]+)\)", said)
    assert name == sweep_file.__name__

"""The names of the public API: they work right after `import gradlab`, are listed, and are known to
type checkers."""

import functools
import json
import os
import re
import subprocess
import sys
import types

import pytest
from paths import ROOT

import gradlab

# Names that README and the notebooks use, wherever those show them today; the documents themselves
# are read below.
NAMES = [
    "gradlab.NoiseScale",
    "gradlab.Runtime",
    "gradlab.UpdateRecord",
    "gradlab.clipping.clip_adaptively",
    "gradlab.cluster.launch",
    "gradlab.cluster.strategy",
    "gradlab.noise.loss_noise",
    "gradlab.runtime.session",
    "gradlab.static_graph.average_on_host",
    "gradlab.static_graph.session",
    "gradlab.static_graph.variable_graph",
    "gradlab.window.accumulate",
    "gradlab.window.window_gradients",
]
WRONG = ["gradlab.Accumulator", "gradlab.checks", "gradlab.window.nothing"]
WITHOUT_EXTRA = "gradlab.AccumulationLab without ipywidgets"

# TensorFlow and Keras are imported once. The names below each `gradlab.NAME` are then used in a
# process of their own, forked right after the import of gradlab, so that none can work only because
# another one has already been used.
USE_NAMES = """
import json, os, pkgutil, sys
import keras, tensorflow
import gradlab

assert {name for name in sys.modules if name.startswith("gradlab.")} <= {"gradlab._checks", "gradlab.runtime"}

def use(path):
    if path.split(".")[1] in ("auditing", "drawing", "lab", "measure", "training"):
        return pkgutil.resolve_name(path)  # the path of a module that is imported before it is used
    value = gradlab
    for name in path.split(".")[1:]:
        value = getattr(value, name)

failed = {}
for paths, missing in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        if missing:
            sys.modules[missing] = None  # importing it now raises ModuleNotFoundError
        errors = {}
        for path in paths:
            try:
                use(path)
            except Exception as error:
                errors[f"{path} without {missing}" if missing else path] = f"{type(error).__name__}: {error}"
        with os.fdopen(write, "w") as pipe:
            json.dump(errors, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        failed |= json.load(pipe)
    os.wait()
print(json.dumps(failed))
"""


def documents() -> dict[str, str]:
    """The texts that show names: README, the pages in docs/, and the notebooks without their
    outputs."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    # A copy in docs/, which lists the old names
    pages = [page for page in pages if page.name != "changelog.md"]
    texts = {
        str(page.relative_to(ROOT)): page.read_text()
        for page in pages
        if "_build" not in page.parts
    }
    for notebook in (ROOT / "notebooks").rglob("*.ipynb"):
        if "checkpoints" not in str(notebook):
            cells = json.loads(notebook.read_text())["cells"]
            texts[str(notebook.relative_to(ROOT))] = "\n".join(
                "".join(cell["source"]) for cell in cells
            )
    return texts


def names_in(text: str) -> set[str]:
    """The dotted names below gradlab in a text, except those of import statements, directives and
    addresses."""
    return set(
        re.findall(
            r"(?<!from )(?<!import )(?<!-m )(?<!module:: )(?<!module} "
            r")(?<![\w./@-])gradlab(?:\.[A-Za-z_]\w*)+",
            text,
        )
    )


@functools.cache
def failures() -> dict[str, str]:
    """The error of each name that cannot be used right after `import gradlab`."""
    shown = set().union(*(names_in(text) for text in documents().values()))
    groups: dict[str, list[str]] = {}
    for name in sorted({*NAMES, *(f"gradlab.{name}" for name in gradlab.__all__), *shown, *WRONG}):
        groups.setdefault(name.split(".")[1], []).append(name)
    calls = [
        *((group, None) for group in groups.values()),
        (["gradlab.AccumulationLab"], "ipywidgets"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", USE_NAMES, json.dumps(calls)],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_names_are_read_from_the_documents():
    text = "`gradlab.window.accumulate`, gradlab.run(x); from gradlab.lab import x; a/gradlab.git"
    assert names_in(text) == {"gradlab.window.accumulate", "gradlab.run"}
    shown = {path: names_in(text) for path, text in documents().items()}
    assert "gradlab.clipping.clip_adaptively" in set().union(*shown.values())
    assert "gradlab.microbatched" in shown["README.md"]
    assert "gradlab.draw_graph" in shown["notebooks/03_placeholder_averaging.ipynb"]


def test_every_public_name_works_right_after_the_import():
    failed = {
        path: error for path, error in failures().items() if path not in (*WRONG, WITHOUT_EXTRA)
    }
    assert not failed, json.dumps(failed, indent=1)


def test_unknown_names_are_found_by_this_check():
    assert set(WRONG) <= failures().keys()


def test_a_missing_extra_is_named():
    assert re.fullmatch(
        r'ModuleNotFoundError: gradlab\.AccumulationLab needs the extra "lab": pip install '
        r'"gradlab\[lab\]"\. '
        r"Received: no module named ipywidgets",
        failures()[WITHOUT_EXTRA],
    )


def test_an_unknown_name_raises_an_error_that_lists_the_known_ones():
    with pytest.raises(
        AttributeError, match=r"^gradlab has [\w, ]*\bTrainer\b[\w, ]*\. Received: 'Accumulator'$"
    ):
        _ = gradlab.Accumulator


def test_importing_gradlab_is_quick_and_shows_public_names_only():
    program = "import json, sys, gradlab; print(json.dumps([dir(gradlab), sorted(sys.modules)]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    shown, imported = json.loads(done.stdout)
    stub = (ROOT / "gradlab" / "__init__.pyi").read_text()
    assert set(shown) - {"__version__"} == set(re.findall(r" import \w+ as (\w+)", stub))
    assert not {"importlib", "checks", "_checks", "runtime", "lazy_loader"} & set(shown)
    assert not {"tensorflow", "keras", "numpy", "matplotlib", "ipywidgets", "pandas"} & set(
        imported
    )


USER = """\
import gradlab

reveal_type(gradlab.Trainer)
reveal_type(gradlab.run)
reveal_type(gradlab.UpdateRecord)
reveal_type(gradlab.setup())
reveal_type(gradlab.noise.loss_noise)
gradlab.Accumulator
gradlab.setup(towers="three")
"""


@pytest.mark.slow
def test_type_checkers_know_the_public_names(tmp_path):
    """The checker sees gradlab as an installed package, which it only reads because of py.typed."""
    installed, project = tmp_path / "installed", tmp_path / "project"
    installed.mkdir()
    project.mkdir()
    (installed / "gradlab").symlink_to(ROOT / "gradlab")
    (project / "user.py").write_text(USER)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-color-output",
        "--cache-dir",
        str(tmp_path / "cache"),
        "user.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=project, env=environment, check=False
    )
    lines = [
        re.sub(r"^user\.py:(\d+): ", r"\1 ", line)
        for line in done.stdout.splitlines()
        if line[:5] == "user."
    ]
    assert [line.split(" ")[0] for line in lines] == [str(n) for n in range(3, 10)], (
        done.stdout + done.stderr
    )
    trainer, run, step, runtime, noise, unknown, wrong_type = lines
    assert 'note: Revealed type is "def (' in trainer and trainer.endswith(
        '-> gradlab.fit.trainer.Trainer"'
    )
    assert run.endswith('-> gradlab.lab.experiments.result.Result"')
    assert "gradient_norms: numpy.ndarray" in step and step.endswith(
        '-> gradlab.fit.records.UpdateRecord"'
    )
    assert runtime.endswith('note: Revealed type is "gradlab.runtime.Runtime"')
    assert noise.endswith('-> gradlab.measure.noise.LossNoise"')
    assert 'error: Module has no attribute "Accumulator"' in unknown
    assert 'error: Argument "towers" to "setup" has incompatible type "str"' in wrong_type


def test_the_package_is_an_ordinary_module():
    """With a public name that is also a submodule's, lazy-loader makes it another class, which
    cannot be pickled."""
    assert type(gradlab) is types.ModuleType

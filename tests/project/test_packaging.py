"""What pip installs: the packages, the wheel, and what works without the extra "lab"."""

import ast
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.request
import venv
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

import gradlab

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = {"tensorflow", "keras", "numpy", "lazy-loader"}
LAB = {Requirement(line).name for line in PYPROJECT["project"]["optional-dependencies"]["lab"]}
LAB_MODULES = ("ipywidgets", "matplotlib", "PIL", "tqdm")  # one of them is imported first
# Modules that nothing imports unless it is asked for what they need.
ON_DEMAND = {
    ("__main__.py",): {"distributed"},
    ("lab", "classroom", "entrance.py"): {"tornado", "voila"},
    ("lab", "classroom", "kernels.py"): {"jupyter-server"},
    ("lab", "classroom", "page_socket.py"): {"jupyter-server", "tornado", "voila"},
    ("lab", "classroom", "local_cluster.py"): {"dask", "distributed"},
    ("lab", "experiments", "jobs", "cluster.py"): {"distributed"},
    ("lab", "experiments", "jobs", "stream.py"): {"distributed"},
    ("auditing", "pytest_plugin.py"): {"pytest"},
    ("auditing", "trajectory_plot.py"): {"matplotlib"},
}
# By ready adapters
AUDITED = {"torch", "accelerate", "transformers", "lightning", "deepspeed", "jax", "optax"}
MODULES = sorted((ROOT / "gradlab").rglob("*.py"))


def names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


def test_the_packages_listed_are_the_folders():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "gradlab").rglob("__init__.py")}
    # No folder of modules lacks __init__.py
    assert folders == {path.parent.relative_to(ROOT) for path in MODULES}
    packages = {".".join(folder.parts) for folder in folders}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed)) and set(listed) == packages | {
        "gradlab.data",
        "gradlab.course",
    }


def test_the_core_is_small():
    assert names(PYPROJECT["project"]["dependencies"]) == CORE


def third_party(path: pathlib.Path) -> set[str]:
    """The distributions that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    distributions = {
        "PIL": "pillow",
        "jupyter_client": "jupyterlab",
        "jupyter_core": "jupyterlab",
        "IPython": "ipywidgets",
    }
    return {
        canonicalize_name(distributions.get(name, name))
        for name in found - set(sys.stdlib_module_names) - {"gradlab", "tomllib"}
    }


def undeclared(path: pathlib.Path) -> set[str]:
    """The distributions that a module imports although neither its part of gradlab nor `ON_DEMAND`
    allows it."""
    parts = path.relative_to(ROOT / "gradlab").parts
    allowed = CORE | LAB if parts[0] == "lab" else CORE
    return (
        third_party(path)
        - allowed
        - ON_DEMAND.get(parts, AUDITED if "adapters" in parts else set())
    )


def test_modules_import_only_what_is_declared():
    """The helper uses the core only, the lab its extra as well. A few modules use more, on
    demand."""
    faults = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in MODULES
        if (found := undeclared(path))
    }
    assert len(MODULES) > 100 and not faults, faults


def test_the_version_is_written_once():
    assert "version" in PYPROJECT["project"]["dynamic"] and "version" not in PYPROJECT["project"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gradlab.__version__"}
    assert [
        path.name for path in MODULES if re.search(r"^__version__ = ", path.read_text(), flags=re.M)
    ] == ["__init__.py"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest.group(1) == gradlab.__version__


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel of this working tree, built from a copy: setuptools writes into the folder that it
    builds from."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("gradlab", "data", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    built = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
    ]
    done = subprocess.run(
        [*command, "--wheel-dir", built, source], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [path] = built.glob("*.whl")
    return path


def test_the_wheel_has_the_package_its_data_and_the_course_and_nothing_else(wheel):
    assert wheel.name == f"gradlab-{gradlab.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        described = archive.read(metadata).decode()
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read("gradlab/data/mnist.npz") == (ROOT / "data" / "mnist.npz").read_bytes()
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in (
            "*.py",
            "*.pyi",
            "*.js",
            "*.css",
            "*.toml",
            "recorded.*",
            "*.bin",
            "template/*",
        )
        for path in (ROOT / "gradlab").rglob(pattern)
    }
    assert {"gradlab/__init__.pyi", "gradlab/lab/widget/one_update.js"} <= wanted
    wanted |= {
        "gradlab/py.typed",
        "gradlab/data/mnist.npz",
        "gradlab/data/shakespeare.txt.gz",
        "gradlab/data/checksums.txt",
        "gradlab/data/README.md",
    }
    wanted |= {
        "gradlab/data/make_mnist.py",
        *(f"gradlab/data/results/{path.name}" for path in (ROOT / "data/results").glob("*.csv")),
    }
    notebooks = [
        path.relative_to(ROOT / "notebooks") for path in (ROOT / "notebooks").rglob("*.ipynb")
    ]
    notebooks = [path for path in notebooks if ".ipynb_checkpoints" not in path.parts]
    assert len(notebooks) == 35
    wanted |= {f"gradlab/course/{path.as_posix()}" for path in notebooks}
    assert files == wanted
    assert not [name for name in files if re.search(r"(^|/)(tests?|benchmarks?|conftest)\b", name)]
    assert licences and f"\nVersion: {gradlab.__version__}\n" in described
    required = re.findall(r"^Requires-Dist: (.+)$", described, flags=re.M)
    assert names([line for line in required if "extra ==" not in line]) == CORE


# Only the core and what the core itself requires can be imported: the rest of the environment is as
# if not installed.
ONLY_THE_CORE = """
import importlib.abc, importlib.metadata, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def closure(names):
    found, left = set(), set(names)
    while left:
        name = left.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for wanted in map(Requirement, requires):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                left |= {canonicalize_name(wanted.name)} - found
    return found

allowed = closure(CORE) | {"gradlab"}
blocked = {
    module
    for module, distributions in importlib.metadata.packages_distributions().items()
    if not {canonicalize_name(name) for name in distributions} & allowed
}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
    del sys.modules[name]
"""

HELPER = """
import gradlab
gradlab.setup(towers=2, seed=0)
import keras, numpy as np, tensorflow as tf

for name in gradlab.__all__:
    try:
        getattr(gradlab, name)
    except ModuleNotFoundError as error:
        print(name, "|", error)

model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
small = gradlab.microbatched(model, 3)
small.compile(keras.optimizers.Adam(), "mse")
small.fit(x, x[:, :1], batch_size=20, verbose=0)
trainer = gradlab.Trainer(model, keras.optimizers.Adam(), "mse", 3)
steps = [trainer.step(x[:20], x[:20, :1]) for _ in range(3)]
accumulator = gradlab.GradientAccumulator(model.trainable_variables)
accumulator.add([tf.ones_like(v) for v in model.trainable_variables], 2.0)
assert float(accumulator.mean()[0][0, 0]) == 1
gradlab.draw_graph(tf.function(lambda a: a + 1).get_concrete_function(tf.constant(1.0)).graph)
result = gradlab.run(gradlab.Experiment(model="dense", updates=2, seeds=1))
assert result.window_losses.shape == (1, 2)
print("works")
"""


def test_the_helper_works_with_the_core_alone(tmp_path):
    """A single experiment runs, too. A name that needs the extra "lab" says so in one sentence."""
    program = f"CORE = {CORE!r}\n{ONLY_THE_CORE}\n{HELPER}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert last == "works"
    missing = dict(line.split(" | ") for line in said if " | " in line)
    assert set(missing) == {"AccumulationLab", "sweep"}
    for name, sentence in missing.items():
        start = f'gradlab.{name} needs the extra "lab": pip install "gradlab[lab]". Received: no module named '
        assert sentence.startswith(start) and sentence.removeprefix(start) in LAB_MODULES


# The environment of the tests without its own gradlab: a path in a .pth file is added as it is,
# without the .pth files in that folder, which would add the checkout.
@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """The bin folder of an environment in which gradlab was installed from the wheel, without a
    checkout."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [packages] = (folder / "lib").glob("python*/site-packages")
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_installed_in_an_empty_environment_opens_the_course(installed, tmp_path):
    """`gradlab lab` copies the notebooks and serves them, a notebook's files are found, and Ctrl-C
    ends everything."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JUPYTER"))
    }
    environment |= {
        # JupyterLab's own page
        "JUPYTERLAB_DIR": str(pathlib.Path(sys.prefix, "share", "jupyter", "lab")),
        "JUPYTER_TOKEN": "test",
        "HOME": str(tmp_path / "home"),
    }
    run = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert run([installed / "gradlab", "--version"]).stdout == f"gradlab {gradlab.__version__}\n"
    program = (
        "import gradlab; from gradlab.lab.experiments import datasets\n"
        "print(gradlab.__file__); print(len(datasets.load().train_labels))\n"
        "print((datasets.data_folder() / 'results' / 'reproduce.csv').is_file())"
    )
    home, examples, results = run([installed / "python", "-c", program]).stdout.split()
    assert (
        pathlib.Path(home).is_relative_to(installed.parent)
        and examples == "55000"
        and results == "True"
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [installed / "gradlab", "lab", "course", "--no-browser", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("w") as file:
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        page, notebook = ("lab/tree/00_start_here.ipynb", "api/contents/00_start_here.ipynb")
        while True:
            assert job.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/{notebook}?token=test", timeout=60
                ) as answer:
                    served = json.load(answer)
                break
            except OSError:
                time.sleep(0.2)
        assert served["type"] == "notebook" and served["content"]["cells"]
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/{page}?token=test", timeout=60
        ) as answer:
            assert "jupyter" in answer.read().decode()
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does
        assert job.wait(timeout=120) == 0, log.read_text()
        with pytest.raises(ProcessLookupError):
            os.killpg(job.pid, 0)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    said = log.read_text()
    assert said.startswith("gradlab: the course is in course: 35 files copied\n")
    assert f"http://127.0.0.1:{port}/lab/tree/00_start_here.ipynb?token=" in said
    assert (tmp_path / "course" / "solutions" / "14_scale_out.ipynb").is_file()


def test_the_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = [path for path in re.findall(r"`([\w./]+)`", text) if "/" in path]
    assert len(paths) > 30
    for path in paths:
        known = [ROOT / path, ROOT / "gradlab" / "lab" / "experiments" / path]
        assert any(each.exists() for each in known) or path == "docs/_build/html", path

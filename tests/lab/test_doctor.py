"""What gradlab doctor reports. tests/project/test_command_line.py shows that a sound installation
passes all checks."""

import importlib.metadata
import subprocess
import types

import pytest
import tensorflow as tf

from gradlab.lab import doctor
from gradlab.lab.experiments import datasets


def finding(name: str, monkeypatch) -> doctor.Finding:
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name]})
    [found] = doctor.examine()
    return found


def test_each_check_is_one_finding_and_none_raises(monkeypatch):
    def fails():
        raise doctor.Fault("broken", "repair it")

    def raises():
        raise KeyError("what")

    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: "fine", "two": fails, "three": raises})
    assert doctor.examine() == [
        doctor.Finding("one", True, "fine"),
        doctor.Finding("two", False, "broken", "repair it"),
        doctor.Finding("three", False, "KeyError: 'what'", doctor.FIX),
    ]


@pytest.mark.parametrize("package", ["keras", "tqdm"])
def test_a_missing_package_of_the_core_or_the_lab_is_named(package, monkeypatch):
    found = finding("packages", monkeypatch)
    assert found.good and f"{package} " in found.found and "pytest" not in found.found
    version = importlib.metadata.version

    def pretended(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", pretended)
    found = finding("packages", monkeypatch)
    assert (
        not found.good and found.found == f"{package} is missing" and '"gradlab[lab]"' in found.fix
    )


def test_a_package_outside_its_bounds_is_named(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "0.1" if name == "keras" else version(name)
    )
    found = finding("packages", monkeypatch)
    assert not found.good and found.found == "keras 0.1"


def test_an_unsupported_python_is_named(monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 9, 1))
    found = finding("Python", monkeypatch)
    assert not found.good and "use Python 3.1" in found.fix


def test_altered_data_are_found(monkeypatch):
    def altered(name):
        raise ValueError("mnist.npz must have the SHA-256 0")

    monkeypatch.setattr(datasets, "load", altered)
    found = finding("data", monkeypatch)
    assert not found.good and "SHA-256" in found.found and "git checkout -- data" in found.fix


@pytest.mark.parametrize(
    ("there", "missing", "carrier"),
    [
        ([], "ipywidgets", "jupyterlab_widgets"),
        (["@jupyter-widgets/jupyterlab-manager"], "anywidget", "anywidget"),
    ],
)
def test_a_missing_extension_of_jupyterlab_is_named(monkeypatch, tmp_path, there, missing, carrier):
    for name in there:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "package.json").write_text('{"version": "1.0"}')
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *folders: [str(tmp_path)])
    found = finding("widgets", monkeypatch)
    assert not found.good and f"the JupyterLab extension of {missing} is missing" in found.found
    assert f"--force-reinstall {carrier}" in found.fix


def test_a_gpu_that_tensorflow_does_not_see_is_named(monkeypatch):
    listed = types.SimpleNamespace(returncode=0, stdout="GPU 0: NVIDIA H100\n")
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: listed)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [])
    found = finding("devices", monkeypatch)
    assert not found.good and found.found.endswith("but the system has one: GPU 0: NVIDIA H100")
    assert 'pip install "tensorflow[and-cuda]==' in found.fix

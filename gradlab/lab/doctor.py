"""Check an installation: what was found, and how to fix what is wrong."""

import contextlib
import importlib.metadata
import json
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

FIX = 'make clean, then make lab; or: python -m pip install --upgrade "gradlab[lab]"'


class Fault(Exception):
    """A check failed.

    Args:
        found: what was found instead of what should be there.
        fix: what to do about it: a command, or a sentence.
    """

    def __init__(self, found: str, fix: str):
        super().__init__(found)
        self.found = found
        self.fix = fix


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: the name of the check, a key of `CHECKS`.
        good: whether the check passed.
        found: what was found: versions, devices, or what is wrong.
        fix: what to do about it; empty if the check passed.
    """

    name: str
    good: bool
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run every check in `CHECKS` and return the findings in that order.

    A check that raises an unexpected exception is a finding, too, so this function does not raise.
    """
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(Finding(name, True, check()))
        except Fault as fault:
            findings.append(Finding(name, False, fault.found, fault.fix))
        except Exception as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}", FIX))
    return findings


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise Fault(
            platform.python_version(), "use Python 3.11 to 3.14: make lab PYTHON=python3.13"
        )
    return platform.python_version()


def _packages() -> str:
    from packaging.requirements import Requirement

    faults: list[str] = []
    good: list[str] = []
    for line in importlib.metadata.requires("gradlab") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not any(
            wanted.marker.evaluate({"extra": extra}) for extra in ("", "lab")
        ):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{wanted.name} is missing")
            continue
        (good if version in wanted.specifier else faults).append(f"{wanted.name} {version}")
    if faults:
        raise Fault(", ".join(faults), FIX)
    return ", ".join(good)


def _data() -> str:
    from gradlab.lab.experiments import datasets

    try:
        mnist = datasets.load("mnist")
    except (OSError, ValueError) as error:
        raise Fault(str(error), "git checkout -- data, or reinstall gradlab") from None
    return f"mnist, {len(mnist.train_labels)} training and {len(mnist.test_labels)} test images; the checksum matches"


def _devices() -> str:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        if listed.returncode == 0 and listed.stdout.strip():
            raise Fault(
                f"TensorFlow sees no GPU, but the system has one: {listed.stdout.splitlines()[0]}",
                f'{sys.executable} -m pip install "tensorflow[and-cuda]=={tf.__version__}"',
            )
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus
    ]
    return ", ".join(names) or "no GPU; computes on the CPU"


def _training() -> str:
    from gradlab.lab.experiments import methods
    from gradlab.lab.experiments.experiment import Experiment
    from gradlab.lab.experiments.jobs.run import run

    results = [
        run(Experiment(model="dense", method=name, updates=2, seeds=1)) for name in methods.METHODS
    ]
    losses = [float(result.window_losses[0, -1]) for result in results]
    if max(losses) - min(losses) > 1e-4:
        raise Fault(
            f"the losses of the methods after one update differ: {losses}",
            "please report this with the output",
        )
    return f"{len(losses)} methods agree after one update"


def _cache() -> str:
    from gradlab.lab.experiments.jobs.cache import Cache

    try:
        folder = Cache().folder
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise Fault(str(error), "set GRADLAB_CACHE to a folder that you may write to") from None
    runs = len(list(folder.glob("*.npz")))
    free = shutil.disk_usage(folder).free / 2**30
    return f"{folder}, {runs} cached runs, {free:.1f} GiB free"


def _kernel() -> str:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    fix = f"{sys.executable} -m pip install --upgrade ipykernel"
    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv
    except NoSuchKernel:
        raise Fault("JupyterLab has no kernel named python3", fix) from None
    if pathlib.Path(command[0]).is_absolute() and not pathlib.Path(command[0]).samefile(
        sys.executable
    ):
        raise Fault(
            f"the kernel of the notebooks is another Python: {command[0]}",
            f"{sys.executable} -m ipykernel install --sys-prefix",
        )
    return "python3 runs this Python"


def _widgets() -> str:
    from jupyter_core.paths import jupyter_path

    found = []
    for package, extension, carrier, what in (
        ("ipywidgets", "@jupyter-widgets/jupyterlab-manager", "jupyterlab_widgets", "sliders"),
        ("anywidget", "anywidget", "anywidget", "the view of one update"),
    ):
        paths = (
            pathlib.Path(folder, extension, "package.json")
            for folder in jupyter_path("labextensions")
        )
        about = next((path for path in paths if path.is_file()), None)
        if about is None:
            raise Fault(
                f"the JupyterLab extension of {package} is missing, so {what} would not appear",
                f"{sys.executable} -m pip install --force-reinstall {carrier}",
            )
        version = json.loads(about.read_text())["version"]
        found.append(
            f"{package} {importlib.metadata.version(package)}, its JupyterLab extension {version}"
        )
    return "; ".join(found)


def _server() -> str:
    """Start JupyterLab without a browser and wait until it serves its page, for a minute at
    most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--allow-root",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jupyterlab", *flags, "--IdentityProvider.token=doctor"]
        server = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        began = time.monotonic()
        try:
            while time.monotonic() - began < 60 and server.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/lab?token=doctor", timeout=10
                    ).read()
                    version = importlib.metadata.version("jupyterlab")
                    return f"JupyterLab {version} answered after {time.monotonic() - began:.0f} s"
                time.sleep(0.2)
        finally:
            server.terminate()
            log = server.communicate()[1].strip().splitlines()
    raise Fault(f"JupyterLab does not answer: {log[-1] if log else 'it printed nothing'}", FIX)


CHECKS: dict[str, Callable[[], str]] = {
    "Python": _python,
    "packages": _packages,
    "data": _data,
    "devices": _devices,
    "training": _training,
    "cache": _cache,
    "JupyterLab": _server,
    "kernel": _kernel,
    "widgets": _widgets,
}

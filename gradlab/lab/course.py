"""The course in a folder of the user's choice: copy the notebooks there and open them in
JupyterLab."""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import gradlab
from gradlab import _checks
from gradlab.lab.experiments.jobs.cluster import DASK, Cluster

FIRST_NOTEBOOK = "00_start_here.ipynb"
PATTERNS = ("*.ipynb", "solutions/*.ipynb", "app/*.ipynb")
# In the user's folder: the SHA-256 of each file as gradlab wrote it
MANIFEST = ".gradlab-course.json"
DEFAULT_PORT = 8888
LAST_PORT = 65_535

_PACKAGE = pathlib.Path(gradlab.__file__).resolve().parent


@dataclass
class _Copied:
    """The outcome of a copy.

    Attributes:
        written: files that were written, in the course's order.
        kept: files that the user changed, which were left as they are.
        beside: the newer editions of such files, written beside them; they are also in `written`.
    """

    written: list[pathlib.Path] = field(default_factory=list)
    kept: list[pathlib.Path] = field(default_factory=list)
    beside: list[pathlib.Path] = field(default_factory=list)


def course_folder() -> pathlib.Path:
    """The folder of gradlab's own notebooks: inside an installed package, or notebooks/ of a
    checkout."""
    inside = _PACKAGE / "course"
    return inside if inside.is_dir() else _PACKAGE.parent / "notebooks"


def copy_course(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Copy the notebooks and their solutions into a folder, without overwriting a file that the
    user changed.

    Running a notebook and saving it changes it. Each file falls into one of these cases:

    - It is missing: it is written. To start a notebook over, delete it and copy again.
    - It is as an earlier gradlab wrote it: it is replaced by this edition.
    - The user changed it: it stays. If this gradlab has a newer edition than the one that the user
      changed, that edition is written beside it, once, as NAME.new.ipynb.

    The folder's file .gradlab-course.json holds the checksums by which the last two cases are told
    apart.

    Args:
        folder: where to copy to; made if it does not exist. The notebooks/ folder of a checkout is
            left alone.

    Returns:
        The files that were written; empty if everything was up to date.

    Raises:
        NotADirectoryError: `folder` is a file.
        OSError: the folder cannot be written to.
    """
    return _copy(pathlib.Path(folder).expanduser()).written


def open_course(
    folder: str | os.PathLike,
    port: int = DEFAULT_PORT,
    browser: bool = True,
    dask: str | None = None,
) -> int:
    """Copy the course into a folder, as `copy_course` does, and run JupyterLab there until Ctrl-C.

    Args:
        folder: where the notebooks are copied to, and the folder that JupyterLab shows.
        port: JupyterLab's port on 127.0.0.1. If 8888, the default, is taken, the next free port is
            used; any other port is used as given, and JupyterLab fails if it is taken.
        browser: whether to open a web browser; without one, JupyterLab prints the address to open.
        dask: the address of a Dask scheduler, on whose workers the labs of the notebooks then
            train.

    Returns:
        JupyterLab's exit status; 0 after Ctrl-C.

    Raises:
        ModuleNotFoundError: JupyterLab is not installed.
        ConnectionError: there is no scheduler at the address.
        ValueError: `port` is not the number of a port.
        OSError: the folder cannot be written to.
    """
    check_port(port)
    if importlib.util.find_spec("jupyterlab") is None:
        raise ModuleNotFoundError(
            'gradlab.lab.course needs the extra "lab": pip install "gradlab[lab]". Received: no '
            "module named jupyterlab",
            name="jupyterlab",
        )
    if dask:
        Cluster(dask).client().close()  # a wrong address is an error before JupyterLab starts
    folder = pathlib.Path(folder).expanduser()
    print(_sentence(folder, _copy(folder)), flush=True)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--port={port}"),
        f"--ServerApp.root_dir={folder.resolve()}",
        f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}",
        "--ServerApp.answer_yes=True",  # Ctrl-C stops the server without asking for confirmation
    ]
    if port != DEFAULT_PORT:
        command.append("--ServerApp.port_retries=0")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Containers and servers often run as root, which JupyterLab refuses by default
        command.append("--allow-root")
    if not browser:
        command.append("--no-browser")
    with _jupyter_settings() as environment:
        return _run(command, environment | ({DASK: dask} if dask else {}))


def check_port(port: int) -> None:
    """Raise ValueError unless a server can listen on this port."""
    _checks.positive_integer("port", port)
    if port > LAST_PORT:
        raise ValueError(f"port must be at most {LAST_PORT}. Received: {port}")


def _copy(folder: pathlib.Path) -> _Copied:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"folder must be a folder, or not exist yet. Received: the file {folder}"
        )
    source = course_folder()
    copied = _Copied()
    if folder.resolve() == source.resolve():
        return copied
    recorded = _read_manifest(folder)
    for path in (path for pattern in PATTERNS for path in sorted(source.glob(pattern))):
        _copy_file(path.read_bytes(), folder, path.relative_to(source), recorded, copied)
    manifest = {"gradlab": gradlab.__version__, "files": recorded}
    _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return copied


def _copy_file(
    content: bytes,
    folder: pathlib.Path,
    name: pathlib.Path,
    recorded: dict[str, str],
    copied: _Copied,
) -> None:
    """Copy one file if the rules of `copy_course` allow it, and update the records."""
    target = folder / name
    new = hashlib.sha256(content).hexdigest()
    key = name.as_posix()
    found = _checksum(target)
    if found == new:
        recorded[key] = new
        return
    if found is None or found == recorded.get(key):
        _write(target, content)
        recorded[key] = new
        copied.written.append(target)
        return
    copied.kept.append(target)
    beside = name.with_suffix(f".new{name.suffix}")
    # A newer edition is offered once: if the user deletes it, it does not come back.
    if new in (recorded.get(key), recorded.get(beside.as_posix())):
        return
    if _checksum(folder / beside) in (None, recorded.get(beside.as_posix())):
        _write(folder / beside, content)
        recorded[beside.as_posix()] = new
        copied.written.append(folder / beside)
        copied.beside.append(folder / beside)


def _checksum(path: pathlib.Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read_manifest(folder: pathlib.Path) -> dict[str, str]:
    """The recorded checksums; empty if there are none, so that every file that differs counts as
    changed."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return dict(files) if isinstance(files, dict) else {}


def _write(path: pathlib.Path, content: bytes) -> None:
    """Write a file in one step: an interrupted copy leaves no half file, which would count as the
    user's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _sentence(folder: pathlib.Path, copied: _Copied) -> str:
    """Describe in one line what a copy did."""

    def count(files: list, words: str) -> str:
        return f"{len(files)} file{'s' if len(files) != 1 else ''} {words}"

    parts = [count(copied.written, "copied") if copied.written else "no file had to be copied"]
    if copied.kept:
        parts.append(count(copied.kept, "with your changes kept"))
    if copied.beside:
        names = ", ".join(str(path.relative_to(folder)) for path in copied.beside)
        parts.append(f"newer editions of these are in {names}")
    return f"gradlab: the course is in {folder}: {'; '.join(parts)}"


@contextlib.contextmanager
def _jupyter_settings() -> Iterator[dict[str, str]]:
    """The environment for JupyterLab: without its question about news, so that the notebook is what
    the user sees."""
    with tempfile.TemporaryDirectory(prefix="gradlab-") as folder:
        config = pathlib.Path(folder, "labconfig")
        config.mkdir()
        news = {
            "@jupyterlab/apputils-extension:notification": {
                "fetchNews": "false",
                "checkForUpdates": False,
            }
        }
        (config / "default_setting_overrides.json").write_text(json.dumps(news))
        folders = [folder, os.environ.get("JUPYTER_CONFIG_PATH", "")]
        yield {**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, folders))}


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run JupyterLab until it ends, and stop it on Ctrl-C or SIGTERM, so that no server is left
    running."""
    with subprocess.Popen(command, env=environment) as server, _passing_sigterm_to(server):
        try:
            status = server.wait()
        except KeyboardInterrupt:
            # A terminal has sent Ctrl-C to the server, too; a signal to this process alone has not
            # reached it.
            server.terminate()
            try:
                server.wait(timeout=30)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                server.kill()
            return 0
    # As a shell reports a process that a signal ended
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _passing_sigterm_to(server: subprocess.Popen) -> Iterator[None]:
    # Only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""The environment of a training, which a result keeps beside its numbers: versions, device,
processor, commit."""

import contextlib
import datetime
import functools
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

import gradlab
from gradlab import runtime


def describe() -> dict[str, Any]:
    """Return versions, device, processor, threads, determinism, commit and date, by name."""
    return {**_fixed(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


@functools.cache
def _fixed() -> dict[str, Any]:
    chosen = runtime.current()
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    return {
        "gradlab": gradlab.__version__,
        "python": platform.python_version(),
        **versions,
        "device": device(),
        "processor": _processor(),
        "threads": None if chosen is None else chosen.threads,
        "deterministic": chosen is not None and chosen.seed is not None,
        "commit": _commit(),
    }


def device() -> str:
    """Return the name of the device that TensorFlow computes on: that of the first GPU, or
    "CPU"."""
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return "CPU"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout, with a plus sign if files differ from it; None outside a
    checkout."""
    root = pathlib.Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", root, *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None

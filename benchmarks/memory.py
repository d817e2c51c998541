"""The second table: how far the peak of the memory grows by an update, each in a process of its own.

The process' own memory; for TensorFlow on a GPU the device's.

python -m benchmarks.memory tensorflow-auto "gradlab" vgg16 32 1      (one measurement)
"""

import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks import networks, speed, worker

NETWORK = "vgg16"
SHAPES = ((1, 32), (8, 4), (32, 1))
MEBIBYTE = 2**20
# glibc keeps freed memory for later, more or less as threads happen to run; like this it gives large pieces back.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
SETTING = {
    "benchmarks.tensorflow_ways": "tensorflow-auto",
    "benchmarks.torch_ways": "torch",
    "benchmarks.jax_ways": "jax",
}


def measure(repeats: int = 3, only=None, kept: dict | None = None, say=print) -> dict:
    """MiB by which the peak grows over the process' start: weights, optimizer, gradients, activations, all of it.

    Args:
        repeats: processes for each figure.
        only: the ways to measure; None: all.
        kept: what an earlier call returned, for the cells of the other ways.
        say: hears what was measured.

    Returns:
        {"cells": a list of {"way", "k", "b", "mebibytes", "all"}, "arithmetic": what the weights alone need}.
    """
    cells, before = [], {(cell["way"], cell["k"], cell["b"]): cell for cell in (kept or {}).get("cells", [])}
    for module, setting in SETTING.items():
        try:
            ways = importlib.import_module(module).WAYS if module != "benchmarks.tensorflow_ways" else None
        except ImportError:
            continue
        for way in ways or _tensorflow_ways():
            for k, b in SHAPES:
                if only and way not in only:
                    cells += [before[way, k, b]] if (way, k, b) in before else []
                    continue
                if (k, b) == SHAPES[0] or way != "big batch":  # one big batch is like the other
                    found = [growth(setting, way, NETWORK, k, b)]
                    while None not in found and len(found) < repeats:  # what takes too long once is not asked again
                        found.append(growth(setting, way, NETWORK, k, b))
                say(f"{way} {k} x {b}: {found}", flush=True)
                median = None if None in found else statistics.median(found)
                cells.append(dict(way=way, k=k, b=b, mebibytes=median, all=found))
    one = [growth("tensorflow-auto", "big batch", NETWORK, 1, 1) for _ in range(repeats)]
    weights = sum(value.nbytes for value in networks.build(NETWORK).model.initial_weights(0).values()) / MEBIBYTE
    return {"cells": cells, "weights": weights, "one example": statistics.median(one)}


def _tensorflow_ways() -> list[str]:
    asked = speed.Worker("tensorflow-auto")
    asked.close()
    return asked.ways


def growth(setting: str, way: str, network: str, k: int, b: int) -> float | None:
    """One process' growth in MiB; None where it failed or took too long."""
    command = [sys.executable, "-m", "benchmarks.memory", setting, way, network, str(k), str(b)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, timeout=2 * speed.LIMIT
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def as_table(found: dict) -> str:
    """The cells as Markdown."""
    by_cell = {(cell["way"], cell["k"], cell["b"]): cell["mebibytes"] for cell in found["cells"]}
    lines = ["| MiB over the process' start | " + " | ".join(f"{k} x {b}" for k, b in SHAPES) + " |"]
    lines += ["| --- |" + " --- |" * len(SHAPES)]
    for way in dict.fromkeys(way for (way, *_), value in by_cell.items() if value is not None):
        row = [by_cell.get((way, *shape)) for shape in SHAPES]
        lines.append(f"| {way} | " + " | ".join("-" if value is None else f"{value:.0f}" for value in row) + " |")
    return "\n".join(lines)


def _counters(module: str) -> tuple[Callable, Callable]:
    """Functions that tell the MiB held now, and the most since now: of the GPU that TensorFlow uses, or the process."""
    if "tensorflow" in module:
        import tensorflow as tf

        if tf.config.list_logical_devices("GPU"):
            tf.config.experimental.reset_memory_stats("GPU:0")
            of_gpu = lambda name: tf.config.experimental.get_memory_info("GPU:0")[name] / MEBIBYTE  # noqa: E731
            return lambda: of_gpu("current"), lambda: of_gpu("peak")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return lambda: _status("VmRSS"), lambda: _status("VmHWM")


def _status(name: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status does not tell {name}")


def main() -> None:
    setting, way, name, k, b = sys.argv[1:]
    module, threads = worker.SETTINGS[setting]
    if threads is not None:
        import gradlab

        gradlab.setup(threads=threads)
    ways = importlib.import_module(module).WAYS
    network = networks.build(name)
    batch = worker.batch(network, int(k) * int(b))
    held, peak = _counters(module)
    before = held()
    ways[way](network, int(k), int(b), *batch)(2)
    print(json.dumps(round(peak() - before, 1)))


if __name__ == "__main__":
    main()

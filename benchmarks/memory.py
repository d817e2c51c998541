"""The second table: the memory that a way adds to a process at its peak. Each figure comes from a
process of its own.

It is the peak during the way's first two updates, less the memory held before the way is built,
when the framework, the network and the batch are already loaded. For TensorFlow on a GPU it is the
memory of the device, otherwise that of the process.

    python -m benchmarks.memory tensorflow-auto "gradlab" vgg16 32 1      (prints one figure, in MiB)
"""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import speed, worker
from gradlab.measure.memory import MEBIBYTE

NETWORK = "vgg16"
SHAPES = ((1, 32), (8, 4), (32, 1))
# How memory grows with k: with micro-batches of so many examples, for the setting and the k of each
# way.
CURVE_NETWORK, CURVE_EXAMPLES, GIBIBYTES = "resnet", 4, (1, 2, 4)
CURVE: dict[str, tuple[str, tuple[int, ...]]] = {
    "big batch in fit": ("tensorflow-auto", (1, 8, 32, 64, 128, 256, 512)),
    "gradlab in fit": ("tensorflow-auto", (1, 8, 64, 512)),
    "gradlab in fit, one in flight": ("tensorflow-auto", (1, 8, 64, 512)),
    "Keras option in fit": ("tensorflow-auto", (1, 8, 64, 512)),
    "PyTorch loop": ("torch", (1, 8, 64, 512)),
}
# By default glibc keeps freed memory for later use, how much depends on how the threads happen to
# run. With these settings it returns large pieces to the system.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


def measure(
    repeats: int = 3,
    only: Sequence[str] | None = None,
    kept: dict | None = None,
    say: Callable[..., None] = print,
) -> dict:
    """Measures all ways. The figures contain everything: weights, optimizer, gradients and
    activations.

    Args:
        repeats: the number of processes for each figure, of which the median counts.
        only: the names of the ways to measure. None: all.
        kept: the result of an earlier call, from which the figures of the other ways are taken.
        say: called with each line of progress, as `print` would be.

    Returns:
        {"cells", "weights", "one example"}. A cell is {"way", "k", "b", "mebibytes", "all"}, where
        "all" lists the figure of each process, and "mebibytes" is their median, or None if a
        process failed or took too long. "weights" is the size of the network's weights, and "one
        example" the figure of a big batch of one example in `fit` and in a function of one's own.
        All are in MiB.
    """
    from benchmarks import networks

    cells, before = (
        [],
        {(cell["way"], cell["k"], cell["b"]): cell for cell in (kept or {}).get("cells", [])},
    )
    for setting in worker.ONE_PER_FRAMEWORK:
        try:
            ways = importlib.import_module(worker.SETTINGS[setting][0]).WAYS
        except ImportError:
            continue
        for way in ways:
            for k, b in SHAPES:
                if only and way not in only:
                    cells += [before[way, k, b]] if (way, k, b) in before else []
                    continue
                # The big batch is the same for every k x b
                if (k, b) == SHAPES[0] or way not in speed.REFERENCES:
                    found = [growth(setting, way, NETWORK, k, b)]
                    # Does not repeat what failed or took too long
                    while None not in found and len(found) < repeats:
                        found.append(growth(setting, way, NETWORK, k, b))
                say(f"{way} {k} x {b}: {found}", flush=True)
                cells.append(dict(way=way, k=k, b=b, mebibytes=_median(found), all=found))
    one = {
        way: _median([growth("tensorflow-auto", way, NETWORK, 1, 1) for _ in range(repeats)])
        for way in speed.REFERENCES
    }
    weights = (
        sum(value.nbytes for value in networks.build(NETWORK).model.initial_weights(0).values())
        / MEBIBYTE
    )
    return {"cells": cells, "weights": weights, "one example": one}


def growth(setting: str, way: str, network: str, k: int, b: int, *options: str) -> float | None:
    """Measures one way in a new process.

    Args:
        setting: a key of `benchmarks.worker.SETTINGS`.
        way: the name of the way.
        network: the name of the network.
        k: the micro-batches per update.
        b: the examples per micro-batch.
        options: options of the command above.

    Returns:
        The MiB that the way adds at its peak, or None if the process failed or took too long.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        setting,
        way,
        network,
        str(k),
        str(b),
        *options,
    ]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **GLIBC},
            capture_output=True,
            text=True,
            timeout=2 * speed.LIMIT,
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def curve(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Measures how the memory of a whole process grows with k, for the network and the ways of
    `CURVE`.

    Args:
        repeats: the number of processes for each figure, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each way and k: {"way", "k", "mebibytes", "all"}, as in the cells of `measure`.
    """
    rows = []
    for way, (setting, steps) in CURVE.items():
        for k in steps:
            shape = (1, CURVE_EXAMPLES * k) if way in speed.REFERENCES else (k, CURVE_EXAMPLES)
            found = [growth(setting, way, CURVE_NETWORK, *shape, "--whole") for _ in range(repeats)]
            say(f"{way} {k} x {CURVE_EXAMPLES}: {found}", flush=True)
            rows.append({"way": way, "k": k, "mebibytes": _median(found), "all": found})
    return rows


def curve_as_table(rows: list[dict]) -> str:
    """Writes the rows of `curve` as two Markdown tables: the memory, and the largest batch that
    fits into it."""
    steps = sorted({row["k"] for row in rows})
    by_cell = {(row["way"], row["k"]): row["mebibytes"] for row in rows}
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [f"| MiB of the process | {' | '.join(f'{k} x {CURVE_EXAMPLES}' for k in steps)} |"]
    lines.append("| --- |" + " --- |" * len(steps))
    for way in ways:
        figures = [by_cell.get((way, k)) for k in steps]
        lines.append(
            f"| {way} | "
            + " | ".join("-" if one is None else f"{one:.0f}" for one in figures)
            + " |"
        )
    lines += ["", f"| largest of these batches | {' | '.join(f'{g} GiB' for g in GIBIBYTES)} |"]
    lines.append("| --- |" + " --- |" * len(GIBIBYTES))
    for way in ways:
        own = {k: one for (other, k), one in by_cell.items() if other == way and one is not None}
        fits = [max((k for k, one in own.items() if one <= 1024 * g), default=0) for g in GIBIBYTES]
        words = [
            f"{CURVE_EXAMPLES * k} or more" if k == max(own) else str(CURVE_EXAMPLES * k)
            for k in fits
        ]
        lines.append(f"| {way} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _median(figures: list[float | None]) -> float | None:
    """The median; None if a process failed or took too long."""
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if len(known) == len(figures) else None


def as_table(found: dict) -> str:
    """Writes the cells as a Markdown table.

    Args:
        found: what `measure` returned.

    Returns:
        A table with a row for each way and a column for each shape, and "-" where a way failed or
        took too long.
    """
    by_cell = {(cell["way"], cell["k"], cell["b"]): cell["mebibytes"] for cell in found["cells"]}
    lines = ["| MiB added to the process | " + " | ".join(f"{k} x {b}" for k, b in SHAPES) + " |"]
    lines += ["| --- |" + " --- |" * len(SHAPES)]
    for way in dict.fromkeys(way for (way, *_), value in by_cell.items() if value is not None):
        row = [by_cell.get((way, *shape)) for shape in SHAPES]
        lines.append(
            f"| {way} | "
            + " | ".join("-" if value is None else f"{value:.0f}" for value in row)
            + " |"
        )
    return "\n".join(lines)


def _counters(module: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that return the MiB held now and the peak since this call, of TensorFlow's GPU or
    of the process."""
    if "tensorflow" in module:
        import tensorflow as tf

        if tf.config.list_logical_devices("GPU"):
            tf.config.experimental.reset_memory_stats("GPU:0")
            of_gpu = lambda name: tf.config.experimental.get_memory_info("GPU:0")[name] / MEBIBYTE  # noqa: E731
            return lambda: of_gpu("current"), lambda: of_gpu("peak")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory held now
    return lambda: _status("VmRSS"), lambda: _status("VmHWM")


def _status(name: str) -> float:
    """A field of /proc/self/status, in MiB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status must contain {name}. Received: no such line")


def main() -> None:
    """Measures one way in this process and prints the MiB as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", choices=list(worker.SETTINGS))
    parser.add_argument("way", help="the name of a way, as in the tables")
    parser.add_argument("network", choices=list(speed.SHAPES))
    parser.add_argument("k", type=int, help="micro-batches per update")
    parser.add_argument("b", type=int, help="examples per micro-batch")
    parser.add_argument(
        "--whole", action="store_true", help="the peak of the whole process, not what the way adds"
    )
    asked = parser.parse_args()
    worker.set_up(asked.setting)
    from benchmarks import networks

    module = worker.SETTINGS[asked.setting][0]
    network = networks.build(asked.network)
    batch = networks.batch(network, asked.k * asked.b)
    held, peak = _counters(module)
    before = held()
    variants = importlib.import_module(module).WAYS[asked.way]
    next(iter(variants.values()))(network, asked.k, asked.b, *batch)(1 if asked.whole else 2)
    print(json.dumps(round(peak() - (0 if asked.whole else before), 1)))


if __name__ == "__main__":
    main()

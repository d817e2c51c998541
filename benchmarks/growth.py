"""The third table: how time and memory grow with k, with the parameters, with the towers and with
the workers.

To measure one part and print its rows as JSON:

    python -m benchmarks.growth k

Like the other parts of one process, "k" is measured in a process of its own.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.speed import digits
from gradlab.measure.memory import MEBIBYTE, PeakMemory

if TYPE_CHECKING:
    from gradlab.lab.experiments.methods import Method
    from gradlab.lab.experiments.models import Model

STEPS = (1, 8, 64, 512)
# Millions of parameters: the hidden units of a dense network with 785 * hidden + 11 * hidden + 10
# parameters.
HIDDEN = {1.0: 1258, 10.0: 12579, 100.0: 125_789}
WORKER = """
import time, gradlab
gradlab.setup()
strategy = gradlab.cluster.strategy()
import keras, numpy as np
from gradlab.measure.memory import MEBIBYTE, PeakMemory
peak = PeakMemory()
with strategy.scope():
    model = keras.Sequential([keras.Input([784]), keras.layers.Dense(512, "relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = gradlab.Trainer(model, optimizer, loss, 16, strategy)
x, y = np.random.default_rng(0).random([512, 784], np.float32), np.zeros(512, np.int32)
for _ in range(3):
    trainer.step(x, y)
began = time.perf_counter()
for _ in range(20):
    trainer.step(x, y)
print("measured", 1000 * (time.perf_counter() - began) / 20, peak.bytes() / MEBIBYTE)
"""


def measure(repeats: int = 3, say: Callable[..., None] = print) -> dict:
    """Measures all four parts.

    Args:
        repeats: the number of processes for each part, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        {"k", "parameters", "towers", "workers"}, each a list of rows. A row has the part's name as
        the key of the quantity that grows, "milliseconds" per update (for "k", per micro-batch),
        and "mebibytes" at the peak.
    """
    found = {}
    for part in PARTS:
        say(part)
        rows = [
            json.loads(_run([sys.executable, "-m", "benchmarks.growth", part]))
            for _ in range(repeats)
        ]
        found[part] = [
            {key: statistics.median(row[i][key] for row in rows) for key in rows[0][i]}
            for i in range(len(rows[0]))
        ]
    say("workers")
    found["workers"] = []
    for n in (1, 2):
        times, peaks = zip(*(workers(n) for _ in range(repeats)))
        row = {
            "workers": n,
            "milliseconds": statistics.median(times),
            "mebibytes": statistics.median(peaks),
        }
        found["workers"].append(row)
    return found


def workers(count: int) -> tuple[float, float]:
    """Trains with several workers on this machine, each with 512 examples per update.

    Args:
        count: the number of workers.

    Returns:
        The milliseconds per update and the peak memory in MiB, both of the slowest worker.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "train.py"
        script.write_text(WORKER)
        command = [
            sys.executable,
            "-m",
            "gradlab",
            "launch",
            "--workers",
            str(count),
            "--",
            str(script),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    found = [
        tuple(map(float, line.split()[-2:]))
        for line in done.stdout.splitlines()
        if "measured" in line
    ]
    if done.returncode or len(found) != count:
        raise RuntimeError(f"{count} workers: {done.stdout[-500:]} {done.stderr[-2000:]}")
    milliseconds, mebibytes = max(found)
    return milliseconds, mebibytes


def as_table(found: dict) -> str:
    """Writes all four parts as a Markdown table.

    Args:
        found: what `measure` returned.

    Returns:
        A table with a row for each part, from its first row to its last.
    """
    rows = {
        "k": "k micro-batches of 4 examples, LeNet (ms per micro-batch)",
        "parameters": "millions of parameters, 8 x 4, SGD (ms per update)",
        "towers": "towers, LeNet, 100 examples in all (ms per update)",
        "workers": "workers on the same cores, 512 examples each (ms per update, MiB per worker)",
    }
    lines = ["| what grows | from | to | ms | peak MiB |", "| --- | --- | --- | --- | --- |"]
    for name, words in rows.items():
        first, last = found[name][0], found[name][-1]
        times = f"{digits(first['milliseconds'])} to {digits(last['milliseconds'])}"
        memory = f"{first['mebibytes']:.0f} to {last['mebibytes']:.0f}"
        lines.append(f"| {words} | {first[name]:g} | {last[name]:g} | {times} | {memory} |")
    return "\n".join(lines)


def _run(command: list[str]) -> str:
    """The last line that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def _seconds(update: Callable[[], object], updates: int) -> float:
    """The seconds per update, after two updates that are not timed."""
    update()
    update()
    began = time.perf_counter()
    for _ in range(updates):
        update()
    return (time.perf_counter() - began) / updates


def _updates(
    method: "Method", model: "Model", x: np.ndarray, y: np.ndarray, b: int
) -> Callable[[], object]:
    """A function that makes one update, from the model's initial weights on."""
    method.reset(model.initial_weights(0))
    return lambda: method.update(x, y, b, 1e-3)


def _with_k() -> list[dict]:
    from benchmarks import networks
    from gradlab.lab.experiments.methods import Microbatched
    from gradlab.lab.experiments.optimizers import OptimizerConfig

    rows = []
    network = networks.build("lenet")
    method = Microbatched(network.model, OptimizerConfig("adam"), in_flight=1)
    x, y = networks.batch(network, 4 * STEPS[-1])
    for k in STEPS:
        update = _updates(method, network.model, x[: 4 * k], y[: 4 * k], 4)
        update()
        peak = PeakMemory()
        seconds = _seconds(update, max(2, 64 // k))
        rows.append(
            {"k": k, "milliseconds": 1000 * seconds / k, "mebibytes": peak.bytes() / MEBIBYTE}
        )
    return rows


def _with_parameters() -> list[dict]:
    from benchmarks import networks
    from gradlab.lab.experiments import models
    from gradlab.lab.experiments.methods import Microbatched
    from gradlab.lab.experiments.optimizers import OptimizerConfig

    rows = []
    x, y = networks.batch(networks.build("dense"), 32)
    for millions, hidden in HIDDEN.items():
        model = models.dense(hidden=hidden)
        method = Microbatched(model, OptimizerConfig("sgd"), in_flight=1)
        peak = PeakMemory()
        seconds = _seconds(_updates(method, model, x, y, 4), 3)
        rows.append(
            {
                "parameters": millions,
                "milliseconds": 1000 * seconds,
                "mebibytes": peak.bytes() / MEBIBYTE,
            }
        )
        del method  # frees its memory before the next, larger network is built
    return rows


def _with_towers() -> list[dict]:
    from benchmarks import networks
    from gradlab.lab.experiments import methods
    from gradlab.lab.experiments.optimizers import OptimizerConfig

    rows = []
    network = networks.build("lenet")
    x, y = networks.batch(network, 100)
    for towers in (1, 2):
        peak = PeakMemory()
        method = methods.build("towers", network.model, OptimizerConfig("adam"), towers=towers)
        seconds = _seconds(_updates(method, network.model, x, y, 100 // towers), 20)
        rows.append(
            {"towers": towers, "milliseconds": 1000 * seconds, "mebibytes": peak.bytes() / MEBIBYTE}
        )
    return rows


# The parts that run in one process. The imports are inside the functions, because `gradlab.setup`
# comes first.
PARTS = {"k": _with_k, "parameters": _with_parameters, "towers": _with_towers}


def main() -> None:
    """Measures one part in this process and prints its rows as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS), help="the quantity that grows")
    part = parser.parse_args().part
    import gradlab

    gradlab.setup(towers=2 if part == "towers" else None)
    print(json.dumps(PARTS[part]()))


if __name__ == "__main__":
    main()

"""The third table: how time and memory grow with k, with parameters, with towers and with workers.

python -m benchmarks.growth k|parameters|towers      (one process each prints JSON)
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = (1, 8, 64, 512)
HIDDEN = {1.0: 1258, 10.0: 12579, 100.0: 125_789}  # millions of parameters: 785 hidden + 11 hidden + 10
WORKER = """
import time, gradlab
gradlab.setup()
strategy = gradlab.cluster.strategy()
import keras, numpy as np
from gradlab.measure.memory import PeakMemory
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
print("measured", 1000 * (time.perf_counter() - began) / 20, peak.bytes() / 2**20)
"""


def measure(repeats: int = 3, say=print) -> dict:
    """Medians over processes: {"k", "parameters", "towers", "workers"}, each a list of dicts."""
    found = {}
    for what in ("k", "parameters", "towers"):
        say(what)
        rows = [json.loads(_run([sys.executable, "-m", "benchmarks.growth", what])) for _ in range(repeats)]
        found[what] = [
            {key: statistics.median(row[i][key] for row in rows) for key in rows[0][i]} for i in range(len(rows[0]))
        ]
    say("workers")
    found["workers"] = []
    for n in (1, 2):
        times, peaks = zip(*(workers(n) for _ in range(repeats)))
        row = {"workers": n, "milliseconds": statistics.median(times), "mebibytes": statistics.median(peaks)}
        found["workers"].append(row)
    return found


def as_table(found: dict) -> str:
    """All four as Markdown."""
    rows = {
        "k": "k, micro-batches of 4 in LeNet: ms a micro-batch",
        "parameters": "million parameters, 8 x 4, SGD: ms an update",
        "towers": "towers, LeNet, 100 examples in all: ms an update",
        "workers": "workers, 512 examples each, on the same cores: ms an update, MiB each",
    }
    lines = ["| what grows | from | to | ms | MiB held at most |", "| --- | --- | --- | --- | --- |"]
    for name, words in rows.items():
        first, last = found[name][0], found[name][-1]
        times = f"{first['milliseconds']:.3g} to {last['milliseconds']:.3g}"
        memory = f"{first['mebibytes']:.0f} to {last['mebibytes']:.0f}"
        lines.append(f"| {words} | {first[name]:g} | {last[name]:g} | {times} | {memory} |")
    return "\n".join(lines)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def workers(count: int) -> tuple[float, float]:
    """Milliseconds an update of 512 examples a worker and MiB a worker, with so many workers on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "train.py"
        script.write_text(WORKER)
        command = [sys.executable, "-m", "gradlab", "launch", "--workers", str(count), "--", str(script)]
        done = subprocess.run(command, capture_output=True, text=True)
    found = [tuple(map(float, line.split()[-2:])) for line in done.stdout.splitlines() if "measured" in line]
    if done.returncode or len(found) != count:
        raise RuntimeError(f"{count} workers: {done.stdout[-500:]} {done.stderr[-2000:]}")
    return max(found)


def _seconds(update, updates: int) -> float:
    update()
    update()
    began = time.perf_counter()
    for _ in range(updates):
        update()
    return (time.perf_counter() - began) / updates


def main() -> None:
    what = sys.argv[1]
    import gradlab

    gradlab.setup(towers=2 if what == "towers" else None)
    from benchmarks import networks, worker
    from gradlab.lab.experiments import methods, models
    from gradlab.measure.memory import PeakMemory
    from gradlab.lab.experiments.optimizers import OptimizerConfig

    def update_of(method, model, x, y, b):
        method.reset(model.initial_weights(0))
        return lambda: method.update(x, y, b, 1e-3)

    rows = []
    if what == "k":
        network = networks.build("lenet")
        method = methods.Microbatched(network.model, OptimizerConfig("adam"), in_flight=1)
        x, y = worker.batch(network, 4 * STEPS[-1])
        for k in STEPS:
            update = update_of(method, network.model, x[: 4 * k], y[: 4 * k], 4)
            update()
            peak = PeakMemory()
            seconds = _seconds(update, max(2, 64 // k))
            rows.append({"k": k, "milliseconds": 1000 * seconds / k, "mebibytes": peak.bytes() / 2**20})
    elif what == "parameters":
        x, y = worker.batch(networks.build("dense"), 32)
        for millions, hidden in HIDDEN.items():
            model = models.dense(hidden=hidden)
            method = methods.Microbatched(model, OptimizerConfig("sgd"), in_flight=1)
            peak = PeakMemory()
            seconds = _seconds(update_of(method, model, x, y, 4), 3)
            rows.append({"parameters": millions, "milliseconds": 1000 * seconds, "mebibytes": peak.bytes() / 2**20})
            del method
    else:
        network = networks.build("lenet")
        x, y = worker.batch(network, 100)
        for towers in (1, 2):
            peak = PeakMemory()
            method = methods.build("towers", network.model, OptimizerConfig("adam"), towers=towers)
            seconds = _seconds(update_of(method, network.model, x, y, 100 // towers), 20)
            rows.append({"towers": towers, "milliseconds": 1000 * seconds, "mebibytes": peak.bytes() / 2**20})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

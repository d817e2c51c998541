"""The table of microbatch_size="auto": the size that it chooses, beside the time of all sizes.

To measure one network and print its figures as JSON:

    python -m benchmarks.auto_size lenet
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

BATCHES = {"dense": 100, "lenet": 100, "resnet": 64, "transformer": 64, "vgg16": 32}  # examples per update
ROUNDS, SECONDS = 5, 0.3  # rounds, and the least time of a timing
SLOW = 3.0  # a size that takes so many times as long as the fastest one is timed once


def measure(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Measures all networks.

    Args:
        repeats: the number of processes for each network, each with a choice of its own.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each network and process: {"network", "examples", "auto": the chosen size, "milliseconds": for each
        size, as text, the time per update in `fit`}.
    """
    rows = []
    for network, examples in BATCHES.items():
        for _ in range(repeats):
            command = [sys.executable, "-m", "benchmarks.auto_size", network]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
            rows.append({"network": network, "examples": examples, **json.loads(done.stdout.splitlines()[-1])})
            say(f"{rows[-1]}", flush=True)
    return rows


def over_best(row: dict) -> float:
    """The time of the chosen size over that of the fastest."""
    return row["milliseconds"][str(row["auto"])] / min(row["milliseconds"].values())


def as_table(rows: list[dict]) -> str:
    """Writes a row for each network, with the choices of all processes."""
    lines = ["| examples per update | fastest size | chosen sizes | time over that of the fastest |"]
    lines.append("| --- | --- | --- | --- |")
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        best = [min(row["milliseconds"], key=row["milliseconds"].get) for row in own]
        chosen = ", ".join(str(row["auto"]) for row in own)
        ratios = ", ".join(f"{over_best(row):.2f}" for row in own)
        lines.append(f"| {network}, {own[0]['examples']} | {', '.join(best)} | {chosen} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    """Measures one network in this process and prints its figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=BATCHES)
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    import keras

    from benchmarks import networks
    from benchmarks.keras_models import keras_model
    from gradlab.training.auto_size import _sizes

    network, examples = networks.build(asked.network), BATCHES[asked.network]
    x, y = networks.batch(network, examples)

    def prepared(size):
        model = gradlab.microbatched(keras_model(network), size)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        fit = lambda updates: model.fit(x, y, batch_size=examples, epochs=updates, shuffle=False, verbose=0)  # noqa: E731
        fit(2)
        return model, fit

    chosen = prepared("auto")[0].microbatch_size
    fits = {size: prepared(size)[1] for size in _sizes(examples)}
    times: dict[int, list[float]] = {size: [] for size in fits}
    for number in range(ROUNDS):
        for size in list(fits)[:: 1 if number % 2 else -1]:
            known = min(map(statistics.median, filter(None, times.values())), default=0.0)
            if times[size] and statistics.median(times[size]) > SLOW * known:
                continue
            began, updates = time.perf_counter(), 0
            while time.perf_counter() - began < SECONDS:
                fits[size](3)
                updates += 3
            times[size].append((time.perf_counter() - began) / updates)
    milliseconds = {size: 1000 * statistics.median(found) for size, found in times.items()}
    print(json.dumps({"auto": chosen, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()

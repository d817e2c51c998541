"""The table of automatic sizes: an update in `fit` with microbatch_size="auto" beside the same with
each size.

To time one of them and print its figures as JSON:

    python -m benchmarks.automatic_sizes lenet auto
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.speed import digits

EXAMPLES = {"lenet": 128, "dense": 128, "resnet": 64, "transformer": 64}  # of an update
CUTS = (1, 2, 4, 8, 16)  # the micro-batches of an update
# The least time of a call of `fit`, and how many there are in a process. The fastest counts: on a
# virtual machine, some calls take up to twice as long as others of the same process (NOTES.md,
# "Automatic sizes").
SECONDS, CALLS = 0.4, 12


def measure(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Times all sizes of all networks.

    Args:
        repeats: the number of processes for each figure, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each network: {"network", "milliseconds": {size: of an update}, "auto": of an
        update with "auto", "chosen": the sizes that it chose}.
    """
    rows = []
    for network, examples in EXAMPLES.items():
        found: dict[str, list[dict]] = {str(examples // k): [] for k in CUTS} | {"auto": []}
        for _ in range(repeats):
            # In turn, so that a slow minute of the machine meets all of them
            for size, runs in found.items():
                runs.append(_run(network, size))
                say(f"{network}, {size}: {runs[-1]}", flush=True)
        medians = {
            size: statistics.median(run["milliseconds"] for run in runs)
            for size, runs in found.items()
        }
        chosen = [run["size"] for run in found["auto"]]
        rows.append(
            {
                "network": network,
                "auto": medians.pop("auto"),
                "milliseconds": medians,
                "chosen": chosen,
            }
        )
    return rows


def _run(network: str, size: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.automatic_sizes", network, size]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table; in parentheses the time over that of the best size."""
    lines = [
        f"| ms per update | {' | '.join(f'B / {k}' if k > 1 else 'b = B' for k in CUTS)} | auto | "
        "it chose |"
    ]
    lines.append("| --- |" + " ---: |" * (len(CUTS) + 1) + " --- |")
    for row in rows:
        examples, best = EXAMPLES[row["network"]], min(row["milliseconds"].values())
        times = [row["milliseconds"][str(examples // k)] for k in CUTS] + [row["auto"]]
        cells = [f"{digits(each)} ({each / best:.2f})" for each in times]
        chosen = ", ".join(map(str, row["chosen"]))
        lines.append(f"| {row['network']}, B = {examples} | {' | '.join(cells)} | {chosen} |")
    return "\n".join(lines)


def main() -> None:
    """Times one size in this process and prints its figures as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=EXAMPLES)
    parser.add_argument("size", help='the examples per micro-batch, or "auto"')
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    import keras
    import tensorflow as tf

    from benchmarks import networks
    from benchmarks.keras_models import keras_model

    network = networks.build(asked.network)
    x, y = networks.batch(network, EXAMPLES[asked.network])
    # One batch again and again: a call of `fit` costs as much as several updates of a small
    # network.
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model = gradlab.microbatched(
        keras_model(network), asked.size if asked.size == "auto" else int(asked.size)
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(data, steps_per_epoch=20, verbose=0)
    steps, times = 1, list[float]()
    while len(times) < CALLS:
        began = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        took = time.perf_counter() - began
        if took < SECONDS:
            steps, times = 2 * steps, []  # too short to time
        else:
            times.append(took / steps)
    print(json.dumps({"milliseconds": 1000 * min(times), "size": model.microbatch_size}))


if __name__ == "__main__":
    main()

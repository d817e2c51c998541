"""The table of six models in 1 GiB: what their batches take as plain Keras, and with gradlab.

The figures are peaks of whole processes, TensorFlow, data and weights included. To measure one of
them and print it:

    python -m benchmarks.six_models CLIP gradlab
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from gradlab.measure.memory import MEBIBYTE, PeakMemory

WAYS = ("Keras", "gradlab")


class Model(NamedTuple):
    """A model of the table.

    Attributes:
        side: the side of its images, or the length of its longest text.
        batch, microbatch: the examples of an update and of a micro-batch.
        change: the lines that gradlab changes.
        before: what the first edition of gradlab did with it.
        guide: where it is explained.
    """

    side: int
    batch: int
    microbatch: int
    change: str
    before: str
    guide: str


_WRAP = "`gradlab.microbatched(model, {})`"
_IN_STEP = "in `train_step`, `gradlab.value_and_gradients` in the place of the tape"
MODELS = {
    "VGG-16 triplets": Model(
        64,
        128,
        4,
        f"{_WRAP.format('4, in_flight=1')}, `gradlab.WholeBatch(loss)`",
        "refused",
        "whole_batch.md#triplets-with-mining",
    ),
    "CLIP": Model(
        64,
        256,
        8,
        f"{_WRAP.format(8)}, `gradlab.WholeBatch(loss)`",
        "refused",
        "whole_batch.md#two-towers-as-in-clip",
    ),
    "VAE": Model(64, 256, 8, f"{_IN_STEP}: 3 lines", "refused", "own_train_step.md"),
    "GAN": Model(
        64,
        128,
        4,
        f"{_IN_STEP}: 3 lines for each of the two networks",
        "refused",
        "own_train_step.md#two-optimizers-and-random-input-a-gan",
    ),
    "text transformer": Model(
        512,
        256,
        2,
        "`gradlab.token_batches(...)`, " + _WRAP.format('"given"'),
        "padded",
        "tokens.md#less-padding",
    ),
    "U-Net": Model(
        128,
        32,
        1,
        _WRAP.format(1),
        "supported",
        "small_memory.md#images-with-many-activations-a-u-net",
    ),
}


def measure(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Measures all models, as plain Keras and with gradlab.

    Args:
        repeats: the number of processes for each figure, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each model: {"model", and for each way the MiB of its process}.
    """
    rows = []
    for name in MODELS:
        row: dict = {"model": name}
        for way in WAYS:
            runs = [_run(name, way) for _ in range(repeats)]
            row[way] = statistics.median(runs)
            say(f"{name}, {way}: {row[way]}", flush=True)
        rows.append(row)
    return rows


def _run(name: str, way: str) -> float:
    command = [sys.executable, "-m", "benchmarks.six_models", name, way]
    # With the allocator as it comes, as a user has it
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table, for a page among the guides."""
    lines = [
        "| model | batch | Keras | gradlab | what changes | first edition |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        model = MODELS[row["model"]]
        cells = [f"{row[way]:.0f} MiB" for way in WAYS]
        words = f"| [{row['model']}]({model.guide}) | {model.batch} | {' | '.join(cells)} "
        lines.append(f"{words}| {model.change} | {model.before} |")
    return "\n".join(lines)


def main() -> None:
    """Measures one model in this process and prints the MiB as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("way", choices=WAYS)
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    from benchmarks.six_programs import PROGRAMS

    side, batch, microbatch, *_ = MODELS[asked.model]
    size = microbatch if asked.way == "gradlab" else None
    build, data = PROGRAMS[asked.model]
    peak = PeakMemory()
    model, examples = build(side, size), data(side, batch, size)
    model.fit(**examples, epochs=3, verbose=0)
    print(peak.bytes() / MEBIBYTE)


if __name__ == "__main__":
    main()

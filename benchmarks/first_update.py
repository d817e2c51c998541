"""The seconds until the first update, with gradlab and without: the time that tracing and compiling
take.

The programs are those of tests/examples, written after examples of Keras.

    python -m benchmarks.first_update      (prints the rows as JSON)
"""

import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

EXAMPLES = pathlib.Path(__file__).parent.parent / "tests" / "examples"
REPEATS = 3  # the measurements of each program in a process, after one that does not count


class Finished(Exception):
    """Ends a program after its first update."""


def measure(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Measures all programs.

    Args:
        repeats: the number of processes, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each program: {"program", "plain": seconds without gradlab, "ratio": the time with
        gradlab over it}.
    """
    runs = []
    for number in range(repeats):
        say(f"first update, process {number + 1}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.first_update"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"benchmarks.first_update: {done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {
            "program": rows[0]["program"],
            "plain": statistics.median(row["plain"] for row in rows),
            "ratio": statistics.median(row["ratio"] for row in rows),
        }
        for rows in zip(*runs)
    ]


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table."""
    lines = [
        "| program | without gradlab, s | with gradlab, times as long |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['program'].replace('_', ' ')} | {row['plain']:.2f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def seconds(program: ModuleType, gradlab: Any) -> float:
    """The seconds from the call of a program's first `fit` to the end of its first update.

    Args:
        program: a module with the functions build() -> model and run(model).
        gradlab: the module that prepares the model with micro-batches of 2, or None.
    """
    import keras

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise Finished

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = program.build()
    if gradlab is not None:
        said = getattr(program, "BATCH_LOSSES", None)
        model = gradlab.microbatched(model, 2, batch_losses=said)
    fit, began = model.fit, []

    def timed(*args, **kwargs):
        began.append(time.perf_counter())
        return fit(*args, **kwargs | {"callbacks": [*(kwargs.get("callbacks") or []), First()]})

    object.__setattr__(model, "fit", timed)
    try:
        program.run(model)
    except Finished:
        return time.perf_counter() - began[0]
    raise RuntimeError(f"{program.__name__} must call fit. Received: a program without it")


def main() -> None:
    """Measures all programs in this process and prints the rows as the last line."""
    import gradlab

    gradlab.setup()
    warnings.simplefilter("ignore")
    rows = []
    for path in sorted(EXAMPLES.glob("*.py")):
        if path.stem.startswith("test_"):
            continue
        program = _load(path)
        plain, ours = [], []
        for _ in range(REPEATS + 1):
            plain.append(seconds(program, None))
            ours.append(seconds(program, gradlab))
        ratio = statistics.median(one / other for one, other in zip(ours[1:], plain[1:]))
        rows.append({"program": path.stem, "plain": statistics.median(plain[1:]), "ratio": ratio})
    print(json.dumps(rows))


def _load(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

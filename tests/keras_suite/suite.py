"""Runs the tests that Keras' wheel carries, as they are and through `microbatched`, and compares every training.

    python tests/keras_suite/suite.py [WORD ...]      only files whose path contains one of the words

prints a line for each test that differs. Nothing of Keras' tests is copied: they are run where they are installed.
"""

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import keras
import numpy as np

HERE = Path(__file__).parent
KERAS = Path(keras.__file__).parent / "src"
TRAINS = re.compile(r"\.fit\(|train_on_batch\(|run_layer_test\(")
# Tests of other backends, and of formats that need packages which gradlab does not install.
ELSEWHERE = ("backend/jax", "backend/torch", "backend/openvino", "jax_layer", "torch_utils", "export/", "sklearn")
TOLERANCE = 1e-3  # of float32 trainings on random data, relative to the largest element


def files(words: list[str]) -> list[str]:
    """The test files that train models."""
    found = sorted(KERAS.rglob("*_test.py"))
    paths = [path for path in found if not any(part in path.as_posix() for part in ELSEWHERE)]
    chosen = [path for path in paths if not words or any(word in path.as_posix() for word in words)]
    return [str(path) for path in chosen if TRAINS.search(path.read_text())]


def start(mode: str, paths: list[str], record: Path) -> subprocess.Popen:
    """Starts pytest over the files in a process of its own."""
    environment = {
        **os.environ, "GRADLAB_SUITE": f"{mode}:{record}",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }  # fmt: skip
    options = [
        *("-q", "-W", "ignore", "-p", "recorder", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"),
        *("--import-mode=importlib", "-o", "addopts=", "-c", os.devnull, "--rootdir", str(KERAS.parents[1])),
        "--continue-on-collection-errors",
    ]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    with open(record.with_suffix(".log"), "w") as log:
        return subprocess.Popen(command, env=environment, cwd=record.parent, stdout=log, stderr=log)


def compare(words: list[str] = ()) -> dict[str, tuple[str, str]]:
    """Runs the tests both ways.

    Returns:
        For each test that trains and that passes as it is: (verdict, reason). The verdict is "equal", "refused" if
        gradlab refused a model, "differs" if a number does, or "fails".
    """
    paths = files(list(words))
    with tempfile.TemporaryDirectory() as folder:
        records = [Path(folder) / mode for mode in ("plain", "microbatched")]
        for job in [start(record.name, paths, record) for record in records]:
            job.wait()
        missing = [record for record in records if not record.exists()]
        if missing:
            raise RuntimeError(missing[0].with_suffix(".log").read_text()[-3000:])
        (outcomes, plain), (seen, small) = (pickle.loads(record.read_bytes()) for record in records)
    return {
        name: verdict(plain[name], small.get(name, []), seen.get(name, ("failed", "it did not run")))
        for name, (outcome, _) in outcomes.items()
        if outcome == "passed" and plain[name]
    }


def verdict(plain: list, small: list, outcome: tuple[str, str]) -> tuple[str, str]:
    """Whether the trainings of a test are equal, and if not, why."""
    refusals = [said for _, said, _, _ in small if said]
    if outcome[0] != "passed":
        return "fails", outcome[1]
    if refusals:
        return "refused", refusals[0]
    if len(plain) != len(small):
        return "differs", f"{len(plain)} trainings, {len(small)} in micro-batches"
    for (_, _, logs, weights), (_, _, other_logs, other_weights) in zip(plain, small):
        if set(logs) != set(other_logs):
            return "differs", f"logs {sorted(logs)}, {sorted(other_logs)}"
        pairs = [*((key, logs[key], other_logs[key]) for key in logs), *zip(range(9999), weights, other_weights)]
        for name, one, other in pairs:
            if np.shape(one) != np.shape(other):
                return "differs", f"{name}: shape {np.shape(one)}, {np.shape(other)}"
            scale = np.max(np.abs(one), initial=1e-2)
            error = np.max(np.abs(np.subtract(one, other)), initial=0) / scale
            if not error <= TOLERANCE and not np.array_equal(one, other, equal_nan=True):
                return "differs", f"{'log' if isinstance(name, str) else 'weight'} {name}: relative error {error:.2g}"
    return "equal", ""


if __name__ == "__main__":
    found = compare(sys.argv[1:])
    for name, (kind, reason) in found.items():
        if kind != "equal":
            print(f"{kind:8} {name}: {reason}")
    print(Counter(kind for kind, _ in found.values()))

"""Runs the tests that Keras' wheel carries, as they are and through `microbatched`, and compares
every training.

    python tests/keras_suite/suite.py [WORD ...]      only files whose path contains one of the words

prints a line for each test that differs, and the table of docs/equality.md, and fails if a
difference is not allowed (`make test-keras`). Nothing of Keras' tests is copied: they are run where
they are installed.
"""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.keras_suite.conditions import ALLOWED, CONDITIONS, among

HERE = Path(__file__).parent
# Found without the seconds of an import
KERAS = Path(importlib.util.find_spec("keras").origin).parent / "src"
TRAINS = re.compile(r"\.fit\(|train_on_batch\(|run_layer_test\(|gradient_accumulation_steps")
# Tests of other backends, and of formats that need packages which gradlab does not install.
ELSEWHERE = (
    "backend/jax",
    "backend/torch",
    "backend/openvino",
    "jax_layer",
    "torch_utils",
    "export/",
    "sklearn",
)
# Tests of layers without variables: they train nothing.
WITHOUT_VARIABLES = ("layers/reshaping", "layers/merging", "layers/pooling")
PROCESSES = 2
TOLERANCE = 1e-3  # of float32 trainings on random data, relative to the largest element


class Verdict(NamedTuple):
    """What became of a test: "equal", "conditional", "allowed" to differ, "failing"; "not here" if
    Keras' own fails."""

    kind: str
    reason: str = ""


def files(words: list[str]) -> list[str]:
    """The test files that train models."""
    found = sorted(KERAS.rglob("*_test.py"))
    paths = [
        path
        for path in found
        if not any(part in path.as_posix() for part in ELSEWHERE + WITHOUT_VARIABLES)
    ]
    chosen = [path for path in paths if not words or any(word in path.as_posix() for word in words)]
    return [str(path) for path in chosen if TRAINS.search(path.read_text())]


def run(job: tuple) -> None:
    """Runs pytest over a part of the tests in a process of its own: (files, the part, whether
    quick, the file for the record)."""
    paths, part, quick, record = job
    environment = {
        **os.environ, "GRADLAB_SUITE": str(record), "GRADLAB_PART": f"{part} {PROCESSES}",
        "GRADLAB_QUICK": "yes" if quick else "",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }  # fmt: skip
    options = [
        *(
            "-q",
            "-W",
            "ignore",
            "-p",
            "recorder",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--noconftest",
        ),
        *(
            "--import-mode=importlib",
            "-o",
            "addopts=",
            "-c",
            os.devnull,
            "--rootdir",
            str(KERAS.parents[1]),
        ),
        "--continue-on-collection-errors",
    ]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    done = subprocess.run(
        command, env=environment, cwd=record.parent, capture_output=True, text=True
    )
    if not record.exists():
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])


def compare(words: list[str] = (), quick: bool = False) -> dict[str, Verdict]:
    """Runs the tests both ways, in several processes, and returns a verdict for each that trains.

    If quick, the slowest tests are left out, of a parametrized test only one case runs, and of these
    every second one.
    """
    paths, found = files(list(words)), {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        jobs = [(paths, part, quick, Path(folder) / f"record {part}") for part in range(PROCESSES)]
        list(pool.map(run, jobs))
        for *_, record in jobs:
            outcomes, trainings = pickle.loads(record.read_bytes())
            for name, outcome in outcomes["plain"].items():
                seen = outcomes["microbatched"].get(name, ("failed", "it did not run"))
                one = verdict(
                    outcome, trainings["plain"][name], seen, trainings["microbatched"].get(name, [])
                )
                if one is not None:
                    found[name] = judged(name, one)
    return dict(sorted(found.items()))


def judged(name: str, one: Verdict) -> Verdict:
    """The verdict on a test that may be on one of the lists."""
    reason = next((reason for word, reason in ALLOWED.items() if word in name), None)
    if one.kind == "failing" and reason:
        return Verdict("allowed", reason)
    if one.kind == "equal" and among(name, CONDITIONS):
        return Verdict("conditional")
    return one


def verdict(
    outcome: tuple[str, str], plain: list, seen: tuple[str, str], small: list
) -> Verdict | None:
    """The verdict on a test, from its outcomes and its trainings both ways; None if it trained
    nothing."""
    if outcome[0] == "failed":
        return Verdict("not here", outcome[1])
    if outcome[0] == "error":
        return Verdict("failing", f"the file cannot be read: {outcome[1]}")
    if outcome[0] != "passed" or not any(has_variables for *_, has_variables in plain):
        return None
    if seen[0] != "passed":
        return Verdict("failing", seen[1])
    refusals = [said for said, *_ in small if said]
    if refusals:
        return Verdict("failing", f"refused: {refusals[0]}")
    if len(plain) != len(small):
        return Verdict("failing", f"{len(plain)} trainings, {len(small)} in micro-batches")
    reasons = (_difference(one[1:3], other[1:3]) for one, other in zip(plain, small))
    reason = next(filter(None, reasons), "")
    return Verdict("failing" if reason else "equal", reason)


def _difference(one: tuple, other: tuple) -> str:
    """In what two trainings, as (logs, weights), differ; "" if they are equal."""
    (logs, weights), (other_logs, other_weights) = one, other
    if set(logs) != set(other_logs):
        return f"logs {sorted(logs)}, {sorted(other_logs)}"
    if len(weights) != len(other_weights):
        return f"{len(weights)} weights, {len(other_weights)}"
    pairs = [(f"log {key}", logs[key], other_logs[key]) for key in logs]
    pairs += [(f"weight {i}", *pair) for i, pair in enumerate(zip(weights, other_weights))]
    for name, expected, seen in pairs:
        if np.shape(expected) != np.shape(seen):
            return f"{name}: shape {np.shape(expected)}, {np.shape(seen)}"
        scale = np.max(np.abs(expected), initial=1e-2)
        error = np.max(np.abs(np.subtract(expected, seen)), initial=0) / scale
        if not error <= TOLERANCE and not np.array_equal(expected, seen, equal_nan=True):
            return f"{name}: relative error {error:.2g}"
    return ""


def table(found: dict[str, Verdict]) -> str:
    """A Markdown table with a row for each of Keras' folders: how many tests train here, and what
    became of them."""
    counts: dict[str, Counter] = {}
    for name, one in found.items():
        place = name.split("/")[2]
        for key in (place, "all"):
            counts.setdefault(key, Counter())[one.kind] += 1
    rows = [
        "| Keras' tests of | run | equal | equal on a condition | may differ | failing |",
        f"| --- |{' ---: |' * 5}",
    ]
    for place in [*sorted(set(counts) - {"all"}), "all"]:
        numbers = [counts[place][kind] for kind in ("equal", "conditional", "allowed", "failing")]
        rows.append(f"| {place} | {' | '.join(map(str, [sum(numbers), *numbers]))} |")
    return "\n".join(rows)


def documented() -> int:
    """How many tests run, as docs/equality.md says."""
    text = (HERE.parents[1] / "docs/equality.md").read_text()
    return int(re.search(r"^\| all \| (\d+) ", text, re.MULTILINE)[1])


def main(words: list[str]) -> bool:
    """Prints the differences, and returns whether all of them are allowed and the number of tests is
    the documented one."""
    verdicts = compare(words)
    for test, one in verdicts.items():
        if one.kind not in ("equal", "conditional"):
            print(f"{one.kind:8} {test}: {one.reason}")
    print(f"\n{table(verdicts)}")
    counts = Counter(one.kind for one in verdicts.values())
    run = len(verdicts) - counts["not here"]
    # A few tests depend on the machine.
    as_documented = bool(words) or abs(run - documented()) <= 10
    if not as_documented:
        print(f"docs/equality.md says that {documented()} run")
    return counts["failing"] == 0 and as_documented


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))

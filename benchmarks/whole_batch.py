"""The table of losses over the whole batch: time and memory of two passes beside plain
accumulation.

A contrastive loss (`gradlab.WholeBatch`) and a mean of squares train the same network in `fit`, and
the large batch of Keras trains with the contrastive loss. To measure one of them and print its
figures as JSON:

    python -m benchmarks.whole_batch "two passes"
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.memory import GLIBC
from benchmarks.speed import digits
from gradlab.measure.memory import MEBIBYTE, PeakMemory

SHAPES = ((4, 16), (16, 16))
WAYS = ("big batch", "plain accumulation", "two passes")
SECONDS = 2.0  # the least time of a timing


def measure(repeats: int = 3, say: Callable[..., None] = print) -> list[dict]:
    """Measures all ways.

    Args:
        repeats: the number of processes for each way and shape, of which the median counts.
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each shape and way: {"k", "b", "way", "milliseconds": per update, "mebibytes":
        added to the process}.
    """
    rows = []
    for k, b in SHAPES:
        found: dict[str, list[dict]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:  # in turn, so that a slow minute of the machine meets all of them
                # GLIBC's settings return freed memory, which shows the memory in use, but cost
                # time.
                time_of, memory_of = _run(way, k, b), _run(way, k, b, **GLIBC)
                found[way].append(
                    {"milliseconds": time_of["milliseconds"], "mebibytes": memory_of["mebibytes"]}
                )
                say(f"{way} {k} x {b}: {found[way][-1]}", flush=True)
        for way, runs in found.items():
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"k": k, "b": b, "way": way, **medians})
    return rows


def _run(way: str, k: int, b: int, **environment: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.whole_batch", way, str(k), str(b)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table; in parentheses the time over that of plain
    accumulation."""
    lines = [
        "| contrastive loss of a residual network | ms per update | MiB added |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        plain = next(
            one for one in rows if (one["k"], one["way"]) == (row["k"], "plain accumulation")
        )
        ratio = row["milliseconds"] / plain["milliseconds"]
        words = f"| {row['way']}, {row['k']} x {row['b']} | {digits(row['milliseconds'])} ({ratio:.2f}) "
        lines.append(f"{words}| {row['mebibytes']:.0f} |")
    return "\n".join(lines)


def _info_nce(y: Any, y_pred: Any) -> Any:
    import tensorflow as tf

    one, other = tf.split(tf.math.l2_normalize(y_pred, axis=-1), 2, axis=-1)
    similarities = tf.matmul(one, other, transpose_b=True) / 0.1
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), similarities)


def main() -> None:
    """Measures one way in this process and prints its figures as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("k", type=int, help="the micro-batches per update")
    parser.add_argument("b", type=int, help="the examples per micro-batch")
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    import keras
    import numpy as np

    from benchmarks import networks
    from benchmarks.keras_models import keras_model

    model = keras_model(networks.build("resnet"))
    embeddings = keras.layers.Dense(64)(model.layers[-2].output)
    model = keras.Model(model.inputs, embeddings)
    examples = asked.k * asked.b
    x = np.random.default_rng(0).random([examples, *model.inputs[0].shape[1:]], np.float32)
    peak = PeakMemory()
    before = peak.bytes()
    if asked.way != "big batch":
        model = gradlab.microbatched(model, asked.b)
    loss = {"plain accumulation": "mse", "two passes": gradlab.WholeBatch(_info_nce)}.get(
        asked.way, _info_nce
    )
    model.compile("adam", loss)
    y = np.zeros([examples, 64], np.float32)
    fit = dict(batch_size=examples, verbose=0)
    model.fit(x, y, epochs=3, **fit)
    memory = peak.bytes() - before
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 5:
        began = time.perf_counter()
        model.fit(x, y, epochs=2, **fit)
        times.append((time.perf_counter() - began) / 2)
    print(
        json.dumps(
            {"milliseconds": 1000 * statistics.median(times), "mebibytes": memory / MEBIBYTE}
        )
    )


if __name__ == "__main__":
    main()

"""Time and memory of losses whose table of logits is computed a chunk of its columns at a time.

Each figure is that of a loss and its gradients, in a process of its own. To print the table, or one
figure as JSON (0: the whole table):

    python -m benchmarks.chunked
    python -m benchmarks.chunked text 1024
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from gradlab.measure.memory import MEBIBYTE, PeakMemory

# rows, columns, features
TABLES = {"text": (512, 32_768, 512), "pairs": (8192, 8192, 64)}
CHUNKS = (0, 4096, 2048, 1024, 512)
# Freed memory goes back to the system, so that the peak is what is in use. With oneDNN, which
# TensorFlow uses by default on some processors, the process keeps it: nothing would be added.
RETURNED = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def measure(table: str, chunk: int, timings: int = 0) -> dict:
    """The figures of a chunk, from a process of its own.

    Args:
        table: one of `TABLES`.
        chunk: the columns at a time; 0 for all of them, with TensorFlow's own loss.
        timings: how often the loss is timed.

    Returns:
        {"mebibytes": added to the process, gradients included; "loss": the loss; "milliseconds":
        the median of the timings}.
    """
    command = [sys.executable, "-m", "benchmarks.chunked", table, str(chunk), str(timings)]
    environment = os.environ | ({} if timings else RETURNED)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def as_table(table: str, rows: list[tuple[int, dict, dict]]) -> str:
    """Writes rows (chunk, figures of memory, figures of time) as a Markdown table."""
    lines = [
        "| logits at a time | MiB added | milliseconds (times the whole table's) |",
        "| --- | --- | --- |",
    ]
    whole = rows[0][2]["milliseconds"]
    for chunk, memory, timed in rows:
        took = timed["milliseconds"]
        columns = chunk or TABLES[table][1]
        lines.append(
            f"| {TABLES[table][0]:,} x {columns:,} | {memory['mebibytes']:.0f} | "
            f"{took:.0f} ({took / whole:.2f}) |"
        )
    return "\n".join(lines)


def _here(table: str, chunk: int, timings: int) -> dict:
    """The figures, measured in this process."""
    import numpy as np
    import tensorflow as tf

    from gradlab import chunked

    rows, columns, features = TABLES[table]
    rng = np.random.default_rng(0)
    inputs = tf.constant(rng.normal(size=(rows, features)), tf.float32)
    kernel = tf.constant(rng.normal(size=(columns, features)) / features**0.5, tf.float32)

    @tf.function
    def gradients(inputs, kernel):
        labels = tf.range(tf.shape(inputs)[0])
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel])
            if chunk:
                losses = chunked.cross_entropy(inputs, kernel, labels, chunk=chunk, transposed=True)
            else:
                logits = tf.matmul(inputs, kernel, transpose_b=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, [inputs, kernel])

    gradients(inputs, kernel)[0].numpy()  # the graph is made, which takes memory, too
    peak = PeakMemory()
    before = peak.bytes()
    loss = float(gradients(inputs, kernel)[0])
    added = (peak.bytes() - before) / MEBIBYTE
    seconds = []
    for _ in range(timings):
        began = time.perf_counter()
        gradients(inputs, kernel)[0].numpy()
        seconds.append(time.perf_counter() - began)
    milliseconds = 1000 * statistics.median(seconds) if seconds else float("nan")
    return {"mebibytes": added, "loss": loss, "milliseconds": milliseconds}


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables, or one figure."""
    parser = argparse.ArgumentParser(description="Time and memory of losses in chunks.")
    parser.add_argument("table", nargs="?", choices=TABLES)
    parser.add_argument("chunk", nargs="?", type=int, default=0)
    parser.add_argument("timings", nargs="?", type=int, default=0)
    asked = parser.parse_args(arguments)
    if asked.table:
        print(json.dumps(_here(asked.table, asked.chunk, asked.timings)))
        return
    for table in TABLES:
        timed = {chunk: [measure(table, chunk, 3) for _ in range(3)] for chunk in CHUNKS}
        rows = [
            (
                chunk,
                measure(table, chunk),
                {"milliseconds": statistics.median(each["milliseconds"] for each in timed[chunk])},
            )
            for chunk in CHUNKS
        ]
        print(f"\n{table}: {TABLES[table]}\n\n{as_table(table, rows)}")


if __name__ == "__main__":
    main()

"""The table of texts: tokens per second, padding and memory of micro-batches cut by tokens or by a
number of texts.

A small transformer classifies texts as long as the docstrings of Keras are, 256 of them per update.
No micro-batch may have more than 2048 tokens, padding included; as the longest text has 512,
micro-batches of a fixed size have 4 texts. To measure one way and print its figures as JSON:

    python -m benchmarks.tokens "token_batches"
"""

import argparse
import ast
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.memory import GLIBC
from benchmarks.speed import digits
from gradlab.measure.memory import MEBIBYTE, PeakMemory

LONGEST, TEXTS, TOKENS, WORDS = 512, 512, 2048, 5000
UPDATES = 2  # of an epoch
FIXED = TOKENS // LONGEST
WAYS = {
    "big batch": "the whole batch at once, padded to its longest text",
    "fixed, padded batches": "gradlab, 4 texts, batches padded to their longest text",
    "fixed, padded micro-batches": "gradlab, 4 texts, each micro-batch padded to its longest text",
    "Keras option": "Keras' option, 4 texts, each micro-batch padded to its longest text",
    "sorted, fixed": "gradlab, 4 texts, sorted by length within the batch",
    "token_batches": "gradlab, `token_batches`",
}
SECONDS = 4.0  # the least time of a timing


def measure(repeats: int = 3, say: Callable[..., None] = print, texts: int = TEXTS) -> list[dict]:
    """Measures all ways.

    Args:
        repeats: the number of processes for each way, of which the median counts.
        say: called with each line of progress, as `print` would be.
        texts: how many texts an epoch has, in two updates.

    Returns:
        A row for each way: {"way", "tokens": real tokens per second, "padding": its share of all
        positions, "mebibytes": added to the process}.
    """
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:  # in turn, so that a slow minute of the machine meets all of them
            command = [sys.executable, "-m", "benchmarks.tokens", way, str(texts)]
            done = subprocess.run(
                command, env={**os.environ, **GLIBC}, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            say(f"{way}: {found[way][-1]}", flush=True)
    return [
        {"way": way, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}
        for way, runs in found.items()
    ]


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table; in parentheses the tokens per second over those of the
    fixed size."""
    fixed = next(row for row in rows if row["way"] == "fixed, padded micro-batches")
    lines = [
        "| texts of 1 to 512 tokens | tokens per second | padding | MiB added |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        words = f"| {WAYS[row['way']]} | {digits(row['tokens'])} ({row['tokens'] / fixed['tokens']:.2f}) "
        lines.append(f"{words}| {100 * row['padding']:.0f} % | {row['mebibytes']:.0f} |")
    return "\n".join(lines)


def lengths(texts: int) -> np.ndarray:
    """The numbers of words of some docstrings of Keras: real texts, which every installation
    has."""
    import keras

    found = []
    for path in sorted(pathlib.Path(keras.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
                node
            ):
                found.append(min(LONGEST, len(ast.get_docstring(node).split())))
    return np.random.default_rng(0).permutation(found)[:texts]


def _datasets(way: str, of_texts: np.ndarray) -> tuple[Any, int]:
    """The dataset of a way, and the number of positions in an epoch of it, padding included."""
    import tensorflow as tf

    import gradlab

    per_update = len(of_texts) // UPDATES
    words = np.random.default_rng(1).integers(1, WORDS, of_texts.sum(), np.int32)
    texts = tf.RaggedTensor.from_row_lengths(words, of_texts)
    dataset = tf.data.Dataset.from_tensor_slices((texts, tf.cast(of_texts % 2, tf.int32)))
    one_by_one = dataset.map(lambda x, y: (tf.ensure_shape(x, [None]), y))
    if way == "token_batches":
        made = gradlab.token_batches(dataset, TOKENS, per_update)
    elif way == "sorted, fixed":
        made = gradlab.token_batches(dataset, TOKENS, per_update).map(_in_fours)
    elif way == "fixed, padded micro-batches":
        made = one_by_one.padded_batch(FIXED).ragged_batch(per_update // FIXED)
    else:
        made = one_by_one.padded_batch(FIXED if way == "Keras option" else per_update)
    made = made.cache()
    positions = sum(
        int(tf.size(x.flat_values if isinstance(x, tf.RaggedTensor) else x)) for x, _ in made
    )
    return made.prefetch(2), positions


def _in_fours(x: Any, y: Any) -> tuple:
    """A window that is cut into micro-batches of a fixed number of texts."""
    import tensorflow as tf

    texts = tf.RaggedTensor.from_tensor(x.values.to_tensor(), padding=0)
    longest = tf.reduce_max(tf.reshape(texts.row_lengths(), [-1, FIXED]), axis=1)
    padded = tf.RaggedTensor.from_tensor(texts.to_tensor(), lengths=tf.repeat(longest, FIXED))
    splits = tf.range(0, texts.nrows() + 1, FIXED)
    return tf.RaggedTensor.from_row_splits(
        padded, tf.cast(splits, tf.int64)
    ), tf.RaggedTensor.from_row_splits(y.values, tf.cast(splits, tf.int64))


def _model() -> Any:
    import keras

    layers = keras.layers
    words = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(WORDS, 128, mask_zero=True)(words)
    for _ in range(2):
        normed = layers.LayerNormalization()(hidden)
        hidden = layers.Add()([hidden, layers.MultiHeadAttention(4, 32)(normed, normed)])
        normed = layers.Dense(512, "gelu")(layers.LayerNormalization()(hidden))
        hidden = layers.Add()([hidden, layers.Dense(128)(normed)])
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(words, layers.Dense(2)(pooled))


def main() -> None:
    """Measures one way in this process and prints its figures as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("texts", type=int, nargs="?", default=TEXTS)
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    import keras

    of_texts = lengths(asked.texts)
    dataset, positions = _datasets(asked.way, of_texts)
    model = _model()
    peak = PeakMemory()
    before = peak.bytes()
    accumulation = len(of_texts) // UPDATES // FIXED if asked.way == "Keras option" else None
    if asked.way == "fixed, padded batches":
        model = gradlab.microbatched(model, FIXED, in_flight=1)
    elif accumulation is None and asked.way != "big batch":
        model = gradlab.microbatched(model, "given")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=accumulation), loss)
    model.fit(dataset, verbose=0)
    memory = peak.bytes() - before
    times: list[float] = []
    while sum(times) < SECONDS:
        began = time.perf_counter()
        model.fit(dataset, verbose=0)
        times.append(time.perf_counter() - began)
    tokens = int(of_texts.sum())
    print(
        json.dumps(
            {
                "tokens": tokens / statistics.median(times),
                "padding": 1 - tokens / positions,
                "mebibytes": memory / MEBIBYTE,
            }
        )
    )


if __name__ == "__main__":
    main()

"""Checkers for the exercises of notebook 13, and the tiny language model that it trains."""

import numbers
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradlab.batch_ramp import BatchRamp
from gradlab.fit.microbatched import microbatched
from gradlab.lab.exercises import exercise, require, require_close, require_unlike
from gradlab.lab.experiments import datasets

LENGTH = 32  # characters of a text
FEATURES = 32
TEXTS = 2048  # of a training run
HELD_OUT = 3200  # texts
# of the last exercise: nats, and updates
LOW_ENOUGH = 2.56
MOST_UPDATES = 1000


def texts() -> tuple[np.ndarray, np.ndarray]:
    """The texts of a training run, from random places of the plays, and for each character the one
    that follows: the numbers of characters, both of shape (TEXTS, LENGTH)."""
    numbers = datasets.shakespeare().train
    starts = np.random.default_rng(0).integers(len(numbers) - LENGTH, size=TEXTS)
    found = numbers[starts[:, np.newaxis] + np.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]


def network() -> keras.Model:
    """A transformer of one block, 17,921 weights, always with the same initial ones: from the numbers
    of characters to the logits of those that follow."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    numbers = keras.Input([LENGTH], dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(numbers), axis=1) - 1
    x = layers.Embedding(65, FEATURES)(numbers) + layers.Embedding(LENGTH, FEATURES)(places)
    normalized = layers.RMSNormalization()(x)
    x = x + layers.MultiHeadAttention(1, FEATURES)(normalized, normalized, use_causal_mask=True)
    wide = layers.Dense(4 * FEATURES, "relu")(layers.RMSNormalization()(x))
    x = x + layers.Dense(FEATURES)(wide)
    return keras.Model(numbers, layers.Dense(65)(layers.RMSNormalization()(x)))


def train(
    optimizer: keras.optimizers.Optimizer, batch: int | Mapping[int, int]
) -> tuple[int, float]:
    """Train the network on each text once, in micro-batches of one text. Texts at the end that are too
    few for a whole update of a batch that grows are left out.

    Args:
        optimizer: a new one.
        batch: the texts of an update, or several such sizes by the update from which on they hold.

    Returns:
        The updates, and the mean loss of the held-out texts in nats.
    """
    model = microbatched(network(), 1)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    first_size = batch if isinstance(batch, int) else batch[0]
    # A call costs time of its own, so small updates share one
    model.compile(optimizer, entropy, steps_per_execution=max(1, 16 // first_size))
    examples = tf.data.Dataset.from_tensor_slices(texts())
    if isinstance(batch, int):
        batches = examples.batch(batch)
    else:
        # With an end: Keras makes several updates at a time, and would make more than asked for
        batches = BatchRamp(batch).batches(examples.repeat()).take(updates_of(batch))
    model.fit(batches, shuffle=False, verbose=0)
    held_out = datasets.shakespeare().held_out[: HELD_OUT * LENGTH + 1]
    x, y = held_out[:-1].reshape(-1, LENGTH), held_out[1:].reshape(-1, LENGTH)
    loss = model.evaluate(x, y, batch_size=128, verbose=0)
    return int(optimizer.iterations), float(loss)


def updates_of(sizes: Mapping[int, int]) -> int:
    """The most updates of these sizes that TEXTS are enough for.

    Example:
        >>> updates_of({0: 1, 2000: 10}), updates_of({0: 2000, 1: 40})
        (2004, 2)
    """
    size, updates, left = sizes[0], 0, TEXTS
    while left >= (size := sizes.get(updates, size)):
        left -= size
        updates += 1
    return updates


@exercise
def beta_2(answer: Any) -> None:
    """A function: (half_life, tokens) -> beta_2 of an update of so many tokens."""
    got = answer(1_000_000, 500_000)
    mistakes = {
        0.25: "a half-life of two updates: after two of them, half is left, so each leaves more "
        "than half",
        0.5: "that is right for an update of a whole half-life",
        0.75: "very close: but what two updates leave multiplies",
        np.exp(-0.5): "after a half-life, one half is left, not 1 / e",
        2**0.5: "above 1 nothing would be forgotten: after a half-life, half is left",
        1 - 0.5**0.5: "that is what is forgotten; beta_2 is what is left",
    }
    require_unlike(got, mistakes, rtol=1e-9)
    require_close(got, 0.5**0.5, "beta_2 of half a half-life", rtol=1e-8)
    require_close(answer(7_000_000, 1024), 0.5 ** (1024 / 7e6), "beta_2 of 1,024 tokens", rtol=1e-9)


@exercise
def accumulation(answer: Any) -> None:
    """A function: (tokens, length, microbatch_size, devices) -> k of a recipe."""
    got = answer(2_359_296, 4096, 2, 8)
    mistakes = {
        288: "the devices compute their micro-batches at the same time: divide by their number, too",
        72: "a micro-batch has `microbatch_size` texts",
        147456: "a text has `length` tokens",
        576: "divide by the texts of all micro-batches: by `microbatch_size` and by `devices`",
    }
    require_unlike(got, mistakes, rtol=1e-9)
    require_close(got, 36, "k", "and should be 36")
    got = answer(1_000_000, 1024, 4, 2)
    require_unlike(
        got,
        {
            122: "whole micro-batches: 122 have fewer tokens than the recipe asks for, so round up",
            1_000_000 / 8192: "k counts whole micro-batches: round up",
        },
        rtol=1e-9,
    )
    require_close(got, 123, "k for 1,000,000 tokens in texts of 1,024, b = 4, two devices")
    require(isinstance(got, numbers.Integral), f"k must be an integer. Received: {got!r}")


@exercise
def weight_decay(answer: Any) -> None:
    """A function: (decay, rate, batch, new_rate, new_batch) -> the new weight decay."""
    # Also right: to keep the exact factor, (1 - rate * decay) ** (new_batch / batch)
    rtol = 1e-3
    got = answer(0.1, 3e-4, 512, 3e-4, 64)
    mistakes = {
        0.8: "a smaller batch makes more updates for the same tokens, so each must decay less",
        0.1: "an update of 64 texts decays the weights as much as one of 512 did, and there are 8 "
        "times as many",
        0.1
        / 8**0.5: "the rule for the weight decay is about the product rate · decay, without a root",
    }
    require_unlike(got, mistakes, rtol)
    what = "the weight decay for an eighth of the batch at the same rate"
    require_close(got, 0.0125, what, rtol=rtol)
    got = answer(0.1, 4e-4, 64, 1e-4, 4)
    mistakes = {
        0.1 / 16: "the decay of an update is rate · decay, and the rate has changed, too",
        0.1 / 64: "a smaller rate decays less by itself, so the decay must grow by that factor",
    }
    require_unlike(got, mistakes, rtol)
    what = "the weight decay for a quarter of the rate and a 16th of the batch"
    require_close(got, 0.025, what, rtol=rtol)
    what = "the weight decay for a larger batch"
    require_close(answer(0.1, 1e-3, 8, 2e-3, 32), 0.2, what, rtol=rtol)


@exercise
def recipe(answer: Any) -> None:
    """The sizes of a batch that grows, at most 1,000 updates, and the rate of plain SGD."""
    keys = {"sizes", "learning_rate"}
    is_named = isinstance(answer, dict) and set(answer) == keys
    require(is_named, "the settings are a dict with the keys sizes and learning_rate")
    require(... not in answer.values(), "put your sizes and your rate in place of the dots")
    sizes = BatchRamp(answer["sizes"]).sizes
    updates = updates_of(sizes)
    require(updates > 0, f"the first batch must have at most {TEXTS:,} texts. Received: {sizes[0]}")
    # A size that no update reaches does not count
    used = sum(first < updates for first in sizes)
    hint = "before the batch grows: begin the next size earlier, or make it smaller"
    require(used > 1, f"the {TEXTS:,} texts end after {updates:,} updates, {hint}")
    require(updates <= MOST_UPDATES, f"at most {MOST_UPDATES:,} updates. These are {updates:,}")
    _, loss = train(keras.optimizers.SGD(answer["learning_rate"]), sizes)
    require(
        loss < LOW_ENOUGH,
        f"{updates:,} updates end at {loss:.3f} nats, and must end below {LOW_ENOUGH}. Begin with "
        "few texts and grow late in the data, and try twice and half the rate",
    )

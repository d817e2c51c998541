"""Checkers for the exercises of notebook 09, and its measurements of memory, in a process of their
own.

As a program, the module measures one case or more and prints the results as JSON. The notebook's
table comes from it:

    python -m gradlab.lab.exercises.memory '[{"network": "vgg16", "examples": 32, "microbatch_size":
    1}]'
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_close
from gradlab.lab.new_process import call_in_new_process

# of the last exercise: examples, and MiB
IMAGES = 64
LIMIT = 500


def measured(*cases: dict[str, Any]) -> list[dict[str, float]]:
    """Train each case, one after the other, in one new process without a GPU.

    Args:
        *cases: the arguments of `train` for each case.

    Returns:
        The result of `train` for each case.

    Raises:
        RuntimeError: the process failed.
    """
    return call_in_new_process(main, cases)


def train(
    network: str = "deep",
    examples: int = 32,
    batch_size: int | None = None,
    microbatch_size: int | None = None,
    in_flight: int = 1,
    remat: bool = False,
    keep_dependencies: bool = False,
    updates: int = 1,
) -> dict[str, float]:
    """Train a network with SGD on random images in this process, and measure its memory and its
    time.

    Args:
        network: "deep", 33 convolutions of 16 channels on 64x64 images; or "vgg16", without its
            top, on 96x96 images.
        examples: the number of images.
        batch_size: the images of one update. None: all of them.
        microbatch_size: the images of a micro-batch. None: the whole batch at once, without
            gradlab.
        in_flight: the micro-batches that may be computed at once.
        remat: compute the activations of "deep" again in the backward pass, in blocks of four
            convolutions.
        keep_dependencies: switch off the dependency optimization of TensorFlow's graph optimizer.
        updates: how many times to train on the images.

    Returns:
        "mib", the growth of the process's peak memory in MiB, NaN where it cannot be read;
        "seconds" of the fastest pass over the images after the first; "examples" and "updates",
        what one pass has trained on and made.
    """
    import keras
    import tensorflow as tf

    import gradlab
    from gradlab.measure.memory import MEBIBYTE, PeakMemory

    tf.config.optimizer.set_experimental_options({"dependency_optimization": not keep_dependencies})
    side, outputs = (96, 512) if network == "vgg16" else (64, 10)
    model = _vgg16(side) if network == "vgg16" else _deep(side, outputs, remat)
    optimizer = keras.optimizers.SGD(0.0078125)
    optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).standard_normal([examples, side, side, 3], "float32")
    y = np.zeros([examples, outputs], "float32")
    batches = [
        (x[i : i + (batch_size or examples)], y[i : i + (batch_size or examples)])
        for i in range(0, examples, batch_size or examples)
    ]
    peak = PeakMemory()
    before = peak.bytes()
    if microbatch_size is None:
        step = _plain_step(model, optimizer)
    else:
        step = gradlab.Trainer(model, optimizer, "mse", microbatch_size, in_flight=in_flight).step
    seconds = []
    for _ in range(updates):
        began = time.perf_counter()
        steps = [step(*batch) for batch in batches]
        seconds.append(time.perf_counter() - began)
    trained = (
        examples if microbatch_size is None else sum(float(step.weights.sum()) for step in steps)
    )
    growth = (peak.bytes() - before) / MEBIBYTE
    return {
        "mib": growth,
        "seconds": min(seconds[1:] or seconds),
        "examples": trained,
        "updates": len(steps),
    }


def _plain_step(model, optimizer):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            model.trainable_variables,
        )
        return loss

    return step


def _vgg16(side: int):
    import keras

    return keras.applications.VGG16(
        weights=None, include_top=False, input_shape=(side, side, 3), pooling="avg"
    )


def _deep(side: int, outputs: int, remat: bool):
    import keras
    from keras.layers import Conv2D, Dense, GlobalAveragePooling2D

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.convolutions = [Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]

        def build(self, shape):
            for convolution in self.convolutions:
                convolution.build(shape)

        def run(self, x):
            for convolution in self.convolutions:
                x = convolution(x)
            return x

        def call(self, x):
            return keras.remat(self.run)(x) if remat else self.run(x)

    first, *blocks = Conv2D(16, 1), *(Block() for _ in range(8))
    top = [GlobalAveragePooling2D(), Dense(outputs)]
    return keras.Sequential([keras.Input([side, side, 3]), first, *blocks, *top])


@exercise
def bytes_needed(answer: Any) -> None:
    """A function: (parameters, activations, microbatch_size, accumulation_steps) -> bytes, with
    Adam, in float32."""
    got = answer(1000, 500, 2, 64)
    what = "the bill"
    for wrong, hint in (
        (6000, "a float32 has 4 bytes"),
        (
            17_000,
            "one copy of the weights is missing: gradients and the accumulator are two things",
        ),
        (
            13_000,
            "two copies of the weights are missing: Adam keeps two moments, besides gradients and "
            "accumulator",
        ),
        (20_500, "each example of a micro-batch has activations of its own"),
    ):
        require(got != wrong, hint)
    require_close(got, 21_000, what, "and should be 21,000")
    what = "the bill for 14,714,688 weights and one example of 180 million bytes"
    require_close(answer(14_714_688, 180_000_000, 1, 128), 474_293_760, what)
    hint = "nothing in the bill grows with the number of micro-batches: each one reuses the memory of the one before"
    require(np.allclose(answer(1000, 500, 2, 2), 21_000), hint)
    alone = (
        "a window of a single micro-batch needs no accumulator: its gradient is the mean already"
    )
    require(np.allclose(answer(1000, 500, 2, 1), 17_000), alone)


@exercise
def largest_microbatch(answer: Any) -> None:
    """A function: (memory, parameters, activations) -> the most examples a micro-batch can have."""
    got = answer(21_500, 1000, 500)
    require(got != 43, "the weights, moments, gradients and the accumulator must fit first")
    require(got != 11, "a window of more than one micro-batch has an accumulator, too")
    require_close(got, 3, "the largest micro-batch", "and should be 3")
    part = answer(21_499, 1000, 500)
    hint = (
        "which is more than fits: round down to whole examples"
        if np.all(part > 2)
        else "and should be 2"
    )
    require_close(part, 2, "the largest micro-batch in 21,499 bytes", hint)
    hint = "but where not even one example fits, it should be 0"
    require_close(answer(19_000, 1000, 500), 0, "the largest micro-batch in 19,000 bytes", hint)
    require(
        isinstance(part, (int, np.integer)),
        f"the number of examples must be an integer. Received: {part!r}",
    )


@exercise
def under_the_limit(answer: Any) -> None:
    """A dictionary: examples, batch_size, microbatch_size and in_flight of one update that a
    process then trains."""
    names = ("examples", "batch_size", "microbatch_size", "in_flight")
    require(
        isinstance(answer, dict) and set(answer) == set(names),
        f"it should be a dictionary of {', '.join(names)}",
    )
    for name in names:
        value = answer[name]
        require(value is not ..., f"{name} is still missing: put your answer in place of the dots")
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0
        require(whole, f"{name} must be a positive integer. Received: {value!r}")
    settings = {name: int(answer[name]) for name in names}
    require(settings["examples"] <= IMAGES, f"there are only {IMAGES} examples")
    found = measured(settings)[0]
    trained = int(found["examples"])
    updates = int(found["updates"])
    require(
        trained == IMAGES,
        f"the process trained on {trained} of {IMAGES} examples: fewer examples are another batch",
    )
    hint = "with an update for each of them, the weights change between them. Cut the micro-batches smaller instead"
    require(updates == 1, f"the process made {updates} updates, not one: {hint}")
    mib = _estimate(settings) if math.isnan(found["mib"]) else found["mib"]
    held = f"the process needed {mib:.0f} MiB"
    parallel = (
        " and in_flight keeps several micro-batches in memory at once"
        if settings["in_flight"] > 1
        else ""
    )
    require(
        mib < LIMIT, f"{held}, more than {LIMIT}: activations grow with microbatch_size{parallel}"
    )
    require(
        mib > LIMIT / 2,
        f"{held}, less than half of {LIMIT}: use the rest, larger micro-batches waste less time",
    )


def _estimate(settings: dict[str, int]) -> float:
    """MiB where the peak cannot be read: from measurements on Linux."""
    return 30 + 10.5 * min(
        settings["microbatch_size"] * settings["in_flight"], settings["batch_size"]
    )


def main(cases: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Train each case in this process, on one thread."""
    import keras

    import gradlab

    gradlab.setup(threads=1, seed=0)
    found = []
    if len(cases) > 1:
        # What TensorFlow allocates once would count for the first case only
        train(examples=1, microbatch_size=1)
    for case in cases:
        keras.backend.clear_session(free_memory=True)
        found.append(train(**case))
    return found


if __name__ == "__main__":
    print(json.dumps(measured(*json.loads(sys.argv[1]))))

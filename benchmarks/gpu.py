"""What can only be measured on a GPU: rounding, memory as its allocator counts it, a memory that is
too small, towers on one card, and networks of the size that people train there.

    python -m benchmarks.gpu PART [ARGUMENT ...]      (prints one line of JSON)

`speed` and `plan_error` of `benchmarks` run on a GPU unchanged.
"""

import argparse
import contextlib
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

from gradlab import runtime

with runtime.without_startup_noise():
    import keras
    import numpy as np
    import tensorflow as tf

import gradlab
from benchmarks import plan_error, speed
from benchmarks.tensorflow_ways import Clock
from gradlab.measure.memory import MEBIBYTE

GPU = "GPU:0"
EXAMPLES, SIZES = 32, (16, 5, 1)  # of `rounding`


# --- rounding: how far an update is from the one that float64 gives
# The networks are smooth: where a ReLU's input is zero within rounding, a size that rounds otherwise
# moves a gradient by 1e-4 and more, on any processor.


def _convolutions() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([24, 24, 3]),
            layers.Conv2D(32, 3, activation="gelu"),
            layers.GroupNormalization(8),
            layers.Conv2D(64, 3, activation="gelu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def _dense() -> keras.Model:
    layers = [keras.layers.Dense(512, "gelu") for _ in range(3)]
    return keras.Sequential([keras.Input([256]), *layers, keras.layers.Dense(10)])


def _transformer() -> keras.Model:
    inputs = keras.Input([32], dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 32)(normed, normed)
        inner = keras.layers.Dense(512, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(128)(inner)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "convolutions": _convolutions,
    "dense": _dense,
    "transformer": _transformer,
}


def _change(
    build: Callable[[], keras.Model], b: int | None, jit: bool, weights: list | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The weights before an update with plain SGD, and the changes. b: None for the big batch."""
    keras.utils.set_random_seed(0)
    model = build()
    if weights is not None:
        model.set_weights(weights)
    before = [value.astype("float64") for value in model.get_weights()]
    rng = np.random.default_rng(1)
    shape = (EXAMPLES, *model.input_shape[1:])
    is_text = "int" in model.inputs[0].dtype
    x = rng.integers(1, 1000, shape).astype("int32") if is_text else rng.normal(size=shape)
    y = rng.integers(0, 10, EXAMPLES)
    trained = model if b is None else gradlab.microbatched(model, b)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.SGD(1.0), loss, jit_compile=jit)
    trained.fit(x, y, batch_size=EXAMPLES, shuffle=False, verbose=0)
    return before, [
        new.astype("float64") - old for new, old in zip(model.get_weights(), before, strict=True)
    ]


def _compute_in(dtype: str) -> None:
    keras.utils.clear_session(
        free_memory=False
    )  # forgets the policy that layers were last made with
    keras.config.set_floatx(dtype)


def rounding() -> list[dict]:
    """The relative error of one update against float64 on the CPU, for the big batch and for
    micro-batches, with and without TensorFloat-32 and XLA."""
    rows = []
    for name, build in MODELS.items():
        weights, _ = _change(build, None, False)
        with tf.device("CPU:0"):
            _compute_in("float64")
            _, truth = _change(build, None, False, weights)
        _compute_in("float32")
        length = np.sqrt(sum(np.sum(one**2) for one in truth))
        for tf32 in (True, False):
            tf.config.experimental.enable_tensor_float_32_execution(tf32)
            for jit in (False, True):
                for b in (None, *SIZES):
                    _, found = _change(build, b, jit, weights)
                    off = np.sqrt(sum(np.sum((a - c) ** 2) for a, c in zip(found, truth)))
                    row = {"model": name, "tf32": tf32, "xla": jit, "b": b, "error": off / length}
                    print(row, flush=True)
                    rows.append(row)
        tf.config.experimental.enable_tensor_float_32_execution(True)
    return rows


# --- auto: a card with too little memory


def auto(limit: int, name: str, examples: int) -> dict:
    """Trains with microbatch_size="auto" on a logical GPU of `limit` MiB, and with the same size
    given; returns the size, what was said, and whether the weights are the same bits."""
    gpu = tf.config.list_physical_devices("GPU")[0]
    tf.config.set_logical_device_configuration(
        gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=limit)]
    )
    gradlab.setup(seed=0)
    x, y = _data(plan_error.NETWORKS[name](), examples)

    def trained(b):
        keras.utils.set_random_seed(0)
        model = gradlab.microbatched(plan_error.NETWORKS[name](), b)
        model.compile("adam", "mse", jit_compile=False)
        data = tf.data.Dataset.from_tensors((x, y)).repeat(3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(data, verbose=0)
        return model, [str(one.message)[:200] for one in said]

    found, said = trained("auto")
    size = int(found.microbatch_size)
    weights = found.get_weights()
    del found
    same, _ = trained(size)
    bits = all(np.array_equal(a, c) for a, c in zip(weights, same.get_weights(), strict=True))
    big = None
    try:
        trained(examples)
    except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
        big = type(error).__name__
    return {
        "network": name, "limit": limit, "examples": examples, "size": size, "said": said,
        "same bits as the size given": bits, "the whole batch at once": big,
    }  # fmt: skip


def _data(model: keras.Model, examples: int) -> tuple[Any, Any]:
    x, y = (
        [plan_error._numbers(tensor, examples) for tensor in nest]
        for nest in (model.inputs, model.outputs)
    )
    return (tuple(x) if len(x) > 1 else x[0]), y[0]


# --- towers: two logical GPUs on one card


def towers() -> dict:
    """Three updates of `fit` in micro-batches, on one device and on two replicas on two logical
    GPUs of one card: the largest difference to the weights that the large batch gives."""
    gpu = tf.config.list_physical_devices("GPU")[0]
    tf.config.set_logical_device_configuration(
        gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=4096)] * 2
    )
    gradlab.setup(seed=0)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    devices = runtime.tower_devices(2)
    strategy = tf.distribute.MirroredStrategy(
        ["GPU:0", "GPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    found = {"devices": devices}

    def trained(scope, b):
        with scope:
            keras.utils.set_random_seed(0)
            model = _dense()
            model = model if b is None else gradlab.microbatched(model, b)
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        rng = np.random.default_rng(0)
        model.fit(
            rng.normal(size=(32, 256)), rng.normal(size=(32, 10)), batch_size=32, epochs=3,
            shuffle=False, verbose=0,
        )  # fmt: skip
        return model.get_weights()

    one = trained(contextlib.nullcontext(), None)
    for name, scope in (("fit", contextlib.nullcontext()), ("fit on two", strategy.scope())):
        other = trained(scope, 4)
        found[name] = max(float(np.max(np.abs(a - c))) for a, c in zip(one, other, strict=True))
    return found


# --- size: networks of the size that people train on a GPU


def _vgg16() -> keras.Model:
    return keras.applications.VGG16(weights=None, classes=1000, classifier_activation=None)


def _vision_transformer() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input([224, 224, 3])
    x = layers.Reshape([196, 384])(layers.Conv2D(384, 16, 16)(inputs))
    x = plan_error._transformer_blocks(x, 12, 384)
    return keras.Model(inputs, layers.Dense(1000, dtype="float32")(x))


REAL: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "VGG-16 at 224x224": (_vgg16, 256),
    "vision transformer, twelve blocks of 384, 224x224": (_vision_transformer, 256),
}


def size(name: str, way: str, k: int, policy: str, rounds: int = 5) -> dict:
    """Milliseconds per update and the allocator's peak of `fit` without XLA, in a batch of 256."""
    gradlab.setup()
    keras.mixed_precision.set_dtype_policy(policy)
    build, examples = REAL[name]
    keras.utils.set_random_seed(0)
    model = build()
    b = examples // k
    if way == "gradlab":
        model = gradlab.microbatched(model, b)
    accumulated = k if way == "Keras option" and k > 1 else None
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-4, gradient_accumulation_steps=accumulated)
    model.compile(optimizer, loss, jit_compile=False)
    with tf.device(GPU):
        x = tf.random.stateless_uniform([b if accumulated else examples, 224, 224, 3], [0, 0])
        y = tf.zeros([len(x)], tf.int32)
    one = tf.data.Dataset.from_tensors((x, y))
    updates = 3
    tf.config.experimental.reset_memory_stats(GPU)
    held = tf.config.experimental.get_memory_info(GPU)["current"]
    data = one.repeat(updates * (accumulated or 1))
    began = time.perf_counter()
    model.fit(one.repeat(accumulated or 1), verbose=0)
    first = time.perf_counter() - began
    took = []
    for _ in range(rounds):
        clock = Clock()
        model.fit(data, verbose=0, callbacks=[clock])
        took.append(1000 * clock.seconds / updates)
    peak = tf.config.experimental.get_memory_info(GPU)["peak"]
    return {
        "network": name, "way": way, "k": k, "policy": policy, "milliseconds": float(np.median(took)),
        "all": took, "first": first, "peak": peak / MEBIBYTE, "held": held / MEBIBYTE,
    }  # fmt: skip


# --- the tables


def as_markdown(found: dict) -> str:
    """Writes what was measured on a GPU.

    Args:
        found: the content of data/results/gpu.json.
    """
    plan = [{"network": row["network"], "b": row["b"], **row["found"]} for row in found["plan"]]
    sizes = sorted({row["b"] for row in plan})
    big = {row["network"]: row for row in found["size"] if row["k"] == 1}
    lines = [
        "**LeNet with dropout, 100 examples per update**",
        "",
        speed.as_table(found["speed"], "lenet"),
        "",
        "**Images of 224x224, 256 per update, Adam, in `fit`, without XLA**",
        "",
        "| network | way | k x b | ms per update (ratio) | peak, MiB |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for row in found["size"]:
        ratio = row["milliseconds"] / big[row["network"]]["milliseconds"]
        shape = f"{row['k']} x {REAL[row['network']][1] // row['k']}"
        lines.append(
            f"| {row['network']}, {row['policy']} | {row['way']} | {shape} | "
            f"{row['milliseconds']:.0f} ({ratio:.2f}) | {row['peak']:,.0f} |"
        )
    lines += ["", "**Peak of the allocator over the plan of memory, `fit` with Adam**", ""]
    lines.append("| times the plan | " + " | ".join(f"b = {b}" for b in sizes) + " |")
    lines.append("| --- |" + " ---: |" * len(sizes))
    for name in plan_error.NETWORKS:
        own = {row["b"]: row["measured"] / row["planned"] for row in plan if row["network"] == name}
        lines.append(f"| {name} | " + " | ".join(f"{own[b]:.2f}" for b in sizes) + " |")
    lines += [
        "",
        '**`microbatch_size="auto"` on a card of 2,048 MiB, 256 examples per update**',
        "",
        "| network | the whole batch at once | size found | weights |",
        "| --- | --- | ---: | --- |",
    ]
    for row in found["auto"]:
        same = "the same bits" if row["same bits as the size given"] else "other bits"
        lines.append(
            f"| {row['network']} | {row['the whole batch at once']} | {row['size']} | {same} as with "
            "that size from the start |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures one part and prints it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["rounding", "auto", "towers", "size"])
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    given = [int(one) if one.isdigit() else one for one in asked.arguments]
    print(json.dumps(globals()[asked.part](*given)))


if __name__ == "__main__":
    main()

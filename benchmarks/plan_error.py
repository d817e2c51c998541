"""The table of planned memory: `gradlab.measure.memory.plan` beside the peaks of real trainings.

Each peak is that of a process of its own: what `fit` with one micro-batch in flight and Adam adds,
from before the model is built. A figure of the table is the median of six peaks. To measure one and
print it with the plan, in MiB:

    python -m benchmarks.plan_error "U-Net, 96x96" 8
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

from gradlab import runtime
from gradlab._batches import map_tensors, tensors_of
from gradlab.measure.memory import MEBIBYTE, PeakMemory, plan

with runtime.without_startup_noise():
    import keras
    import tensorflow as tf
from keras import layers

SIZES = (2, 8, 16, 32)
MICROBATCHES = 3  # of an update
PROCESSES = 6  # the peaks of processes that do the same differ by a few percent


def _image_network(side: int, *rest: Callable) -> keras.Model:
    inputs = outputs = keras.Input([side, side, 3])
    for layer in rest:
        outputs = layer(outputs)
    return keras.Model(inputs, layers.Dense(10)(outputs))


def _vgg16() -> keras.Model:
    body = keras.applications.VGG16(
        weights=None, include_top=False, input_shape=(96, 96, 3), pooling="avg"
    )
    return keras.Model(body.inputs, layers.Dense(10)(body.output))


def _residual() -> keras.Model:
    def block(filters: int, stride: int) -> Callable:
        def call(x):
            inner = x
            for step in (stride, 1):
                inner = layers.ReLU()(layers.GroupNormalization(8)(inner))
                inner = layers.Conv2D(filters, 3, step, padding="same")(inner)
            return layers.Conv2D(filters, 1, stride)(x) + inner

        return call

    blocks = [block(32, 1), block(64, 2), block(128, 2)]
    return _image_network(
        64, layers.Conv2D(32, 3, padding="same"), *blocks, layers.GlobalAveragePooling2D()
    )


def _dense() -> keras.Model:
    hidden = [layers.Dense(2000, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input([2000]), *hidden, layers.Dense(10)])


def _u_net() -> keras.Model:
    def twice(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    inputs = x = keras.Input([96, 96, 3])
    kept = []
    for filters in (32, 64, 128):
        x = twice(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = twice(x, 256)
    for filters, skip in zip((128, 64, 32), reversed(kept)):
        x = twice(layers.concatenate([layers.UpSampling2D()(x), skip]), filters)
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


def _transformer_blocks(x, blocks: int, width: int):
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(normed, normed)
        inner = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(inner)
    return layers.GlobalAveragePooling1D()(x)


def _transformer() -> keras.Model:
    inputs = keras.Input([128], dtype="int32")
    outputs = _transformer_blocks(layers.Embedding(5000, 256)(inputs), 4, 256)
    return keras.Model(inputs, layers.Dense(10)(outputs))


def _vision_transformer() -> keras.Model:
    patches = layers.Conv2D(128, 8, 8), layers.Reshape([144, 128])
    return _image_network(96, *patches, lambda x: _transformer_blocks(x, 6, 128))


def _depthwise() -> keras.Model:
    def block(x):
        inner = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
        return x + layers.Dense(64)(layers.Dense(256, "gelu")(inner))

    return _image_network(
        96, layers.Conv2D(64, 4, 4), block, block, block, layers.GlobalAveragePooling2D()
    )


def _autoencoder() -> keras.Model:
    inputs = x = keras.Input([128, 128, 3])
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, 2, padding="same", activation="relu")(x)
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(x))


def _sound() -> keras.Model:
    convolutions = [layers.Conv1D(64, 9, padding="same", activation="relu") for _ in range(4)]
    body = [*convolutions, layers.GlobalAveragePooling1D(), layers.Dense(10)]
    return keras.Sequential([keras.Input([4000, 1]), *body])


def _two_towers() -> keras.Model:
    image, numbers = keras.Input([64, 64, 3]), keras.Input([500])
    seen = image
    for filters in (32, 64):
        seen = layers.MaxPooling2D()(
            layers.Conv2D(filters, 3, padding="same", activation="relu")(seen)
        )
    seen = layers.Dense(256, "relu")(layers.Flatten()(seen))
    read = layers.Dense(256, "relu")(layers.Dense(1000, "relu")(numbers))
    return keras.Model([image, numbers], layers.Dense(10)(layers.concatenate([seen, read])))


def _mixer() -> keras.Model:
    def block(x):
        turned = layers.Permute([2, 1])(layers.LayerNormalization()(x))
        x = x + layers.Permute([2, 1])(layers.Dense(64)(layers.Dense(256, "gelu")(turned)))
        return x + layers.Dense(128)(layers.Dense(512, "gelu")(layers.LayerNormalization()(x)))

    patches = layers.Conv2D(128, 8, 8), layers.Reshape([64, 128])
    return _image_network(64, *patches, *[block] * 5, layers.GlobalAveragePooling1D())


def _densely_connected() -> keras.Model:
    def block(x):
        for _ in range(6):
            x = layers.concatenate([x, layers.Conv2D(24, 3, padding="same", activation="relu")(x)])
        return x

    between = layers.Conv2D(48, 1), layers.AveragePooling2D(2)
    body = (
        layers.Conv2D(48, 3, padding="same"),
        block,
        *between,
        block,
        layers.GlobalAveragePooling2D(),
    )
    return _image_network(48, *body)


def _wide_convolutions() -> keras.Model:
    wide = [layers.Conv2D(256, 3, padding="same", activation="relu") for _ in range(2)]
    return _image_network(28, *wide, layers.GlobalAveragePooling2D())


# The four numbers of the plan (gradlab.fit.sizes.memory_plan) were fitted to networks like the first
# ten.
NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "VGG-16 at 96x96": _vgg16,
    "residual network with GroupNormalization, 64x64": _residual,
    "dense, six layers of 2,000": _dense,
    "U-Net, 96x96": _u_net,
    "transformer, four blocks, 128 tokens": _transformer,
    "depthwise convolutions with LayerNormalization, 96x96": _depthwise,
    "convolutional autoencoder, 128x128": _autoencoder,
    "convolutions over 4,000 samples of sound": _sound,
    "vision transformer, six blocks, 144 patches": _vision_transformer,
    "two towers, convolutional and dense, 64x64": _two_towers,
    "*not used to fit:* MLP-Mixer, five blocks": _mixer,
    "*not used to fit:* densely connected convolutions, 48x48": _densely_connected,
    "*not used to fit:* two wide convolutions, 28x28": _wide_convolutions,
}


def measure(say: Callable[..., None] = print) -> list[dict]:
    """Plans and measures each network with each size, in several processes.

    Args:
        say: called with each line of progress, as `print` would be.

    Returns:
        A row for each network and size: {"network", "b", "planned", "measured", "peaks"}, the last
        three in MiB; "measured" is the median of "peaks".
    """
    rows = []
    for name in NETWORKS:
        for b in SIZES:
            found = [_in_a_process(name, b) for _ in range(PROCESSES)]
            peaks = [each["measured"] for each in found]
            measured = {"measured": statistics.median(peaks), "peaks": peaks}
            rows.append({"network": name, "b": b, "planned": found[0]["planned"], **measured})
            say(rows[-1], flush=True)
    return rows


def _in_a_process(name: str, b: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.plan_error", name, str(b)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def as_table(rows: list[dict]) -> str:
    """Writes the rows as a Markdown table of the plan's errors, over what was measured."""
    lines = ["| the plan's error | " + " | ".join(f"b = {b}" for b in SIZES) + " |"]
    lines.append("| --- |" + " ---: |" * len(SIZES))
    for name in dict.fromkeys(row["network"] for row in rows):
        own = {
            row["b"]: row["planned"] / row["measured"] - 1 for row in rows if row["network"] == name
        }
        lines.append(
            f"| {name} | " + " | ".join(f"{round(100 * own[b]):+d} %" for b in SIZES) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and plans one network in this process, and prints both figures as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("b", type=int, help="the examples per micro-batch")
    asked = parser.parse_args()
    import gradlab

    gradlab.setup(seed=0)
    peak = PeakMemory()
    before = peak.bytes()
    model = gradlab.microbatched(NETWORKS[asked.network](), asked.b, in_flight=1)
    model.compile("adam", "mse")
    x, [y] = (
        [_numbers(tensor, MICROBATCHES * asked.b) for tensor in nest]
        for nest in (model.inputs, model.outputs)
    )
    batch = tuple(x) if len(x) > 1 else x[0], y
    # Of arrays, fit would copy and prefetch batches, which the plan leaves out. This batch is there
    # once.
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(2), verbose=0)
    measured = peak.bytes() - before - sum(tensor.numpy().nbytes for tensor in tensors_of(batch))
    example = map_tensors(lambda tensor: tensor[:1], batch)
    planned = plan(NETWORKS[asked.network](), "mse", "adam", example).total(asked.b)
    print(json.dumps({"planned": planned / MEBIBYTE, "measured": measured / MEBIBYTE}))


def _numbers(tensor: keras.KerasTensor, examples: int) -> tf.Tensor:
    shape = [examples, *tensor.shape[1:]]
    if "int" in tensor.dtype:
        return tf.random.stateless_uniform(shape, [0, 0], 1, 5000, tf.int64)
    return tf.random.stateless_uniform(shape, [0, 0])


if __name__ == "__main__":
    main()

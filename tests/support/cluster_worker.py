"""The program of a worker in the cluster tests, and of the single process to compare with.

Usage: python cluster_worker.py MODE OUT, where MODE is "step", "auto", "fit", "wait" or "keras".
"""

import os
import signal
import sys
from pathlib import Path

import gradlab

gradlab.setup(threads=1, seed=0)
strategy = gradlab.cluster.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from gradlab.fit.sizes import memory_room  # noqa: E402
from gradlab.measure.memory import plan  # noqa: E402

mode, out = sys.argv[1], Path(sys.argv[2])
resolver = strategy.cluster_resolver
worker = resolver.task_id if resolver is not None else None
x = np.random.default_rng(0).normal(size=(37, 4)).astype("float32")
y = np.argmax(x[:, :3], axis=1)

# The functions with a fixed signature that the Trainer compiles, to look at their graphs
functions = []
make_function = tf.function


def remember(*arguments, **options):
    made = make_function(*arguments, **options)
    if "input_signature" in options:
        functions.append(made)
    return made


tf.function = remember


def model(dropout):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([4]), keras.layers.Dense(8, "tanh"), *dropout, keras.layers.Dense(3)]
    return keras.Sequential(layers)


def collectives(function) -> list[str]:
    """The types of all collective operations in the graph of a function, those of the functions it
    calls included."""
    definition = function.get_concrete_function().graph.as_graph_def()
    nodes = [
        *definition.node,
        *(node for called in definition.library.function for node in called.node_def),
    ]
    return sorted(node.op for node in nodes if "Collective" in node.op and "Group" not in node.op)


with strategy.scope():
    network = model([keras.layers.Dropout(0.5)] if mode in ("fit", "wait") else [])
    optimizer = keras.optimizers.AdamW(0.0625, weight_decay=0.125, global_clipnorm=0.25)
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = gradlab.Trainer(network, optimizer, entropy, 3, strategy)

if mode == "keras":
    with strategy.scope():
        small = gradlab.microbatched(network, 3)
        small.compile("sgd", entropy)
    small.fit(x, y)
elif mode == "auto":  # worker 1 has less memory than worker 0
    mine = slice(None) if worker is None else slice(0, 9) if worker == 0 else slice(9, None)

    def apart(y, y_pred):  # an example's term depends on all others
        drawn = tf.reduce_sum(
            tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3) * y_pred, axis=-1
        )
        return tf.reduce_mean((y_pred - tf.reduce_mean(y_pred, 0)) ** 2) - tf.math.reduce_std(drawn)

    def automatic(loss, memory):
        return gradlab.Trainer(
            network, optimizer, loss, "auto", strategy, memory=memory if worker == 1 else None
        )

    try:
        if worker is not None:
            automatic(entropy, 1000).step(x[mine], y[mine])
    except ValueError as error:
        print("refused:", error)
    for loss in (entropy, gradlab.WholeBatch(apart)):
        four = plan(network, loss, optimizer, (x[:1], y[:1])).total(4)
        trainer = automatic(loss, memory_room.times_planned() * four + 1)
        for _ in range(3):
            step = trainer.step(x[mine], y[mine])
        print(f"loss {step.loss:.4f},", trainer.microbatch_choice)
elif mode == "step":  # uneven shards: 9 and 28 examples, 10 and 27, ...
    for update in range(4):
        cut = 9 + update
        mine = slice(None) if worker is None else slice(0, cut) if worker == 0 else slice(cut, None)
        step = trainer.step(x[mine], y[mine])
        print(f"update {step.update}: loss {step.loss:.5f}, {len(step.losses)} micro-batches")
    print("collectives:", [found for function in functions if (found := collectives(function))])
else:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(37, seed=3).batch(13)

    def on_update(step):
        if (out / "die").exists() and worker == 1 and step.update == 5:
            (out / "die").unlink()
            # In the middle of the second epoch, two updates after a checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        if (out / "stop").exists() and worker == 1 and step.update == 4:
            (out / "stop").unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        if mode == "wait":
            (out / f"pid{worker}").write_text(str(os.getpid()))
            signal.pause()  # until the test ends this process

    steps = trainer.fit(
        data,
        8,
        checkpoint_dir=out / "checkpoints",
        checkpoint_every=3,
        on_update=on_update,
        verbose=False,
    )
    print("updates:", [step.update for step in steps])

if not worker:
    np.savez(
        out / "weights.npz",
        *[variable.numpy() for variable in (*network.variables, *optimizer.variables)],
    )

"""The towers of a static graph: a batch split over devices, a loss and its gradients on each, and their average.

This is what the three classic graphs of static_graph.py have in common. Built with tf.compat.v1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab import runtime
from gradlab.averaging import accumulation_dtype, average_gradients

v1 = tf.compat.v1
HOST = "/device:CPU:0"


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The placeholders to feed.

    Attributes:
        features: the batch, shape (examples, ...).
        labels: their classes, shape (examples,).
        weights: the examples' weights, shape (examples,).
        dropout_seed: two integers that choose the dropout masks; tower i uses [first, second + i].
        learning_rate: a scalar; only an update needs it.
    """

    features: tf.Tensor
    labels: tf.Tensor
    weights: tf.Tensor
    dropout_seed: tf.Tensor
    learning_rate: tf.Tensor

    def feed(self, features, labels, weights=None, dropout_seed=(0, 0)) -> dict:
        """The feed_dict for one run's batch; without weights every example counts 1."""
        if weights is None:
            weights = np.ones(len(labels))
        return {
            self.features: features,
            self.labels: labels,
            self.weights: weights,
            self.dropout_seed: dropout_seed,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Tower:
    """One copy of the computation.

    Attributes:
        name: its name scope, "tower_0".
        device: its device.
        loss: the weighted mean loss of its part of the batch: a scalar.
        weight: the sum of the weights of its examples: a scalar.
        gradients: (gradient, variable) pairs, as `compute_gradients` returns them.
    """

    name: str
    device: str
    loss: tf.Tensor
    weight: tf.Tensor
    gradients: list[tuple]


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What the three graphs share: everything up to the mean gradient of one run.

    Attributes:
        graph: the tf.Graph they stand in.
        home: the device where the variables live and the towers meet: the host, or a single tower's own device.
        inputs: the placeholders.
        towers: one `Tower` a device.
        variables: the model's variables, shared by all towers.
        weight: the sum of the weights of the run's examples: a scalar.
        average: (mean gradient over the towers, variable) pairs.
        summary: a merged summary, kept from the last tower.
        global_step: counts updates.
        init_op: gives every variable its first value.
    """

    graph: tf.Graph
    home: str
    inputs: Inputs
    towers: list[Tower]
    variables: list[tf.Variable]
    weight: tf.Tensor
    average: list[tuple]
    summary: tf.Tensor
    global_step: tf.Variable
    init_op: tf.Operation


def build_towers(loss: Callable, optimizer: Callable, feature_shape: Sequence[int], towers: int, dtype):
    """Builds, in the default graph, the inputs, the towers and their average.

    Args: see `gradlab.static_graph.tower_graph`.

    Returns:
        The optimizer, made with the learning rate's placeholder, and the fields of `Forward` but init_op.
    """
    chosen = runtime.current()
    if chosen is not None and chosen.seed is not None:
        v1.set_random_seed(chosen.seed)  # a graph does not inherit the program's seed
    devices = runtime.tower_devices(towers)
    home = devices[0] if len(devices) == 1 else HOST
    with tf.device(HOST):
        inputs = Inputs(
            features=v1.placeholder(dtype, [None, *feature_shape], name="features"),
            labels=v1.placeholder(tf.int32, [None], name="labels"),
            weights=v1.placeholder(accumulation_dtype(dtype), [None], name="weights"),
            dropout_seed=v1.placeholder(tf.int32, [2], name="dropout_seed"),
            # float64, so that an optimizer gets the rate as it was said, whatever type its variables have
            learning_rate=v1.placeholder(tf.float64, [], name="learning_rate"),
        )
    with tf.device(home):
        global_step = v1.train.get_or_create_global_step()
        optimizer = optimizer(inputs.learning_rate)

    towers = [_tower(i, devices, home, loss, optimizer, inputs) for i in range(len(devices))]

    with tf.device(home), tf.name_scope("average"):
        weights = [tower.weight for tower in towers]
        average = average_gradients([tower.gradients for tower in towers], weights if len(towers) > 1 else None)
        weight = tf.add_n(weights, name="weight")
        # Every tower summarises itself; the last one's is kept.
        summary = v1.summary.merge(v1.get_collection(v1.GraphKeys.SUMMARIES, f"{towers[-1].name}/"))
    return optimizer, dict(
        graph=v1.get_default_graph(),
        home=home,
        inputs=inputs,
        towers=towers,
        variables=v1.trainable_variables(),
        weight=weight,
        average=average,
        summary=summary,
        global_step=global_step,
    )


def _tower(i: int, devices: Sequence[str], home: str, loss: Callable, optimizer, inputs: Inputs) -> Tower:
    """One tower: its part of the batch, its loss and its gradients, under its own name and on its device."""
    name, device = f"tower_{i}", devices[i]
    with tf.device(HOST), tf.name_scope(f"split_{i}"):
        features, labels, weights = _part(inputs, i, len(devices))
        seed = inputs.dropout_seed + [0, i]
    # The first tower makes the variables, at home; the others reuse them.
    with v1.variable_scope("", reuse=i > 0, use_resource=True), _on(device, home), tf.name_scope(name):
        losses = loss(features, labels, seed)
        variables = v1.trainable_variables()
        _check(losses, variables)
        weight = tf.reduce_sum(weights, name="weight")
        total = tf.reduce_sum(tf.cast(losses, weights.dtype) * weights)
        mean = tf.math.divide_no_nan(total, weight, name="mean_loss")  # weight 0: loss and gradients are 0
        v1.summary.scalar("loss", mean)
        gradients = optimizer.compute_gradients(mean, variables)
    return Tower(name=name, device=device, loss=mean, weight=weight, gradients=gradients)


def _part(inputs: Inputs, i: int, towers: int) -> tuple:
    """Tower i's examples: parts as equal as can be, in order.

    A tower that would have none (fewer examples than towers) borrows one with the weight 0: not every kernel of
    TensorFlow takes an empty batch.
    """
    examples = tf.shape(inputs.labels)[0]
    start, end = examples * i // towers, examples * (i + 1) // towers
    rows = tf.range(start, tf.maximum(end, start + 1))
    own = tf.cast(rows < end, inputs.weights.dtype)
    return tf.gather(inputs.features, rows), tf.gather(inputs.labels, rows), tf.gather(inputs.weights, rows) * own


def _on(device: str, home: str):
    """The tower's device for operations, home for the variables they use."""
    return v1.device(lambda operation: home if operation.type == "VarHandleOp" else device)


def _check(losses, variables: list) -> None:
    if losses.shape.rank != 1:
        raise ValueError(f"loss must return one number an example, shape (examples,). Received: {losses.shape}")
    if not variables:
        raise ValueError("loss must make variables with tf.compat.v1.get_variable. Received: a loss without any")

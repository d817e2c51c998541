"""The towers of a static graph: a batch split over devices, the loss and gradients on each, and
their average.

This is what the three classic graphs of static_graph.py have in common. It is built with
tf.compat.v1.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from gradlab import runtime
from gradlab.averaging import accumulation_dtype, average_gradients

v1 = tf.compat.v1
HOST = "/device:CPU:0"
# Features, labels, dropout_seed -> losses
Loss: TypeAlias = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
# Learning rate -> optimizer
MakeOptimizer: TypeAlias = Callable[[tf.Tensor], tf.compat.v1.train.Optimizer]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The placeholders of a graph.

    Attributes:
        features: the features of a batch, shape (examples, ...).
        labels: the classes of the examples, shape (examples,).
        weights: the weights of the examples, shape (examples,).
        dropout_seed: two integers that determine the dropout masks, shape (2,); tower i uses
            [first, second + i].
        learning_rate: the learning rate, a scalar; only operations that update the variables need
            it.
    """

    features: tf.Tensor
    labels: tf.Tensor
    weights: tf.Tensor
    dropout_seed: tf.Tensor
    learning_rate: tf.Tensor

    def feed(
        self,
        features: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        dropout_seed: tuple[int, int] = (0, 0),
    ) -> dict[tf.Tensor, Any]:
        """The feed_dict for one batch, without a learning rate. If weights is None, every example
        has the weight 1."""
        if weights is None:
            weights = np.ones(np.shape(labels)[0])
        return {
            self.features: features,
            self.labels: labels,
            self.weights: weights,
            self.dropout_seed: dropout_seed,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Tower:
    """One copy of the model's computation on one device.

    Attributes:
        name: its name scope, such as "tower_0".
        device: its device.
        loss: the weighted mean loss of its shard of the batch, a scalar.
        weight: the sum of the weights of its examples, a scalar.
        gradients: (gradient, variable) pairs, as `compute_gradients` returns them.
    """

    name: str
    device: str
    loss: tf.Tensor
    weight: tf.Tensor
    gradients: list[tuple]


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """The common attributes of the three graphs: everything up to the mean gradient of one batch.

    Attributes:
        graph: the tf.Graph.
        home: the device that holds the variables and averages the towers' gradients: the host, or
            the tower's own device if there is only one.
        inputs: the placeholders.
        towers: one `Tower` for each device.
        variables: the model's variables, shared by all towers.
        weight: the sum of the weights of the batch's examples, a scalar.
        average: (mean gradient over the towers, variable) pairs.
        summary: the merged summaries of the last tower.
        global_step: the variable that counts updates.
        init_op: the operation that initializes every variable.
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


def build_towers(
    loss: Loss,
    optimizer: MakeOptimizer,
    feature_shape: Sequence[int],
    towers: int,
    dtype: tf.DType | str,
) -> tuple[tf.compat.v1.train.Optimizer, dict[str, Any]]:
    """Build, in the default graph, the inputs, the towers and their average.

    Args: see `gradlab.static_graph.tower_graph`.

    Returns:
        The optimizer, made with the placeholder of the learning rate, and the fields of `Forward`
        except init_op.
    """
    chosen = runtime.current()
    if chosen is not None and chosen.seed is not None:
        v1.set_random_seed(chosen.seed)  # a graph does not inherit the seed of the program
    devices = runtime.tower_devices(towers)
    home = devices[0] if len(devices) == 1 else HOST
    with tf.device(HOST):
        inputs = Inputs(
            features=v1.placeholder(dtype, [None, *feature_shape], name="features"),
            labels=v1.placeholder(tf.int32, [None], name="labels"),
            weights=v1.placeholder(accumulation_dtype(dtype), [None], name="weights"),
            dropout_seed=v1.placeholder(tf.int32, [2], name="dropout_seed"),
            # float64 passes the learning rate on unrounded, whatever type the variables have.
            learning_rate=v1.placeholder(tf.float64, [], name="learning_rate"),
        )
    with tf.device(home):
        global_step = v1.train.get_or_create_global_step()
        made = optimizer(inputs.learning_rate)

    built = [_tower(i, devices, home, loss, made, inputs) for i in range(len(devices))]

    with tf.device(home), tf.name_scope("average"):
        weights = [tower.weight for tower in built]
        average = average_gradients(
            [tower.gradients for tower in built], weights if len(built) > 1 else None
        )
        weight = tf.add_n(weights, name="weight")
        # Every tower makes a summary, as in the classic multi-GPU code, which keeps the last one.
        summary = v1.summary.merge(v1.get_collection(v1.GraphKeys.SUMMARIES, f"{built[-1].name}/"))
    return made, dict(
        graph=v1.get_default_graph(),
        home=home,
        inputs=inputs,
        towers=built,
        variables=v1.trainable_variables(),
        weight=weight,
        average=average,
        summary=summary,
        global_step=global_step,
    )


def _tower(
    i: int, devices: Sequence[str], home: str, loss: Loss, optimizer: Any, inputs: Inputs
) -> Tower:
    """Build tower i on its device: the loss of its shard of the batch, and the gradients."""
    name = f"tower_{i}"
    device = devices[i]
    with tf.device(HOST), tf.name_scope(f"split_{i}"):
        features, labels, weights = _shard(inputs, i, len(devices))
        seed = inputs.dropout_seed + [0, i]
    # The first tower creates the variables, on the home device; the others reuse them.
    with (
        v1.variable_scope("", reuse=i > 0, use_resource=True),
        _on(device, home),
        tf.name_scope(name),
    ):
        losses = loss(features, labels, seed)
        variables = v1.trainable_variables()
        _check(losses, variables)
        weight = tf.reduce_sum(weights, name="weight")
        total = tf.reduce_sum(tf.cast(losses, weights.dtype) * weights)
        # Weight 0: loss and gradients are 0
        mean = tf.math.divide_no_nan(total, weight, name="mean_loss")
        v1.summary.scalar("loss", mean)
        gradients = optimizer.compute_gradients(mean, variables)
    return Tower(name=name, device=device, loss=mean, weight=weight, gradients=gradients)


def _shard(inputs: Inputs, i: int, towers: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The features, labels and weights of tower i: consecutive examples, as evenly split as
    possible.

    If there are fewer examples than towers, a tower without any gets one example with the weight 0,
    because some of TensorFlow's kernels do not accept an empty batch.
    """
    examples = tf.shape(inputs.labels)[0]
    start = examples * i // towers
    end = examples * (i + 1) // towers
    rows = tf.range(start, tf.maximum(end, start + 1))
    own = tf.cast(rows < end, inputs.weights.dtype)
    return (
        tf.gather(inputs.features, rows),
        tf.gather(inputs.labels, rows),
        tf.gather(inputs.weights, rows) * own,
    )


def _on(device: str, home: str) -> AbstractContextManager:
    """A device scope: operations go to the tower's device, the variables that they create to the
    home device."""
    return v1.device(lambda operation: home if operation.type == "VarHandleOp" else device)


def _check(losses: tf.Tensor, variables: list) -> None:
    if losses.shape.rank != 1:
        raise ValueError(
            f"loss must return one number per example, shape (examples,). Received: {losses.shape}"
        )
    if not variables:
        raise ValueError(
            "loss must create its variables with tf.compat.v1.get_variable. Received: a loss "
            "without variables"
        )

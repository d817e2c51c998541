"""The three classic static graphs: averaging over towers, through placeholders, in variables. Built with tf.compat.v1.

A static graph is built first and run later: what these functions return are references to tensors and operations, not
values. A `tf.compat.v1.Session` (see `gradlab.runtime.session`) runs them and gives the values.

All three begin alike: a batch is split over the towers, each tower computes its loss and gradients on its device, and
`average_gradients` joins them. They differ in what happens to the result:

    tower_graph         it is applied at once: one run is one update
    placeholder_graph   it is fetched to the host, averaged there over the window, and fed back through placeholders
    variable_graph      it is added to variables, run by run, and their mean is applied at the end of the window
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab import runtime
from gradlab.accumulator import GradientAccumulator
from gradlab.averaging import accumulation_dtype, average_gradients

v1 = tf.compat.v1
HOST = "/device:CPU:0"  # the variables live here, and here the towers meet


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
    inputs: Inputs
    towers: list[Tower]
    variables: list[tf.Variable]
    weight: tf.Tensor
    average: list[tuple]
    summary: tf.Tensor
    global_step: tf.Variable
    init_op: tf.Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class TowerGraph(Forward):
    """Averaging over towers: each run of `train_op` is an update with its batch."""

    train_op: tf.Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class PlaceholderGraph(Forward):
    """Averaging on the host: fetch `gradients` k times, average them, feed `gradient_placeholders`, run `train_op`.

    Half-precision gradients travel as float32, sparse ones as dense tensors. A variable that no gradient reaches has
    neither gradient nor placeholder.
    """

    gradients: list[tf.Tensor]
    gradient_placeholders: list[tf.Tensor]
    train_op: tf.Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class VariableGraph(TowerGraph):
    """Averaging in variables: run `zero_ops`, then `accum_ops` k times, then `train_step`.

    For a window of one run there is `train_op`, which applies that run's gradients at once.
    """

    accumulator: GradientAccumulator
    zero_ops: tf.Operation
    accum_ops: tf.Operation
    train_step: tf.Operation


def tower_graph(loss: Callable, optimizer: Callable, feature_shape: Sequence[int], towers: int = 1, dtype="float32"):
    """Builds averaging over towers: the multi-GPU update in one run.

    In words::

        for each tower, on its device, with the shared variables:
            its part of the batch -> loss -> gradients
        mean of each gradient over the towers        (the towers wait for each other here)
        apply the means, once

    Args:
        loss: a function (features, labels, dropout_seed) -> the loss of each example, shape (examples,). It makes its
            variables with `tf.compat.v1.get_variable`; it is called once a tower and gets the same variables each time.
        optimizer: a function (learning rate tensor) -> tf.compat.v1.train.Optimizer, such as AdamOptimizer itself.
        feature_shape: the shape of one example's features.
        towers: how many; each on a GPU if there are enough, else on a logical CPU device.
        dtype: the type of the features and weights.

    Returns:
        A `TowerGraph`.

    Raises:
        ValueError: more towers than devices, or a loss without variables or not of one number an example.
    """
    with tf.Graph().as_default() as graph:
        optimizer, parts = _forward(graph, loss, optimizer, feature_shape, towers, dtype)
        with tf.device(HOST):
            train_op = optimizer.apply_gradients(parts["average"], parts["global_step"], name="train")
            return TowerGraph(**parts, init_op=v1.global_variables_initializer(), train_op=train_op)


def placeholder_graph(
    loss: Callable, optimizer: Callable, feature_shape: Sequence[int], towers: int = 1, dtype="float32"
):
    """Builds averaging through placeholders: computing gradients and applying them are two runs.

    In words::

        k times:  gradients of a micro-batch -> host
        host:     their weighted mean (`average_on_host`)
        once:     host -> placeholders -> apply

    Arguments, errors: see `tower_graph`.

    Returns:
        A `PlaceholderGraph`.
    """
    with tf.Graph().as_default() as graph:
        optimizer, parts = _forward(graph, loss, optimizer, feature_shape, towers, dtype)
        gradients, placeholders, averages = [], [], []
        with tf.device(HOST):
            for gradient, variable in parts["average"]:
                if gradient is None:
                    continue
                name = variable.name.removesuffix(":0")
                gradients.append(tf.cast(tf.convert_to_tensor(gradient), accumulation_dtype(gradient.dtype)))
                placeholders.append(v1.placeholder(gradients[-1].dtype, variable.shape, name=f"{name}/gradient"))
                averages.append((tf.cast(placeholders[-1], variable.dtype), variable))
            train_op = optimizer.apply_gradients(averages, parts["global_step"], name="train")
            return PlaceholderGraph(
                **parts,
                init_op=v1.global_variables_initializer(),
                gradients=gradients,
                gradient_placeholders=placeholders,
                train_op=train_op,
            )


def variable_graph(loss: Callable, optimizer: Callable, feature_shape: Sequence[int], towers: int = 1, dtype="float32"):
    """Builds accumulation in variables: the gradients never leave the device's graph.

    In words::

        once:     accumulators = 0
        k times:  accumulators += weight * gradients of a micro-batch
        once:     apply accumulators / weight

    Arguments, errors: see `tower_graph`.

    Returns:
        A `VariableGraph`.
    """
    with tf.Graph().as_default() as graph:
        optimizer, parts = _forward(graph, loss, optimizer, feature_shape, towers, dtype)
        with tf.device(HOST):
            train_op = optimizer.apply_gradients(parts["average"], parts["global_step"], name="train")
            with tf.name_scope("accumulator"):
                accumulator = GradientAccumulator(parts["variables"])
            with tf.name_scope("zero"):
                zero_ops = accumulator.zero()
            with tf.name_scope("accumulate"):
                accum_ops = accumulator.add([gradient for gradient, _ in parts["average"]], parts["weight"])
            with tf.name_scope("mean"):
                mean = accumulator.mean()
            train_step = optimizer.apply_gradients(zip(mean, parts["variables"]), parts["global_step"], name="train_step")
            return VariableGraph(
                **parts,
                init_op=v1.global_variables_initializer(),
                train_op=train_op,
                accumulator=accumulator,
                zero_ops=zero_ops,
                accum_ops=accum_ops,
                train_step=train_step,
            )


def average_on_host(gradients: Sequence[Sequence[np.ndarray]], weights: Sequence[float]) -> list[np.ndarray]:
    """The weighted mean, in NumPy, of gradients that were fetched from a `placeholder_graph`.

    Args:
        gradients: a list over micro-batches of lists of arrays.
        weights: the weight of each micro-batch.

    Example:
        >>> average_on_host([[np.array([1.0])], [np.array([4.0])]], weights=[2, 1])
        [array([2.])]
    """
    if not gradients or not np.sum(weights) > 0:
        raise ValueError(
            f"average_on_host needs gradients with a weight above 0. Received: {len(gradients)} micro-batches of "
            f"weights {list(weights)}"
        )
    return [np.average(np.stack(column), axis=0, weights=weights).astype(column[0].dtype) for column in zip(*gradients)]


def _forward(graph, loss, optimizer, feature_shape, towers, dtype):
    """Builds inputs, towers and their average. Returns the optimizer and the fields of `Forward`."""
    devices = runtime.tower_devices(towers)
    chosen = runtime.current()
    if chosen is not None and chosen.seed is not None:
        v1.set_random_seed(chosen.seed)  # a graph does not inherit the program's seed
    with tf.device(HOST):
        inputs = Inputs(
            features=v1.placeholder(dtype, [None, *feature_shape], name="features"),
            labels=v1.placeholder(tf.int32, [None], name="labels"),
            weights=v1.placeholder(accumulation_dtype(dtype), [None], name="weights"),
            dropout_seed=v1.placeholder(tf.int32, [2], name="dropout_seed"),
            # float64, so that an optimizer gets the rate as it was said, whatever type its variables have
            learning_rate=v1.placeholder(tf.float64, [], name="learning_rate"),
        )
        global_step = v1.train.get_or_create_global_step()
        optimizer = optimizer(inputs.learning_rate)

    towers = []
    for i, device in enumerate(devices):
        with tf.device(HOST), tf.name_scope(f"split_{i}"):
            features, labels, weights = _part(inputs, i, len(devices))
            seed = inputs.dropout_seed + [0, i]
        # The first tower makes the variables, on the host; the others reuse them.
        with v1.variable_scope("", reuse=i > 0, use_resource=True), _on(device):
            with tf.name_scope(f"tower_{i}") as scope:
                losses = loss(features, labels, seed)
                _check_losses(losses)
                weight = tf.reduce_sum(weights, name="weight")
                # divide_no_nan: a tower of weight 0 has the loss 0 and the gradients 0.
                mean = tf.math.divide_no_nan(
                    tf.reduce_sum(tf.cast(losses, weights.dtype) * weights), weight, name="mean_loss"
                )
                v1.summary.scalar("loss", mean)
                if not v1.trainable_variables():
                    raise ValueError(
                        "loss must make variables with tf.compat.v1.get_variable. Received: a loss without any"
                    )
                gradients = optimizer.compute_gradients(mean, v1.trainable_variables())
        towers.append(Tower(name=f"tower_{i}", device=device, loss=mean, weight=weight, gradients=gradients))
        summaries = v1.get_collection(v1.GraphKeys.SUMMARIES, scope)  # the last tower's are kept

    with tf.device(HOST), tf.name_scope("average"):
        weight = tf.add_n([tower.weight for tower in towers], name="weight")
        average = average_gradients(
            [tower.gradients for tower in towers], None if len(towers) == 1 else [tower.weight for tower in towers]
        )
        summary = v1.summary.merge(summaries)
    variables = v1.trainable_variables()
    parts = dict(graph=graph, inputs=inputs, towers=towers, variables=variables, weight=weight, average=average)
    return optimizer, parts | dict(summary=summary, global_step=global_step)


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


def _on(device: str):
    """The tower's device for operations, the host for the variables they use."""
    return v1.device(lambda operation: HOST if operation.type == "VarHandleOp" else device)


def _check_losses(losses) -> None:
    if losses.shape.rank != 1:
        raise ValueError(f"loss must return one number an example, shape (examples,). Received: {losses.shape}")

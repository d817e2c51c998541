"""The three classic static graphs: averaging over towers, through placeholders, in variables. Built with tf.compat.v1.

A static graph is built first and run later: what these functions return are references to tensors and operations, not
values. A `tf.compat.v1.Session` (see `gradlab.runtime.session`) runs them and gives the values.

All three begin alike (see towers.py): a batch is split over the towers, each tower computes its loss and gradients on
its device, and `average_gradients` joins them. They differ in what happens to the result:

    tower_graph         it is applied at once: one run is one update
    placeholder_graph   it is fetched to the host, averaged there over the window, and fed back through placeholders
    variable_graph      it is added to variables, run by run, and their mean is applied at the end of the window
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab.accumulator import GradientAccumulator
from gradlab.averaging import accumulation_dtype
from gradlab.towers import Forward, build_towers

v1 = tf.compat.v1


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
    with tf.Graph().as_default():
        optimizer, parts = build_towers(loss, optimizer, feature_shape, towers, dtype)
        with tf.device(parts["home"]):
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
    with tf.Graph().as_default():
        optimizer, parts = build_towers(loss, optimizer, feature_shape, towers, dtype)
        gradients, placeholders, averages = [], [], []
        with tf.device(parts["home"]):
            for gradient, variable in parts["average"]:
                if gradient is None:
                    continue
                name = variable.name.removesuffix(":0")
                gradients.append(tf.cast(tf.convert_to_tensor(gradient), accumulation_dtype(gradient.dtype)))
                placeholders.append(v1.placeholder(gradients[-1].dtype, variable.shape, name=f"gradient/{name}"))
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
    with tf.Graph().as_default():
        optimizer, parts = build_towers(loss, optimizer, feature_shape, towers, dtype)
        with tf.device(parts["home"]):
            train_op = optimizer.apply_gradients(parts["average"], parts["global_step"], name="train")
            with tf.name_scope("accumulator"):
                accumulator = GradientAccumulator(parts["variables"])
            with tf.name_scope("zero"):
                zero_ops = accumulator.zero()
            with tf.name_scope("accumulate"):
                accum_ops = accumulator.add([gradient for gradient, _ in parts["average"]], parts["weight"])
            with tf.name_scope("mean"):
                mean = accumulator.mean()
            train_step = optimizer.apply_gradients(
                zip(mean, parts["variables"]), parts["global_step"], name="train_step"
            )
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

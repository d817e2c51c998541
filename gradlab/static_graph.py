"""The three classic static graphs: averaging over towers, through placeholders, and in variables,
with tf.compat.v1.

A static graph is built first and run later: the functions here return references to tensors and
operations, not values. A session runs them and returns the values; `session` makes one with the
threads that `gradlab.setup` chose.

All three graphs begin alike (see towers.py): a batch is split over the towers, each tower computes
its loss and its gradients on its device, and `average_gradients` averages them. They differ in what
happens to this average:

    tower_graph         it is applied at once: each run is one update
    placeholder_graph   it is fetched to the host, averaged there over the window, and fed back through placeholders
    variable_graph      each run adds it to variables, whose mean is applied at the end of the window
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab.accumulator import GradientAccumulator
from gradlab.averaging import accumulation_dtype
from gradlab.runtime import session as session
from gradlab.towers import Forward, Loss, MakeOptimizer, build_towers

v1 = tf.compat.v1


@dataclass(frozen=True, kw_only=True, eq=False)
class TowerGraph(Forward):
    """The graph of `tower_graph`.

    Attributes:
        train_op: updates the variables with the mean gradient of the batch that is fed; each run is
            one update.
    """

    train_op: tf.Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class PlaceholderGraph(Forward):
    """The graph of `placeholder_graph`.

    For one update, fetch `gradients` k times, average them with `average_on_host`, feed the means
    through `gradient_placeholders`, and run `train_op`.

    Attributes:
        gradients: the mean gradient of a micro-batch for each variable on which the loss depends.
            Half-precision gradients are converted to float32, sparse ones to dense tensors.
        gradient_placeholders: a placeholder for each of these gradients, in the same order.
        train_op: updates the variables with the gradients that are fed.
    """

    gradients: list[tf.Tensor]
    gradient_placeholders: list[tf.Tensor]
    train_op: tf.Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class VariableGraph(TowerGraph):
    """The graph of `variable_graph`.

    For one update, run `zero_ops`, then `accum_ops` k times, then `train_step`. For a window of a
    single micro-batch, `train_op` applies its gradients at once.

    Attributes:
        accumulator: the sums of the gradients, and their weight.
        zero_ops: sets the sums to zero.
        accum_ops: adds the gradients of the micro-batch that is fed.
        train_step: updates the variables with the mean of the sums.
    """

    accumulator: GradientAccumulator
    zero_ops: tf.Operation
    accum_ops: tf.Operation
    train_step: tf.Operation


def tower_graph(
    loss: Loss,
    optimizer: MakeOptimizer,
    feature_shape: Sequence[int],
    towers: int = 1,
    dtype: tf.DType | str = "float32",
) -> TowerGraph:
    """Build a graph that averages over towers: the classic multi-GPU update in one run.

    In pseudocode::

        for each tower, on its device, with the shared variables:
            its shard of the batch -> loss -> gradients
        mean of each gradient over the towers        (the towers synchronize here)
        apply the means, once

    Args:
        loss: a function (features, labels, dropout_seed) -> the loss of each example, shape
            (examples,). It creates its variables with `tf.compat.v1.get_variable`. It is called
            once for each tower and gets the same variables each time.
        optimizer: a function (learning rate tensor) -> tf.compat.v1.train.Optimizer, such as the
            class AdamOptimizer.
        feature_shape: the shape of one example's features.
        towers: the number of towers. Each runs on a GPU if there are enough, otherwise on a logical
            CPU device.
        dtype: the type of the features and weights.

    Returns:
        A `TowerGraph`.

    Raises:
        ValueError: there are more towers than devices, or the loss has no variables or does not
            return one number per example.
    """
    with tf.Graph().as_default():
        made, fields = build_towers(loss, optimizer, feature_shape, towers, dtype)
        with tf.device(fields["home"]):
            train_op = made.apply_gradients(fields["average"], fields["global_step"], name="train")
            return TowerGraph(
                **fields, init_op=v1.global_variables_initializer(), train_op=train_op
            )


def placeholder_graph(
    loss: Loss,
    optimizer: MakeOptimizer,
    feature_shape: Sequence[int],
    towers: int = 1,
    dtype: tf.DType | str = "float32",
) -> PlaceholderGraph:
    """Build a graph that averages through placeholders: gradients are computed and applied in
    separate runs.

    In pseudocode::

        k times:  gradients of a micro-batch -> host
        host:     their weighted mean (`average_on_host`)
        once:     host -> placeholders -> apply

    Args and Raises: see `tower_graph`.

    Returns:
        A `PlaceholderGraph`.
    """
    with tf.Graph().as_default():
        made, fields = build_towers(loss, optimizer, feature_shape, towers, dtype)
        gradients = []
        placeholders = []
        averages = []
        with tf.device(fields["home"]):
            for gradient, variable in fields["average"]:
                if gradient is None:
                    continue
                name = variable.name.removesuffix(":0")
                gradients.append(
                    tf.cast(tf.convert_to_tensor(gradient), accumulation_dtype(gradient.dtype))
                )
                placeholders.append(
                    v1.placeholder(gradients[-1].dtype, variable.shape, name=f"gradient/{name}")
                )
                averages.append((tf.cast(placeholders[-1], variable.dtype), variable))
            train_op = made.apply_gradients(averages, fields["global_step"], name="train")
            return PlaceholderGraph(
                **fields,
                init_op=v1.global_variables_initializer(),
                gradients=gradients,
                gradient_placeholders=placeholders,
                train_op=train_op,
            )


def variable_graph(
    loss: Loss,
    optimizer: MakeOptimizer,
    feature_shape: Sequence[int],
    towers: int = 1,
    dtype: tf.DType | str = "float32",
) -> VariableGraph:
    """Build a graph that accumulates in variables: the gradients stay on the device.

    In pseudocode::

        once:     accumulators = 0
        k times:  accumulators += weight * gradients of a micro-batch
        once:     apply accumulators / weight

    Args and Raises: see `tower_graph`.

    Returns:
        A `VariableGraph`.
    """
    with tf.Graph().as_default():
        made, fields = build_towers(loss, optimizer, feature_shape, towers, dtype)
        with tf.device(fields["home"]):
            train_op = made.apply_gradients(fields["average"], fields["global_step"], name="train")
            with tf.name_scope("accumulator"):
                accumulator = GradientAccumulator(fields["variables"])
            with tf.name_scope("zero"):
                zero_ops = accumulator.zero()
            with tf.name_scope("accumulate"):
                accum_ops = accumulator.add(
                    [gradient for gradient, _ in fields["average"]], fields["weight"]
                )
            with tf.name_scope("mean"):
                mean = accumulator.mean()
            train_step = made.apply_gradients(
                zip(mean, fields["variables"]), fields["global_step"], name="train_step"
            )
            return VariableGraph(
                **fields,
                init_op=v1.global_variables_initializer(),
                train_op=train_op,
                accumulator=accumulator,
                zero_ops=zero_ops,
                accum_ops=accum_ops,
                train_step=train_step,
            )


def average_on_host(
    gradients: Sequence[Sequence[np.ndarray]], weights: Sequence[float]
) -> list[np.ndarray]:
    """The weighted mean of gradients that were fetched from a `placeholder_graph`, computed in
    NumPy.

    Args:
        gradients: a list over micro-batches of lists of arrays.
        weights: the weight of each micro-batch.

    Returns:
        The mean of each gradient, in the gradient's type.

    Raises:
        ValueError: there are no gradients, or their weights are all 0.

    Example:
        >>> average_on_host([[np.array([1.0])], [np.array([4.0])]], weights=[2, 1])
        [array([2.])]
    """
    if not gradients or not np.sum(weights) > 0:
        raise ValueError(
            f"average_on_host needs gradients with a weight above 0. Received: {len(gradients)} "
            f"micro-batches of weights {list(weights)}"
        )
    return [
        np.average(np.stack(column), axis=0, weights=weights).astype(column[0].dtype)
        for column in zip(*gradients)
    ]

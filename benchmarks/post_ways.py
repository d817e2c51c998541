"""The two methods of the blog posts that started the project: static graphs in a tf.compat.v1
session."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks import Network, Run

v1 = tf.compat.v1
RATE = 1e-3  # the learning rate


def placeholders(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: fetches the gradients as NumPy arrays and feeds their mean back through
    placeholders."""
    with tf.Graph().as_default() as graph:
        optimizer, loss, pairs, feed = _graph(network)
        means = [v1.placeholder(gradient.dtype, gradient.shape) for gradient, _ in pairs]
        train = optimizer.apply_gradients(list(zip(means, [variable for _, variable in pairs])))
        init = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(init)
    gradients = [gradient for gradient, _ in pairs]

    def run(updates):
        for _ in range(updates):
            fetched = []
            for i in range(k):
                rows = slice(i * b, (i + 1) * b)
                fetched.append(session.run([gradients, loss], feed(x[rows], y[rows], i))[0])
            session.run(
                train,
                {mean: np.stack(column).mean(axis=0) for mean, column in zip(means, zip(*fetched))},
            )

    return run


def variables(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: sets sums to zero, adds k gradients to them and applies their mean, with one
    session.run for each."""
    with tf.Graph().as_default() as graph:
        optimizer, loss, pairs, feed = _graph(network)
        sums = [
            v1.get_variable(f"sum_{i}", initializer=tf.zeros(v.shape))
            for i, (_, v) in enumerate(pairs)
        ]
        zero = tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])
        add = tf.group(*[total.assign_add(gradient) for total, (gradient, _) in zip(sums, pairs)])
        train = optimizer.apply_gradients(
            [(total / k, variable) for total, (_, variable) in zip(sums, pairs)]
        )
        init = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(init)

    def run(updates):
        for _ in range(updates):
            session.run(zero)
            for i in range(k):
                rows = slice(i * b, (i + 1) * b)
                session.run([add, loss], feed(x[rows], y[rows], i))
            session.run(train)

    return run


def _graph(network: Network) -> tuple[Any, tf.Tensor, list[tuple], Callable]:
    """Builds the static graph of the posts in the current default graph.

    Returns:
        The optimizer, the mean loss, the (gradient, variable) pairs, and a function (x, y, number)
        -> feed_dict, where the number of the micro-batch seeds its dropout masks.
    """
    model = network.model
    if model is None:
        raise RuntimeError("the posts' static graphs are written for the lab's networks")
    features = v1.placeholder(tf.float32, [None, *network.input_shape])
    labels = v1.placeholder(tf.int32, [None])
    seed = v1.placeholder(tf.int32, [2])
    weights = {
        name: v1.get_variable(name, initializer=value, use_resource=True)
        for name, value in model.initial_weights(0).items()
    }
    loss = tf.reduce_mean(model.losses(weights, features, labels, seed))
    optimizer = v1.train.AdamOptimizer(RATE)

    def feed(x, y, number):
        return {features: x, labels: y, seed: [0, number]}

    return optimizer, loss, optimizer.compute_gradients(loss, list(weights.values())), feed

"""Ways to make an update in TensorFlow: gradlab's, the posts', Keras' and the usual loop.

Each way is made from a network, k, b and a batch of k * b examples, and gives a function that makes so many updates. It
may return the seconds that they took, where the call took longer for other reasons.
"""

import time

import keras
import numpy as np
import tensorflow as tf

import gradlab
from gradlab.lab.experiments import methods
from gradlab.lab.experiments.optimizers import OptimizerConfig
from gradlab.window import window_gradients

v1 = tf.compat.v1
RATE = 1e-3


def keras_model(network):
    """The network in Keras layers."""
    made = {
        "conv": lambda filters, size, padding: keras.layers.Conv2D(filters, size, padding=padding),
        "pool": keras.layers.MaxPooling2D,
        "flatten": keras.layers.Flatten,
        "dense": keras.layers.Dense,
        "relu": keras.layers.ReLU,
        "dropout": keras.layers.Dropout,
    }
    layers = [made[name](*sizes) for name, *sizes in network.layers]
    return keras.Sequential([keras.Input(network.input_shape), *layers])


def _method(build):
    """A way from one of gradlab's methods."""

    def way(network, k, b, x, y):
        method = build(network.model, OptimizerConfig("adam"))
        method.reset(network.model.initial_weights(0))

        def run(updates):
            for _ in range(updates):
                method.update(x, y, b, RATE)

        return run

    return way


def big_batch(network, k, b, x, y):
    """One tf.function with the whole batch: what all others stand in for."""
    weights = [tf.Variable(value, name=name) for name, value in network.model.initial_weights(0).items()]
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(weights)

    @tf.function
    def update(x, y, seed):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network.model.losses(dict(zip(network.model.shapes, weights)), x, y, seed))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    arguments = tf.constant(x), tf.constant(y), tf.zeros(2, tf.int32)

    def run(updates):
        for _ in range(updates):
            update(*arguments).numpy()

    return run


def _your_function(in_flight=1, xla=False):
    """gradlab's loop in a tf.function of one's own, which is traced for its k and b and returns the losses alone."""

    def way(network, k, b, x, y):
        convolutions = any(name == "conv" for name, *_ in network.layers)
        if xla and convolutions and not tf.config.list_logical_devices("GPU"):
            raise RuntimeError("on a CPU, XLA takes 10 times as long for LeNet and more than a minute for VGG-16")
        weights = [tf.Variable(value, name=name) for name, value in network.model.initial_weights(0).items()]
        optimizer = keras.optimizers.Adam(RATE)
        optimizer.build(weights)

        @tf.function(jit_compile=xla)
        def update(x, y, seed):
            def losses(part, number):
                named = dict(zip(network.model.shapes, weights))
                return network.model.losses(named, *part, seed + tf.stack([0, number]))

            window = window_gradients(losses, weights, (x, y), tf.ones([k * b]), b, in_flight, norms=False)
            optimizer.apply(window.gradients, weights)
            return window.losses

        arguments = tf.constant(x), tf.constant(y), tf.zeros(2, tf.int32)

        def run(updates):
            for _ in range(updates):
                update(*arguments).numpy()

        return run

    return way


def function_per_microbatch(network, k, b, x, y):
    """The usual loop: a tf.function adds a micro-batch's gradients to variables, another applies their mean."""
    model, loss = keras_model(network), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = model.trainable_variables
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(weights)
    sums = [tf.Variable(tf.zeros(weight.shape)) for weight in weights]

    @tf.function
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            mean = loss(y, model(x, training=True))
        for total, gradient in zip(sums, tape.gradient(mean, weights)):
            total.assign_add(gradient)
        return mean

    @tf.function
    def apply():
        optimizer.apply([total / k for total in sums], weights)
        for total in sums:
            total.assign(tf.zeros_like(total))

    parts = [(tf.constant(x[i : i + b]), tf.constant(y[i : i + b])) for i in range(0, k * b, b)]

    def run(updates):
        for _ in range(updates):
            for part in parts:
                mean = accumulate(*part)
            apply()
            mean.numpy()

    return run


def keras_option(network, k, b, x, y):
    """Keras' own gradient_accumulation_steps, in fit."""
    model = keras_model(network)
    steps = {"gradient_accumulation_steps": k} if k > 1 else {}
    model.compile(keras.optimizers.Adam(RATE, **steps), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model, b, x, y)


def gradlab_fit(network, k, b, x, y):
    """gradlab.microbatched, in fit."""
    model = gradlab.microbatched(keras_model(network), b)
    model.compile(keras.optimizers.Adam(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model, k * b, x, y)


class _Clock(keras.callbacks.Callback):
    """The seconds from the first step of a fit to its last. What tf.data does before and after is no update's: when a
    fit ends, it now and then waits for a thread that sleeps for as long again as the fit took."""

    def on_train_begin(self, logs=None):
        self._began = time.perf_counter()

    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self._began


def _fit(model, batch_size, x, y):
    def run(updates):
        # one epoch of so many batches: what fit does before the first is shared by all
        data, clock = (np.concatenate([x] * updates), np.concatenate([y] * updates)), _Clock()
        model.fit(*data, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def _session_graph(network):
    """A static graph as the posts build it: the network, its loss, its gradients."""
    model = network.model
    features = v1.placeholder(tf.float32, [None, *network.input_shape])
    labels = v1.placeholder(tf.int32, [None])
    seed = v1.placeholder(tf.int32, [2])
    weights = {
        name: v1.get_variable(name, initializer=value, use_resource=True)
        for name, value in model.initial_weights(0).items()
    }
    loss = tf.reduce_mean(model.losses(weights, features, labels, seed))
    optimizer = v1.train.AdamOptimizer(RATE)
    feed = lambda x, y, number: {features: x, labels: y, seed: [0, number]}  # noqa: E731
    return optimizer, loss, optimizer.compute_gradients(loss, list(weights.values())), feed


def post_placeholders(network, k, b, x, y):
    """The placeholder post's way: gradients to NumPy, their mean back through placeholders."""
    with tf.Graph().as_default() as graph:
        optimizer, loss, pairs, feed = _session_graph(network)
        means = [v1.placeholder(gradient.dtype, gradient.shape) for gradient, _ in pairs]
        train = optimizer.apply_gradients(list(zip(means, [variable for _, variable in pairs])))
        init = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(init)
    gradients = [gradient for gradient, _ in pairs]

    def run(updates):
        for _ in range(updates):
            seen = []
            for i in range(k):
                rows = slice(i * b, (i + 1) * b)
                seen.append(session.run([gradients, loss], feed(x[rows], y[rows], i))[0])
            session.run(train, {mean: np.stack(column).mean(axis=0) for mean, column in zip(means, zip(*seen))})

    return run


def post_variables(network, k, b, x, y):
    """The variable post's way: zero, accumulate k times, apply, each a session.run."""
    with tf.Graph().as_default() as graph:
        optimizer, loss, pairs, feed = _session_graph(network)
        sums = [v1.get_variable(f"sum_{i}", initializer=tf.zeros(v.shape)) for i, (_, v) in enumerate(pairs)]
        zero = tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])
        add = tf.group(*[total.assign_add(gradient) for total, (gradient, _) in zip(sums, pairs)])
        train = optimizer.apply_gradients([(total / k, variable) for total, (_, variable) in zip(sums, pairs)])
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


WAYS = {
    "big batch": big_batch,
    "gradlab": _method(lambda model, optimizer: methods.Microbatched(model, optimizer, in_flight=1)),
    "gradlab, two in flight": _method(lambda model, optimizer: methods.Microbatched(model, optimizer, in_flight=2)),
    "gradlab in your function": _your_function(),
    "gradlab in your function, two in flight": _your_function(in_flight=2),
    "gradlab in your function, XLA": _your_function(xla=True),
    "gradlab in fit": gradlab_fit,
    "gradlab placeholders": _method(lambda model, optimizer: methods.build("placeholders", model, optimizer)),
    "gradlab variables": _method(lambda model, optimizer: methods.build("variables", model, optimizer)),
    "placeholders (post)": post_placeholders,
    "variables (post)": post_variables,
    "tf.function a micro-batch": function_per_microbatch,
    "Keras option in fit": keras_option,
}


def _training(method):
    """A whole training of the lab: shuffled MNIST, every figure that a Result keeps, without the accuracy."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.training import train

        name = network.model.name
        plan = dict(model=name, method=method, microbatch_size=b, accumulation_steps=k, eval_every=10**6)
        return lambda updates: list(train(Experiment(**plan, updates=updates, seeds=1)))

    return way


def _seeds(count):
    """So many seeds trained at once."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.together import train_together

        plan = dict(model=network.model.name, method="microbatched", microbatch_size=b, accumulation_steps=k)
        return lambda updates: list(train_together(Experiment(**plan, updates=updates, seeds=count, eval_every=10**6)))

    return way


TRAININGS = {
    "training, microbatched": _training("microbatched"),
    "training, placeholders": _training("placeholders"),
    "training, 1 seed": _seeds(1),
    "training, 5 seeds": _seeds(5),
}

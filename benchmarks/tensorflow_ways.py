"""Ways to make an update in TensorFlow: gradlab's, those of the posts, Keras' own option and the usual loop."""

import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import gradlab
from benchmarks import post_ways
from benchmarks.networks import Network, Run, Way
from gradlab.lab.experiments import methods
from gradlab.lab.experiments.optimizers import OptimizerConfig
from gradlab.window import window_gradients

RATE = 1e-3  # the learning rate


def keras_model(network: Network) -> keras.Model:
    """Builds the network from Keras layers."""
    layer_types = {
        "conv": lambda filters, size, padding: keras.layers.Conv2D(filters, size, padding=padding),
        "pool": keras.layers.MaxPooling2D,
        "flatten": keras.layers.Flatten,
        "dense": keras.layers.Dense,
        "relu": keras.layers.ReLU,
        "dropout": keras.layers.Dropout,
    }
    layers = [layer_types[name](*sizes) for name, *sizes in network.layers]
    return keras.Sequential([keras.Input(network.input_shape), *layers])


def _method(build: Callable[..., methods.Method]) -> Way:
    """A way from a function (model, optimizer) -> one of the lab's methods."""

    def way(network, k, b, x, y):
        method = build(network.model, OptimizerConfig("adam"))
        method.reset(network.model.initial_weights(0))

        def run(updates):
            for _ in range(updates):
                method.update(x, y, b, RATE)

        return run

    return way


def _variables(network: Network) -> tuple[list[tf.Variable], keras.optimizers.Optimizer]:
    """The network's initial weights as variables, and Adam for them."""
    weights = [tf.Variable(value, name=name) for name, value in network.model.initial_weights(0).items()]
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(weights)
    return weights, optimizer


def _calls(update: Callable, x: np.ndarray, y: np.ndarray) -> Run:
    """A run that calls a compiled function (x, y, seed) -> losses, and waits for the losses."""
    arguments = tf.constant(x), tf.constant(y), tf.zeros(2, tf.int32)

    def run(updates):
        for _ in range(updates):
            update(*arguments).numpy()

    return run


def big_batch(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: one tf.function with the whole batch at once. It is the reference for all other ways."""
    weights, optimizer = _variables(network)

    @tf.function
    def update(x, y, seed):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network.model.losses(dict(zip(network.model.shapes, weights)), x, y, seed))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return _calls(update, x, y)


def _your_function(in_flight: int = 1, xla: bool = False) -> Way:
    """gradlab's loop in the user's own tf.function, which is traced for its k and b and returns only the losses."""

    def way(network, k, b, x, y):
        convolutions = any(name == "conv" for name, *_ in network.layers)
        if xla and convolutions and not tf.config.list_logical_devices("GPU"):
            raise RuntimeError("on a CPU, XLA takes 10 times as long for LeNet and more than a minute for VGG-16")
        weights, optimizer = _variables(network)

        @tf.function(jit_compile=xla)
        def update(x, y, seed):
            def losses(microbatch, number):
                named = dict(zip(network.model.shapes, weights))
                return network.model.losses(named, *microbatch, seed + tf.stack([0, number]))

            ones = tf.ones([k * b])
            window = window_gradients(losses, weights, (x, y), ones, b, in_flight=in_flight, norms=False)
            optimizer.apply(window.gradients, weights)
            return window.losses

        return _calls(update, x, y)

    return way


def function_per_microbatch(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`, the usual loop: one tf.function adds a micro-batch's gradients to variables, one applies their mean."""
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

    microbatches = [(tf.constant(x[i : i + b]), tf.constant(y[i : i + b])) for i in range(0, k * b, b)]

    def run(updates):
        for _ in range(updates):
            for microbatch in microbatches:
                mean = accumulate(*microbatch)
            apply()
            mean.numpy()

    return run


def keras_option(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: Keras' own gradient_accumulation_steps, in `fit`."""
    model = keras_model(network)
    steps = {"gradient_accumulation_steps": k} if k > 1 else {}
    model.compile(keras.optimizers.Adam(RATE, **steps), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model, b, x, y)


def gradlab_fit(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: `gradlab.microbatched`, in `fit`."""
    model = gradlab.microbatched(keras_model(network), b)
    model.compile(keras.optimizers.Adam(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _fit(model, k * b, x, y)


class _Clock(keras.callbacks.Callback):
    """Measures the seconds from the first step of a fit to its last.

    The time that tf.data takes before and after the steps is not part of the updates. At the end of a fit, tf.data now
    and then waits for a thread that sleeps for as long again as the fit took.
    """

    def on_train_begin(self, logs=None):
        self._began = time.perf_counter()

    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self._began


def _fit(model: keras.Model, batch_size: int, x: np.ndarray, y: np.ndarray) -> Run:
    def run(updates):
        # The updates are one epoch of a longer data set, so that they share the fixed cost at the start of fit.
        data, clock = (np.concatenate([x] * updates), np.concatenate([y] * updates)), _Clock()
        model.fit(*data, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def _training(method: str) -> Way:
    """One whole training of the lab: shuffled MNIST and every number that a Result keeps, but no test accuracy."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.training import train

        name = network.model.name
        plan = dict(model=name, method=method, microbatch_size=b, accumulation_steps=k, eval_every=10**6)

        def run(updates):
            list(train(Experiment(**plan, updates=updates, seeds=1)))

        return run

    return way


def _seeds(count: int) -> Way:
    """A number of seeds trained together."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.together import train_together

        plan = dict(model=network.model.name, method="microbatched", microbatch_size=b, accumulation_steps=k)

        def run(updates):
            list(train_together(Experiment(**plan, updates=updates, seeds=count, eval_every=10**6)))

        return run

    return way


# The names are the keys of the recorded data, and the row labels of the tables.
WAYS: dict[str, Way] = {
    "big batch": big_batch,
    "gradlab": _method(lambda model, optimizer: methods.Microbatched(model, optimizer, in_flight=1)),
    "gradlab, two in flight": _method(lambda model, optimizer: methods.Microbatched(model, optimizer, in_flight=2)),
    "gradlab in your function": _your_function(),
    "gradlab in your function, two in flight": _your_function(in_flight=2),
    "gradlab in your function, XLA": _your_function(xla=True),
    "gradlab in fit": gradlab_fit,
    "gradlab placeholders": _method(lambda model, optimizer: methods.build("placeholders", model, optimizer)),
    "gradlab variables": _method(lambda model, optimizer: methods.build("variables", model, optimizer)),
    "placeholders (post)": post_ways.placeholders,
    "variables (post)": post_ways.variables,
    "tf.function a micro-batch": function_per_microbatch,
    "Keras option in fit": keras_option,
}
TRAININGS: dict[str, Way] = {
    "training, microbatched": _training("microbatched"),
    "training, placeholders": _training("placeholders"),
    "training, 1 seed": _seeds(1),
    "training, 5 seeds": _seeds(5),
}

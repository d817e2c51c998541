"""Ways to make an update in TensorFlow: gradlab's, those of the posts, Keras' own option and the
usual loop."""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import gradlab
from benchmarks import post_ways
from benchmarks.keras_models import keras_model
from benchmarks.networks import Network, Run, Way, Ways
from gradlab.lab.experiments import methods
from gradlab.lab.experiments.optimizers import OptimizerConfig
from gradlab.window import window_gradients

RATE = 1e-3  # the learning rate
SLOW_XLA = (
    "on a CPU, XLA's convolutions take 10 times as long for LeNet and more than a minute for VGG-16"
)


def _method(build: Callable[..., methods.Method]) -> Way:
    """A way from a function (model, optimizer) -> one of the lab's methods."""

    def way(network, k, b, x, y):
        _check(network.model is not None, "the lab does not have this network")
        method = build(network.model, OptimizerConfig("adam"))
        method.reset(network.model.initial_weights(0))

        def run(updates):
            for _ in range(updates):
                method.update(x, y, b, RATE)

        return run

    return way


def _check(possible: bool, otherwise: str) -> None:
    """Leaves a way out where it is not possible."""
    if not possible:
        raise RuntimeError(otherwise)


def _has_slow_xla(network: Network) -> bool:
    """Whether XLA's convolutions run on a CPU."""
    has_convolutions = len(network.input_shape) == 3 and network.layers[0][0] != "flatten"
    return has_convolutions and not tf.config.list_logical_devices("GPU")


def _on_gpu(way: Way) -> Way:
    """A way that is measured only on a GPU, where Keras compiles with XLA unless told otherwise."""

    def on_gpu(network, k, b, x, y):
        _check(bool(tf.config.list_logical_devices("GPU")), "it is for GPUs")
        return way(network, k, b, x, y)

    return on_gpu


def _losses(network: Network) -> tuple[list, Callable, keras.optimizers.Optimizer]:
    """The network's weights, a function (x, y, seed) -> the loss of each example, and Adam for the
    weights."""
    optimizer = keras.optimizers.Adam(RATE)
    if network.model is None:
        model = keras_model(network)
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        optimizer.build(model.trainable_variables)
        return (
            model.trainable_variables,
            lambda x, y, seed: each(y, model(x, training=True)),
            optimizer,
        )
    weights = [
        tf.Variable(value, name=name) for name, value in network.model.initial_weights(0).items()
    ]
    optimizer.build(weights)
    named = dict(zip(network.model.shapes, weights))
    return weights, functools.partial(network.model.losses, named), optimizer


def _calls(update: Callable, x: np.ndarray, y: np.ndarray) -> Run:
    """A run that calls a compiled function (x, y, seed) -> losses, and waits for the losses."""
    arguments = tf.constant(x), tf.constant(y), tf.zeros(2, tf.int32)

    def run(updates):
        for _ in range(updates):
            update(*arguments).numpy()

    return run


def big_batch(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: one tf.function with the whole batch at once. It is the reference for other
    functions of one's own."""
    weights, losses, optimizer = _losses(network)

    @tf.function
    def update(x, y, seed):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(x, y, seed))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return _calls(update, x, y)


def _your_function(in_flight: int = 1, xla: bool = False) -> Way:
    """gradlab's loop in the user's own tf.function, which is traced for its k and b and returns
    only the losses."""

    def way(network, k, b, x, y):
        _check(
            not (xla and _has_slow_xla(network)),
            SLOW_XLA,
        )
        weights, losses, optimizer = _losses(network)

        @tf.function(jit_compile=xla)
        def update(x, y, seed):
            def of_microbatch(microbatch, number):
                return losses(*microbatch, seed + tf.stack([0, number]))

            ones = tf.ones([k * b])
            window = window_gradients(
                of_microbatch, weights, (x, y), ones, b, in_flight=in_flight, norms=False
            )
            optimizer.apply(window.gradients, weights)
            return window.losses

        return _calls(update, x, y)

    return way


def _function_per_microbatch(xla: bool = False) -> Way:
    """The usual loop: one tf.function adds a micro-batch's gradients to variables, one applies
    their mean."""

    def way(network, k, b, x, y):
        _check(not (xla and _has_slow_xla(network)), SLOW_XLA)
        return _loop_of_functions(network, k, b, x, y, xla)

    return way


def _loop_of_functions(
    network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray, xla: bool
) -> Run:
    model, loss = keras_model(network), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = model.trainable_variables
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(weights)
    sums = [tf.Variable(tf.zeros(weight.shape)) for weight in weights]

    @tf.function(jit_compile=xla)
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            mean = loss(y, model(x, training=True))
        for total, gradient in zip(sums, tape.gradient(mean, weights)):
            total.assign_add(gradient)
        return mean

    @tf.function(jit_compile=xla)
    def apply():
        optimizer.apply([total / k for total in sums], weights)
        for total in sums:
            total.assign(tf.zeros_like(total))

    microbatches = [
        (tf.constant(x[i : i + b]), tf.constant(y[i : i + b])) for i in range(0, k * b, b)
    ]

    def run(updates):
        for _ in range(updates):
            for microbatch in microbatches:
                mean = accumulate(*microbatch)
            apply()
            mean.numpy()

    return run


def _in_fit(
    k_in_fit: bool, prepare: Callable, updates_per_execution: int = 1, xla: bool = False
) -> Way:
    """A way that calls `fit`.

    Args:
        k_in_fit: whether `fit` gets micro-batches, and Keras' option sums their gradients;
            otherwise it gets windows.
        prepare: a function (model, b) -> the model to compile.
        updates_per_execution: how many updates one call of TensorFlow makes.
        xla: whether to compile with XLA.
    """

    def way(network, k, b, x, y):
        _check(not (xla and _has_slow_xla(network)), SLOW_XLA)
        accumulated = k if k_in_fit and k > 1 else None
        model = prepare(keras_model(network), b)
        model.compile(
            keras.optimizers.Adam(RATE, gradient_accumulation_steps=accumulated),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=updates_per_execution * (accumulated or 1),
            jit_compile=xla,
        )
        return _fit(model, b if k_in_fit else k * b, x, y)

    return way


def _microbatched(**settings: Any) -> Callable:
    """A function (model, b) -> the model prepared by gradlab."""
    return lambda model, b: gradlab.microbatched(model, b, **settings)


def _plain(model: keras.Model, b: int) -> keras.Model:
    return model


def trainer(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: `gradlab.Trainer.step`."""
    model, loss = keras_model(network), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = gradlab.Trainer(model, keras.optimizers.Adam(RATE), loss, b).step

    def run(updates):
        for _ in range(updates):
            step(x, y)

    return run


class Clock(keras.callbacks.Callback):
    """Measures the seconds from the first step of a fit to its last.

    The time that tf.data takes before and after the steps is not part of the updates. At the end of
    a fit, tf.data now and then waits for a thread that sleeps for as long again as the fit took.
    """

    def on_train_begin(self, logs=None):
        self._began = time.perf_counter()

    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self._began


def _fit(model: keras.Model, batch_size: int, x: np.ndarray, y: np.ndarray) -> Run:
    def run(updates):
        # The updates are one epoch of a longer data set, so that they share the fixed cost at the
        # start of fit.
        data, clock = (np.concatenate([x] * updates), np.concatenate([y] * updates)), Clock()
        model.fit(
            *data, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, callbacks=[clock]
        )
        return clock.seconds

    return run


def _training(method: str) -> Way:
    """One whole training of the lab: shuffled MNIST and every number that a Result keeps, but no
    test accuracy."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.training import train

        name = network.model.name
        plan = dict(
            model=name, method=method, microbatch_size=b, accumulation_steps=k, eval_every=10**6
        )

        def run(updates):
            list(train(Experiment(**plan, updates=updates, seeds=1)))

        return run

    return way


def _seeds(count: int) -> Way:
    """A number of seeds trained together."""

    def way(network, k, b, x, y):
        from gradlab.lab.experiments.batched_seeds import train_together
        from gradlab.lab.experiments.experiment import Experiment

        plan = dict(
            model=network.model.name, method="microbatched", microbatch_size=b, accumulation_steps=k
        )

        def run(updates):
            list(train_together(Experiment(**plan, updates=updates, seeds=count, eval_every=10**6)))

        return run

    return way


# The names are the keys of the recorded data, and the row labels of the tables. Each way has one or
# more variants, of which the fastest counts.
WAYS: Ways = {
    "big batch in fit": {
        "": _in_fit(False, _plain),
        "XLA": _on_gpu(_in_fit(False, _plain, xla=True)),
    },
    "gradlab in fit": {
        "": _in_fit(False, _microbatched()),
        "XLA": _on_gpu(_in_fit(False, _microbatched(), xla=True)),
    },
    "gradlab in fit, 10 updates per execution": {"": _in_fit(False, _microbatched(), 10)},
    "gradlab in fit, one in flight": {"": _in_fit(False, _microbatched(in_flight=1))},
    "gradlab.Trainer": {"": trainer},
    "Keras option in fit": {
        "": _in_fit(True, _plain),
        "10 updates per execution": _in_fit(True, _plain, 10),
        "10 updates per execution, XLA": _in_fit(True, _plain, 10, xla=True),
    },
    "big batch": {"": big_batch},
    "gradlab in your function": {"": _your_function()},
    "gradlab in your function, two in flight": {"": _your_function(in_flight=2)},
    "gradlab in your function, XLA": {"": _your_function(xla=True)},
    "gradlab in the lab": {
        "": _method(lambda model, optimizer: methods.Microbatched(model, optimizer))
    },
    "gradlab placeholders": {
        "": _method(lambda model, optimizer: methods.build("placeholders", model, optimizer))
    },
    "gradlab variables": {
        "": _method(lambda model, optimizer: methods.build("variables", model, optimizer))
    },
    "placeholders (post)": {"": post_ways.placeholders},
    "variables (post)": {"": post_ways.variables},
    "tf.function a micro-batch": {
        "": _function_per_microbatch(),
        "XLA": _function_per_microbatch(xla=True),
    },
}
TRAININGS: Ways = {
    "training, microbatched": {"": _training("microbatched")},
    "training, placeholders": {"": _training("placeholders")},
    "training, 1 seed": {"": _seeds(1)},
    "training, 5 seeds": {"": _seeds(5)},
}

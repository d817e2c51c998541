"""Programs in the manner of public reports about Keras and TensorFlow: they train here as they
train there."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from plain_and_microbatched import assert_equal, history

import gradlab

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}


def network(*layers):
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])


def fitted(loss="mse", optimizer=None, x=X, y=Y, callbacks=None, **compiled):
    def run(model):
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.05), loss, **compiled)
        return history(model.fit(x, y, callbacks=callbacks(model) if callbacks else None, **FIT))

    return run


def test_loss_weights_in_variables_that_change():
    """keras-team/keras#20294."""

    def two_outputs():
        inputs = keras.Input([4])
        return keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])

    def run(model):
        shares = [keras.Variable(1e-3), keras.Variable(1.0)]
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"], loss_weights=shares)
        model.fit(X, [Y, Y], **FIT)
        shares[0].assign(1.0)
        shares[1].assign(1e-3)
        return {"loss": np.array(model.fit(X, [Y, Y], **FIT | {"batch_size": 20}).history["loss"])}

    assert_equal(two_outputs, run, 3)


class Slope(keras.Model):
    """Predicts the derivative of a network with respect to its input:
    tensorflow/tensorflow#31264."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = self.out(self.hidden(x))
        return tf.reduce_sum(tape.gradient(value, x), -1, keepdims=True) + value


def test_derivatives_with_respect_to_inputs():
    assert_equal(Slope, fitted(), 3)


def test_an_added_loss_of_another_model_that_is_frozen():
    """A perceptual loss: tensorflow/tensorflow#33471."""

    def build():
        judge = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "tanh")])
        judge.trainable = False

        class Perceptual(keras.layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.judge = judge

            def call(self, x, made):
                self.add_loss(ops.mean((self.judge(x) - self.judge(made)) ** 2))
                return made

        inputs = keras.Input([4])
        made = keras.layers.Dense(4)(inputs)
        return keras.Model(inputs, Perceptual(name="perceptual")(inputs, made))

    assert_equal(build, fitted(y=X), 3, batch_losses={"perceptual": "mean"})


class Uncertain(keras.layers.Layer):
    """Weighs two losses by variances that are learnt: yaringal/multi-task-learning-example#6."""

    def build(self, *shapes):
        self.log_variance = self.add_weight(shape=(2,), initializer="zeros")

    def call(self, target, one, other):
        errors = ops.stack([ops.mean((target - one) ** 2), ops.mean(ops.abs(target - other))])
        self.add_loss(ops.sum(ops.exp(-self.log_variance) * errors + self.log_variance))
        return one


def test_weights_of_losses_that_are_learnt():
    def build():
        x, y = keras.Input([4]), keras.Input([1])
        return keras.Model(
            [x, y],
            Uncertain(name="uncertain")(y, keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)),
        )

    assert_equal(build, fitted(None, x=[X, Y], y=None), 3, batch_losses="mean")


@pytest.mark.parametrize("rows", [True, False])
def test_a_parameter_of_the_loss_that_is_learnt(rows):
    """keras-team/keras#12983."""

    class Owner(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x

    def run(model):
        def loss(y, y_pred):
            errors = ops.abs(y - y_pred)[:, 0] * model.layers[0].scale + ops.square(
                model.layers[0].scale
            )
            return errors if rows else ops.mean(errors)

        return fitted(loss)(model)

    assert_equal(lambda: network(Owner()), run, 3)


class Batches(keras.metrics.Metric):
    """Counts batches: tensorflow/tensorflow#20529."""

    def __init__(self):
        super().__init__(name="batches")
        self.count = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count


class TruePositives(keras.metrics.Metric):
    """Adds up over examples: tensorflow/tensorflow#39451."""

    def __init__(self):
        super().__init__(name="true_positives")
        self.total = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast((y_true > 0) & (y_pred > 0), "float32")))

    def result(self):
        return self.total


def test_metrics_that_count():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are of classes of their own
        plain, _ = assert_equal(
            network, lambda model: fitted(metrics=[Batches(), TruePositives()])(model), 3
        )
    np.testing.assert_array_equal(plain["history batches"], [3, 3])


def test_logs_of_single_batches():
    """keras-team/keras#22617."""

    def run(model):
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        logs = [
            step(X[:size], Y[:size])
            for size in (20, 7)
            for step in (model.train_on_batch, model.test_on_batch)
        ]
        return {"logs": np.array(logs)}

    assert_equal(network, run, 3)


def test_averaged_weights_that_are_swapped_for_validation():
    def run(model):
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)
        model.compile(optimizer, "mse")
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=False)
        return history(model.fit(X, Y, validation_data=(X, Y), callbacks=[swap], **FIT))

    assert_equal(network, run, 3)


class Annealed(keras.layers.Layer):
    """Adds a Kullback-Leibler divergence that grows with the updates made, as variational
    autoencoders do."""

    optimizer = None

    def call(self, x):
        share = ops.minimum(1.0, ops.cast(type(self).optimizer.iterations, "float32") / 4)
        self.add_loss(share * ops.mean(x**2))
        return x


def test_a_term_that_grows_with_the_updates_made():
    def build():
        Annealed.optimizer = keras.optimizers.SGD(0.05)
        return network(keras.layers.Dense(3), Annealed())

    assert_equal(build, fitted(optimizer=lambda: Annealed.optimizer), 3, batch_losses="mean")


def test_a_schedule_by_a_callback_and_one_by_what_it_sees():
    def callbacks(model):
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
        ]

    assert_equal(
        network, fitted(optimizer=lambda: keras.optimizers.Adam(0.05), callbacks=callbacks), 3
    )


def test_adapters_of_low_rank_that_are_added_after_the_model_was_prepared():
    def run(model):
        model.layers[0].enable_lora(2)
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return history(model.fit(X, Y, **FIT))

    assert_equal(lambda: network(keras.layers.Dense(6)), run, 3)


def test_a_loss_that_divides_its_rows_by_the_batch_is_refused():
    """As the sum over a global batch in a custom loop divides: such rows are no values of single
    examples."""

    def divided(y, y_pred):
        return ops.sum((y - y_pred) ** 2, -1) / ops.cast(ops.shape(y)[0], "float32")

    model = gradlab.microbatched(network(), 3)
    model.compile("sgd", divided)
    with pytest.raises(
        ValueError, match="^divided must give each example a loss that does not depend on"
    ):
        model.fit(X, Y, **FIT)

"""Variables that layers and losses assign without Keras, or inside loops: once per update, as in
the large batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from plain_and_microbatched import assert_equal, history, train

import gradlab

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 5, 4)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}


class Counts(keras.layers.Layer):
    """Counts calls in a variable of TensorFlow, and scales by it. Its `call` may be compiled."""

    def __init__(self, compiled=False, **kwargs):
        super().__init__(**kwargs)
        self.calls = tf.Variable(0, trainable=False)
        self.count = tf.function(self.add_one) if compiled else self.add_one

    def add_one(self):
        self.calls.assign_add(1)

    def call(self, x):
        self.count()
        return x / tf.cast(1 + self.calls, x.dtype)


def model_with(layer, *more):
    return keras.Sequential(
        [keras.Input([5, 4]), layer, *more, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def fitted(loss="mse", evaluates=False, counter=None):
    def run(model):
        model.compile(keras.optimizers.SGD(0.1), loss)
        found = history(model.fit(X, Y, validation_data=(X, Y) if evaluates else None, **FIT))
        calls = [layer.calls.numpy() for layer in model.layers if isinstance(layer, Counts)]
        return (
            found
            | {"calls": np.array(calls)}
            | ({"loss calls": counter.numpy()} if counter is not None else {})
        )

    return run


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_counter_counts_updates(evaluates):
    plain, _ = assert_equal(lambda: model_with(Counts()), fitted(evaluates=evaluates), 1, 3)
    assert plain["calls"] == (12 if evaluates else 6)


def test_a_counter_of_a_layer_that_adds_a_loss_and_of_a_loss_over_the_whole_batch():
    """gradlab looks at the model more often than it trains it."""

    class Adds(Counts):
        def call(self, x):
            self.add_loss(ops.mean(x**2))
            return super().call(x)

    whole = gradlab.WholeBatch(lambda y, y_pred: tf.reduce_mean(y - y_pred) ** 2)
    assert_equal(lambda: model_with(Adds()), fitted(), 3, batch_losses="mean")
    plain = train(
        lambda: model_with(Counts()), fitted(lambda y, y_pred: tf.reduce_mean(y - y_pred) ** 2)
    )
    small = train(lambda: model_with(Counts()), fitted(whole), 3)
    np.testing.assert_allclose(small["history loss"], plain["history loss"], rtol=1e-5)
    assert small["calls"] == plain["calls"] == 6


@pytest.mark.parametrize("rows", [True, False])
def test_a_counter_of_a_loss(rows):
    counter = tf.Variable(0.0)

    def loss(y, y_pred):
        counter.assign_add(1.0)
        values = tf.reduce_mean((y - y_pred) ** 2, -1) * tf.minimum(1.0, counter / 8)
        return values if rows else tf.reduce_mean(values)

    def run(model):
        counter.assign(0.0)
        return fitted(loss, counter=counter)(model)

    assert_equal(lambda: model_with(keras.layers.Activation("tanh")), run, 3)


def test_what_depends_on_the_examples_is_named():
    class Remembers(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.last = tf.Variable(tf.zeros([4]), trainable=False)

        def call(self, x):
            self.last.assign(tf.reduce_mean(x, [0, 1]))
            return x

    model = gradlab.microbatched(model_with(Remembers()), 3)
    model.compile("sgd", "mse")
    with pytest.warns(
        UserWarning, match="AssignVariableOp is assigned from the examples in a forward pass"
    ):
        model.fit(X, Y, **FIT)


class Noisy(keras.layers.Layer):
    """A recurrent cell with dropout on its state, drawn in each step of a loop."""

    def __init__(self):
        super().__init__()
        self.state_size = 4
        self.dense, self.drop = keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.5, seed=3)

    def build(self, shape):
        self.dense.build((None, 8))

    def call(self, x, states, training=False):
        hidden = self.drop(self.dense(ops.concatenate([x, states[0]], -1)), training=training)
        return hidden, [hidden]


class Mapped(keras.layers.Layer):
    """Dropout in the body of `tf.map_fn`, and in a branch."""

    def __init__(self):
        super().__init__()
        self.drop = keras.layers.Dropout(0.5, seed=3)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x, training=False):
        mapped = tf.map_fn(lambda row: self.drop(row, training=training), x)
        return tf.cond(
            tf.reduce_sum(x) > -1e9, lambda: self.drop(mapped, training=training), lambda: mapped
        )


LOOPS = {
    "a recurrent cell": lambda: keras.layers.RNN(Noisy(), return_sequences=True),
    "a map and a branch": Mapped,
}


@pytest.mark.parametrize("name", LOOPS)
def test_random_numbers_inside_loops(name):
    build = lambda: model_with(LOOPS[name]())  # noqa: E731
    assert_equal(build, fitted(), 8, eager=False)  # one micro-batch draws what the batch draws
    parts = train(build, fitted(), 4)["history loss"]
    assert np.isfinite(parts).all()


def test_what_gradlab_draws_to_compare_a_loss_is_not_drawn_in_training():
    def rows(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2, -1)

    assert_equal(lambda: model_with(LOOPS["a recurrent cell"]()), fitted(rows), 8, eager=False)


def test_a_loss_over_the_whole_batch_draws_the_same_numbers_twice_in_a_loop():
    def spread(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2) + tf.reduce_mean(y_pred) ** 2

    build = lambda: model_with(LOOPS["a recurrent cell"]())  # noqa: E731
    plain = train(build, fitted(spread), eager=False)
    small = train(build, fitted(gradlab.WholeBatch(spread)), 8)
    np.testing.assert_allclose(small["history loss"], plain["history loss"], rtol=1e-5)


@pytest.mark.parametrize("size", ["auto", 3])
def test_refused_where_it_cannot_be_undone(size, two_devices):
    if size == "auto":
        model = gradlab.microbatched(model_with(Counts(name="counts")), size)
        model.compile("sgd", "mse")
    else:
        with two_devices.scope():
            model = gradlab.microbatched(
                model_with(keras.layers.RNN(Noisy(), return_sequences=True)), size
            )
            model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match="^Layers and losses must assign their variables with Keras"
    ):
        model.fit(X, Y, **FIT)


def test_value_and_gradients_refuses_them():
    calls = tf.Variable(0.0)
    weight = tf.Variable([1.0])

    def loss(x):
        calls.assign_add(1.0)
        return tf.reduce_mean((x * weight) ** 2)

    with pytest.raises(ValueError, match="loss must not assign variables"):
        tf.function(lambda x: gradlab.value_and_gradients(loss, [weight], (x,), 2))(tf.ones([4]))


def test_predict_counts_batches():
    def run(model):
        model.compile("sgd", "mse")
        predicted = model.predict(X, batch_size=10, verbose=0)
        return {"predicted": predicted, "calls": model.layers[0].calls.numpy()}

    plain, _ = assert_equal(lambda: model_with(Counts()), run, 3)
    assert plain["calls"] == 2

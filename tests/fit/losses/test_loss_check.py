"""Losses and variables that micro-batches cannot add up: found out, also where the first examples
hide it."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab.fit.losses import loss_check

REFUSED = (tf.errors.InvalidArgumentError, ValueError)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
LABELS = (np.arange(20) % 10).astype("int32")
W = tf.Variable(RNG.normal(size=(4, 1)).astype("float32"))


def network(kind=keras.Sequential, **regularized):
    keras.utils.set_random_seed(0)
    return kind(
        [
            keras.Input([4]),
            keras.layers.Dense(3, **regularized),
            keras.layers.Dense(1, **regularized),
        ]
    )


def fit(model, x, y, weights=None, loss="mse", epochs=1, said=None):
    small = gradlab.microbatched(model, 4, batch_losses=said)
    small.compile("sgd", loss, metrics=["mae"])
    small.fit(x, y, batch_size=20, epochs=epochs, verbose=0, shuffle=False, sample_weight=weights)


def pairs(labels, outputs):
    """A loss of pairs with equal labels: the first ten examples have none."""
    labels = tf.reshape(labels, [-1])
    equal = tf.cast(labels[:, None] == labels, outputs.dtype) - tf.eye(tf.size(labels))
    return tf.reduce_mean(equal * tf.abs(outputs - tf.transpose(outputs)))


def test_a_loss_of_pairs_that_is_zero_for_the_first_examples():
    with pytest.raises(REFUSED, match="must be a mean over the examples"):
        fit(network(), X, LABELS, loss=pairs, said="mean")
    step = tf.function(
        lambda x, y: gradlab.value_and_gradients(lambda y, x: pairs(y, x @ W), [W], (y, x), 4)
    )
    with pytest.raises(REFUSED, match="loss must be a mean over the examples"):
        step(X, LABELS)


@pytest.mark.parametrize("first", [1.0, 3.0])
def test_one_number_for_a_batch_with_weights_of_which_the_first_are_equal(first):
    def mean(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2)

    weights = np.r_[[first] * 6, 1 + np.arange(14) % 3].astype("float32")
    with pytest.raises(REFUSED, match="must be a mean over the examples"):
        fit(network(), X, Y, weights, loss=mean, said="mean")
    if first == 1:
        # Equal ones change nothing
        fit(network(), X, Y, np.ones(20, "float32"), loss=mean, said="mean")


def test_a_mean_that_becomes_a_sum():
    """The factor of the sum is 0 in the first two updates, and is not in the third."""
    factor = tf.Variable(0.0)

    def loss(y, y_pred):
        error = (y - y_pred) ** 2
        return tf.reduce_mean(error) + factor * tf.reduce_sum(error)

    small = gradlab.microbatched(network(), 4, batch_losses="mean")
    small.compile("sgd", loss)
    step = tf.function(lambda x: gradlab.value_and_gradients(lambda x: loss(x @ W, 0.0), W, x, 4))
    for _ in range(2):
        small.train_on_batch(X, Y)
        step(X)
    factor.assign(1.0)
    with pytest.raises(REFUSED, match="must be a mean over the examples"):
        small.train_on_batch(X, Y)
    with pytest.raises(REFUSED, match="loss must be a mean over the examples"):
        step(X)


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: tf.nn.log_softmax(x @ W, axis=0)[:, 0],
        lambda x: (x @ W)[:, 0] / tf.cast(tf.shape(x)[0], tf.float32),
        lambda x: x @ W - tf.reduce_mean(x @ W),
        lambda x: x @ tf.transpose(x),
    ],
    ids=[
        "relates examples",
        "divides by the batch",
        "is centered",
        "has a column for each example",
    ],
)
def test_rows_that_depend_on_other_examples(rows):
    def loss(x):
        return {"loss": tf.reduce_sum(x @ W), "rows": rows(x)}

    step = tf.function(lambda x: gradlab.value_and_gradients(loss, W, x, 4, reduction="sum"))
    with pytest.raises(REFUSED, match="rows must have a row for each example"):
        step(X)


class Assigns(keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=[4], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x


def test_a_variable_that_is_assigned_from_the_examples_is_named_once():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([4]), Assigns(name="running"), keras.layers.BatchNormalization()]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, X, X, epochs=2)
    found = [
        str(one.message) for one in caught if "is assigned from the examples" in str(one.message)
    ]
    assert len(found) == 1 and "running/variable is assigned" in found[0]


class Regularized(keras.Sequential):
    """Adds a multiple of its regularization; a factor of None adds that of the first layer alone."""

    factor: float | None = 1.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        error = keras.ops.mean((y - y_pred) ** 2)
        if self.factor is None:
            return error + sum(self.layers[0].losses)
        return error + self.factor * sum(self.losses)


@pytest.mark.parametrize("factor", [1.0, 0.1, None])
def test_a_compute_loss_adds_its_regularization_as_it_likes(factor):
    def trained(convert):
        model = network(Regularized, kernel_regularizer=keras.regularizers.L2(1.0))
        model.factor = factor
        model = convert(model)
        model.compile("sgd")
        return model.fit(X, Y, batch_size=20, epochs=3, verbose=0, shuffle=False), model

    plain, expected = trained(lambda model: model)
    seen, model = trained(lambda model: gradlab.microbatched(model, 3, batch_losses="mean"))
    np.testing.assert_allclose(seen.history["loss"], plain.history["loss"], rtol=1e-5)
    for one, other in zip(model.weights, expected.weights):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


def test_a_compute_loss_that_is_a_sum_has_no_regularizers():
    with pytest.raises(ValueError, match="must be a mean .* weight regularizers.*Received: batch"):
        fit(network(Regularized, kernel_regularizer="l2"), X, Y, said="sum")


class Squares(keras.regularizers.Regularizer):
    def __call__(self, weights):
        return 0.1 * weights**2


def test_a_regularizer_that_returns_an_array():
    histories = []
    for convert in (lambda model: model, lambda model: gradlab.microbatched(model, 4)):
        model = convert(network(kernel_regularizer=Squares()))
        model.compile("sgd", "mse")
        histories.append(
            model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False).history["loss"]
        )
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)


def related(values):
    """Values of which each depends on the others."""
    return values - tf.reduce_mean(values)


def test_a_loss_that_is_not_finite_for_moved_predictions_is_compared_with_those_of_the_model():
    """It needs outputs above 1: the model's are, and those that gradlab moves are not."""

    def loss(y, y_pred):
        return related(tf.reduce_mean(tf.math.log(y_pred - 1.0), -1)) ** 2

    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, "softplus"), keras.layers.Rescaling(0.02, 1.0)]
    )
    with pytest.raises(REFUSED, match="loss must give each example a loss that does not depend"):
        fit(model, X, Y, loss=loss)


def test_what_the_model_draws_does_not_keep_its_loss_from_being_compared():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    def loss(y, y_pred):
        return related(tf.reduce_mean((y - y_pred) ** 2, -1)) ** 2

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1), Noise()])
    with pytest.raises(REFUSED, match="loss must give each example a loss that does not depend"):
        fit(model, X, Y, loss=loss)


@pytest.mark.parametrize("is_tf32", [True, False])
def test_a_mean_of_products_that_a_gpu_rounds(is_tf32, monkeypatch):
    """What an H100 gave for a mean over three examples, over the first two and the last."""
    config = loss_check.tf.config
    monkeypatch.setattr(config, "list_logical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(config.experimental, "tensor_float_32_execution_enabled", lambda: is_tf32)
    numbers = {None: 0.00842080917, 0: 0.00640513049, 2: 0.0124593591}

    def scalars(rows, _):
        return tf.constant([numbers[None if rows is None else int(rows.start)]])

    def is_wrong(is_mean):
        near = [loss_check.rounding(tf.float32)]
        return bool(loss_check.compare(scalars, tf.constant(3), [is_mean], lambda: near).wrong)

    assert is_wrong(True) != is_tf32 and is_wrong(False)


def test_xla_on_a_gpu_can_read_the_verdict():
    """TensorFlow keeps variables of int32 on the CPU, where XLA on a GPU cannot read them."""
    with tf.Graph().as_default():
        assert loss_check._variable().dtype == tf.int64

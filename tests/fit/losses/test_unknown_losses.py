"""Losses that do not surely give each example a value of its own: exact in two passes, declared, or
refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from plain_and_microbatched import assert_equal, differences, history, train

import gradlab

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")
Y = RNG.normal(size=(20, 3)).astype("float32")
KINDS = keras.utils.to_categorical(np.arange(20) % 3, 3)
WEIGHTS = np.linspace(0.2, 2, 20).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def network(activation=None):
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3, activation)]
    )


def fitted(loss, y=Y, weights=None, **fit):
    def run(model):
        model.compile(keras.optimizers.SGD(0.1), loss)
        return history(model.fit(X, y, sample_weight=weights, **FIT | fit))

    return run


def valid_rows(y, y_pred):
    """Squared errors where the first target is above 0: a row for each example that counts."""
    kept = y[:, 0] > 0
    return tf.reduce_sum((tf.boolean_mask(y, kept) - tf.boolean_mask(y_pred, kept)) ** 2, -1)


def masked_mean(y, y_pred):
    """A mean over what counts. In the first batch everything does."""
    counts = tf.cast(y > -10, y_pred.dtype)
    return tf.reduce_sum(counts * (y - y_pred) ** 2) / tf.reduce_sum(counts)


def sums_of_columns(y, y_pred):
    """A vector, but not one of examples: its length is that of an example."""
    return tf.reduce_sum(tf.abs(y - y_pred), axis=0)


def standardized(y, y_pred):
    """NaN for a batch of one example, whose deviation from the mean is 0."""
    error = y - y_pred
    return tf.reduce_mean(error - tf.reduce_mean(error, 0)) + tf.reduce_sum(
        error**2
    ) / tf.reduce_sum((y - tf.reduce_mean(y, 0)) ** 2)


class RootOfMean(keras.losses.Loss):
    """Reduces by itself, as a root of a mean."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


class ByFrequency(keras.losses.MeanAbsoluteError):
    """One of Keras' losses with a `call` of its own, which weighs columns by what is in the
    batch."""

    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) * ops.mean(ops.abs(y_true), 0), -1) / ops.mean(
            y_true**2
        )


LATER_MASKED = np.where(
    (np.arange(20)[:, None] >= 8) & (RNG.random((20, 3)) > 0.6), -100, Y
).astype("float32")
EXACT = {
    "rows of a mask": (valid_rows, Y),
    "a masked mean, full at first": (masked_mean, LATER_MASKED),
    "sums of columns": (sums_of_columns, Y),
    "NaN for one example": (standardized, Y),
    "a root of a mean": (RootOfMean(), Y),
}


@pytest.mark.parametrize("name", EXACT)
def test_one_number_or_other_rows_are_exact(name):
    loss, y = EXACT[name]
    assert_equal(network, fitted(loss, y), 1, 3)


AXES = {
    "focal": keras.losses.CategoricalFocalCrossentropy(axis=0),
    "tversky": keras.losses.Tversky(axis=0),
    "cosine of all": keras.losses.CosineSimilarity(axis=(0, 1)),
    "negative": keras.losses.CosineSimilarity(axis=-2),
}


@pytest.mark.parametrize("name", AXES)
def test_an_axis_over_the_batch_is_exact(name):
    assert_equal(lambda: network("softmax"), fitted(AXES[name], KINDS, batch_size=20), 3, rtol=2e-4)


def test_an_axis_inside_an_example_needs_no_second_pass():
    """Its update has the norms of micro-batches, which a loss over the whole batch does not
    have."""
    x = RNG.normal(size=(8, 4, 4, 1)).astype("float32")
    model = keras.Sequential(
        [keras.Input([4, 4, 1]), keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")]
    )
    trainer = gradlab.Trainer(model, "sgd", keras.losses.Dice(axis=(1, 2, 3)), 3)
    assert np.isfinite(trainer.step(x, np.abs(x) > 0.5).gradient_norms).all()


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
def test_a_term_that_is_switched_on_later_is_exact(weights):
    def run(model):
        factor = keras.Variable(0.0, trainable=False)

        def loss(y, y_pred):
            return ops.mean(ops.abs(y - y_pred)) + factor * ops.mean(y_pred) ** 2

        model.compile(keras.optimizers.SGD(0.1), loss)
        begins = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: factor.assign(epoch / 2.0)
        )
        return history(model.fit(X, Y, sample_weight=weights, epochs=3, callbacks=[begins], **FIT))

    assert_equal(network, run, 3)


def test_a_subclass_of_a_loss_of_keras_is_looked_at():
    model = gradlab.microbatched(network(), 3)
    model.compile("sgd", ByFrequency())
    with pytest.raises(
        ValueError,
        match="^mean_absolute_error must give each example a loss that does not depend on",
    ):
        model.fit(X, Y, **FIT)


@pytest.mark.slow
def test_a_mean_that_is_said_to_be_one_needs_one_pass_and_gives_the_same():
    def squares(y, y_pred):
        return ops.mean((y - y_pred) ** 2)

    plain = train(network, fitted(squares))
    for said in (None, "mean", {"squares": "mean"}):
        assert not differences(plain, train(network, fitted(squares), 3, batch_losses=said), 1e-5)


def test_trainer_computes_such_losses_as_well():
    keras.utils.set_random_seed(1)
    expected, model = network(), network()
    model.set_weights(expected.get_weights())
    expected.compile(keras.optimizers.SGD(0.1), valid_rows)
    expected.train_on_batch(X, Y)
    gradlab.Trainer(model, keras.optimizers.SGD(0.1), valid_rows, 3).step(X, Y)
    for one, other in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


class Rows(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2, -1)


def test_a_compute_loss_that_returns_rows_is_refused():
    model = gradlab.microbatched(Rows(network().layers), 3, batch_losses="mean")
    model.compile("sgd")
    with pytest.raises(
        ValueError, match="^compute_loss must return a scalar. Received: a tensor of shape "
    ):
        model.fit(X, Y, **FIT)


def test_activity_regularizers_of_keras_are_known_to_be_means():
    def build():
        regularized = keras.layers.Dense(
            5, "tanh", activity_regularizer=keras.regularizers.L1L2(0.01, 0.1)
        )
        return keras.Sequential([keras.Input([4]), regularized, keras.layers.Dense(3)])

    assert_equal(build, fitted("mse"), 3)
    assert_equal(build, fitted("mse"), 3, batch_losses="sum")  # which says nothing of what is known


class Orthogonal(keras.regularizers.L2):
    """A class of its own, of which nothing is known."""


def test_other_activity_regularizers_must_be_declared():
    def build():
        return keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(3, activity_regularizer=Orthogonal(), name="own")]
        )

    model = gradlab.microbatched(build(), 3)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="^own gives one number for the whole batch"):
        model.fit(X, Y, **FIT)
    assert_equal(build, fitted("mse"), 3, batch_losses={"own": "mean"})

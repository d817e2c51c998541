"""`microbatched(..., skip_nonfinite=True)`: what `fit` does with a micro-batch that contains NaN or
inf."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab

X = np.random.default_rng(0).normal(size=(29, 3))
Y = np.random.default_rng(1).integers(0, 3, 29)
WEIGHTS = np.random.default_rng(2).uniform(0.5, 2, 29)
BATCH, SIZE = 12, 4  # batches of 12, 12 and 5 examples
BAD = {1: np.nan, 14: np.inf, 15: -np.inf}  # in the first micro-batches of the first two batches
KEPT = [np.arange(4, 12), np.arange(16, 24), np.arange(24, 29)]


@pytest.fixture
def bad():
    found = X.copy()
    for row, value in BAD.items():
        found[row, row % 3] = value
    return found


def network(*more, inputs=3):
    return keras.Sequential(
        [
            keras.Input([inputs]),
            keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
            *more,
            keras.layers.Dense(3, "softmax"),
        ]
    )


def compiled(model, optimizer="adam", **more):
    model.compile(
        keras.optimizers.get(optimizer),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="entropy")],
        **more,
    )
    return model


def pair():
    """A model with `skip_nonfinite`, and a plain one with the same weights."""
    model, plain = network(), network()
    plain.set_weights(model.get_weights())
    return compiled(gradlab.microbatched(model, SIZE, skip_nonfinite=True)), compiled(plain)


def variables_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def batches(*rows, sample_weight=None):
    """A dataset of batches with these rows of the data."""
    parts = (X, Y) if sample_weight is None else (X, Y, sample_weight)
    of_part = lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype)  # noqa: E731
    made = tf.data.Dataset.from_generator(
        lambda: (tuple(part[chosen] for part in parts) for chosen in rows),
        output_signature=tuple(of_part(part) for part in parts),
    )
    # Of a dataset of unknown size, Keras trains on one batch too many, which is empty
    return made.apply(tf.data.experimental.assert_cardinality(len(rows)))


def assert_equal_trainings(model, fitted, plain, expected, skipped):
    seen = dict(fitted.history)
    assert seen.pop("skipped") == skipped and set(seen) == set(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(seen[name], values, rtol=1e-9, err_msg=name)
    for one, other in zip(variables_of(model), variables_of(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sample_weight", [None, WEIGHTS], ids=["", "weighted"])
def test_fit_is_that_of_the_batches_without_what_is_left_out(bad, sample_weight, float64):
    model, plain = pair()
    fitted = model.fit(
        bad, Y, BATCH, epochs=2, sample_weight=sample_weight, shuffle=False, verbose=0
    )
    dataset = batches(*KEPT, sample_weight=sample_weight)
    expected = plain.fit(dataset, epochs=2, verbose=0)
    assert_equal_trainings(model, fitted, plain, expected, skipped=[2, 2])


def test_a_batch_of_which_nothing_is_left_changes_nothing(float64):
    model, plain = pair()
    bad = X.copy()
    bad[BATCH : 2 * BATCH] = np.nan
    fitted = model.fit(bad, Y, BATCH, shuffle=False, verbose=0)
    expected = plain.fit(batches(np.arange(12), np.arange(24, 29)), verbose=0)
    assert_equal_trainings(model, fitted, plain, expected, skipped=[3])
    kept = variables_of(model)
    model.train_on_batch(bad[BATCH : 2 * BATCH], Y[:BATCH])
    for one, other in zip(variables_of(model), kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_count_is_that_of_an_epoch_and_of_training_alone(bad):
    model, _ = pair()
    found = model.fit(
        bad, Y, BATCH, epochs=2, validation_data=(X, Y), steps_per_epoch=3, shuffle=False, verbose=0
    ).history
    assert found["skipped"] == [2, 2] and "val_skipped" not in found
    assert np.isfinite([*found["loss"], *found["val_loss"]]).all()
    assert "skipped" not in model.evaluate(X, Y, verbose=0, return_dict=True)


def test_moving_averages_and_seeds_are_those_of_what_counts(bad):
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
    model = compiled(gradlab.microbatched(network(*layers), SIZE, skip_nonfinite=True))
    with pytest.warns(UserWarning, match="normalizes each micro-batch"):
        model.fit(bad, Y, BATCH, shuffle=False, verbose=0)
    assert all(np.isfinite(value).all() for value in variables_of(model))


def test_an_automatic_size_and_a_number_of_batches_in_one_call(bad):
    model = gradlab.microbatched(network(), "auto", skip_nonfinite=True, memory=2**30)
    compiled(model, steps_per_execution=3)
    x, y = np.tile(bad, (2, 1))[:36], np.tile(Y, 2)[:36]
    found = model.fit(x, y, BATCH, epochs=2, verbose=0)
    assert min(found.history["skipped"]) >= 1 and np.isfinite(found.history["loss"]).all()


def test_without_it_the_weights_are_nan_as_in_keras(bad):
    model = compiled(gradlab.microbatched(network(), SIZE))
    assert "skipped" not in model.fit(bad, Y, BATCH, verbose=0).history
    assert np.isnan(model.get_weights()[0]).all()


def test_refusals(two_devices):
    def prepared(model=None):
        return gradlab.microbatched(model or network(), SIZE, skip_nonfinite=True)

    class Own(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {}

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="must be False with a LossScaleOptimizer, which learns"):
        compiled(prepared(), scaled)
    with pytest.raises(ValueError, match="compute_metrics of its own.*Received: Own.compute_met"):
        compiled(prepared(Own([keras.Input([3]), keras.layers.Dense(3)])))
    with two_devices.scope(), pytest.raises(ValueError, match="Received: True, on 2 replicas"):
        compiled(prepared())
    model = prepared()
    model.compile("sgd", gradlab.WholeBatch(lambda y, y_pred: tf.reduce_max(y_pred, -1)))
    with pytest.raises(ValueError, match="must be False with a loss over the whole batch"):
        model.fit(X, Y, verbose=0)
    model = prepared()
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError("skipped")])
    with pytest.raises(
        ValueError, match="not have the name of what gradlab adds.*Received: skipped"
    ):
        model.fit(X, X, verbose=0)

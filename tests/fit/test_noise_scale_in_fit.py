"""`microbatched(..., noise_scale=True)`: the gradient noise scale in the logs of `fit`."""

import keras
import numpy as np
import pytest

import gradlab

BATCH, SIZE = 12, 4
X = np.random.default_rng(0).normal(size=(60, 3))
Y = X @ [[1.0], [-2.0], [0.5]] + np.random.default_rng(1).normal(size=(60, 1))


def network():
    return keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(1, use_bias=False, kernel_regularizer="l2")]
    )


def prepared(model=None, microbatch_size=SIZE, **more):
    return gradlab.microbatched(model or network(), microbatch_size, noise_scale=True, **more)


def fit(model, x=X, y=Y, batch_size=BATCH, epochs=1, **more):
    return model.fit(
        x, y, batch_size, epochs=epochs, shuffle=False, verbose=0, **more
    ).history["noise_scale"]  # fmt: skip


def of_numpy(weights, batches, rate):
    """The noise scale of a linear model's updates, from the gradients themselves."""
    variances, squares = [], []
    for x, y in batches:
        gradients = [
            2 * x[rows].T @ (x[rows] @ weights - y[rows]) / len(x[rows])
            for rows in (slice(start, start + SIZE) for start in range(0, len(x), SIZE))
        ]
        counts = np.array([len(x[start : start + SIZE]) for start in range(0, len(x), SIZE)])
        mean = sum(n * g for n, g in zip(counts, gradients)) / counts.sum()
        small = sum(n * (g**2).sum() for n, g in zip(counts, gradients)) / counts.sum()
        big = (mean**2).sum()
        if len(counts) > 1:
            variances.append((small - big) * counts.sum() / (len(counts) - 1))
            squares.append((len(counts) * big - small) / (len(counts) - 1))
        weights = weights - rate * (mean + 2 * 0.01 * weights)
    return sum(variances) / sum(squares), weights


def test_it_is_that_of_the_gradients_themselves(float64):
    """Batches of 12, 12, 12, 12 and 3: the last one has a single micro-batch."""
    model = prepared()
    weights = model.get_weights()[0]
    model.compile(keras.optimizers.SGD(0.05), "mse")
    seen = fit(model, X[:51], Y[:51], epochs=2)
    batches = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, 48, BATCH)]
    batches.append((X[48:51], Y[48:51]))
    for value in seen:
        expected, weights = of_numpy(weights, batches, 0.05)
        assert value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_it_is_that_of_a_trainer(in_flight, float64):
    model, other = prepared(in_flight=in_flight), network()
    other.set_weights(model.get_weights())
    model.compile(keras.optimizers.Adam(0.05), "mse")
    trainer = gradlab.Trainer(other, keras.optimizers.Adam(0.05), "mse", SIZE)
    steps = [trainer.step(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, 60, BATCH)]
    scale = gradlab.gradient_noise_scale(
        [step.gradient_norms for step in steps],
        [step.window_gradient_norm for step in steps],
        [step.weights for step in steps],
    )
    assert fit(model) == [pytest.approx(scale.value, rel=1e-9)]


def test_the_update_is_the_same_and_what_is_left_out_shows_no_noise(float64):
    model, plain = prepared(skip_nonfinite=True), network()
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        each.compile("sgd", "mse")
    x = X.copy()
    x[1] = np.nan
    [seen] = fit(model, x)
    rows = np.delete(np.arange(60), range(SIZE))
    assert np.isfinite(seen)
    for start, end in ((0, 8), (8, 20), (20, 32), (32, 44), (44, 56)):
        plain.train_on_batch(X[rows[start:end]], Y[rows[start:end]])
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-12)


def test_before_there_is_any_noise_it_is_nan_and_validation_has_none():
    model = prepared()
    model.compile("sgd", "mse")
    data = (X, Y)
    assert np.isnan(fit(model, X[:4], Y[:4], validation_data=data)).all()
    history = model.fit(X, Y, BATCH, epochs=2, validation_data=data, verbose=0).history
    assert "val_noise_scale" not in history and (np.array(history["noise_scale"]) > 0).all()


def test_refusals(two_devices):
    with two_devices.scope(), pytest.raises(ValueError, match="Received: True, on 2 replicas"):
        prepared().compile("sgd", "mse")
    model = prepared()
    model.compile("sgd", gradlab.WholeBatch(lambda y, y_pred: abs(y - y_pred)[:, 0]))
    with pytest.raises(ValueError, match="noise_scale must be False with a loss over the whole"):
        fit(model)
    model = prepared()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(ValueError, match="that divide by the number of examples. .*divide by sum"):
        fit(model)
    for batch_size in (SIZE, None):
        model = prepared(microbatch_size=batch_size or 32)
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="batch_size must be above microbatch_size, for noise"):
            fit(model, batch_size=batch_size)

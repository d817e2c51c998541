"""The gradient noise scale: on Gaussian gradients whose noise scale is known, and from the steps of
a Trainer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab import gradient_noise_scale

DIMENSIONS = 40


def gaussian(seed, updates, sizes, true_norm=1.0, deviation=None):
    """The norms of the mean gradients of micro-batches of these sizes and of their windows; the
    true noise scale."""
    rng = np.random.default_rng(seed)
    true = np.full(DIMENSIONS, true_norm / np.sqrt(DIMENSIONS))
    deviation = np.linspace(0.5, 3, DIMENSIONS) if deviation is None else deviation
    sizes = np.broadcast_to(np.asarray(sizes, float), (updates, np.shape(sizes)[-1]))
    gradients = (
        true + deviation * rng.normal(size=[*sizes.shape, DIMENSIONS]) / np.sqrt(sizes)[..., None]
    )
    windows = (gradients * sizes[..., None]).sum(axis=1) / sizes.sum(axis=1, keepdims=True)
    norms, window_norms = np.linalg.norm(gradients, axis=2), np.linalg.norm(windows, axis=1)
    return norms, window_norms, sizes, (deviation**2).sum() / true_norm**2


@pytest.mark.parametrize("sizes", [[10] * 2, [10] * 8, [1] * 20, [20, 20, 20, 3]])
def test_the_estimate_is_unbiased_and_its_interval_covers_the_truth_in_95_percent(sizes):
    hits, variances, signals = [], [], []
    for seed in range(300):
        norms, window_norms, weights, true = gaussian(seed, 200, sizes)
        found = gradient_noise_scale(norms, window_norms, weights, smoothing=0.0)
        hits.append(found.interval[0] < true < found.interval[1])
        variances.append(found.variance.mean())
        signals.append(found.squared_gradient.mean())
    # Both estimates are unbiased: their means over 60,000 windows are within three standard errors
    # of the true values.
    for values, truth in ((variances, true), (signals, 1.0)):
        assert abs(np.mean(values) - truth) < 3 * np.std(values) / np.sqrt(len(values)), (
            np.mean(values),
            truth,
        )
    assert 0.91 < np.mean(hits) < 0.985


def test_without_a_signal_the_interval_has_no_upper_bound():
    norms, window_norms, weights, _ = gaussian(0, 100, [5] * 4, true_norm=1e-6)
    found = gradient_noise_scale(norms, window_norms, weights)
    assert found.interval[1] == np.inf and found.interval[0] > 0


def test_without_noise_it_is_zero():
    found = gradient_noise_scale(np.full([20, 4], 2.0), np.full(20, 2.0), 5)
    assert found.value == 0 and found.interval == (0, 0)
    np.testing.assert_allclose(found.squared_gradient, 4)


def test_along_a_training_it_follows_the_change():
    """The variance grows fourfold. Numerator and denominator are averaged separately, so their
    ratio has no bias."""
    first = gaussian(0, 3000, [10] * 4)
    second = gaussian(1, 3000, [10] * 4, deviation=2 * np.linspace(0.5, 3, DIMENSIONS))
    joined = [np.concatenate([a, b]) for a, b in zip(first[:3], second[:3])]
    found = gradient_noise_scale(*joined, smoothing=0.995)
    assert found.along[2999] == pytest.approx(first[3], rel=0.25)
    assert found.along[-1] == pytest.approx(second[3], rel=0.25)
    unsmoothed = gradient_noise_scale(*joined, smoothing=0.0)
    # The mean of the ratios
    naive = np.mean(unsmoothed.along[:3000][np.isfinite(unsmoothed.along[:3000])])
    assert abs(naive - first[3]) > 2 * abs(found.along[2999] - first[3])


def test_a_window_of_one_micro_batch_is_skipped():
    norms, window_norms, weights, _ = gaussian(0, 50, [10] * 4)
    expected = gradient_noise_scale(norms, window_norms, weights)
    tail = np.array([[7.0, np.nan, np.nan, np.nan]])
    found = gradient_noise_scale(
        np.concatenate([norms, tail]),
        np.append(window_norms, 7.0),
        np.concatenate([weights, [[3.0, 0, 0, 0]]]),
    )
    assert found.value == expected.value and found.interval == expected.interval
    assert found.along[-1] == expected.along[-1]
    first = gradient_noise_scale(
        np.concatenate([tail, norms]),
        np.append(7.0, window_norms),
        np.concatenate([[[3.0, 0, 0, 0]], weights]),
    )
    assert np.isnan(first.along[0]) and first.along[-1] == expected.along[-1]


def test_the_critical_batch_size_needs_twice_the_fewest_updates_and_examples():
    norms, window_norms, weights, _ = gaussian(0, 500, [10] * 8)
    found = gradient_noise_scale(norms, window_norms, weights)
    batch = found.critical_batch_size
    assert found.updates_needed(batch) == found.examples_needed(batch) == pytest.approx(2)
    assert found.updates_needed(100 * batch) == pytest.approx(1.01)
    assert found.examples_needed(batch / 100) == pytest.approx(1.01)


# ---- from the steps of a Trainer, against per-example gradients of a softmax classifier, written in NumPy ----

EXAMPLES, FEATURES, CLASSES = 60, 4, 3


def classifier(dtype):
    """A data set, the model softmax(x kernel + bias), and the gradient of each example's loss, in
    NumPy."""
    rng = np.random.default_rng(3)
    x = rng.normal(0.5, 1.0, [EXAMPLES, FEATURES])
    labels = rng.choice(CLASSES, EXAMPLES, p=[0.6, 0.3, 0.1])
    kernel, bias = rng.normal(0, 0.3, [FEATURES, CLASSES]), rng.normal(0, 0.3, CLASSES)

    model = keras.Sequential(
        [keras.Input([FEATURES], dtype=dtype), keras.layers.Dense(CLASSES, dtype=dtype)]
    )
    model.set_weights([kernel, bias])

    logits = x @ kernel + bias
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    error = probabilities - np.eye(CLASSES)[labels]
    gradients = np.concatenate(
        [(x[:, :, None] * error[:, None, :]).reshape(EXAMPLES, -1), error], axis=1
    )
    return x.astype(dtype), labels, model, gradients


def trainer_of(model, microbatch_size):
    """A Trainer that leaves the weights where they are."""
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return gradlab.Trainer(model, keras.optimizers.SGD(0.0), entropy, microbatch_size)


def test_the_norms_of_a_step_are_those_of_numpy(float64):
    x, labels, model, gradients = classifier("float64")
    step = trainer_of(model, 8).step(x[:20], labels[:20])
    assert step.weights.tolist() == [8, 8, 4]
    expected = [
        np.linalg.norm(gradients[rows].mean(axis=0))
        for rows in (slice(8), slice(8, 16), slice(16, 20))
    ]
    np.testing.assert_allclose(step.gradient_norms, expected, rtol=1e-6)
    np.testing.assert_allclose(
        step.window_gradient_norm, np.linalg.norm(gradients[:20].mean(axis=0)), rtol=1e-6
    )


def test_the_steps_of_a_trainer_give_the_noise_scale_of_the_data():
    x, labels, model, gradients = classifier("float32")
    mean = gradients.mean(axis=0)
    exact = ((gradients - mean) ** 2).sum() / EXAMPLES / (mean @ mean)

    updates, accumulation_steps, microbatch_size = 300, 12, 10
    window = accumulation_steps * microbatch_size
    # Independent draws, with replacement
    drawn = np.random.default_rng(0).integers(0, EXAMPLES, updates * window)
    dataset = tf.data.Dataset.from_tensor_slices((x[drawn], labels[drawn])).batch(window)
    steps = trainer_of(model, microbatch_size).fit(dataset, updates=updates, verbose=False)

    gradient_norms = np.array([step.gradient_norms for step in steps])
    window_gradient_norms = np.array([step.window_gradient_norm for step in steps])
    weights = np.array([step.weights for step in steps])
    found = gradient_noise_scale(gradient_norms, window_gradient_norms, weights)
    assert 0.8 * exact < found.interval[0] < exact < found.interval[1] < 1.25 * exact
    assert found.value == pytest.approx(exact, rel=0.06)

    # If a step held squared norms, this test would fail.
    wrong = gradient_noise_scale(gradient_norms**2, window_gradient_norms**2, weights)
    assert wrong.value > 2 * exact and wrong.interval[1] > 4 * exact


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (np.ones([5, 1]), np.ones(5), 20),
            "gradient_noise_scale needs windows of 2 micro-batches or more, since a single one "
            "does not show its noise. Received: k = 1",
        ),
        (
            (np.ones([5, 2]), np.ones(4), 20),
            r"window_gradient_norms must be finite, one for each of the 5 updates. .*\(4,\)",
        ),
        ((np.ones([5, 2]), np.full(5, np.nan), 20), "window_gradient_norms must be finite"),
        ((np.ones([5, 2]), np.ones(5), 0), "weights must be a finite number above 0. Received: 0"),
        (
            (np.ones([5, 2]), np.ones(5), -np.ones([5, 2])),
            r"weights must be 0 or more, .* Received: \[-1.0, -1.0\] in window 0",
        ),
        (
            (np.full([5, 2], np.inf), np.ones(5), 20),
            r"gradient_norms must be finite for .* Received: \[inf, inf\] in window 0",
        ),
    ],
)
def test_invalid_input_raises_an_error_with_the_rule_and_the_value(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradient_noise_scale(*arguments)

"""The gradient noise scale, on Gaussian gradients whose noise scale is known."""

import numpy as np
import pytest

from gradlab.measure.noise_scale import gradient_noise_scale

DIMENSIONS = 40


def gaussian(seed, updates, sizes, true_norm=1.0, deviation=None):
    """Norms of mean gradients over micro-batches of these sizes, and of their windows; and the true noise scale."""
    rng = np.random.default_rng(seed)
    true = np.full(DIMENSIONS, true_norm / np.sqrt(DIMENSIONS))
    deviation = np.linspace(0.5, 3, DIMENSIONS) if deviation is None else deviation
    sizes = np.broadcast_to(np.asarray(sizes, float), (updates, np.shape(sizes)[-1]))
    gradients = true + deviation * rng.normal(size=[*sizes.shape, DIMENSIONS]) / np.sqrt(sizes)[..., None]
    windows = (gradients * sizes[..., None]).sum(axis=1) / sizes.sum(axis=1, keepdims=True)
    norms, window_norms = np.linalg.norm(gradients, axis=2), np.linalg.norm(windows, axis=1)
    return norms, window_norms, sizes, (deviation**2).sum() / true_norm**2


@pytest.mark.parametrize("sizes", [[10] * 2, [10] * 8, [1] * 20, [20, 20, 20, 3]])
def test_it_is_right_on_average_and_its_interval_19_times_of_20(sizes):
    hits, variances, signals = [], [], []
    for seed in range(300):
        norms, window_norms, weights, true = gaussian(seed, 200, sizes)
        found = gradient_noise_scale(norms, window_norms, weights, smoothing=0.0)
        hits.append(found.interval[0] < true < found.interval[1])
        variances.append(found.variance.mean())
        signals.append(found.squared_gradient.mean())
    # Both estimates are unbiased: their means over 60,000 windows are the truth, within three standard errors.
    for values, truth in ((variances, true), (signals, 1.0)):
        assert abs(np.mean(values) - truth) < 3 * np.std(values) / np.sqrt(len(values)), (np.mean(values), truth)
    assert 0.91 < np.mean(hits) < 0.985


def test_without_a_signal_the_interval_has_no_upper_end():
    norms, window_norms, weights, _ = gaussian(0, 100, [5] * 4, true_norm=1e-6)
    found = gradient_noise_scale(norms, window_norms, weights)
    assert found.interval[1] == np.inf and found.interval[0] > 0


def test_without_noise_it_is_zero():
    found = gradient_noise_scale(np.full([20, 4], 2.0), np.full(20, 2.0), 5)
    assert found.value == 0 and found.interval == (0, 0)
    np.testing.assert_allclose(found.squared_gradient, 4)


def test_along_a_training_it_follows_the_change():
    """The noise grows to four times; numerator and denominator are averaged apart, so the ratio is not biased up."""
    first = gaussian(0, 3000, [10] * 4)
    second = gaussian(1, 3000, [10] * 4, deviation=2 * np.linspace(0.5, 3, DIMENSIONS))
    joined = [np.concatenate([a, b]) for a, b in zip(first[:3], second[:3])]
    found = gradient_noise_scale(*joined, smoothing=0.995)
    assert found.along[2999] == pytest.approx(first[3], rel=0.25)
    assert found.along[-1] == pytest.approx(second[3], rel=0.25)
    each = gradient_noise_scale(*joined, smoothing=0.0)
    naive = np.mean(each.along[:3000][np.isfinite(each.along[:3000])])  # the mean of ratios
    assert abs(naive - first[3]) > 2 * abs(found.along[2999] - first[3])


def test_a_tail_of_one_micro_batch_is_passed_over():
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
        np.concatenate([tail, norms]), np.append(7.0, window_norms), np.concatenate([[[3.0, 0, 0, 0]], weights])
    )
    assert np.isnan(first.along[0]) and first.along[-1] == expected.along[-1]


def test_the_critical_batch_size_costs_twice_the_least():
    norms, window_norms, weights, _ = gaussian(0, 500, [10] * 8)
    found = gradient_noise_scale(norms, window_norms, weights)
    batch = found.critical_batch_size
    assert found.updates_needed(batch) == found.examples_needed(batch) == pytest.approx(2)
    assert found.updates_needed(100 * batch) == pytest.approx(1.01)
    assert found.examples_needed(batch / 100) == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (np.ones([5, 1]), np.ones(5), 20),
            "gradient_noise_scale needs windows of 2 micro-batches or more: in a single one, noise cannot be told from "
            "the rest. Received: k = 1",
        ),
        ((np.ones([5, 2]), np.ones(4), 20), r"window_norms must be finite, one for each of the 5 updates. .*\(4,\)"),
        ((np.ones([5, 2]), np.full(5, np.nan), 20), "window_norms must be finite"),
        ((np.ones([5, 2]), np.ones(5), 0), "weights must be a finite number above 0. Received: 0"),
        ((np.ones([5, 2]), np.ones(5), -np.ones([5, 2])), "weights must be 0 or more"),
        ((np.full([5, 2], np.inf), np.ones(5), 20), "microbatch_norms must be finite wherever"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradient_noise_scale(*arguments)

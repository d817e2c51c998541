"""Each estimator of noise, on synthetic problems with a known answer."""

import numpy as np
import pytest

from gradlab.measure import noise

MICROBATCH, K = 0.5, 16  # the standard deviation of a micro-batch's loss; micro-batches per window


def test_the_intervals_of_loss_noise_cover_the_truth_in_95_percent():
    hits = []
    for seed in range(400):
        found = noise.loss_noise(np.random.default_rng(seed).normal(2.0, MICROBATCH, [40, K]))
        hits.append(
            [
                found.microbatch_interval[0] < MICROBATCH < found.microbatch_interval[1],
                found.window_interval[0] < MICROBATCH / np.sqrt(K) < found.window_interval[1],
            ]
        )
    covered = np.mean(hits, axis=0)  # 400 trials: 0.95 with a standard error of 0.011
    assert (covered > 0.91).all() and (covered < 0.985).all()


def test_the_intervals_do_not_assume_a_normal_distribution():
    """The kurtosis of exponential losses is 9 and that of normal ones 3, so their variance is
    harder to estimate."""
    hits, naive = [], []
    for seed in range(400):
        losses = np.random.default_rng(seed).exponential(MICROBATCH, [400, 1])
        found = noise.loss_noise(losses)
        hits.append(found.microbatch_interval[0] < MICROBATCH < found.microbatch_interval[1])
        half = noise.Z * np.sqrt(2 / 399) / 2
        naive.append(abs(np.log(found.microbatch / MICROBATCH)) < half)
    assert np.mean(hits) > 0.88 > 0.8 > np.mean(naive)


def test_the_law_holds_for_independent_micro_batches_only():
    rng = np.random.default_rng(0)
    independent = noise.loss_noise(rng.normal(2.0, MICROBATCH, [4000, K]))
    assert independent.law == pytest.approx(MICROBATCH / 4, rel=0.02)
    assert independent.window == pytest.approx(independent.law, rel=0.05)
    copies = noise.loss_noise(np.repeat(rng.normal(2.0, MICROBATCH, [4000, 1]), K, axis=1))
    assert copies.window == pytest.approx(MICROBATCH, rel=0.05) and copies.law < copies.window / 3


def test_constant_losses_have_no_noise():
    found = noise.loss_noise(np.full([5, 3], 2.0))
    assert found.microbatch == found.window == 0 and found.window_interval == (0, 0)


def test_the_fall_of_the_loss_along_a_training_is_not_noise():
    rng = np.random.default_rng(0)
    updates = 20_000
    fall = 2 * np.exp(-np.arange(updates) / 4000)[:, None]  # much larger than the noise, but slow
    found = noise.loss_noise_along(fall + rng.normal(0, MICROBATCH, [updates, K]), smoothing=0.9995)
    assert np.std(fall) > 3 * MICROBATCH / 4
    assert found.microbatch[-1] == pytest.approx(MICROBATCH, rel=0.03)
    assert found.window[-1] == pytest.approx(MICROBATCH / 4, rel=0.05)
    assert found.law[-1] == pytest.approx(MICROBATCH / 4, rel=0.03)
    assert np.isnan(found.window[:2]).all() and np.isfinite(found.window[2:]).all()


def test_a_steep_straight_fall_has_no_noise_and_a_curved_one_hardly_any():
    steep = np.linspace(100, 0, 50)
    np.testing.assert_allclose(noise.successive_std(steep)[2:], 0, atol=1e-12)
    rng = np.random.default_rng(0)
    # Falls by ten times the noise per update
    early = 2.3 * np.exp(-np.arange(60) / 20) + rng.normal(0, 0.01, 60)
    assert noise.successive_std(early, 0.0)[2:].mean() < 0.015
    # The differences of neighbors count the fall as noise
    assert np.sqrt((np.diff(early) ** 2 / 2).mean()) > 0.03


def test_ragged_windows_are_weighted_by_their_examples():
    """Micro-batches of 4, 4 and 1 examples: their means have 1/4, 1/4 and 1 times the variance of
    one example."""
    rng = np.random.default_rng(1)
    updates, sizes = 40_000, np.array([4.0, 4.0, 1.0])
    losses = rng.normal(0, 1, [updates, 3]) / np.sqrt(sizes)
    weights = np.tile(sizes, [updates, 1])
    # Padded as in a Result
    losses, weights = np.insert(losses, 3, np.nan, axis=1), np.insert(weights, 3, 0, axis=1)
    found = noise.loss_noise_along(losses, weights, smoothing=0.9998)
    # For a micro-batch of 3, the mean size
    assert found.microbatch[-1] == pytest.approx(np.sqrt(1 / 3), rel=0.03)
    assert found.window[-1] == pytest.approx(1 / 3, rel=0.03)  # 9 examples
    assert found.law[-1] == pytest.approx(1 / 3, rel=0.03)
    plain = noise.loss_noise_along(np.nan_to_num(losses[:, :3]), None, smoothing=0.9998)
    assert plain.law[-1] > 1.05 / 3  # treating all sizes as equal gives a clearly wrong result


def test_gradient_variance_is_unbiased_with_and_without_the_full_gradient():
    rng = np.random.default_rng(0)
    true, deviation = rng.normal(size=30), rng.uniform(0.5, 2, 30)
    samples = [true + deviation * rng.normal(size=[5, 30]) for _ in range(4000)]
    trace = (deviation**2).sum()
    assert np.mean([noise.gradient_variance(s) for s in samples]) == pytest.approx(trace, rel=0.01)
    assert np.mean([noise.gradient_variance(s, true) for s in samples]) == pytest.approx(
        trace, rel=0.01
    )


def test_cosines_follow_the_closed_form():
    """In many dimensions the cosine of a noisy gradient is |G| / sqrt(|G|^2 + variance)."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=20_000)
    length = np.linalg.norm(true)
    for ratio in (0.1, 1.0, 10.0):
        noisy = true + rng.normal(size=[8, 20_000]) * np.sqrt(ratio * length**2 / 20_000)
        np.testing.assert_allclose(noise.cosines(noisy, true), 1 / np.sqrt(1 + ratio), atol=0.02)
    assert np.isnan(noise.cosines([[0.0, 0.0]], [1.0, 0.0])[0])


def test_running_mean_has_no_bias_towards_zero():
    values = np.full(50, 3.0)
    np.testing.assert_allclose(noise.running_mean(values, 0.99), values)
    np.testing.assert_allclose(noise.running_mean([1.0, np.inf, 2.0], 0.0), [1, 1, 2])
    assert np.isnan(noise.running_mean([np.nan, 1.0], 0.5)[0])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: noise.loss_noise([[1.0, 2.0]]),
            "loss_noise needs 4 windows or more to estimate their noise. Received: 1",
        ),
        (
            lambda: noise.loss_noise([1.0, 2.0]),
            r"losses must be finite, of the shape \(windows, k\). Received: \(2,\)",
        ),
        (
            lambda: noise.loss_noise([[1.0, np.nan]]),
            "losses must be finite, .* Received: values that are not finite",
        ),
        (
            lambda: noise.loss_noise_along(np.ones([5, 1])),
            "loss_noise_along needs windows of 2 micro-batches or more, .* Received: k = 1",
        ),
        (
            lambda: noise.loss_noise_along(np.ones([5, 2]), np.ones([5, 3])),
            r"Received: \(5, 2\), \(5, 3\)",
        ),
        (
            lambda: noise.loss_noise_along(np.ones([5, 2]), smoothing=1),
            "smoothing must be .* below 1. Received: 1",
        ),
        (
            lambda: noise.loss_noise_along([[1.0, np.inf]]),
            r"losses must be finite for .* Received: \[1.0, inf\] in window 0",
        ),
        (
            lambda: noise.gradient_variance([[1.0, 2.0]]),
            "needs 2 gradients or more, or full_gradient. Received: 1",
        ),
        (
            lambda: noise.gradient_variance([[1.0]], [1.0, 2.0]),
            r"the gradients' shape, \(1,\). Received: \(2,\)",
        ),
        (lambda: noise.cosines([1.0], [1.0]), r"gradients must be finite, .* Received: \(1,\)"),
    ],
)
def test_invalid_input_raises_an_error_with_the_rule_and_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

"""The gradient noise scale: the batch size at which a gradient contains as much noise as signal."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gradlab import _checks
from gradlab.measure.noise import Z, check_windows, running_mean


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale along a training, and over all of it.

    Attributes:
        along: the noise scale after each update, in examples, shape (updates,): variance /
            squared_gradient. It is inf where the estimate of the squared gradient is not above 0,
            and NaN before the first window with two micro-batches.
        variance: the running mean of the estimates of the gradient's variance between examples (the
            trace of its covariance matrix), shape (updates,).
        squared_gradient: the running mean of the estimates of the true gradient's squared norm,
            shape (updates,). Noise can make it negative.
        value: the noise scale over all updates, in examples: the ratio of the two means.
        interval: its 95 % confidence interval (low, high), computed as if the updates were
            independent samples (Fieller 1954). high is inf if the squared gradient cannot be
            distinguished from 0.
    """

    along: np.ndarray
    variance: np.ndarray
    squared_gradient: np.ndarray
    value: float
    interval: tuple[float, float]

    @property
    def critical_batch_size(self) -> float:
        """The effective batch, in examples, that needs twice the fewest updates and twice the
        fewest examples."""
        return self.value

    def updates_needed(self, effective_batch: float) -> float:
        """The updates needed to reach a given loss, relative to the fewest that any batch needs.

        This is 1 + noise scale / effective batch.
        """
        _checks.positive_number("effective_batch", effective_batch)
        return 1 + self.value / effective_batch

    def examples_needed(self, effective_batch: float) -> float:
        """The examples needed to reach a given loss, relative to the fewest that any batch needs.

        This is 1 + effective batch / noise scale.
        """
        _checks.positive_number("effective_batch", effective_batch)
        return 1 + effective_batch / self.value


def gradient_noise_scale(
    gradient_norms: ArrayLike,
    window_gradient_norms: ArrayLike,
    weights: ArrayLike,
    smoothing: float = 0.99,
) -> NoiseScale:
    """Estimate the gradient noise scale from the norms of gradients that accumulation computes
    anyway.

    The squared norm of a mean gradient over n examples is, on average, the squared norm `|G|^2` of
    the true gradient plus variance / n. Two batch sizes, that of a micro-batch and that of a window
    of N examples, give two equations with two unknowns::

        A = mean of the micro-batches' squared norms   (weighted by their examples)   ->  |G|^2 + k variance / N
        W = squared norm of the window's mean                                         ->  |G|^2 +   variance / N
        variance = (A - W) N / (k - 1)          |G|^2 = (k W - A) / (k - 1)

    Both estimates are unbiased but noisy, so each is averaged over the updates before their ratio
    is taken. They assume that examples are drawn independently: a window that is a large fraction
    of the data set has less noise than this estimate says.

    The arguments are norms, not squared norms, with the names that `gradlab.Result` uses. For a
    `gradlab.Trainer` with the same number of micro-batches in every window::

        steps = [step for step in trainer.fit(dataset, updates=1000) if step.applied]
        scale = gradlab.gradient_noise_scale(
            np.array([step.gradient_norms for step in steps]),
            np.array([step.window_gradient_norm for step in steps]),
            np.array([step.weights for step in steps]),
        )

    On several workers, first join the gradient norms and the weights of all workers: a step has
    those of its own worker, but the norm of the window over all of them.

    Source: McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training",
    appendix A.1; the weighted form for micro-batches of different sizes follows from the same two
    equations.

    Args:
        gradient_norms: the norm of each micro-batch's mean gradient, shape (updates, k) with k of 2
            or more. NaN pads a window with fewer micro-batches.
        window_gradient_norms: the norm of each window's mean gradient, shape (updates,).
        weights: the number of examples of each micro-batch, shape (updates, k), 0 where there was
            no micro-batch; or one number for all micro-batches.
        smoothing: the weight of the past in the running means, from 0 (no smoothing) to below 1.

    Returns:
        A `NoiseScale`. Windows of a single micro-batch (a ragged tail) contain no information about
        the noise and are skipped.

    Raises:
        ValueError: no window has two micro-batches, the shapes do not match, a norm is not finite,
            or a weight is negative.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> g = np.full(50, 0.2) + rng.normal(0, 3, [500, 8, 50]) / np.sqrt(10)     # noise scale 50 * 9 / (50 * 0.04)
        >>> norms, window_norms = np.linalg.norm(g, axis=2), np.linalg.norm(g.mean(axis=1), axis=1)
        >>> scale = gradient_noise_scale(norms, window_norms, 10)
        >>> scale.interval[0] < 225 < scale.interval[1]
        True
    """
    if np.ndim(weights) == 0:
        _checks.positive_number("weights", weights)
        weights = np.where(np.isnan(np.asarray(gradient_norms, np.float64)), 0.0, weights)
    norms, weights = check_windows(
        "gradient_norms", gradient_norms, weights, "gradient_noise_scale"
    )
    window_norms = np.asarray(window_gradient_norms, np.float64)
    if window_norms.shape != norms.shape[:1] or not np.isfinite(window_norms).all():
        raise ValueError(
            f"window_gradient_norms must be finite, one for each of the {len(norms)} updates. "
            f"Received: {window_norms.shape if np.isfinite(window_norms).all() else window_norms}"
        )
    variance, squared = estimates(norms, window_norms, weights)
    smooth = running_mean(variance, smoothing), running_mean(squared, smoothing)
    with np.errstate(invalid="ignore", divide="ignore"):
        along = np.where(smooth[1] > 0, smooth[0] / smooth[1], np.inf)
    along[np.isnan(smooth[0])] = np.nan
    there = (weights > 0).sum(axis=1) > 1
    value, interval = _ratio(variance[there], squared[there])
    return NoiseScale(along, *smooth, value, interval)


def estimates(
    norms: np.ndarray, window_norms: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The estimates of each window: the gradient's variance between examples and the true
    gradient's squared norm.

    Args:
        norms: the norm of each micro-batch's mean gradient, shape (updates, k); 0 where there was
            no micro-batch.
        window_norms: the norm of each window's mean gradient, shape (updates,).
        weights: the number of examples of each micro-batch, shape (updates, k).

    Returns:
        Two arrays of shape (updates,), NaN for a window of a single micro-batch.
    """
    count = (weights > 0).sum(axis=1)
    total = weights.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        small = (weights * norms**2).sum(axis=1) / total
        big = window_norms**2
        variance = np.where(count > 1, (small - big) * total / (count - 1), np.nan)
        squared = np.where(count > 1, (count * big - small) / (count - 1), np.nan)
    return variance, squared


def _ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The ratio of two means, and its 95 % confidence interval by Fieller's method.

    The interval contains all ratios r for which the mean of above - r * below does not differ
    significantly from 0.
    """
    a = above.mean()
    b = below.mean()
    value = float(a / b) if b > 0 else math.inf
    n = len(above)
    if n < 2:
        return value, (0.0, math.inf)
    (aa, ab), (_, bb) = Z**2 * np.cov(above, below) / n
    # (a - r b)^2 <= aa - 2 r ab + r^2 bb, a quadratic in r
    two = b**2 - bb
    one = a * b - ab
    zero = a**2 - aa
    root = math.sqrt(max(one**2 - two * zero, 0.0))
    if b <= 0 or two <= 0:  # the denominator does not differ significantly from 0: no upper bound
        low = (one - root) / two if two < 0 and b > 0 else 0.0
        return value, (float(max(low, 0.0)) if low < value else 0.0, math.inf)
    return value, (float(max((one - root) / two, 0.0)), float((one + root) / two))

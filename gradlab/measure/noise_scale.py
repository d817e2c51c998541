"""The gradient noise scale: the batch size at which a gradient is as much noise as signal. Arrays in, arrays out."""

import math
from dataclasses import dataclass

import numpy as np

from gradlab import _checks
from gradlab.measure.noise import Z, check_windows, running_mean


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale, along a training and over all of it.

    Attributes:
        along: the noise scale after each update, in examples, shape (updates,): variance / squared_gradient. Above any
            bound (inf) where the signal cannot be told from 0.
        variance: the running mean of the estimates of the gradient's variance from example to example (the trace of its
            covariance matrix).
        squared_gradient: the running mean of the estimates of the true gradient's squared norm; noise can take it
            below 0.
        value: the noise scale over all updates, the ratio of the two means, in examples.
        interval: its 95 % interval (low, high), as if the updates were independent samples (Fieller 1954); high is inf
            where the signal cannot be told from 0.
    """

    along: np.ndarray
    variance: np.ndarray
    squared_gradient: np.ndarray
    value: float
    interval: tuple[float, float]

    @property
    def critical_batch_size(self) -> float:
        """The effective batch, in examples, that costs twice the least updates and twice the least examples."""
        return self.value

    def updates_needed(self, effective_batch: float) -> float:
        """Updates to a given loss, in units of the least that any batch needs: 1 + noise scale / batch."""
        _checks.positive_number("effective_batch", effective_batch)
        return 1 + self.value / effective_batch

    def examples_needed(self, effective_batch: float) -> float:
        """Examples to a given loss, in units of the least that any batch needs: 1 + batch / noise scale."""
        _checks.positive_number("effective_batch", effective_batch)
        return 1 + effective_batch / self.value


def gradient_noise_scale(microbatch_norms, window_norms, weights, smoothing: float = 0.99) -> NoiseScale:
    """The gradient noise scale, from the gradient norms that accumulation computes anyway.

    The squared norm of a mean over n examples is, on average, the true gradient's plus variance / n. Two sizes, the
    micro-batch and the window, make two equations with two unknowns::

        A = mean of the micro-batches' squared norms   (weighted by their examples)   ->  |G|^2 + k variance / N
        W = squared norm of the window's mean                                         ->  |G|^2 +   variance / N
        variance = (A - W) N / (k - 1)          |G|^2 = (k W - A) / (k - 1)

    Both are unbiased but noisy, so each is averaged by itself before the ratio is taken. The examples are supposed to
    be drawn independently: a window that is a good part of the data set has less noise than this says.

    Source: McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1; the
    weighted form for micro-batches of different sizes follows from the same two equations.

    Args:
        microbatch_norms: the norm of each micro-batch's mean gradient, shape (updates, k), k 2 or more; NaN where there
            was none.
        window_norms: the norm of each window's mean gradient, shape (updates,).
        weights: the examples of each micro-batch, shape (updates, k), 0 where there was none; or one number for all.
        smoothing: of the running means, 0 (none) to below 1.

    Returns:
        A `NoiseScale`. Windows of a single micro-batch (a ragged tail) say nothing and are passed over.

    Raises:
        ValueError: no window has two micro-batches, shapes that do not go together, or a norm that is not finite.

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
        weights = np.where(np.isnan(np.asarray(microbatch_norms, np.float64)), 0.0, weights)
    norms, weights = check_windows("microbatch_norms", microbatch_norms, weights, "gradient_noise_scale")
    window_norms = np.asarray(window_norms, np.float64)
    if window_norms.shape != norms.shape[:1] or not np.isfinite(window_norms).all():
        raise ValueError(
            f"window_norms must be finite, one for each of the {len(norms)} updates. Received: "
            f"{window_norms.shape if np.isfinite(window_norms).all() else window_norms}"
        )
    count, total = (weights > 0).sum(axis=1), weights.sum(axis=1)
    small, big = (weights * norms**2).sum(axis=1) / total, window_norms**2
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.where(count > 1, (small - big) * total / (count - 1), np.nan)
        squared = np.where(count > 1, (count * big - small) / (count - 1), np.nan)
        smooth = running_mean(variance, smoothing), running_mean(squared, smoothing)
        along = np.where(smooth[1] > 0, smooth[0] / smooth[1], np.inf)
    along[np.isnan(smooth[0])] = np.nan
    value, interval = _ratio(variance[count > 1], squared[count > 1])
    return NoiseScale(along, *smooth, value, interval)


def _ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The ratio of two means and its 95 % interval: all r for which above - r * below may well have the mean 0."""
    a, b = above.mean(), below.mean()
    value = float(a / b) if b > 0 else math.inf
    n = len(above)
    if n < 2:
        return value, (0.0, math.inf)
    (aa, ab), (_, bb) = Z**2 * np.cov(above, below) / n
    # (a - r b)^2 <= aa - 2 r ab + r^2 bb, a quadratic in r
    two, one, zero = b**2 - bb, a * b - ab, a**2 - aa
    root = math.sqrt(max(one**2 - two * zero, 0.0))
    if b <= 0 or two <= 0:  # the mean below is not clearly above 0: no upper end
        low = (one - root) / two if two < 0 and b > 0 else 0.0
        return value, (float(max(low, 0.0)) if low < value else 0.0, math.inf)
    return value, (float(max((one - root) / two, 0.0)), float((one + root) / two))

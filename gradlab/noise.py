"""How noisy losses and gradients are: arrays in, arrays out.

Micro-batches are random samples, so their losses and gradients scatter around the full data's. The mean over a window of
k independent ones scatters 1 / sqrt(k) times as much (in variance 1 / k): that is what accumulation buys. How much
scatter matters depends on how large the true gradient is; the gradient noise scale is the ratio of the two.
"""

import math
from dataclasses import dataclass

import numpy as np

from gradlab import checks

Z = 1.959963984540054  # of a normal distribution, 95 % lie within so many standard deviations


@dataclass(frozen=True)
class LossNoise:
    """Standard deviations of losses, each a number or an array over updates; intervals are (low, high), 95 %.

    Attributes:
        microbatch: of a micro-batch's loss.
        window: of a window's mean loss.
        law: what microbatch / sqrt(k) predicts for window.
        microbatch_interval, window_interval: confidence intervals; None where there is nothing to base one on.
    """

    microbatch: float | np.ndarray
    window: float | np.ndarray
    law: float | np.ndarray
    microbatch_interval: tuple[float, float] | None = None
    window_interval: tuple[float, float] | None = None


def loss_noise(losses) -> LossNoise:
    """The scatter of losses at fixed weights.

    Args:
        losses: the losses of independent micro-batches of one size, all at the same weights, in nats; shape
            (windows, k), 4 windows or more.

    Returns:
        A `LossNoise` of numbers. The intervals come from the samples' fourth moments, on a logarithmic scale, so they
        do not suppose a normal distribution.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> noise = loss_noise(rng.normal(2.0, 0.5, [400, 16]))
        >>> round(noise.microbatch, 2), round(noise.law, 3), round(noise.window, 2)
        (0.5, 0.124, 0.12)
    """
    losses = _array("losses", losses, ("windows", "k"))
    if len(losses) < 4:
        raise ValueError(f"loss_noise needs 4 windows or more to see them scatter. Received: {len(losses)}")
    means = losses.mean(axis=1)
    microbatch, window = np.std(losses, ddof=1), np.std(means, ddof=1)
    law = microbatch / math.sqrt(losses.shape[1])
    return LossNoise(float(microbatch), float(window), float(law), _std_interval(losses.ravel()), _std_interval(means))


def loss_noise_along(losses, weights=None, smoothing: float = 0.95) -> LossNoise:
    """The scatter of losses along a training, whose loss falls meanwhile.

    The fall must not be taken for noise. Micro-batches are compared within their window, that is at the same weights;
    windows with the window before: half the squared difference of two neighbours has the variance as its mean, and
    a slow change hardly touches it (von Neumann et al. 1941, "The Mean Square Successive Difference").

    Args:
        losses: the micro-batches' losses in nats, shape (updates, k), k 2 or more; NaN where there was none.
        weights: the examples of each, 0 where there was none; None: all alike.
        smoothing: of the running means of variances, 0 (none) to below 1.

    Returns:
        A `LossNoise` of arrays, shape (updates,). window is NaN for the first update.
    """
    losses, weights = _windows("losses", losses, weights, "loss_noise_along")
    _check_smoothing(smoothing)
    count, total = (weights > 0).sum(axis=1), weights.sum(axis=1)
    means = (losses * weights).sum(axis=1) / total
    # sum of n_i (l_i - mean)^2 has the mean (k - 1) v, with v the variance of one example: each loss has v / n_i
    spread = (weights * (losses - means[:, None]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        example = _running_mean(np.where(count > 1, spread / (count - 1), np.nan), smoothing)
        successive = np.concatenate([[np.nan], np.diff(means) ** 2 / 2])
        window = np.sqrt(_running_mean(successive, smoothing))
        return LossNoise(np.sqrt(example * count / total), window, np.sqrt(example / total))


def gradient_variance(gradients, full_gradient=None) -> float:
    """The scatter of gradients at fixed weights: the mean squared distance from the true one, over all parameters.

    Args:
        gradients: of independent micro-batches, shape (micro-batches, parameters).
        full_gradient: the full data's, shape (parameters,). None: their own mean takes its place, and one of them is
            not counted for it.

    Returns:
        The trace of the covariance matrix of a micro-batch's gradient; times the micro-batch size, that of an example.

    Example:
        >>> float(gradient_variance([[1.0, 0.0], [3.0, 0.0]])), float(gradient_variance([[1.0, 0.0]], [0.0, 2.0]))
        (2.0, 5.0)
    """
    gradients = _array("gradients", gradients, ("micro-batches", "parameters"))
    if full_gradient is None:
        if len(gradients) < 2:
            raise ValueError(f"gradient_variance needs 2 gradients or more, or full_gradient. Received: {len(gradients)}")
        return ((gradients - gradients.mean(axis=0)) ** 2).sum() / (len(gradients) - 1)
    return ((gradients - _like(full_gradient, gradients)) ** 2).sum() / len(gradients)


def cosines(gradients, full_gradient) -> np.ndarray:
    """The cosine of the angle between each gradient and the full data's: 1 is the same way, 0 says nothing about it.

    Args:
        gradients: shape (micro-batches, parameters).
        full_gradient: shape (parameters,).

    Returns:
        Shape (micro-batches,); NaN for a gradient of 0.

    Example:
        >>> cosines([[1.0, 0.0], [1.0, 1.0]], [2.0, 0.0]).round(3)
        array([1.   , 0.707])
    """
    gradients = _array("gradients", gradients, ("micro-batches", "parameters"))
    full = _like(full_gradient, gradients)
    with np.errstate(invalid="ignore"):
        return gradients @ full / (np.linalg.norm(gradients, axis=1) * np.linalg.norm(full))


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
        checks.positive_number("effective_batch", effective_batch)
        return 1 + self.value / effective_batch

    def examples_needed(self, effective_batch: float) -> float:
        """Examples to a given loss, in units of the least that any batch needs: 1 + batch / noise scale."""
        checks.positive_number("effective_batch", effective_batch)
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
        checks.positive_number("weights", weights)
        weights = np.where(np.isnan(np.asarray(microbatch_norms, np.float64)), 0.0, weights)
    norms, weights = _windows("microbatch_norms", microbatch_norms, weights, "gradient_noise_scale")
    window_norms = np.asarray(window_norms, np.float64)
    if window_norms.shape != norms.shape[:1] or not np.isfinite(window_norms).all():
        raise ValueError(
            f"window_norms must be finite, one for each of the {len(norms)} updates. Received: "
            f"{window_norms.shape if np.isfinite(window_norms).all() else window_norms}"
        )
    _check_smoothing(smoothing)
    count, total = (weights > 0).sum(axis=1), weights.sum(axis=1)
    small, big = (weights * norms**2).sum(axis=1) / total, window_norms**2
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.where(count > 1, (small - big) * total / (count - 1), np.nan)
        squared = np.where(count > 1, (count * big - small) / (count - 1), np.nan)
        smooth = _running_mean(variance, smoothing), _running_mean(squared, smoothing)
        along = np.where(smooth[1] > 0, smooth[0] / smooth[1], np.inf)
    along[np.isnan(smooth[0])] = np.nan
    value, interval = _ratio(variance[count > 1], squared[count > 1])
    return NoiseScale(along, *smooth, value, interval)


def _array(name: str, values, axes: tuple[str, str]) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        received = values.shape if np.isfinite(values).all() else "values that are not finite"
        raise ValueError(f"{name} must be finite, of the shape ({', '.join(axes)}). Received: {received}")
    return values


def _like(full_gradient, gradients: np.ndarray) -> np.ndarray:
    full = np.asarray(full_gradient, np.float64)
    if full.shape != gradients.shape[1:]:
        raise ValueError(
            f"full_gradient must have the gradients' shape, ({gradients.shape[1]},). Received: {full.shape}"
        )
    return full


def _windows(name: str, values, weights, caller: str) -> tuple[np.ndarray, np.ndarray]:
    """Values a micro-batch, 0 where there was none, and their weights, after a check."""
    values = np.asarray(values, np.float64)
    weights = np.where(np.isnan(values), 0.0, 1.0) if weights is None else np.asarray(weights, np.float64)
    if values.ndim != 2 or values.shape != weights.shape or not len(values):
        raise ValueError(
            f"{name} and weights must have the shape (updates, k). Received: {values.shape}, {weights.shape}"
        )
    if (weights < 0).any() or not (weights.sum(axis=1) > 0).all():
        raise ValueError("weights must be 0 or more, and in each window not all 0. Received: others")
    if not np.isfinite(values[weights > 0]).all():
        raise ValueError(f"{name} must be finite wherever there was a micro-batch. Received: values that are not")
    most = int((weights > 0).sum(axis=1).max())
    if most < 2:
        raise ValueError(
            f"{caller} needs windows of 2 micro-batches or more: in a single one, noise cannot be told from the rest. "
            f"Received: k = {most}"
        )
    return np.where(weights > 0, values, 0.0), weights


def _check_smoothing(smoothing) -> None:
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be a number from 0 to below 1. Received: {smoothing!r}")


def _running_mean(values: np.ndarray, smoothing: float) -> np.ndarray:
    """The exponential running mean, free of the pull towards its start; NaN values are passed over."""
    means, mean, weight = np.full(len(values), np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if not np.isnan(value):
            mean = smoothing * mean + (1 - smoothing) * value
            weight = smoothing * weight + (1 - smoothing)
        if weight:
            means[i] = mean / weight
    return means


def _std_interval(samples: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a standard deviation, from the samples' own fourth moment."""
    n, squares = len(samples), (samples - samples.mean()) ** 2
    variance = squares.sum() / (n - 1)
    if variance == 0:
        return 0.0, 0.0
    excess = max((squares**2).mean() / variance**2 - (n - 3) / (n - 1), 2 / n)
    half = Z * math.sqrt(excess / n) / 2
    return float(math.sqrt(variance) * math.exp(-half)), float(math.sqrt(variance) * math.exp(half))


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

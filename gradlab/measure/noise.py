"""The noise of losses and gradients. Arguments and results are NumPy arrays.

Micro-batches are random samples, so their losses and gradients vary around those of the full data
set. The mean over a window of k independent micro-batches has 1 / k of their variance, and 1 /
sqrt(k) of their standard deviation. This is the benefit of accumulation. Whether it justifies the
computation depends on the size of the true gradient relative to its noise: see noise_scale.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# 95 % of a normal distribution lie within this many standard deviations of its mean
Z = 1.959963984540054


@dataclass(frozen=True)
class LossNoise:
    """Standard deviations of losses, in nats: each a number, or an array over updates.

    Attributes:
        microbatch: the standard deviation of a micro-batch's loss.
        window: the standard deviation of a window's mean loss.
        law: the standard deviation of a window's mean loss that microbatch / sqrt(k) predicts.
        microbatch_interval: the 95 % confidence interval (low, high) of microbatch; None if it is
            unknown.
        window_interval: the same for window.
    """

    microbatch: float | np.ndarray
    window: float | np.ndarray
    law: float | np.ndarray
    microbatch_interval: tuple[float, float] | None = None
    window_interval: tuple[float, float] | None = None


def loss_noise(losses: ArrayLike) -> LossNoise:
    """The standard deviations of losses at fixed weights.

    Args:
        losses: the losses of independent micro-batches of one size, all at the same weights, in
            nats; shape (windows, k), with 4 windows or more.

    Returns:
        A `LossNoise` of numbers. The confidence intervals are computed from the samples' fourth
        moments, on a logarithmic scale, so they do not assume a normal distribution.

    Raises:
        ValueError: the losses are not finite, have another shape, or fewer than 4 windows.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> noise = loss_noise(rng.normal(2.0, 0.5, [400, 16]))
        >>> round(noise.microbatch, 2), round(noise.law, 3), round(noise.window, 2)
        (0.5, 0.124, 0.12)
    """
    losses = _array("losses", losses, ("windows", "k"))
    if len(losses) < 4:
        raise ValueError(
            f"loss_noise needs 4 windows or more to estimate their noise. Received: {len(losses)}"
        )
    means = losses.mean(axis=1)
    microbatch = np.std(losses, ddof=1)
    window = np.std(means, ddof=1)
    law = microbatch / math.sqrt(losses.shape[1])
    return LossNoise(
        float(microbatch),
        float(window),
        float(law),
        _std_interval(losses.ravel()),
        _std_interval(means),
    )


def loss_noise_along(
    losses: ArrayLike, weights: ArrayLike | None = None, smoothing: float = 0.95
) -> LossNoise:
    """The standard deviations of losses along a training, during which the loss falls.

    So that the fall of the loss does not count as noise, micro-batches are compared within their
    window, that is at the same weights, and each window is compared with the two before it: see
    `successive_std`.

    Args:
        losses: the losses of the micro-batches in nats, shape (updates, k), with k of 2 or more.
            NaN pads a window with fewer micro-batches.
        weights: the number of examples of each micro-batch, shape (updates, k), 0 where there was
            no micro-batch. None: all micro-batches have the same size.
        smoothing: the weight of the past in the running means of variances, from 0 (no smoothing)
            to below 1.

    Returns:
        A `LossNoise` of arrays, shape (updates,). window is NaN for the first two updates.

    Raises:
        ValueError: no window has two micro-batches, the shapes do not match, or a loss is not
            finite.
    """
    losses, weights = check_windows("losses", losses, weights, "loss_noise_along")
    count = (weights > 0).sum(axis=1)
    total = weights.sum(axis=1)
    means = (losses * weights).sum(axis=1) / total
    # With v the variance of one example's loss, a micro-batch of n_i examples has the variance v /
    # n_i, so the expected value of the sum of n_i (l_i - mean)^2 is (k - 1) v.
    spread = (weights * (losses - means[:, None]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        example = running_mean(np.where(count > 1, spread / (count - 1), np.nan), smoothing)
    return LossNoise(
        np.sqrt(example * count / total), successive_std(means, smoothing), np.sqrt(example / total)
    )


def successive_std(values: ArrayLike, smoothing: float = 0.95) -> np.ndarray:
    """The standard deviation of the noise in a series that changes slowly.

    It is the square root of the running mean of a sixth of the squared second differences. The
    second difference v[i] - 2 v[i-1] + v[i-2] of independent values has six times their variance,
    and that of a straight line is 0, so a falling loss does not count as noise (Gasser, Sroka and
    Jennen-Steinmetz 1986, "Residual variance and residual pattern in nonlinear regression").

    Args:
        values: shape (n,).
        smoothing: the weight of the past in the running mean, from 0 (no smoothing) to below 1.

    Returns:
        The standard deviation up to each value, shape (n,), NaN for the first two.

    Example:
        >>> successive_std([5.0, 4.0, 3.0, 5.0], smoothing=0.0).round(3)
        array([  nan,   nan, 0.   , 1.225])
    """
    values = np.asarray(values, np.float64)
    variances = np.diff(values, n=2) ** 2 / 6
    return np.sqrt(
        running_mean(
            np.concatenate([np.full(len(values) - len(variances), np.nan), variances]), smoothing
        )
    )


def running_mean(values: ArrayLike, smoothing: float) -> np.ndarray:
    """The exponential running mean, corrected for its usual bias towards 0 at the start.

    Args:
        values: shape (n,). Values that are not finite are skipped.
        smoothing: the weight of the past, from 0 (no smoothing) to below 1.

    Returns:
        The mean up to each value, shape (n,), NaN before the first finite one.

    Example:
        >>> running_mean([4.0, 2.0, np.nan], smoothing=0.5).round(2)
        array([4.  , 2.67, 2.67])
    """
    return RunningMean(smoothing).extend(values)


class RunningMean:
    """The running mean of a series that grows, as `running_mean` computes it.

    Args:
        smoothing: the weight of the past, from 0 (no smoothing) to below 1.

    Example:
        >>> mean = RunningMean(0.5)
        >>> mean.extend([4.0, 2.0]).round(2), mean.extend([np.nan]).round(2)
        (array([4.  , 2.67]), array([2.67]))
    """

    def __init__(self, smoothing: float):
        _check_smoothing(smoothing)
        self._smoothing = smoothing
        self._mean = self._weight = 0.0

    def extend(self, values: ArrayLike) -> np.ndarray:
        """Add values, shape (n,), and return the mean up to each of them, shape (n,)."""
        values = np.asarray(values, np.float64)
        means = np.full(len(values), np.nan)
        past = self._smoothing
        for i, value in enumerate(values):
            if math.isfinite(value):
                self._mean = past * self._mean + (1 - past) * value
                self._weight = past * self._weight + (1 - past)
            if self._weight:
                means[i] = self._mean / self._weight
        return means


def gradient_variance(gradients: ArrayLike, full_gradient: ArrayLike | None = None) -> float:
    """The variance of gradients at fixed weights: the mean squared distance from the true gradient.

    Args:
        gradients: the gradients of independent micro-batches, shape (micro-batches, parameters).
        full_gradient: the gradient of the full data set, shape (parameters,). None: the mean of the
            gradients is used instead, and the sum of squares is divided by their number minus 1.

    Returns:
        The sum of the variances of all parameters, that is the trace of the covariance matrix of a
        micro-batch's gradient. Multiplied by the micro-batch size, it is that of one example.

    Raises:
        ValueError: the gradients are not finite, the shapes do not match, or there is only one
            gradient to compare.

    Example:
        >>> float(gradient_variance([[1.0, 0.0], [3.0, 0.0]])), float(gradient_variance([[1.0, 0.0]], [0.0, 2.0]))
        (2.0, 5.0)
    """
    gradients = _array("gradients", gradients, ("micro-batches", "parameters"))
    if full_gradient is None:
        if len(gradients) < 2:
            raise ValueError(
                "gradient_variance needs 2 gradients or more, or full_gradient. Received: "
                f"{len(gradients)}"
            )
        return ((gradients - gradients.mean(axis=0)) ** 2).sum() / (len(gradients) - 1)
    return ((gradients - _like(full_gradient, gradients)) ** 2).sum() / len(gradients)


def cosines(gradients: ArrayLike, full_gradient: ArrayLike) -> np.ndarray:
    """The cosine of the angle between each gradient and that of the full data set: 1 parallel, 0
    perpendicular.

    Args:
        gradients: shape (micro-batches, parameters).
        full_gradient: shape (parameters,).

    Returns:
        Shape (micro-batches,); NaN for a gradient of 0.

    Raises:
        ValueError: the gradients are not finite, or the shapes do not match.

    Example:
        >>> cosines([[1.0, 0.0], [1.0, 1.0]], [2.0, 0.0]).round(3)
        array([1.   , 0.707])
    """
    gradients = _array("gradients", gradients, ("micro-batches", "parameters"))
    full = _like(full_gradient, gradients)
    with np.errstate(invalid="ignore"):
        return gradients @ full / (np.linalg.norm(gradients, axis=1) * np.linalg.norm(full))


def _array(name: str, values: ArrayLike, axes: tuple[str, str]) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        received = values.shape if np.isfinite(values).all() else "values that are not finite"
        raise ValueError(
            f"{name} must be finite, of the shape ({', '.join(axes)}). Received: {received}"
        )
    return values


def _like(full_gradient: ArrayLike, gradients: np.ndarray) -> np.ndarray:
    full = np.asarray(full_gradient, np.float64)
    if full.shape != gradients.shape[1:]:
        raise ValueError(
            f"full_gradient must have the gradients' shape, ({gradients.shape[1]},). Received: "
            f"{full.shape}"
        )
    return full


def check_windows(
    name: str, values: ArrayLike, weights: ArrayLike | None, caller: str
) -> tuple[np.ndarray, np.ndarray]:
    """Check the values and weights of micro-batches, and replace the values at a weight of 0 by 0.

    Args:
        name: the name of the values, for error messages.
        values: shape (updates, k), NaN where there was no micro-batch.
        weights: shape (updates, k), or None if all micro-batches have the same size.
        caller: the name of the function that needs them, for error messages.

    Returns:
        The values and the weights, each of shape (updates, k).

    Raises:
        ValueError: the shapes differ, a value is not finite, a weight is negative, or no window has
            two micro-batches.
    """
    values = np.asarray(values, np.float64)
    weights = (
        np.where(np.isnan(values), 0.0, 1.0) if weights is None else np.asarray(weights, np.float64)
    )
    if values.ndim != 2 or values.shape != weights.shape or not len(values):
        raise ValueError(
            f"{name} and weights must have the shape (updates, k). Received: {values.shape}, "
            f"{weights.shape}"
        )
    bad = (weights < 0).any(axis=1) | ~(weights.sum(axis=1) > 0)
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(
            "weights must be 0 or more, and not all 0 in any window. Received: "
            f"{weights[first].tolist()} in window {first}"
        )
    bad = ((weights > 0) & ~np.isfinite(values)).any(axis=1)
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(
            f"{name} must be finite for every micro-batch with a weight above 0. Received: "
            f"{values[first].tolist()} in window {first}"
        )
    most = int((weights > 0).sum(axis=1).max())
    if most < 2:
        raise ValueError(
            f"{caller} needs windows of 2 micro-batches or more, since a single one does not show "
            f"its noise. Received: k = {most}"
        )
    return np.where(weights > 0, values, 0.0), weights


def _check_smoothing(smoothing: Any) -> None:
    if (
        isinstance(smoothing, bool)
        or not isinstance(smoothing, (int, float))
        or not 0 <= smoothing < 1
    ):
        raise ValueError(f"smoothing must be a number from 0 to below 1. Received: {smoothing!r}")


def _std_interval(samples: np.ndarray) -> tuple[float, float]:
    """The 95 % confidence interval of a standard deviation, from the samples' fourth moment."""
    n = len(samples)
    squares = (samples - samples.mean()) ** 2
    variance = squares.sum() / (n - 1)
    if variance == 0:
        return 0.0, 0.0
    excess = max((squares**2).mean() / variance**2 - (n - 3) / (n - 1), 2 / n)
    half = Z * math.sqrt(excess / n) / 2
    return float(math.sqrt(variance) * math.exp(-half)), float(math.sqrt(variance) * math.exp(half))

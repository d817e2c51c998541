"""How noisy losses and gradients are: arrays in, arrays out.

Micro-batches are random samples, so their losses and gradients scatter around the full data's. The mean over a window
of k independent ones scatters 1 / sqrt(k) times as much (in variance 1 / k): that is what accumulation buys. Whether it
is worth its price depends on how large the true gradient is beside its noise: see noise_scale.py.
"""

import math
from dataclasses import dataclass

import numpy as np

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
    windows with the two before them: see `successive_std`.

    Args:
        losses: the micro-batches' losses in nats, shape (updates, k), k 2 or more; NaN where there was none.
        weights: the examples of each, 0 where there was none; None: all alike.
        smoothing: of the running means of variances, 0 (none) to below 1.

    Returns:
        A `LossNoise` of arrays, shape (updates,). window is NaN for the first two updates.
    """
    losses, weights = check_windows("losses", losses, weights, "loss_noise_along")
    count, total = (weights > 0).sum(axis=1), weights.sum(axis=1)
    means = (losses * weights).sum(axis=1) / total
    # sum of n_i (l_i - mean)^2 has the mean (k - 1) v, with v the variance of one example: each loss has v / n_i
    spread = (weights * (losses - means[:, None]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        example = running_mean(np.where(count > 1, spread / (count - 1), np.nan), smoothing)
    return LossNoise(np.sqrt(example * count / total), successive_std(means, smoothing), np.sqrt(example / total))


def successive_std(values, smoothing: float = 0.95) -> np.ndarray:
    """The scatter of a series that changes slowly: the root of the running mean of a sixth of its squared bends.

    The bend v[i] - 2 v[i-1] + v[i-2] of independent values has six times their variance, and a straight slope has
    none: so a falling loss is not taken for a noisy one (Gasser, Sroka and Jennen-Steinmetz 1986, "Residual variance
    and residual pattern in nonlinear regression").

    Args:
        values: shape (n,).
        smoothing: of the running mean, 0 (none) to below 1.

    Returns:
        Shape (n,), the first two NaN.

    Example:
        >>> successive_std([5.0, 4.0, 3.0, 5.0], smoothing=0.0).round(3)
        array([  nan,   nan, 0.   , 1.225])
    """
    values = np.asarray(values, np.float64)
    bends = np.diff(values, n=2) ** 2 / 6
    return np.sqrt(running_mean(np.concatenate([np.full(len(values) - len(bends), np.nan), bends]), smoothing))


def running_mean(values, smoothing: float) -> np.ndarray:
    """The exponential running mean, without the usual pull towards 0 at the start.

    Args:
        values: shape (n,); those that are not finite are passed over.
        smoothing: 0 (none) to below 1: how much of the mean so far is kept.

    Example:
        >>> running_mean([4.0, 2.0, np.nan], smoothing=0.5).round(2)
        array([4.  , 2.67, 2.67])
    """
    _check_smoothing(smoothing)
    values = np.asarray(values, np.float64)
    means, mean, weight = np.full(len(values), np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if math.isfinite(value):
            mean = smoothing * mean + (1 - smoothing) * value
            weight = smoothing * weight + (1 - smoothing)
        if weight:
            means[i] = mean / weight
    return means


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
            raise ValueError(
                f"gradient_variance needs 2 gradients or more, or full_gradient. Received: {len(gradients)}"
            )
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


def check_windows(name: str, values, weights, caller: str) -> tuple[np.ndarray, np.ndarray]:
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


def _std_interval(samples: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a standard deviation, from the samples' own fourth moment."""
    n, squares = len(samples), (samples - samples.mean()) ** 2
    variance = squares.sum() / (n - 1)
    if variance == 0:
        return 0.0, 0.0
    excess = max((squares**2).mean() / variance**2 - (n - 3) / (n - 1), 2 / n)
    half = Z * math.sqrt(excess / n) / 2
    return float(math.sqrt(variance) * math.exp(-half)), float(math.sqrt(variance) * math.exp(half))

"""A toy problem that answers at once: noisy gradient descent on a two-dimensional quadratic, in
NumPy alone.

The browser repeats its arithmetic (one_update.js).

The loss is L(w) = (h1 w1^2 + h2 w2^2) / 2. The gradient of a micro-batch is the true gradient h w
plus noise of standard deviation s in each direction. A window averages k of them, so its noise has
standard deviation s / sqrt(k). With the learning rate r, the descent w <- w - r g does not converge
to 0. The variance v of w in each direction becomes stationary when v = (1 - r h)^2 v + r^2 s^2 / k,
which gives

    variance of w = r s^2 / (k h (2 - r h))      and      mean loss = sum over directions of  r s^2 / (2 k (2 - r h))

This mean loss is the noise floor. Doubling k halves it; halving the learning rate nearly halves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab import _checks

CURVATURE = np.array([0.4, 1.6])  # h: the valley is steeper in one direction
START = np.array([-4.0, 2.2])
LEARNING_RATE = 0.3
NOISE = 2.0  # s
UPDATES = 60
LOOKED_AT = 2  # the update whose gradients are drawn at first
MOST = 100  # micro-batches of a window
# The noise is a whole number of these, so that two bytes carry it to the browser exactly.
UNIT = 2.0**-12


@dataclass(frozen=True)
class Descent:
    """A descent on the quadratic.

    Attributes:
        path: the weights before each update and after the last, shape (updates + 1, 2).
        losses: the losses at these weights, shape (updates + 1,).
        gradients: the gradients of the micro-batches of the update that is drawn, shape (k, 2).
        looked_at: the index of that update in `path`.
        floor: the noise floor, in closed form.
    """

    path: np.ndarray
    losses: np.ndarray
    gradients: np.ndarray
    looked_at: int
    floor: float

    @property
    def mean(self) -> np.ndarray:
        """The mean gradient of the update that is drawn, shape (2,)."""
        return self.gradients.mean(axis=0)


def noise_floor(
    accumulation_steps: int, learning_rate: float = LEARNING_RATE, noise: float = NOISE
) -> float:
    """The stationary mean loss of the descent, in closed form.

    Args:
        accumulation_steps: k, the micro-batches of a window.
        learning_rate: the learning rate, below 1.25.
        noise: the standard deviation of a micro-batch's gradient in each direction.

    >>> round(noise_floor(1) / noise_floor(16), 6)
    16.0
    """
    _check(accumulation_steps, learning_rate, noise)
    return float(
        (
            learning_rate * noise**2 / (2 * accumulation_steps * (2 - learning_rate * CURVATURE))
        ).sum()
    )


def draws(updates: int = UPDATES, seed: int = 0) -> np.ndarray:
    """The noise of each micro-batch, standard normal, in units of `UNIT`: int16, shape (updates,
    MOST, 2)."""
    return np.rint(np.random.default_rng(seed).normal(size=[updates, MOST, 2]) / UNIT).astype(
        np.int16
    )


def descend(
    accumulation_steps: int,
    learning_rate: float = LEARNING_RATE,
    noise: float = NOISE,
    updates: int = UPDATES,
    seed: int = 0,
    start: Sequence[float] | np.ndarray = START,
) -> Descent:
    """Descend with windows of noisy gradients.

    Args:
        accumulation_steps: k, the micro-batches of a window, at most `MOST`. A larger window has
            the micro-batches of a smaller one, and more.
        learning_rate: the learning rate, below 1.25. From there on the steep direction diverges.
        noise: the standard deviation of a micro-batch's gradient in each direction.
        updates: the number of updates.
        seed: the seed of the noise. The same seed gives the same noise, whatever the learning rate.
        start: the weights to start with, shape (2,).

    Raises:
        ValueError: an argument is not allowed.
    """
    _check(accumulation_steps, learning_rate, noise)
    if accumulation_steps > MOST:
        raise ValueError(
            f"accumulation_steps must be at most {MOST} in the toy. Received: {accumulation_steps}"
        )
    _checks.positive_integer("updates", updates)
    _checks.natural_number("seed", seed)
    drawn = noise * UNIT * draws(updates, seed)[:, :accumulation_steps]
    points = [np.asarray(start, float)]
    looked_at = min(LOOKED_AT, updates - 1)
    for each in drawn:
        points.append(points[-1] - learning_rate * (CURVATURE * points[-1] + each.mean(axis=0)))
    path = np.array(points)
    return Descent(
        path=path,
        losses=(CURVATURE * path**2).sum(axis=1) / 2,
        gradients=CURVATURE * path[looked_at] + drawn[looked_at],
        looked_at=looked_at,
        floor=noise_floor(accumulation_steps, learning_rate, noise),
    )


def describe(descent: Descent) -> str:
    """What a drawing of a descent shows, for readers who cannot see it."""
    k = len(descent.gradients)
    spread = np.linalg.norm(descent.gradients - descent.mean, axis=1).mean() if k > 1 else 0.0
    return (
        f"Toy: {k} micro-batch gradients, on average {spread:.1f} away from their mean of length "
        f"{np.linalg.norm(descent.mean):.1f}; the loss settles near {descent.floor:.3f}."
    )


def _check(accumulation_steps: int, learning_rate: float, noise: float) -> None:
    _checks.positive_integer("accumulation_steps", accumulation_steps)
    _checks.positive_number("learning_rate", learning_rate)
    _checks.positive_number("noise", noise)
    limit = 2 / CURVATURE.max()
    if learning_rate >= limit:
        raise ValueError(
            f"learning_rate must be below {limit:g}, or the toy diverges. Received: "
            f"{learning_rate!r}"
        )

"""A toy problem that answers at once: noisy gradient descent on a two-dimensional quadratic, in
NumPy alone.

The browser repeats its arithmetic (one_update.js); here it is drawn for pages without widgets.

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
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gradlab import _checks
from gradlab.lab.figures import style
from gradlab.lab.figures.style import FAINT, STYLES

CURVATURE = np.array([0.4, 1.6])  # h: the valley is steeper in one direction
START = np.array([-4.0, 2.2])
LEARNING_RATE = 0.3
NOISE = 2.0  # s
UPDATES = 60
LOOKED_AT = 2  # the update whose gradients are drawn at first
MOST = 100  # micro-batches of a window
# The noise is a whole number of these, so that two bytes carry it to the browser exactly.
UNIT = 2.0**-12
# of a picture: width and height in inches, pixels an inch
SIZE = (3.4, 2.6)
DOTS = 130


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


def picture(descent: Descent) -> tuple[bytes, str]:
    """A descent as a PNG image, and its text alternative."""
    return style.to_png(draw(descent), compression=1), describe(descent)


def draw(descent: Descent) -> Figure:
    """The picture of a descent: the path, the negative gradients as arrows, and the loss."""
    figure = Figure(figsize=SIZE, dpi=DOTS)
    valley, losses = figure.subplots(1, 2, width_ratios=(3, 2), gridspec_kw={"wspace": 0.34})
    _draw_background(figure, valley, losses)
    draw_descent(valley, losses, descent)
    return figure


def describe(descent: Descent) -> str:
    """The text alternative of a descent's picture."""
    k = len(descent.gradients)
    spread = np.linalg.norm(descent.gradients - descent.mean, axis=1).mean() if k > 1 else 0.0
    return (
        f"Toy: {k} micro-batch gradients, on average {spread:.1f} away from their mean of length "
        f"{np.linalg.norm(descent.mean):.1f}; the loss settles near {descent.floor:.3f}."
    )


def _draw_background(figure: Figure, valley: Axes, losses: Axes) -> None:
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.17, top=0.88)
    angle = np.linspace(0, 2 * np.pi, 60)
    for level in (0.5, 2, 5, 9):
        radii = np.sqrt(2 * level / CURVATURE)
        valley.plot(
            radii[0] * np.cos(angle), radii[1] * np.sin(angle), color="#bbbbbb", linewidth=0.8
        )
    valley.set(
        xlim=(-6.5, 5.5),
        ylim=(-4.5, 4.5),
        xticks=[],
        yticks=[],
        xlabel="weight 1",
        ylabel="weight 2",
    )
    losses.set(
        xlabel="updates", yscale="log", ylim=(3e-3, 20), xlim=(-3, UPDATES + 3), xticks=[0, UPDATES]
    )
    losses.set_yticks([0.01, 0.1, 1, 10], labels=["0.01", "0.1", "1", "10"])
    losses.yaxis.set_minor_locator(NullLocator())
    valley.set_title("gradients, mean, path", fontsize=8, loc="left")
    losses.set_title("loss, floor (--)", fontsize=8, loc="left")
    for axes in (valley, losses):
        axes.tick_params(labelsize=7)
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)


def draw_descent(valley: Axes, losses: Axes, descent: Descent) -> list[Any]:
    """Draw a descent on the two axes of its picture.

    Args:
        valley: the axes for the path, the negative gradients as thin arrows, and their mean as a
            thick arrow.
        losses: the axes for the loss and the noise floor.
        descent: what to draw.

    Returns:
        The matplotlib artists, from back to front: path, arrows of the micro-batches, arrow of the
        mean, loss, floor.
    """
    path = STYLES[0]["color"]
    mean = STYLES[1]["color"]
    at = descent.path[descent.looked_at]
    tails = np.tile(at, [len(descent.gradients), 1])
    arrows = {"angles": "xy", "scale_units": "xy", "scale": 2.0, "headwidth": 4}
    return [
        *valley.plot(*descent.path.T, color=path, linewidth=1, marker=".", markersize=3),
        valley.quiver(*tails.T, *-descent.gradients.T, color=FAINT, **arrows, width=0.006),
        valley.quiver(*at, *-descent.mean, color=mean, **arrows, width=0.016),
        *losses.plot(np.maximum(descent.losses, 1e-6), color=path, linewidth=1),
        losses.axhline(descent.floor, color=mean, linestyle="--", linewidth=1.5),
    ]


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

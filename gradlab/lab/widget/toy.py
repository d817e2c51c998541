"""A toy that answers at once: noisy descent on a two-dimensional quadratic, in NumPy alone.

The loss is L(w) = (h1 w1^2 + h2 w2^2) / 2. A micro-batch's gradient is the true one, h w, plus noise of standard
deviation s in each direction; a window averages k of them, so its noise is s / sqrt(k). Descent w <- w - r g never
comes to rest at 0: it settles where the noise that each update brings is what the descent takes out. In each direction

    variance of w = r s^2 / (k h (2 - r h))        so        mean loss = sum over directions of  r s^2 / (2 k (2 - r h))

the noise floor (from v = (1 - r h)^2 v + r^2 s^2 / k). Halve it: double k, or halve the learning rate.
"""

import threading
from dataclasses import dataclass

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gradlab import _checks
from gradlab.lab.figures import style
from gradlab.lab.figures.style import FAINT, STYLES

CURVATURE = np.array([0.4, 1.6])  # h: a valley, steeper one way
START = np.array([-4.0, 2.2])
UPDATES = 60


@dataclass(frozen=True)
class Descent:
    """A descent on the quadratic.

    Attributes:
        path: the weights before each update, and after the last; shape (updates + 1, 2).
        losses: of these weights, shape (updates + 1,).
        gradients: the micro-batches' gradients of the update that is looked at, shape (k, 2).
        looked_at: the number of that update.
        floor: the mean loss that it settles at, in closed form.
    """

    path: np.ndarray
    losses: np.ndarray
    gradients: np.ndarray
    looked_at: int
    floor: float

    @property
    def mean(self) -> np.ndarray:
        """The mean gradient of the update that is looked at."""
        return self.gradients.mean(axis=0)


def noise_floor(accumulation_steps: int, learning_rate: float = 0.3, noise: float = 2.0) -> float:
    """The mean loss that the descent settles at.

    >>> round(noise_floor(1) / noise_floor(16), 6)
    16.0
    """
    _check(accumulation_steps, learning_rate, noise)
    return float((learning_rate * noise**2 / (2 * accumulation_steps * (2 - learning_rate * CURVATURE))).sum())


def descend(
    accumulation_steps: int, learning_rate: float = 0.3, noise: float = 2.0, updates: int = UPDATES, seed: int = 0
) -> Descent:
    """Descends with windows of noisy gradients. The same seed draws the same noise whatever the learning rate.

    Args:
        accumulation_steps: k, the micro-batches of a window.
        learning_rate: below 1.25, where the steep direction begins to diverge.
        noise: the standard deviation of a micro-batch's gradient in each direction.
        updates: how many.
        seed: of the noise.
    """
    _check(accumulation_steps, learning_rate, noise)
    _checks.positive_integer("updates", updates)
    _checks.natural_number("seed", seed)
    drawn = noise * np.random.default_rng(seed).normal(size=[updates, accumulation_steps, 2])
    path, looked_at = [START], min(2, updates - 1)
    for each in drawn:
        path.append(path[-1] - learning_rate * (CURVATURE * path[-1] + each.mean(axis=0)))
    path = np.array(path)
    return Descent(
        path=path,
        losses=(CURVATURE * path**2).sum(axis=1) / 2,
        gradients=CURVATURE * path[looked_at] + drawn[looked_at],
        looked_at=looked_at,
        floor=noise_floor(accumulation_steps, learning_rate, noise),
    )


class Scene:
    """The toy's picture: path, gradients as arrows (against them it goes), loss. What never changes is drawn once.

    Drawing all of it anew for each step of a slider would take several times as long.
    """

    def __init__(self, size: tuple[float, float] = (4.2, 3.0)):
        self._drawing = threading.Lock()
        self._figure = Figure(figsize=size, dpi=100)
        self._valley, self._losses = self._figure.subplots(1, 2, width_ratios=(3, 2), gridspec_kw={"wspace": 0.34})
        _draw_ground(self._figure, self._valley, self._losses)
        self._canvas = FigureCanvasAgg(self._figure)
        self._canvas.draw()
        self._ground = self._canvas.copy_from_bbox(self._figure.bbox)

    def picture(self, descent: Descent) -> tuple[bytes, str]:
        """The picture as PNG, and what it shows in words."""
        with self._drawing:
            self._canvas.restore_region(self._ground)
            for artist in _draw_descent(self._valley, self._losses, descent):
                artist.axes.draw_artist(artist)
                artist.remove()
            return style.pixels_to_png(self._canvas.buffer_rgba(), compression=1), words(descent)


def words(descent: Descent) -> str:
    """What a descent's picture shows."""
    k = len(descent.gradients)
    spread = np.linalg.norm(descent.gradients - descent.mean, axis=1).mean() if k > 1 else 0.0
    return (
        f"Toy: {k} micro-batch gradients scatter by {spread:.1f} around their mean of length "
        f"{np.linalg.norm(descent.mean):.1f}; the loss settles near {descent.floor:.3f}."
    )


def _draw_ground(figure: Figure, valley, losses) -> None:
    """The valley's contours, the axes and their words."""
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.17, top=0.88)
    angle = np.linspace(0, 2 * np.pi, 60)
    for level in (0.5, 2, 5, 9):
        radii = np.sqrt(2 * level / CURVATURE)
        valley.plot(radii[0] * np.cos(angle), radii[1] * np.sin(angle), color="#bbbbbb", linewidth=0.8)
    valley.set(xlim=(-6.5, 5.5), ylim=(-4.5, 4.5), xticks=[], yticks=[], xlabel="weight 1", ylabel="weight 2")
    losses.set(xlabel="updates", yscale="log", ylim=(3e-3, 20), xlim=(-3, UPDATES + 3), xticks=[0, UPDATES])
    losses.set_yticks([0.01, 0.1, 1, 10], labels=["0.01", "0.1", "1", "10"])
    losses.yaxis.set_minor_locator(NullLocator())
    valley.set_title("toy: gradients, their mean, the path", fontsize=8, loc="left")
    losses.set_title("loss, noise floor (--)", fontsize=8, loc="left")
    for axes in (valley, losses):
        axes.tick_params(labelsize=7)
        axes.xaxis.label.set_size(8)
        axes.yaxis.label.set_size(8)


def _draw_descent(valley, losses, descent: Descent) -> list:
    """What a descent adds to the axes: the artists, from back to front."""
    path, mean = STYLES[0]["color"], STYLES[1]["color"]
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


def _check(accumulation_steps, learning_rate, noise) -> None:
    _checks.positive_integer("accumulation_steps", accumulation_steps)
    _checks.positive_number("learning_rate", learning_rate)
    _checks.positive_number("noise", noise)
    limit = 2 / CURVATURE.max()
    if learning_rate >= limit:
        raise ValueError(f"learning_rate must be below {limit:g}, or the toy diverges. Received: {learning_rate!r}")

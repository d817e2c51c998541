"""Eight bugs of accumulation loops on one small problem, in NumPy alone: what `BugLab` computes.

The model has one weight w and predicts w x. An example is a text of one or more tokens (x, y). The
loss of a batch is the mean of (w x - y)^2 / 2 over its tokens, so its gradient is the mean of (w x
- y) x. With normalization, x is replaced by (x - mean) / sqrt(variance + 0.001) over the batch. The
large batch computes a window's gradient at once; the loop adds up the gradients of its
micro-batches. Without a bug both train the same weight.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from gradlab import _checks
from gradlab.lab.widget.course.bugs import BUGS, EVERYTHING, MEASURES, STEPS, Settings

EXAMPLES = 2  # of a micro-batch
# windows: of an epoch
EPOCHS = 2
WINDOWS = 3
# tokens of a text: at most, and of each text when all are equal
MOST = 8
EQUAL = 4
# learning rate, largest gradient with clipping, micro-batches at once with bug 8
RATE = 0.1
LIMIT = 3.0
IN_FLIGHT = 10
# Adam's constants; the last one is added to a variance
BETA1 = 0.9
BETA2 = 0.999
TINY = 1e-12
FLOOR = 1e-3


class MicroBatch(NamedTuple):
    """The inputs and labels of its tokens, and the number of texts that they belong to."""

    x: np.ndarray
    y: np.ndarray
    texts: int


class Evidence(NamedTuple):
    """What an experiment shows.

    Attributes:
        settings: what was switched on.
        measure: "weight" or "memory".
        loop: of the loop: the weight at the beginning and after each window, or the number of texts
            in memory at the beginning of a full window and after each of its forward and backward
            passes.
        large: the same of the large batch.
        micro_batches: the number of micro-batches of each window.
    """

    settings: Settings
    measure: str
    loop: np.ndarray
    large: np.ndarray
    micro_batches: list[int]

    @property
    def equal(self) -> bool:
        """Whether the weights agree to 1e-5, or the loop holds at most one micro-batch in
        memory."""
        if self.measure == "memory":
            return bool(self.loop.max() <= EXAMPLES)
        return bool(np.allclose(self.loop, self.large, rtol=0, atol=1e-5))


def experiment(
    settings: Settings, measure: str = "weight", bug: str | None = None, seed: int = 0
) -> Evidence:
    """Train with the loop and with the large batch.

    Args:
        settings: what is switched on.
        measure: "weight" or "memory".
        bug: a name of `BUGS`, or None for the right loop.
        seed: the seed of the data.

    Raises:
        ValueError: an argument is not allowed.

    >>> right = experiment(EVERYTHING)
    >>> bool(np.abs(right.loop - right.large).max() < 1e-12)
    True
    """
    _checks.one_of("measure", measure, MEASURES)
    _checks.natural_number("seed", seed)
    if bug is not None:
        _checks.one_of("bug", bug, BUGS)
    windows = data(settings, seed)
    sizes = [len(window) for window in windows]
    if measure == "memory":
        loop = _held(settings.k, IN_FLIGHT if bug == "in_flight" else 1, EXAMPLES)
        return Evidence(settings, measure, loop, _held(1, 1, settings.k * EXAMPLES), sizes)
    return Evidence(
        settings, measure, _loop(windows, settings, bug), _large_batch(windows, settings), sizes
    )


def is_clear(seed: int) -> bool:
    """Whether the experiments on these data tell all bugs apart, by differences that a reader can
    see."""

    def path(settings: Settings, bug: str | None) -> np.ndarray:
        return experiment(settings, bug=bug, seed=seed).loop

    wrong = [bug for bug in BUGS if bug != "in_flight"]
    alone = [
        np.abs(path(BUGS[bug].shown_by, bug) - path(BUGS[bug].shown_by, None)).max()
        for bug in wrong
    ]
    together = [
        np.abs(one - other).max()
        for one, other in combinations([path(EVERYTHING, b) for b in [None, *wrong]], 2)
    ]
    return bool(min(alone) >= 0.03 and min(together) >= 0.01)


def data(settings: Settings, seed: int = 0) -> list[list[MicroBatch]]:
    """The windows of all epochs, each a list of micro-batches. An epoch repeats the one before."""
    rng = np.random.default_rng(seed)
    slope = rng.choice([-1, 1]) * rng.uniform(2, 3)
    full = settings.k * EXAMPLES
    texts = WINDOWS * full
    if settings.ragged and settings.k > 1:
        texts -= full - (settings.k // 2 * EXAMPLES - 1)
    elif settings.ragged:
        texts -= 1
    most = WINDOWS * STEPS[-1] * EXAMPLES
    tokens = rng.integers(1, MOST + 1, most) if settings.unequal else np.full(most, EQUAL)
    x = rng.normal(0.3, 1.0, [most, MOST])
    y = slope * x + rng.normal(0, 3.0, [most, 1]) + rng.normal(0, 0.5, [most, MOST])

    def cut(first: int) -> MicroBatch:
        texts_here = range(first, min(first + EXAMPLES, texts))
        xs, ys = (
            np.concatenate([values[text, : tokens[text]] for text in texts_here])
            for values in (x, y)
        )
        return MicroBatch(xs, ys, len(texts_here))

    micro_batches = [cut(first) for first in range(0, texts, EXAMPLES)]
    return EPOCHS * [
        micro_batches[at : at + settings.k] for at in range(0, len(micro_batches), settings.k)
    ]


class _Weight:
    """The weight and its optimizer."""

    def __init__(self, settings: Settings, updates: int):
        self.value = 0.0
        self._settings = settings
        self._updates = updates
        self._mean = self._square = 0.0

    def apply(self, gradient: float, count: int) -> None:
        """Make an update; `count` is what the schedule and Adam take for the number of updates
        before it."""
        rate = RATE * max(0.0, 1 - count / self._updates) if self._settings.schedule else RATE
        if self._settings.optimizer == "SGD":
            self.value -= rate * gradient
            return
        self._mean += (1 - BETA1) * (gradient - self._mean)
        self._square += (1 - BETA2) * (gradient**2 - self._square)
        mean = self._mean / (1 - BETA1 ** (count + 1))
        square = self._square / (1 - BETA2 ** (count + 1))
        self.value -= rate * mean / (np.sqrt(square) + TINY)


def _large_batch(windows: list[list[MicroBatch]], settings: Settings) -> np.ndarray:
    weight = _Weight(settings, len(windows))
    path = [0.0]
    for update, window in enumerate(windows):
        x, y = (np.concatenate([getattr(part, name) for part in window]) for name in "xy")
        gradient = _gradient(weight.value, _normalized(x, x) if settings.normalization else x, y)
        weight.apply(_clipped(gradient) if settings.clipping else gradient, update)
        path.append(weight.value)
    return np.array(path)


def _loop(windows: list[list[MicroBatch]], settings: Settings, bug: str | None) -> np.ndarray:
    weight = _Weight(settings, len(windows))
    path = [0.0]
    updates = seen = 0
    for window in windows:
        seen += len(window)
        if bug != "tail_dropped" or len(window) == settings.k:
            gradient = _window_gradient(weight.value, window, settings, bug)
            weight.apply(gradient, seen - 1 if bug == "clocks" else updates)
            updates += 1
        path.append(weight.value)
    return np.array(path)


def _window_gradient(
    w: float, window: list[MicroBatch], settings: Settings, bug: str | None
) -> float:
    total = 0.0
    divisor = 0
    # Statistics of inputs need no weights, so they can come first
    whole = np.concatenate([part.x for part in window])
    for part in window:
        x = (
            _normalized(part.x, part.x if bug == "batch_norm" else whole)
            if settings.normalization
            else part.x
        )
        gradient = _gradient(w, x, part.y)
        if settings.clipping and bug == "clip_each":
            gradient = _clipped(gradient)
        size = part.texts if bug == "mean_of_means" else len(part.x)
        total += size * gradient
        divisor += size
    mean = total / divisor
    if bug == "sum":
        mean *= len(window)
    if bug == "tail_by_k":
        mean *= len(window) / settings.k
    return _clipped(mean) if settings.clipping and bug != "clip_each" else mean


def _gradient(w: float, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((w * x - y) * x))


def _normalized(x: np.ndarray, over: np.ndarray) -> np.ndarray:
    return (x - over.mean()) / np.sqrt(over.var() + FLOOR)


def _clipped(gradient: float) -> float:
    return float(np.clip(gradient, -LIMIT, LIMIT))


def _held(micro_batches: int, in_flight: int, texts: int) -> np.ndarray:
    """The texts in memory at the beginning of a window and after each of its passes."""
    begun = done = 0
    held = [0]
    while done < micro_batches:
        if begun < micro_batches and begun - done < in_flight:
            begun += 1
        else:
            done += 1
        held.append((begun - done) * texts)
    return np.array(held)

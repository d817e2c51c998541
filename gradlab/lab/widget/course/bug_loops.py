"""Eight bugs of accumulation loops on one small problem, in NumPy alone: what `BugLab` computes.

The model has one weight w and predicts w x. An example is a text of one or more tokens (x, y). The
loss of a batch is the mean of (w x - y)^2 / 2 over its tokens, so its gradient is the mean of (w x
- y) x. With normalization, x is replaced by (x - mean) / sqrt(variance + 0.001) over the batch. The
large batch computes a window's gradient at once; the loop adds up the gradients of its
micro-batches. Without a bug both train the same weight. Both follow the rules of
`gradlab.auditing`, which knows five of the bugs. It has none for the others: bugs 4 and 7 change
what a micro-batch counts and which inputs it has, and bug 8 changes the memory only.
"""

from dataclasses import replace
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from gradlab import _checks
from gradlab.auditing.problem import Problem, windows
from gradlab.auditing.rules import LoopRules, trajectory
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
FLOOR = 1e-3  # added to a variance


class MicroBatch(NamedTuple):
    """The inputs and labels of texts, and which of them are tokens and not padding: arrays of the
    shape (texts, length)."""

    x: np.ndarray
    y: np.ndarray
    mask: np.ndarray


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
    epoch = data(settings, seed)
    sizes = EPOCHS * [len(window) for window in epoch]
    if measure == "memory":
        loop = _held(settings.k, IN_FLIGHT if bug == "in_flight" else 1, EXAMPLES)
        return Evidence(settings, measure, loop, _held(1, 1, settings.k * EXAMPLES), sizes)
    right = _problem(epoch, settings)
    large = replace(right, k=1, epochs=[windows(right)])
    rules = LoopRules(**BUGS[bug].rules) if bug else LoopRules()
    return Evidence(
        settings,
        measure,
        _path(_problem(epoch, settings, bug), rules, sizes),
        _path(large, LoopRules(), sizes),
        sizes,
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
    """The windows of an epoch, each a list of micro-batches. All epochs have the same ones."""
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

    mask = np.arange(MOST) < tokens[:, np.newaxis]
    micro_batches = [
        MicroBatch(*(each[:texts][first : first + EXAMPLES] for each in (x, y, mask)))
        for first in range(0, texts, EXAMPLES)
    ]
    return [micro_batches[at : at + settings.k] for at in range(0, len(micro_batches), settings.k)]


def _problem(epoch: list[list[MicroBatch]], settings: Settings, bug: str | None = None) -> Problem:
    """The training of the loop, with what a bug changes beside the rules."""
    updates = EPOCHS * len(epoch)
    if settings.normalization:
        epoch = [_normalized(window, bug == "batch_norm") for window in epoch]
    micro_batches: list[tuple] = list(chain(*epoch))
    return Problem(
        "one weight",
        {"w": np.zeros(1)},
        EPOCHS * [micro_batches],
        settings.k,
        settings.optimizer.lower(),
        lambda update: RATE * max(0, 1 - update / updates) if settings.schedule else RATE,
        clip_norm=LIMIT if settings.clipping else None,
        average_over="examples" if bug == "mean_of_means" else "tokens",
    )


def _normalized(window: list[MicroBatch], alone: bool) -> list[MicroBatch]:
    """A window whose inputs are normalized by its statistics, or by those of each micro-batch
    alone. Statistics of inputs need no weights, so they can come before the training."""
    found = []
    for part in window:
        over = np.concatenate([each.x[each.mask] for each in ([part] if alone else window)])
        x = (part.x - over.mean()) / np.sqrt(over.var() + FLOOR)
        found.append(MicroBatch(x, part.y, part.mask))
    return found


def _path(problem: Problem, rules: LoopRules, sizes: list[int]) -> np.ndarray:
    """The weight at the beginning and after each window, of so many micro-batches."""
    updates = trajectory(problem, rules, _gradient)
    path = [0.0]
    for size in sizes:
        is_dropped = rules.tail == "dropped" and size < problem.k
        path.append(path[-1] if is_dropped else next(updates).item())
    return np.array(path)


def _gradient(w: np.ndarray, microbatch: tuple) -> np.ndarray:
    x, y, mask = microbatch
    return np.array([np.average((w * x - y) * x, weights=mask)])


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

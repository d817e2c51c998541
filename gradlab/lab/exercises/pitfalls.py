"""Checkers for the exercises of notebook 07."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_close
from gradlab.lab.widget.course.bug_loops import Evidence, experiment
from gradlab.lab.widget.course.bugs import BUGS, Settings

MOST = 4  # experiments that an answer to the last exercise may use for a loop
DATA = (701, 704, 705)  # seeds of data for which `bug_loops.is_clear` holds


@exercise
def updates_until_zero(answer: Any) -> None:
    """A function: (steps of the schedule, k) -> how many updates have a learning rate above 0."""
    for steps, k in ((1000, 8), (10, 5), (1000, 1), (10, 4), (97, 16), (5, 8)):
        value = answer(steps, k)
        hints = (
            (steps, "which would be right if the schedule counted updates. What does it count?"),
            (
                steps * k,
                "which is later than planned. Is the schedule slower than planned, or faster?",
            ),
            (steps / k, "and should be a whole number: an update that was not made does not count"),
            (
                -(-steps // k),
                "which is one too many: its last micro-batch is past the end of the schedule",
            ),
        )
        hint = _matching(value, hints, "and should not be: what is the count at the first update?")
        require_close(
            value, steps // k, f"for {steps} steps and k = {k}, the number of updates", hint
        )


def _matching(value, hints: tuple, otherwise: str = "and should not be") -> str:
    for wrong, hint in hints:
        if np.shape(value) == np.shape(wrong) and np.allclose(np.asarray(value, np.float64), wrong):
            return hint
    return otherwise


@exercise
def train(answer: Any) -> None:
    """A function: an epoch of training, (microbatches, w, k, learning_rate) -> the last w."""
    constant = lambda update: 0.125  # noqa: E731

    def trained(sizes, k, learning_rate):
        """The student's weight, that of the large batch, and the updates whose learning rates were
        requested."""
        asked = []

        def recorded(update):
            asked.append(int(update))
            return learning_rate(update)

        value = answer(_microbatches(sizes), 1.0, k, recorded)
        return value, _large_batches(sizes, k, learning_rate), asked

    value, wanted, _ = trained([2, 2, 2, 2], 2, constant)
    require_close(
        value,
        wanted,
        "with two full windows and a constant rate, w",
        "although it was right before you changed the code",
    )

    value, wanted, asked = trained([2, 2, 2, 2], 2, lambda update: 0.125 / (1 + update))
    require(
        asked == [0, 1],
        f"two updates, counted from 0, asked for the learning rates of {_listed(asked)}",
    )
    require_close(value, wanted, "with a rate that falls, w")

    before = _large_batches([2, 2, 2, 2], 2, constant)
    value, wanted, asked = trained([2, 2, 2, 2, 2], 2, constant)
    hints = ((before, "as if there were no fifth micro-batch"),)
    require_close(
        value,
        wanted,
        "with five micro-batches and k = 2, w",
        _matching(value, hints, "look at the last window"),
    )
    require(
        asked == [0, 1, 2],
        f"five micro-batches with k = 2 asked for the learning rates of {_listed(asked)}",
    )

    value, wanted, _ = trained([4, 4, 2], 3, constant)
    hint = "look at a window of 4, 4 and 2 examples: what is the weight of each micro-batch?"
    require_close(value, wanted, "with micro-batches of 4, 4 and 2, and k = 3, w", hint)
    for sizes, k in (([4, 4, 4, 1], 2), ([3, 3, 1], 5), ([1], 4), ([5, 2, 5, 2, 1], 2)):
        value, wanted, _ = trained(sizes, k, constant)
        require_close(
            value, wanted, f"with micro-batches of {_listed(sizes)} examples, and k = {k}, w"
        )


def _microbatches(sizes) -> list:
    rng = np.random.default_rng(6)
    return [
        (rng.integers(1, 4, size).astype(np.float64), rng.integers(-4, 5, size) / 2)
        for size in sizes
    ]


def _large_batches(sizes, k: int, learning_rate) -> float:
    """The weight after an epoch of large batches, each of k of these micro-batches."""
    microbatches = _microbatches(sizes)
    w = 1.0
    for update, first in enumerate(range(0, len(microbatches), k)):
        x, y = (np.concatenate(column) for column in zip(*microbatches[first : first + k]))
        w -= learning_rate(update) * np.mean((w * x - y) * x)
    return w


def _listed(numbers) -> str:
    words = [str(number) for number in numbers] or ["none"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@exercise
def is_right(answer: Any) -> None:
    """A function: loop -> whether it is right. A loop is a function like `train`."""
    for make, what in _RIGHT:
        verdict = _verdict(answer, make)
        require(verdict is not None, "the function returns nothing yet: return True or False")
        require(
            isinstance(verdict, (bool, np.bool_)), f"return True or False. Received: {verdict!r}"
        )
        require(verdict, f"your check rejects a right loop: {what}")
    passed = [what for loop, what in _BROKEN if _verdict(answer, loop)]
    if passed:
        more = f" (and {len(passed) - 1} more)" if len(passed) > 1 else ""
        require(False, f"your check accepts a wrong loop: {passed[0]}{more}")


def _verdict(answer, loop):
    """The result of the student's check; a failed assertion counts as False."""
    try:
        return answer(loop)
    except AssertionError:
        return False


def _loop(
    sizes: Callable = len,
    clip: float = np.inf,
    tail: str = "update",
    clock: str = "updates",
    dtype: type = np.float64,
) -> Callable:
    """A training loop like that of exercise 2.

    Args:
        sizes: the weight of a micro-batch, from its inputs.
        clip: the largest gradient of a micro-batch.
        tail: "update", "drop", or "divide" to divide by k micro-batches.
        clock: what the learning rate counts: "updates" or "micro-batches".
        dtype: the type of the sums.
    """

    def train(microbatches, w, k, learning_rate):
        microbatches = list(microbatches)
        updates = 0
        for first in range(0, len(microbatches), k):
            window = microbatches[first : first + k]
            if len(window) < k and tail == "drop":
                break
            total = weight = dtype(0)
            for x, y in window:
                x = np.asarray(x, dtype)
                y = np.asarray(y, dtype)
                total += dtype(sizes(x)) * np.clip(np.mean((dtype(w) * x - y) * x), -clip, clip)
                weight += dtype(sizes(x))
            factor = len(window) / k if tail == "divide" else 1
            count = first + len(window) - 1 if clock == "micro-batches" else updates
            w = w - learning_rate(count) * factor * float(total / weight)
            updates = updates + 1
        return w

    return train


def _summing(microbatches, w, k, learning_rate):
    """A loop that adds up the mean gradients of a window and does not divide."""
    for update, first in enumerate(range(0, len(microbatches), k)):
        w = w - learning_rate(update) * sum(
            np.mean((w * x - y) * x) for x, y in microbatches[first : first + k]
        )
    return w


_RIGHT = (
    (_loop(), "it weights by examples, and updates at the end of the epoch"),
    (
        _loop(dtype=np.float32),
        "it sums in float32, so its last digits differ. Is your comparison too strict?",
    ),
)
_BROKEN = (
    (_summing, "it adds the gradients of a window and does not divide"),
    (
        _loop(sizes=lambda x: 1),
        "it weights all micro-batches equally. Try micro-batches of different sizes",
    ),
    (
        _loop(tail="drop"),
        "it forgets a window that is not full. Try a number of micro-batches that k does not "
        "divide",
    ),
    (_loop(tail="divide"), "it divides by k in a window that is not full. Try one"),
    (
        _loop(clock="micro-batches"),
        "it counts micro-batches for the learning rate. Try a rate that changes",
    ),
    (_loop(clip=3.0), "it clips the gradient of each micro-batch to 3. Try larger gradients"),
)


@exercise
def detective(answer: Any) -> None:
    """A function: experiment -> the bug's name; an experiment is a function of the settings."""
    for seed in DATA:
        for bug in np.random.default_rng(seed).permutation(list(BUGS)):
            used: list[Evidence] = []
            said = answer(_experiments(str(bug), seed, used))
            require(
                said is not None and said is not ...,
                "the function returns nothing yet: return the name of a bug",
            )
            require(
                isinstance(said, str) and said in BUGS,
                f"return one of {', '.join(BUGS)}. Received: {said!r}",
            )
            require(used, "your function names a bug without an experiment")
            last = used[-1]
            hint = f"the last experiment was {last.settings}, of the {last.measure}"
            require(said == bug, f"your function says {said!r} for a loop with another bug; {hint}")


def _experiments(bug: str, seed: int, used: list[Evidence]) -> Callable[..., Evidence]:
    """The experiments on a loop with this bug, of which each is added to `used`."""

    def run(measure: str = "weight", **settings: Any) -> Evidence:
        require(len(used) < MOST, f"your function runs more than {MOST} experiments on a loop")
        used.append(experiment(Settings(**settings), measure, bug, seed))
        return used[-1]

    return run

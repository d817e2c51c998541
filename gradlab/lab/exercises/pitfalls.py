"""Checkers for the exercises of notebook 07."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_close


@exercise
def window_mean(answer: Any) -> None:
    """A function: (gradients of the micro-batches, their numbers of examples) -> the gradient of the window."""
    value = answer([1.0, 4.0, 10.0], [4, 4, 2])
    require_close(value, 4, "the window's gradient", _about_the_mean(value, [1.0, 4.0, 10.0], [4, 4, 2]))
    gradients = [np.array([3.0, -6.0]), np.array([0.0, 9.0])]
    require_close(answer(gradients, [2, 1]), [2, -1], "for [3, -6] of two examples and [0, 9] of one, the gradient")
    require_close(answer([7.0], [2]), 7, "for a single micro-batch of gradient 7, the gradient")
    kernels = [np.full([2, 3], 1.0), np.full([2, 3], 5.0)]
    require_close(answer(kernels, [3, 1]), np.full([2, 3], 2.0), "for 2 x 3 gradients of ones and fives, the gradient")


def _about_the_mean(value, gradients: list, examples: list) -> str:
    """The second half of the message: names the mistake behind a known wrong mean."""
    wrong = {
        np.sum(gradients): "which is the sum of the three: it was not divided",
        np.mean(gradients): "which gives the two examples of the tail the weight of four",
        np.dot(gradients, examples): "which is a sum over examples: divide it by something",
        np.dot(gradients, examples) / (len(examples) * max(examples)): "which divides by more examples than there were",
        np.dot(gradients, examples)
        / len(examples): "which sums over examples and divides by the number of micro-batches",
    }
    if np.shape(value) != () or np.asarray(value).dtype.kind not in "fiu":
        return "and should be one number"
    near = [hint for number, hint in wrong.items() if np.isclose(value, number)]
    return near[0] if near else "and should be 4: weight each micro-batch by its number of examples"


@exercise
def clipped_mean(answer: Any) -> None:
    """A function: (gradients of equal micro-batches, the largest norm allowed) -> the gradient to apply."""
    pair = [np.array([6.0, 8.0]), np.array([0.0, 0.0])]
    value = answer([part.copy() for part in pair], 6.0)
    hints = (
        ([1.8, 2.4], "which was clipped before the mean was taken"),
        ([3.6, 4.8], "but the mean has length 5, and the limit is 6: do not change a shorter gradient"),
        ([6, 8], "which is a sum"),
    )
    require_close(value, [3, 4], "with a limit of 6, the mean of [6, 8] and [0, 0]", _matching(value, hints))
    value = answer([part.copy() for part in pair], 1.0)
    hints = (
        ([1, 1], "which clips each element and changes the direction. Scale the vector as a whole"),
        ([0.3, 0.4], "which was clipped before the mean was taken"),
        ([3, 4], "which was not clipped"),
    )
    require_close(value, [0.6, 0.8], "with a limit of 1, the mean of [6, 8] and [0, 0]", _matching(value, hints))
    with np.errstate(all="ignore"):
        value = answer([np.array([1.0, -2.0]), np.array([-1.0, 2.0])], 1.0)
    require(np.all(np.isfinite(value)), "two gradients that cancel have a mean of length 0: do not divide by it")
    require_close(value, [0, 0], "the mean of two gradients that cancel")
    kernels = [np.full([2, 2], 3.0), np.full([2, 2], -1.0), np.full([2, 2], 4.0)]
    wanted = np.full([2, 2], 0.5)
    require_close(answer(kernels, 1.0), wanted, "for three 2 x 2 gradients, whose mean has length 4, and a limit of 1")


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
        """The student's weight, that of the large batch, and the updates whose learning rates were requested."""
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
    require(asked == [0, 1], f"two updates, counted from 0, asked for the learning rates of {_listed(asked)}")
    require_close(value, wanted, "with a rate that falls, w")

    before = _large_batches([2, 2, 2, 2], 2, constant)
    value, wanted, asked = trained([2, 2, 2, 2, 2], 2, constant)
    hints = ((before, "as if there were no fifth micro-batch"),)
    require_close(
        value, wanted, "with five micro-batches and k = 2, w", _matching(value, hints, "look at the last window")
    )
    require(asked == [0, 1, 2], f"five micro-batches with k = 2 asked for the learning rates of {_listed(asked)}")

    value, wanted, _ = trained([4, 4, 2], 3, constant)
    hint = "look at a window of 4, 4 and 2 examples: what is the weight of each micro-batch?"
    require_close(value, wanted, "with micro-batches of 4, 4 and 2, and k = 3, w", hint)
    for sizes, k in (([4, 4, 4, 1], 2), ([3, 3, 1], 5), ([1], 4), ([5, 2, 5, 2, 1], 2)):
        value, wanted, _ = trained(sizes, k, constant)
        require_close(value, wanted, f"with micro-batches of {_listed(sizes)} examples, and k = {k}, w")


def _microbatches(sizes) -> list:
    rng = np.random.default_rng(6)
    return [(rng.integers(1, 4, size).astype(np.float64), rng.integers(-4, 5, size) / 2) for size in sizes]


def _large_batches(sizes, k: int, learning_rate) -> float:
    """The weight after an epoch of large batches, each of k of these micro-batches."""
    microbatches, w = _microbatches(sizes), 1.0
    for update, first in enumerate(range(0, len(microbatches), k)):
        x, y = (np.concatenate(column) for column in zip(*microbatches[first : first + k]))
        w -= learning_rate(update) * np.mean((w * x - y) * x)
    return w


def _listed(numbers) -> str:
    words = [str(number) for number in numbers] or ["none"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@exercise
def is_right(answer: Any) -> None:
    """A function: accumulator -> whether it is right. An accumulator is a function: (gradients, examples) -> mean."""
    for make, what in _RIGHT:
        verdict = _verdict(answer, make())
        require(verdict is not None, "the function returns nothing yet: return True or False")
        require(isinstance(verdict, (bool, np.bool_)), f"return True or False. Received: {verdict!r}")
        require(verdict, f"your check rejects a right accumulator: {what}")
    passed = [what for make, what in _BROKEN if _verdict(answer, make())]
    if passed:
        more = f" (and {len(passed) - 1} more)" if len(passed) > 1 else ""
        require(False, f"your check accepts a wrong accumulator: {passed[0]}{more}")


def _verdict(answer, accumulate):
    """The result of the student's check; a failed assertion counts as False."""
    try:
        return answer(accumulate)
    except AssertionError:
        return False


def _weighted(gradients, examples, dtype=np.float64):
    """The right mean, computed in this type."""
    weights = np.asarray(examples, dtype) / np.asarray(sum(examples), dtype)
    return sum(weight * np.asarray(gradient, dtype) for weight, gradient in zip(weights, gradients))


def _running(gradients, examples):
    """The right mean, computed as a running mean over the micro-batches."""
    mean, seen = 0.0, 0
    for gradient, count in zip(gradients, examples):
        seen += count
        mean = mean + (np.asarray(gradient, np.float64) - mean) * (count / seen)
    return mean


def _leaking():
    """An accumulator that is never reset to zero."""
    gradients, examples = [], []

    def accumulate(new_gradients, new_examples):
        gradients.extend(new_gradients)
        examples.extend(new_examples)
        return _weighted(gradients, examples)

    return accumulate


def _without_the_tail(gradients, examples):
    whole = [pair for pair in zip(gradients, examples) if pair[1] == max(examples)]
    return _weighted(*zip(*whole))


def _clipping(gradients, examples):
    lengths = [max(float(np.linalg.norm(gradient)), 1e-12) for gradient in gradients]
    parts = [np.asarray(gradient) * min(1, 3 / length) for gradient, length in zip(gradients, lengths)]
    return _weighted(parts, examples)


_RIGHT = (
    (lambda: _weighted, "it computes the weighted mean"),
    (
        lambda: _running,
        "it keeps a running mean, whose last digits differ. Is your comparison too strict?",
    ),
    (lambda: lambda g, n: _weighted(g, n, np.float32), "it sums in float32. Is your comparison too strict?"),
)
_BROKEN = (
    (
        lambda: lambda g, n: sum(map(np.asarray, g)),
        "it returns the sum. Any window with several micro-batches shows that",
    ),
    (
        lambda: lambda g, n: sum(map(np.asarray, g)) / len(g),
        "it weights all micro-batches equally. Try micro-batches of different sizes",
    ),
    (
        lambda: lambda g, n: _weighted(g, n) * sum(n) / (max(n) * len(n)),
        "it divides by k full micro-batches, even if some are smaller. Try a ragged tail",
    ),
    (lambda: _without_the_tail, "it leaves out micro-batches that are smaller than the others"),
    (lambda: _clipping, "it clips the gradient of each micro-batch to length 3. Try longer gradients"),
    (
        _leaking,
        "it is right the first time and wrong the second, because it is never reset. Try two different windows",
    ),
)


@exercise
def updates_until_zero(answer: Any) -> None:
    """A number: updates."""
    if answer is not ...:
        require(answer != 1000, "1000 would be right if the schedule counted updates. What does it count instead?")
        require(answer != 8000, "8000 would be later than planned. Is the schedule slower than planned, or faster?")
    require_close(answer, 125, "the number", "and should not be: an update has eight micro-batches")

"""Checkers for the exercises of notebook 08."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import (
    exercise,
    filled,
    hint_for,
    require,
    require_changed,
    require_close,
    require_unlike,
)

# the function with two bugs, as its exercise has it
_TRAINING_STEP = """
def training_step(w, micro_batches, rate):
    total = np.zeros_like(w)
    for x, y, mask in micro_batches:
        errors = (x @ w - y) * mask
        gradient = np.tensordot(errors, x, axes=2)
        total += gradient / mask.size
    mean = total / len(micro_batches)
    return w - rate * mean
"""
_RATE = 0.1


@exercise
def loss_of_window(answer: Any) -> None:
    """A function: (list of (losses, mask), arrays of shape (texts, positions)) -> the mean loss
    over real tokens."""
    first = np.array([[1.0, 2.0, 9.0]]), np.array([[1, 1, 0]])
    second = np.array([[6.0, 9.0, 9.0]]), np.array([[1, 0, 0]])
    got = _number(answer([(losses.copy(), mask.copy()) for losses, mask in (first, second)]))
    mistakes = {
        3.75: "this is the mean of the two means: the one token of the second counts as much as "
        "two of the first",
        6: "padding counts too: multiply by the mask",
        1.5: "the sum is right, but it was divided by all positions. Divide by the number of real "
        "tokens",
        9: "this is the sum. Divide it by the number of real tokens",
        4.5: "this was divided by the number of micro-batches",
    }
    require_unlike(got, mistakes)
    require_close(got, 3, "the loss of the example", "and should be (1 + 2 + 6) / 3")
    generator = np.random.default_rng(0)
    windows = [(generator.random([2, 5]), generator.integers(2, size=[2, 5])) for _ in range(3)]
    wanted = sum((a * b).sum() for a, b in windows) / sum(b.sum() for _, b in windows)
    require_close(_number(answer(windows)), wanted, "the loss of three random micro-batches")


@exercise
def factors(answer: Any) -> None:
    """A function: (numbers of tokens) -> the factor of each micro-batch's mean loss, so that the
    sum is the mean."""
    got = _list(answer([12, 3]), 2)
    mistakes = {
        (0.5, 0.5): "with equal factors the three tokens count as much as the twelve",
        (12, 3): "the sum of the gradients is then a sum over tokens. Divide by all tokens",
        (1 / 12, 1 / 3): "the losses are means already: they were divided by their own tokens",
    }
    require_unlike(got, mistakes)
    require_close(got, [0.8, 0.2], "for 12 and 3 tokens your answer", "and should be [0.8, 0.2]")
    require_close(
        _list(answer([5, 5, 10, 20]), 4),
        [0.125, 0.125, 0.25, 0.5],
        "for 5, 5, 10 and 20 tokens your answer",
    )


@exercise
def factor_of_sum(answer: Any) -> None:
    """A function: (total_tokens, devices) -> the factor of the sum of a device's losses."""
    got = _number(answer(30, 2))
    mistakes = {
        1 / 30: "the all-reduce takes a mean: it divides by the number of devices once more",
        1 / 60: "this divides by the number of devices twice: the all-reduce does it already",
        15: "this is the number by which to divide, not the factor",
    }
    require_unlike(got, mistakes)
    require_close(got, 1 / 15, "on 2 devices with 30 tokens the factor", "and should be 1/15")
    require_close(_number(answer(1000, 8)), 0.008, "on 8 devices with 1,000 tokens the factor")


@exercise
def repaired_loop(answer: Any) -> None:
    """A function: (w, micro-batches (x, y, mask), rate) -> w after an update with the mean gradient
    over all real tokens."""
    require_changed(answer, _TRAINING_STEP)
    equal, padded = [(2, 4, 4), (2, 4, 4)], [(2, 6, 3), (2, 5, 3), (2, 3, 3)]
    lengths, both = [(2, 6, 6), (2, 2, 2), (1, 4, 4)], [(3, 5, 2), (1, 5, 5), (2, 7, 1)]
    before = "although it was right before you changed the function"
    nothing = "but a micro-batch without real tokens adds nothing"
    _step(answer, equal, "with texts of one length and no padding, w", before)
    _step(answer, padded, "with padding, and equally many tokens in each micro-batch, w")
    _step(answer, lengths, "with texts of different lengths and no padding, w")
    _step(answer, both, "with padding and different lengths, w")
    _step(answer, [(2, 3, 0), (2, 3, 2)], "with a micro-batch of padding only, w", nothing)


def _step(answer: Any, shapes: list[tuple[int, int, int]], what: str, hint: str = "") -> None:
    """Require the right weights after a step.

    Args:
        answer: the student's function.
        shapes: of each micro-batch the texts, the positions, and the real tokens of each text.
        what: what the weights are.
        hint: what to say of wrong weights, if no known mistake leads to them.
    """
    generator = np.random.default_rng(0)
    w = generator.normal(size=3)
    parts = []
    for texts, positions, real in shapes:
        mask = np.tile(np.arange(positions) < real, (texts, 1)).astype(np.float64)
        x = generator.normal(size=[texts, positions, 3])
        parts.append((x, generator.normal(size=[texts, positions]), mask))
    sums = [np.tensordot((x @ w - y) * mask, x, axes=2) for x, y, mask in parts]
    unmasked = [np.tensordot(x @ w - y, x, axes=2) for x, y, _ in parts]
    tokens, sizes = ([function(mask) for *_, mask in parts] for function in (np.sum, np.size))

    def after(gradient: Any) -> tuple:
        return tuple(w - _RATE * gradient)

    def mean_of_means(counts: list) -> Any:
        return sum(each / count for each, count in zip(sums, counts) if count) / len(sums)

    padding = "as if padding were counted: divide by the number of real tokens, the sum of the mask"
    means = "as if each micro-batch counted the same: sum first, and divide once, by all tokens"
    mistakes = {
        after(sum(unmasked) / sum(tokens)): "as if the errors at the padding counted, too",
        after(sum(unmasked) / sum(sizes)): "as if the padding were tokens",
        after(sum(sums)): "as if the sum over the tokens were applied, and not their mean",
        after(sum(sums) / len(sums)): "as if the sum were divided by the number of micro-batches",
        after(sum(sums) / sum(sizes)): padding,
        after(mean_of_means(sizes)): padding,
        after(mean_of_means(tokens)): means,
    }
    got = answer(w.copy(), [tuple(each.copy() for each in part) for part in parts], _RATE)
    otherwise = hint or "and should be the step of the mean over all real tokens"
    hint = hint_for(got, mistakes, otherwise)
    require_close(got, after(sum(sums) / sum(tokens)), what, hint)


def _number(value: Any) -> np.ndarray:
    value = np.asarray(filled(value), np.float64)
    require(value.shape == (), f"the answer is one number, and yours has the shape {value.shape}")
    return value


def _list(value: Any, count: int) -> np.ndarray:
    value = np.asarray(filled(value), np.float64)
    require(
        value.shape == (count,),
        f"the answer has one factor for each micro-batch, and yours has the shape {value.shape}",
    )
    return value

"""Checkers for the exercises of notebook 08."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close, require_unlike


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
    """A function: (tokens of all devices, number of devices) -> the factor of the sum of a device's
    losses."""
    got = _number(answer(30, 2))
    mistakes = {
        1 / 30: "the all-reduce takes a mean: it divides by the number of devices once more",
        1 / 60: "this divides by the number of devices twice: the all-reduce does it already",
        15: "this is the number by which to divide, not the factor",
    }
    require_unlike(got, mistakes)
    require_close(got, 1 / 15, "on 2 devices with 30 tokens the factor", "and should be 1/15")
    require_close(_number(answer(1000, 8)), 0.008, "on 8 devices with 1,000 tokens the factor")


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

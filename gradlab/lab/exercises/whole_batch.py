"""Checkers for the exercises of notebook 11."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close, require_unlike


@exercise
def gradients_in_between(answer: Any) -> None:
    """A function: (a, b), arrays of n numbers -> the gradients of mean((a - mean(b)) ** 2) by a and
    by b."""
    value = filled(answer(np.array([1.0, 3.0]), np.array([0.0, 2.0])))
    require(
        isinstance(value, tuple | list | np.ndarray) and len(value) == 2,
        "return two arrays: the gradients by a and by b",
    )
    by_a, by_b = (np.asarray(each, np.float64) for each in value)
    mistakes = {
        (0, 4): "the gradient with respect to a was not divided by n: the loss is a mean",
        (0, 1): "a factor of 2 is missing: the derivative of a square",
    }
    require_unlike(by_a, mistakes)
    require_close(
        by_a, [0, 2], "the gradient with respect to a of the example", "and should be [0, 2]"
    )
    mistakes = {
        (1, 1): "the sign of the gradient with respect to b is wrong: b is subtracted",
        (0, -2): "every b is in every square, through the mean of b",
        (-2, -2): "mean(b) contains each b only with the factor 1/n",
    }
    require_unlike(by_b, mistakes)
    require_close(
        by_b, [-1, -1], "the gradient with respect to b of the example", "and should be [-1, -1]"
    )
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=[2, 7])
    by_a, by_b = answer(a.copy(), b.copy())
    require_close(
        by_a, 2 * (a - b.mean()) / 7, "the gradient with respect to a of seven random numbers"
    )
    require_close(
        by_b,
        np.full(7, -2 * (a.mean() - b.mean()) / 7),
        "the gradient with respect to b of seven random numbers",
    )


@exercise
def bytes_between(answer: Any) -> None:
    """A function: (images, views, width of an embedding) -> the bytes kept between the passes."""
    value = answer(128, 2, 32)
    mistakes = {
        32_768: "this is the embeddings alone, or one view. Their gradients are kept as well",
        16_384: "these are the numbers. A float32 has 4 bytes",
        8_192: "this counts the numbers of one kind only, and a float32 has 4 bytes",
        131_072: "that would be float64",
    }
    require_unlike(value, mistakes)
    require_close(
        value, 65_536, "for 128 images, 2 views and 32 numbers the memory", "and should be 65,536"
    )
    require_close(
        answer(1000, 3, 512), 12_288_000, "for 1,000 images, 3 views and 512 numbers the memory"
    )


@exercise
def can_be_accumulated(answer: Any) -> None:
    """A dictionary: loss -> whether it can be accumulated. The hint does not say which ones are
    wrong, nor how many."""
    wanted = {"mse": True, "correlation": False, "weighted": True, "f1": False, "max": False}
    require(
        isinstance(answer, dict) and set(answer) == set(wanted),
        f"answer a dictionary with the keys {', '.join(wanted)}",
    )
    require(
        all(isinstance(value, bool) for value in answer.values()),
        "answer True or False for each of the five losses",
    )
    require(
        answer == wanted,
        "not all five are right. Try each on two micro-batches of two numbers: is the loss of all four "
        "the weighted mean of the two losses, whatever the numbers?",
    )

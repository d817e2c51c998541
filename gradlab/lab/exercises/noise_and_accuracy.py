"""Checkers for the exercises of notebook 06."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import (
    exercise,
    filled,
    require,
    require_changed,
    require_close,
    require_unlike,
)

ROW_1 = (95.0, 0.172, 10)
ROW_2 = (95.2, 0.303, 10)
# the function with the bug, as its exercise has it
_ROWS_OF_WINDOW = """
def rows_of_window(order, update, k, b):
    first = update % (len(order) // (k * b)) * k * b
    return np.array([order[first : first + b] for _ in range(k)])
"""


@exercise
def standard_error(answer: Any) -> None:
    """A function: accuracies -> the standard error of their mean."""
    three = np.array([94.0, 95.0, 96.0])
    got = filled(answer(three))
    mistakes = {
        1.0: "that is the standard deviation of one run. The standard error is smaller",
        (2 / 3)
        ** 0.5: "that is the standard deviation of one run, with n for n - 1. The standard error "
        "is smaller",
        2**0.5 / 3: "the mean was computed from the same runs, so divide by n - 1: see ddof",
        1 / 3: "divide by the square root of the number of runs",
        1
        / 2**0.5: "ddof applies to the standard deviation only: take the square root of the number "
        "of all runs",
    }
    require_unlike(got, mistakes)
    require_close(got, 3**-0.5, "the standard error of 94, 95, 96")
    more = np.array([94.1, 95.3, 94.8, 95.0, 95.9, 94.7, 95.2])
    require_close(answer(more), np.std(more, ddof=1) / 7**0.5, "the standard error of seven runs")
    require_close(answer(np.array([1.0, 3.0])), 1.0, "the standard error of 1 and 3")


@exercise
def standard_errors_apart(answer: Any) -> None:
    """A function: two rows of a table -> their distance in standard errors."""
    got = filled(answer(*ROW_1, *ROW_2))
    mistakes = {
        -1.81524: "the sign: the second mean is the higher one here, so it should be positive",
        0.57403: "compare the means: divide each variance by its number of runs",
        0.42105: "compare the means, and add variances, not standard deviations",
        1.33148: "add variances, not standard errors: square, add, take the square root",
        0.36304: "combine the two standard errors: the square root of the sum of their squares",
        16.47504: "take the square root of the sum of the variances",
        0.2: "that is the difference itself: divide it by its standard error",
    }
    require_unlike(got, mistakes, rtol=1e-4)
    require_close(got, 1.815236, "the distance of the published rows", rtol=1e-4)
    wanted = -1.0 / (0.5**2 / 4 + 0.3**2 / 9) ** 0.5
    got = answer(96.0, 0.5, 4, 95.0, 0.3, 9)
    mistakes = {-wanted: "where the second mean is the lower one, it should be negative"}
    require_unlike(got, mistakes)
    hint = "but the rows have different numbers of runs: divide each variance by its own"
    require_close(got, wanted, "the distance of rows of 4 and 9 runs", hint)


@exercise
def best_of_equal_looks(answer: Any) -> None:
    """A function: (looks of a run, how many of them count) -> the best of these."""
    looks = np.array([6.0, 5.0, 3.0, 9.0, 2.0, 4.0])
    got = filled(answer(looks, 2))
    require(np.ndim(got) == 0, "the best look is one number")
    require(got != 9, "9 is not among the third and the sixth look")
    require(
        got != 6, "6 is the first look: evenly spaced looks that include the last one begin later"
    )
    require(got != 3, "the best of the looks is the largest, and the sixth is one of them")
    require_close(got, 4, "the best of the third and the sixth", "and is one of the two")
    require_close(answer(looks, 6), 9, "the best of all six", "and should be the best there is")
    require_close(answer(looks, 1), 4, "the best of one look", "and should be the last one")
    require_close(answer(looks, 3), 9, "the best of three of the six looks")
    rising = np.arange(200.0)
    require_close(
        answer(rising, 10),
        199,
        "the best of 10 looks at a run that only rises",
        "and should be the last one",
    )
    falling = rising[::-1]
    require_close(
        answer(falling, 10),
        180,
        "the best of 10 looks at a run that only falls",
        "but look 20 is the first",
    )


@exercise
def rows_of_window(answer: Any) -> None:
    """A function: (order of all examples, number of the update, k, b) -> the rows of a window,
    shape (k, b)."""
    require_changed(answer, _ROWS_OF_WINDOW)
    order = np.random.default_rng(0).permutation(26)
    got = filled(answer(order.copy(), 0, 3, 4))
    got = np.asarray(got)
    require(
        got.shape == (3, 4),
        f"the rows of 3 micro-batches of 4 should have the shape (3, 4), not {got.shape}",
    )
    same = (got[0] == got[1]).all()
    require(
        not same,
        "the micro-batches of a window are all the same: which of its terms depends on the "
        "micro-batch?",
    )
    require(
        len(np.unique(got)) == 12,
        "the micro-batches of the first window overlap: each one begins b rows later",
    )
    second = np.asarray(answer(order.copy(), 1, 3, 4))
    require(not np.isin(second, got).any(), "the second window repeats examples of the first one")
    require(
        np.isin(got, order[:24]).all(),
        "an epoch has 2 windows of 12 here: examples 24 and 25 are left out",
    )
    third = np.asarray(answer(order.copy(), 2, 3, 4))
    require(
        third.shape == (3, 4) and set(third.flat) == set(got.flat),
        "the third window begins the epoch again",
    )
    wanted = order[:24].reshape(2, 3, 4)
    require(
        (got == wanted[0]).all() and (second == wanted[1]).all(),
        "take the rows in the order that is given",
    )
    large = np.arange(600)
    got = np.asarray(answer(large, 7, 5, 20))
    require(
        (got == large[100:200].reshape(5, 20)).all(),
        "with 5 micro-batches of 20, update 7 takes rows 100 to 199",
    )

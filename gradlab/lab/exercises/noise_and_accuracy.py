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

# the function with the bug, as its exercise has it
_ROWS_OF_WINDOW = """
def rows_of_window(order, update, k, b):
    first = update % (len(order) // (k * b)) * k * b
    return np.array([order[first : first + b] for _ in range(k)])
"""


@exercise
def standard_error(answer: Any) -> None:
    """A function: (standard deviation of n runs, with n in the denominator; n) -> the standard
    error of their mean."""
    deviation = (2 / 3) ** 0.5  # of 94, 95 and 96
    got = filled(answer(deviation, 3))
    mistakes = {
        deviation: "that is the standard deviation of one run. The standard error is smaller",
        1.0: "that is the standard deviation with n - 1 in place of n. The standard error is smaller",
        deviation / 3**0.5: "the mean comes from the same runs, so a deviation with n in the "
        "denominator is too small: which one should be divided by √n?",
        deviation * (2 / 3) ** 0.5 / 3**0.5: "the deviation with n - 1 in the denominator is the "
        "larger one, and this makes it smaller",
        deviation * 1.5 / 3**0.5: "a deviation is the square root of a variance: the factor that "
        "replaces n by n - 1 needs a square root, too",
        deviation / 3: "divide a standard deviation by a square root",
        deviation / 2: "divide a standard deviation by a square root",
        1 / 3: "divide a standard deviation by a square root",
    }
    require_unlike(got, mistakes)
    require_close(got, 3**-0.5, "the standard error for 0.816 and n = 3")
    more = np.array([94.1, 95.3, 94.8, 95.0, 95.9, 94.7, 95.2])
    require_close(
        answer(np.std(more), 7), np.std(more, ddof=1) / 7**0.5, "the standard error of seven runs"
    )
    require_close(answer(1.0, 2), 1.0, "the standard error for 1 and n = 2")


@exercise
def seed_by_seed(answer: Any) -> None:
    """A function: the accuracies of two rows that share their seeds -> by how many standard errors
    they differ, seed by seed."""
    first, second = np.array([94.0, 95.0, 96.0]), np.array([94.5, 95.4, 96.6])
    got = filled(answer(first.copy(), second.copy()))
    mistakes = {
        0.5961965: "that is their distance as independent rows: subtract seed by seed first",
        -8.6602540: "the sign: the second mean is the higher one here, so it should be positive",
        5.0: "that is the mean difference in standard deviations: divide by that of the *mean*",
        10.606602: "the mean was computed from the same differences, so divide by n - 1: see ddof",
        15.0: "divide the standard deviation by the square root of the number of seeds",
        0.5: "that is the mean difference itself: divide it by its standard error",
        0.0577350: "that is the standard error: divide the mean difference by it",
    }
    require_unlike(got, mistakes)
    require_close(got, 75**0.5, "the distance of the example's rows")
    first = np.array([95.9, 94.1, 95.3, 94.8, 95.0])
    differences = np.array([-0.3, 0.1, -0.5, -0.2, -0.4])
    wanted = differences.mean() / (differences.std(ddof=1) / 5**0.5)
    got = filled(answer(first.copy(), first + differences))
    mistakes = {-wanted: "where the second mean is the lower one, it should be negative"}
    require_unlike(got, mistakes)
    require_close(got, wanted, "the distance of two rows of five seeds")


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

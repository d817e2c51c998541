"""Checkers for the exercises of notebook 03."""

import tracemalloc
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_close

# gradients of two variables with the shapes [2] and [], from micro-batches of 4, 4 and 2 examples
_WINDOW = [[np.array([1.0, 2.0]), np.array(3.0)], [np.array([3.0, 6.0]), np.array(0.0)], [np.zeros(2), np.array(9.0)]]
_WEIGHTS = [4, 4, 2]
_MEANS = [[1.6, 3.2], 3.0]


@exercise
def mean_of_window(answer: Any) -> None:
    """A function: lists over micro-batches of lists over variables of arrays, weights -> the list of weighted means."""
    one = _list(answer([[np.array(1.0)], [np.array(4.0)]], [2, 1]), variables=1)
    require_close(
        one[0], 2, "the mean of 1 and 4 with the weights 2 and 1", _why(one[0], total=6, plain=2.5, planned=3)
    )
    window = [[gradient.copy() for gradient in micro_batch] for micro_batch in _WINDOW]
    _check_means(_list(answer(window, list(_WEIGHTS)), variables=2))


@exercise
def mean_of_stream(answer: Any) -> None:
    """A function: an iterator of (arrays of the variables, weight), the arrays reused -> the list of weighted means."""
    one = _list(answer(iter([([np.array(1.0)], 2), ([np.array(4.0)], 1)])), variables=1)
    require_close(
        one[0], 2, "the mean of 1 and 4 with the weights 2 and 1", _why(one[0], total=6, plain=2.5, planned=3)
    )
    still = [[gradient.copy() for gradient in micro_batch] for micro_batch in _WINDOW]
    _check_means(_list(answer(iter(zip(still, _WEIGHTS))), variables=2))
    means = _list(answer(_reusing_stream()), variables=2)
    hint = "but was right when the arrays were not reused: you kept an array that the stream has overwritten"
    for value, wanted in zip(means, _MEANS):
        require_close(value, wanted, "with arrays that are reused, a mean", hint)
    tracemalloc.start()
    try:
        answer(([np.ones(10_000)], 1) for _ in range(100))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    hint = "the means are right, but memory grows with the window: more than 25 gradients for 100 micro-batches"
    require(most < 25 * 80_000, hint)


@exercise
def bytes_through_host(answer: Any) -> None:
    """A function: (parameters, k, bytes per number) -> bytes per update."""
    got = answer(1000, 4)
    require(got is not None, "the function returns nothing yet")
    require(got != 16_000, "16,000 bytes are the k gradients on the way to the host. Something goes back to the device")
    require(got != 32_000, "32,000 would be k gradients in both directions, but only their mean goes back")
    require(got not in (5_000, 4_000), "that is a count of numbers, not of bytes")
    require_close(got, 20_000, "for 1,000 parameters and k = 4 the result", "and should be 20,000")
    require_close(answer(1000, 4, 2), 10_000, "in half precision (2 bytes a number) the result", "and should be half")
    require_close(
        answer(44_426, 1), 355_408, "for k = 1 the result", "but even a single gradient goes to the host and back"
    )


@exercise
def clip(answer: Any) -> None:
    """A function: (list of arrays, the largest norm allowed) -> the list, scaled as a whole if its norm is larger."""
    short = _list(answer([np.array([3.0, 0.0]), np.array([4.0])], 10), variables=2)
    require_close(short[0], [3, 0], "a gradient of length 5, clipped to 10,", "and should be left as it is")
    require_close(short[1], [4], "a gradient of length 5, clipped to 10,", "and should be left as it is")
    first, second = _list(answer([np.array([3.0, 0.0]), np.array([4.0])], 1), variables=2)
    apart = np.allclose(first, [1, 0]) and np.allclose(second, [1])
    require(not apart, "each array was clipped separately: the length is that of all arrays together")
    squared = np.allclose(first, [3 / 25, 0]) and np.allclose(second, [4 / 25])
    require(not squared, "it was divided by the sum of squares: the length is the square root of that")
    require_close(first, [0.6, 0], "the first array of [[3, 0], [4]], clipped to 1,", "and should be [0.6, 0]")
    require_close(second, [0.8], "the second array of [[3, 0], [4]], clipped to 1,", "and should be [0.8]")
    first, second = _list(answer([np.array([30.0, 0.0]), np.array([[40.0]])], 10), variables=2)
    require_close(first, [6, 0], "the first array of [[30, 0], [[40]]], clipped to 10,", "and should be [6, 0]")
    require_close(second, [[8]], "the second array of [[30, 0], [[40]]], clipped to 10,", "and should be [[8]]")
    with np.errstate(all="ignore"):
        zeros = _list(answer([np.zeros(2), np.zeros(1)], 1), variables=2)
    require(np.isfinite(zeros[0]).all(), "a gradient of zeros becomes NaN: its length is 0, and 0 / 0 is NaN")
    require_close(zeros[0], [0, 0], "a gradient of zeros, clipped,", "and should stay zeros")


def _reusing_stream():
    """The micro-batches of the window, all in the same arrays, which are overwritten each time."""
    arrays = [np.empty_like(gradient) for gradient in _WINDOW[0]]
    for micro_batch, weight in zip(_WINDOW, _WEIGHTS):
        for array, gradient in zip(arrays, micro_batch):
            array[...] = gradient
        yield arrays, weight
    for array in arrays:
        array[...] = np.nan


def _list(value, variables: int) -> list:
    require(value is not None and value is not ..., "the function returns nothing yet")
    require(isinstance(value, list | tuple | np.ndarray), "the result should be a list over variables")
    value = list(value)
    wanted = "one array" if variables == 1 else f"{variables} arrays, one for each variable"
    require(len(value) == variables, f"the result should be a list of {wanted}. Yours has {len(value)}")
    return value


def _check_means(means: list) -> None:
    vector, scalar = means
    hint = _why(scalar, total=30, plain=4, planned=10)
    require_close(scalar, _MEANS[1], "the mean of 3, 0 and 9 with the weights 4, 4 and 2", hint)
    hint = "but should be [1.6, 3.2]: take the mean over micro-batches, not over the elements of a gradient"
    require_close(vector, _MEANS[0], "the mean of [1, 2], [3, 6] and [0, 0] with the weights 4, 4 and 2", hint)


def _why(value, total: float, plain: float, planned: float) -> str:
    """The second half of the message: names the mistake behind a frequent wrong mean."""
    for wrong, hint in (
        (total, "which is the weighted sum: divide it by the sum of the weights"),
        (plain, "which is the unweighted mean: use the weights"),
        (planned, "which is the weighted sum over the number of micro-batches: divide by the sum of the weights"),
    ):
        if np.shape(value) == () and np.isclose(float(value), wrong):
            return hint
    return "and should not be: the sum of weight times gradient, over the sum of the weights"

"""Checkers for the exercises of notebook 04."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab.auditing.problem import Problem
from gradlab.auditing.rules import LoopRules, trajectory
from gradlab.lab.exercises import (
    NotYet,
    exercise,
    filled,
    hint_for,
    require,
    require_changed,
    require_close,
    require_unlike,
)


@exercise
def accumulator(answer: Any) -> None:
    """A class with zero, add and mean, for a list with the gradient of each variable."""
    made = answer(2)
    made.zero()
    made.add([np.array(1.0), None], 2)
    made.add([np.array(4.0), np.array(6.0)], 1)
    mistakes = {
        6: "which is the weighted sum: divide by the weight that was added",
        2.5: "which is the unweighted mean: use the weights",
        3: "which is the sum over the number of micro-batches: divide by the weight that was added",
        5: "which is the unweighted sum",
        4: "which is the last gradient alone",
    }
    first, second = _means(made, 2)
    what = "after 1 with weight 2 and 4 with weight 1 the mean"
    require_close(first, 2, what, hint_for(first, mistakes))
    mistakes = {6: "but the gradient None counts as zero: its weight belongs to the divisor, too"}
    what = "after None with weight 2 and 6 with weight 1 the mean"
    require_close(second, 2, what, hint_for(second, mistakes))
    hint = "but mean() must not change anything"
    require_close(_means(made, 2), [2, 2], "called a second time, the list of the means", hint)
    made.add([np.array(6.0), np.array(6.0)], 3)
    what = "after one more add in the same window, 6 and 6 with weight 3, the list of the means"
    require_close(_means(made, 2), [4, 4], what, hint)

    made.zero()
    made.add([np.array(10.0), np.array(20.0)], 1)
    made.add([None, np.array(10.0)], 1)
    hint = "and should be [5, 15]: zero() must reset the sums and the weight"
    what = "after [10, 20] and [None, 10] in a second window, the list of the means"
    require_close(_means(made, 2), [5, 15], what, hint)

    for weight in (1, 2):
        given = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
        other = answer(2)
        for gradient in given:
            other.add([gradient, np.array(7.0)], weight)
        vector, scalar = _means(other, 2)
        hint = "and should be [2, 4] with a new accumulator"
        require_close(vector, [2, 4], "the mean of [1, 2] and [3, 6]", hint)
        require_close(scalar, 7, "the mean of 7 and 7", "and should be 7 with a new accumulator")
        untouched = given[0].tolist() == [1, 2] and given[1].tolist() == [3, 6]
        require(
            untouched,
            f"the first gradient was [1, 2] and is {given[0].tolist()} now: add must not change "
            "the caller's array",
        )

    reused = answer(1)
    array = np.array([1.0, 2.0])
    reused.add([array], 1)
    array[...] = [3.0, 6.0]
    reused.add([array], 1)
    hint = "and should be [2, 4]: add must not keep the array, which its caller overwrites before the next add"
    [mean] = _means(reused, 1)
    require_close(mean, [2, 4], "the mean of [1, 2] and [3, 6] in one reused array", hint)

    many = answer(1)
    tracemalloc.start()
    for _ in range(50):
        many.add([np.ones(10_000)], 1)
    kept = tracemalloc.get_traced_memory()[0] / np.ones(10_000).nbytes
    tracemalloc.stop()
    require(
        kept < 5,
        f"after 50 micro-batches the memory of {kept:.0f} gradients is in use: keep their sum only",
    )


def _means(made: Any, count: int) -> list:
    """What mean() returns, if it is a list of so many means."""
    means = made.mean()
    missing = "mean() returns nothing yet: put your answer in place of the dots"
    require(means is not None and means is not ..., missing)
    wanted = f"mean() should return a list of {count}, one for each variable"
    require(isinstance(means, list | tuple | np.ndarray) and len(means) == count, wanted)
    return list(means)


@exercise
def repaired_rate(answer: Any) -> None:
    """A number: the learning rate for the mean that is equivalent to 0.01 for the sum of 8."""
    mistakes = {
        0.01: "with 0.01 each step would be 8 times smaller than before",
        0.00125: "that is the wrong direction: the mean is smaller than the sum",
    }
    require_unlike(answer, mistakes)
    require_close(
        answer, 0.08, "the learning rate", "and should make rate × mean equal to 0.01 × sum"
    )


@exercise
def mean_in_a_loop(answer: Any) -> None:
    """A function for tf.function: (i -> gradient of micro-batch i, weights) -> the weighted mean of
    the gradients."""
    answer = getattr(answer, "python_function", answer)  # it may be a tf.function already
    table = tf.constant([[1.0, 2.0], [4.0, 8.0], [10.0, 0.0], [0.0, 5.0], [3.0, 3.0]])
    calls = []

    def gradient_of(i):
        calls.append(i)
        return tf.gather(table, i)

    filled(answer(gradient_of, tf.constant([2.0, 1.0])))

    def traced(weights):
        return tf.convert_to_tensor(answer(gradient_of, weights))

    compiled = tf.function(traced, input_signature=[tf.TensorSpec([None], tf.float32)])
    try:
        graph = compiled.get_concrete_function().graph
    except Exception as error:
        hint = "the number of micro-batches is not known while tracing: loop over tf.range(tf.shape(weights)[0])"
        if any(
            word in str(error)
            for word in ("shape invariant", "dtype", "int32", "must be defined", "to be defined")
        ):
            hint = "the sum must exist before the loop, with its final shape and type: begin with tf.zeros([2])"
        raise NotYet(f"it works eagerly, but cannot be traced: {hint}") from None
    require(calls, "gradient_of was never called")
    require(
        any("While" in op.type for op in graph.get_operations()),
        "there is no loop in the graph: use tf.range",
    )
    require(
        all(op.type != "TensorListStack" for op in graph.get_operations()),
        "your loop keeps the gradients of all micro-batches: keep their sum only",
    )
    for weights in ([2.0, 1.0], [1.0, 1.0, 2.0], [1.0, 0.0, 1.0, 3.0, 1.0]):
        wanted = np.average(table.numpy()[: len(weights)], axis=0, weights=weights)
        got = compiled(tf.constant(weights)).numpy()
        mistakes = {
            tuple(wanted * sum(weights)): "which is the sum: divide by the sum of the weights",
            tuple(table.numpy()[: len(weights)].mean(axis=0)): "which is the unweighted mean: use "
            "the weights",
            tuple(wanted * sum(weights) / len(weights)): "which is the sum divided by k: divide "
            "by the sum of the weights",
        }
        hint = hint_for(got, mistakes)
        require_close(got, wanted, f"with the weights {weights} the mean", hint, rtol=1e-4)


@exercise
def is_right(answer: Any) -> None:
    """A function: method -> whether it is right; a method is a function (gradients, weights) ->
    mean."""
    require(
        filled(answer(_right)),
        "your test returns False for a right method. Compare with a tolerance, as np.allclose does",
    )
    for planted, words in _PLANTED:
        try:
            verdict = answer(planted)
        except Exception:
            verdict = False  # an exception also rejects the method
        require(verdict is not None, f"your test returns nothing for a method that {words}")
        require(not verdict, f"your test accepts a method that {words}")
    require(
        answer(_right),
        "your test returns True for a right method the first time, and False the second time",
    )


def _right(gradients, weights):
    # computed differently from np.average, so that the last digits may differ
    total = sum(
        weight * np.asarray(gradient, np.float64) for gradient, weight in zip(gradients, weights)
    )
    return total * (1 / sum(weights)) * (1 + 1e-13)


def _mean(gradients, weights):
    return np.average(
        np.stack([np.asarray(g, np.float64) for g in gradients]), axis=0, weights=weights
    )


_PLANTED = (
    (lambda gradients, weights: _mean(gradients, weights) * sum(weights), "returns the sum"),
    (
        lambda gradients, weights: _mean(gradients, weights) * sum(weights) / len(weights),
        "divides by k",
    ),
    (lambda gradients, weights: _mean(gradients, [1] * len(weights)), "ignores the weights"),
    (
        lambda gradients, weights: (
            _mean(gradients[:-1], weights[:-1]) if len(weights) > 1 else _mean(gradients, weights)
        ),
        "drops the tail",
    ),
    (
        lambda gradients, weights: np.asarray(gradients[0], np.float64),
        "only looks at the first micro-batch",
    ),
)


def curves(updates: int = 40) -> dict[str, list[float]]:
    """The loss after each update of exercise 5's training, with a right loop and with the loop that
    has a bug.

    Args:
        updates: the number of updates.

    Returns:
        "right" and "with the bug": a list of updates + 1 losses, the first of them before the first
        update.
    """
    windows = _windows(seed=0, sizes=[[8, 8, 8, 8]] * updates, weights=2)
    x, y = (
        np.concatenate(column) for column in zip(*(part for window in windows for part in window))
    )
    found: dict[str, list[float]] = {}
    for name, reset in (("right", "all"), ("with the bug", "divisor")):
        weights = _train(np.zeros(2), windows, 0.1, reset=reset)
        found[name] = [float(np.mean((x @ w - y) ** 2)) for w in weights]
    return found


@exercise
def repaired(answer: Any) -> None:
    """A function: (w, windows of micro-batches, rate) -> the weights after an update from each
    window."""
    require_changed(answer, _STARTER)
    for seed, sizes, rate in _CASES:
        windows = _windows(seed, sizes, weights=1 + seed % 3)
        start = np.ones(1 + seed % 3)
        for calls in ("", " in a second call"):
            w = start.copy()
            value = answer(w, windows, rate)
            if value is None or value is ...:
                raise NotYet(
                    "the function returns nothing: it should return the weights after the last "
                    "window"
                )
            number = "one window" if len(sizes) == 1 else f"{len(sizes)} windows"
            wanted = _train(start, windows, rate)[-1]
            hint = _hint(value, start, windows, rate)
            require_close(value, wanted, f"after {number}{calls} w", hint, rtol=1e-8)
            require(
                np.array_equal(w, start),
                "your loop changes the array w that it is given: write w = w - ...",
            )

    sizes = [[4, 4, 2], [4, 1], [3, 3, 3]]
    windows = _windows(9, sizes, weights=2)
    streamed = answer(np.ones(2), [_stream(window) for window in windows], 0.05)
    hint = "as if the loop kept micro-batches: only one fits in memory"
    wanted = _train(np.ones(2), windows, 0.05)[-1]
    require_close(
        streamed, wanted, "when each micro-batch overwrites the one before, w", hint, rtol=1e-8
    )


# the loop with the bug, as exercise 5 has it
_STARTER = """
def train(w, windows, rate):
    zeros = np.zeros_like(w)
    for window in windows:
        total, weight = zeros, 0
        for x, y in window:
            total += len(x) * gradient(w, x, y)
            weight += len(x)
        mean = total / weight
        w = w - rate * mean
    return w
"""

# (seed, examples of each micro-batch of each window, rate)
_CASES = (
    (1, [[4, 4, 4]], 0.05),
    (2, [[4, 4], [4, 4]], 0.05),
    (3, [[4, 4]] * 6, 0.1),
    (4, [[5, 3, 1], [2, 2], [1], [4, 4, 4]], 0.05),
)


def _windows(seed: int, sizes: list[list[int]], weights: int) -> list:
    """Windows of micro-batches (x, y) of these sizes, of a linear problem with noise."""
    rng = np.random.default_rng(seed)
    right = rng.uniform(1, 3, weights)

    def part(size):
        x = rng.normal(size=[size, weights])
        return x, x @ right + rng.normal(scale=0.3, size=size)

    return [[part(size) for size in window] for window in sizes]


def _stream(window: list) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The micro-batches one by one, in two buffers that the next one overwrites."""
    most = max(len(x) for x, _ in window)
    all_x = np.empty([most, window[0][0].shape[1]])
    all_y = np.empty(most)
    for x, y in window:
        all_x[...] = np.nan
        all_y[...] = np.nan
        all_x[: len(x)] = x
        all_y[: len(x)] = y
        yield all_x[: len(x)], all_y[: len(x)]


def _train(w: np.ndarray, windows: list, rate: float, **rules: Any) -> list[np.ndarray]:
    """The weights before the loop of exercise 5, and after each update.

    Args:
        w, windows, rate: as in the exercise.
        **rules: the fields of `LoopRules` that differ from those of a right loop.
    """
    # Windows of any number of micro-batches: each is a short epoch
    most = max(map(len, windows))
    problem = Problem("no bias", {"w": w}, windows, most, learning_rate=lambda update: rate)
    return [w, *trajectory(problem, LoopRules(**rules), _gradient)]


def _gradient(w: np.ndarray, microbatch: tuple) -> np.ndarray:
    x, y = microbatch
    return 2 / len(x) * x.T @ (x @ w - y)


# hint: the rules of the loop that it is for
_BUGS: dict[str, dict[str, Any]] = {
    "and after one window it is right. What does the second window begin with?": {
        "reset": "divisor"
    },
    "as if the weight of earlier windows were still there": {"reset": "sum"},
    "as if each window went on with the mean of those before": {"reset": "none"},
    "as if all micro-batches counted the same: weight each one by its examples": {"alike": True},
    "as if mean gradients were added and not divided": {"alike": True, "divisor": "none"},
    "as if the sum over the examples were applied: divide it": {"divisor": "none"},
    "as if the sum were divided by the number of micro-batches": {"divisor": "microbatches"},
    "as if only the last micro-batch of a window counted: zero once for each window": {
        "keep": "last"
    },
    "as if each micro-batch were a window: apply once, after the last one": {"step": "each"},
}


def _hint(value: Any, start: np.ndarray, windows: list, rate: float) -> str:
    """What is wrong with the weights that a student's loop returned."""
    sizes = [[len(x) for x, _ in window] for window in windows]
    otherwise = f"and should not be. The examples of the micro-batches of each window: {sizes}"
    mistakes: dict[tuple, str] = {}
    for hint, rules in _BUGS.items():
        mistakes.setdefault(tuple(_train(start, windows, rate, **rules)[-1]), hint)
    one = tuple(_train(start, windows, rate)[1])
    mistakes.setdefault(one, "as if there were one window only: is the return inside the loop?")
    return hint_for(value, mistakes, otherwise, rtol=1e-8)

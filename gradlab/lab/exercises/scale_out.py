"""Checkers for the exercises of notebook 14."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close


@exercise
def mean_of_all(answer: Any) -> None:
    """A function: (a worker's mean gradient, its examples, all_reduce) -> the mean over all
    workers' examples."""
    sums = _check_mean(answer, [([1.0, 1.0], 30), ([5.0, 3.0], 10)], [2, 1.5])
    _check_mean(
        answer, [([1.0, 0.0, 2.0], 2), ([4.0, 1.0, 2.0], 4), ([0.0, 0.0, 0.0], 0)], [3, 2 / 3, 2]
    )
    require(
        sums == 1,
        f"the mean is right, but took {sums} sums: pass everything in one array, such as "
        "np.append makes",
    )


@exercise
def most_devices(answer: Any) -> None:
    """A function: (micro-batches, seconds of each, s, efficiency) -> the largest number of devices
    that reaches it."""
    got = float(filled(answer(64, 0.3, 0.32, 0.75)))
    require(
        got != 11,
        "11 devices would be efficient enough, but 64 micro-batches cannot be divided by 11",
    )
    require(
        got != 16,
        "16 devices reach 67%: the ring takes 2 (p - 1) / p times s, which is nearly twice s",
    )
    require(
        got != 1,
        "1 device is always 100% efficient. Which is the largest number that is still efficient "
        "enough?",
    )
    for case, wanted in {
        (64, 0.3, 0.32, 0.75): 8,
        (64, 0.3, 0.32, 0.9): 4,
        (64, 0.3, 0.32, 0.5): 16,
        (12, 1.0, 1.0, 0.5): 6,
        (7, 0.1, 1.0, 0.5): 1,
        (24, 0.1, 0.0, 0.99): 24,
    }.items():
        _check_devices(answer, case, wanted)


class _Waits(BaseException):
    """Stop a worker at a sum for which some workers have not passed a value yet."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def _check_mean(answer: Callable, workers: list[tuple], wanted: list[float]) -> int:
    """Raise `NotYet` unless each worker returns the mean; return the number of sums that were
    used."""
    results, sums = _run_workers(answer, workers)
    for result in results:
        filled(result)
    require(sums, "all_reduce was never called, so each worker uses only its own examples")
    gradients, examples = (np.array(column) for column in zip(*workers))
    counts = ", ".join(str(count) for count in examples)
    for result in results:
        got = np.asarray(result, np.float64)
        if got.shape == gradients[0].shape:
            total = examples @ gradients
            require(
                not np.allclose(got, gradients.mean(axis=0)),
                "this is the unweighted mean of the means: the workers have different numbers of "
                "examples",
            )
            require(
                not np.allclose(got, gradients.sum(axis=0)),
                "this is the sum of the means: weight each by its number of examples",
            )
            require(
                not np.allclose(got, total),
                "the weighted sum is right. Divide it by the number of examples on all workers",
            )
            require(
                not np.allclose(got, total / len(examples)),
                "divided by the number of workers: divide by the number of examples on all workers",
            )
        require_close(
            got,
            wanted,
            f"the mean over workers with {counts} examples",
            "and should be the mean over all examples",
        )
    return sums


def _run_workers(answer: Callable, workers: list[tuple]) -> tuple[list, int]:
    """Run a function as several workers would; return the result of each worker, and the number of
    sums.

    The workers run one after the other. At a new sum a worker is stopped; once all have passed a
    value, each one is run again from the beginning, and the sums that are already known are
    returned to it.
    """
    sums: list[np.ndarray] = []
    while True:
        passed = []
        results = []
        for gradient, examples in workers:
            known = iter(sums)

            def all_reduce(value, known=known):
                for total in known:
                    return total.copy()
                raise _Waits(value)

            try:
                results.append(answer(np.array(gradient), examples, all_reduce))
            except _Waits as at:
                passed.append(np.asarray(at.value, np.float64))
        if not passed:
            return results, len(sums)
        require(
            not results,
            "a worker waits forever: all must call all_reduce equally often, even a worker "
            "without examples",
        )
        shapes = {value.shape for value in passed}
        require(
            len(shapes) == 1,
            f"the workers pass arrays of different shapes to all_reduce, {sorted(shapes)}, which "
            "cannot be added",
        )
        sums.append(np.sum(passed, axis=0))
        require(len(sums) < 10, "all_reduce was called ten times: once is enough")


def _check_devices(answer: Callable, case: tuple, wanted: int) -> None:
    microbatches, seconds, ring, efficiency = case
    got = float(filled(answer(*case)))
    said = f"for {microbatches} micro-batches of {seconds:g} s, s = {ring:g} and {100 * efficiency:.0f}%"
    require(
        got == int(got) and 1 <= got <= microbatches,
        f"{said}: {got:g} is not from 1 to {microbatches}",
    )
    require(
        microbatches % got == 0,
        f"{said}: {microbatches} micro-batches cannot be divided by {got:g}",
    )
    work = microbatches * seconds
    reached = work / (work + 2 * (got - 1) * ring)
    require(got <= wanted, f"{said}: {got:g} devices reach only {100 * reached:.1f}%")
    require(got >= wanted, f"{said}: {got:g} devices reach {100 * reached:.1f}%, but more would do")

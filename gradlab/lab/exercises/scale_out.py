"""Checkers for the exercises of notebook 12."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import NotYet, exercise, require, require_close


@exercise
def mean_of_all(answer: Any) -> None:
    """A function: (a worker's mean gradient, its examples, all_reduce) -> the mean over all workers' examples."""
    sums = _check_mean(answer, [([1.0, 1.0], 30), ([5.0, 3.0], 10)], [2, 1.5])
    _check_mean(answer, [([1.0, 0.0, 2.0], 2), ([4.0, 1.0, 2.0], 4), ([0.0, 0.0, 0.0], 0)], [3, 2 / 3, 2])
    require(
        sums == 1, f"the mean is right, but took {sums} sums: pass everything in one array, such as np.append makes"
    )


@exercise
def smallest_k(answer: Any) -> None:
    """A function: (seconds per micro-batch, seconds per sum, efficiency) -> the smallest k that reaches it."""
    got = _number(answer(0.1, 0.56, 0.75))
    require(got != 5, "5 micro-batches take 0.5 s, and the sum 0.56 s: less than half of the time is computation")
    require(got != 8, "8 micro-batches take 0.8 s, and the sum 0.56 s: that is 59 %, not 75 %")
    require(got != 16, "16 micro-batches take 1.6 s, and the sum 0.56 s: that is 74 %, a little short of 75 %")
    _check_k(answer, 0.1, 0.56, 0.75, 17)
    _check_k(answer, 0.1, 0.56, 0.9, 51)
    _check_k(answer, 1.0, 3.0, 0.5, 3)
    _check_k(answer, 2.0, 1.0, 0.5, 1)
    _check_k(answer, 0.1, 0.0, 0.9, 1)


@exercise
def tf_config(answer: Any) -> None:
    """A function: (addresses of the machines, the number of one) -> that machine's TF_CONFIG."""
    machines = ["node1:12345", "node2:12345", "node3:12345"]
    for index in range(3):
        _check_config(answer(list(machines), index), machines, index)


@exercise
def first_update_again(answer: Any) -> None:
    """A number: the first update of the restarted job."""
    require(answer != 1, "1 would be right without checkpoints, but there are two")
    require(answer != 251, "the state after update 250 was in memory, and is lost. Which state is on disk?")
    require(answer != 200, "the checkpoint holds the state after update 200, so update 200 need not be repeated")
    require_close(answer, 201, "the first update", "but checkpoints were written after the updates 100 and 200")


class _Waits(BaseException):
    """Stop a worker at a sum for which some workers have not passed a value yet."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def _check_mean(answer: Callable, workers: list[tuple], wanted: list[float]) -> int:
    """Raise `NotYet` unless each worker returns the mean; return the number of sums that were used."""
    results, sums = _run_workers(answer, workers)
    require(all(result is not None and result is not ... for result in results), "the function returns nothing yet")
    require(sums, "all_reduce was never called, so each worker uses only its own examples")
    gradients, examples = (np.array(column) for column in zip(*workers))
    counts = ", ".join(str(count) for count in examples)
    for result in results:
        got = np.asarray(result, np.float64)
        if got.shape == gradients[0].shape:
            total = examples @ gradients
            require(
                not np.allclose(got, gradients.mean(axis=0)),
                "this is the unweighted mean of the means: the workers have different numbers of examples",
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
            got, wanted, f"the mean over workers with {counts} examples", "and should be the mean over all examples"
        )
    return sums


def _run_workers(answer: Callable, workers: list[tuple]) -> tuple[list, int]:
    """Run a function as several workers would; return the result of each worker, and the number of sums.

    The workers run one after the other. At a new sum a worker is stopped; once all have passed a value, each one is
    run again from the beginning, and the sums that are already known are returned to it.
    """
    sums: list[np.ndarray] = []
    while True:
        passed, results = [], []
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
            "a worker waits forever: all must call all_reduce equally often, even a worker without examples",
        )
        shapes = {value.shape for value in passed}
        require(
            len(shapes) == 1,
            f"the workers pass arrays of different shapes to all_reduce, {sorted(shapes)}, which cannot be added",
        )
        sums.append(np.sum(passed, axis=0))
        require(len(sums) < 10, "all_reduce was called ten times: once is enough")


def _check_k(answer: Callable, micro_batch: float, sum_: float, efficiency: float, wanted: int) -> None:
    got = _number(answer(micro_batch, sum_, efficiency))
    case = f"for {micro_batch:g} s per micro-batch, {sum_:g} s per sum and {100 * efficiency:.0f} %"
    require(got == int(got), f"{case} your answer is {got:g}, and k is an integer: should it be rounded up or down?")
    require(got >= 1, f"{case} your answer is {got:g}, and an update has at least one micro-batch")
    reached = got * micro_batch / (got * micro_batch + sum_)
    require(got >= wanted, f"{case} your answer is {got:g}, which reaches only {100 * reached:.1f} %")
    require(got <= wanted, f"{case} your answer is {got:g}, but a smaller k is enough")


def _check_config(text, machines: list[str], index: int) -> None:
    require(text is not None and text is not ..., "the function returns nothing yet")
    require(
        isinstance(text, str),
        f"an environment variable is text, and your answer is a {type(text).__name__}: use json.dumps",
    )
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        raise NotYet("the text is not JSON. str() of a dictionary has other quotes: use json.dumps") from None
    require(isinstance(config, dict) and set(config) == {"cluster", "task"}, 'it has two entries, "cluster" and "task"')
    require(isinstance(config["cluster"], dict) and isinstance(config["task"], dict), "both entries are dictionaries")
    hint = 'is {"worker": [the addresses of all machines, in order]}, the same on each machine'
    require(config["cluster"] == {"worker": machines}, f'"cluster" {hint}')
    task = config["task"]
    require(task.get("type") == "worker", '"type" in "task" names the list that contains this machine: "worker"')
    require(not isinstance(task.get("index"), str), 'the "index" in "task" is a number, not text')
    require(task.get("index") == index, f'the "index" of machine {index} is its position in the list, counted from 0')
    require(set(task) == {"type", "index"}, '"task" has two entries, "type" and "index"')


def _number(value) -> float:
    require(value is not None and value is not ..., "the function returns nothing yet")
    return float(value)

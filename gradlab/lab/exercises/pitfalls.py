"""Checkers for the exercises of notebook 07."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.auditing.audit import audit
from gradlab.auditing.bugs import BUGS as KNOWN
from gradlab.auditing.problem import Problem
from gradlab.auditing.rules import LoopRules, trajectory
from gradlab.lab.exercises import exercise, hint_for, require, require_changed, require_close
from gradlab.lab.widget.course.bug_loops import Evidence, experiment
from gradlab.lab.widget.course.bugs import BUGS, Settings

MOST = 4  # experiments that an answer to the last exercise may use for a loop
DATA = (701, 704, 705)  # seeds of data for which `bug_loops.is_clear` holds
# the functions with bugs, as their exercises have them
_TRAIN = """
def train(microbatches, w, k, learning_rate):
    total = 0.0
    for number, (x, y) in enumerate(microbatches, start=1):
        total += gradient(w, x, y)
        if number % k == 0:
            w -= learning_rate(number) * total / k
            total = 0.0
    return w
"""
_TRAINING = """
def training(problem):
    weights, running, history = problem.weights, {}, []
    step = 0
    for epoch in problem.epochs:
        for batch in epoch:
            _, gradients = problem.gradients(weights, batch)
            for name in gradients:
                running[name] = running.get(name, 0.0) + gradients[name] / problem.k
            step += 1
            if step % problem.k == 0:
                norm = np.sqrt(sum(np.sum(total**2) for total in running.values()))
                limit = problem.clip_norm or np.inf
                rate = problem.learning_rate(step - 1) * min(1.0, limit / norm)
                weights = {name: weights[name] - rate * running[name] for name in weights}
                history.append(weights)
                running = {}
    return history
"""


@exercise
def updates_until_zero(answer: Any) -> None:
    """A function: (steps of the schedule, k) -> how many updates have a learning rate above 0."""
    for steps, k in ((1000, 8), (10, 5), (1000, 1), (10, 4), (97, 16), (5, 8)):
        value = answer(steps, k)
        mistakes = {
            steps: "which would be right if the schedule counted updates. What does it count?",
            steps * k: "which is later than planned. Is the schedule slower than planned, or "
            "faster?",
            steps / k: "and should be a whole number: an update that was not made does not count",
            -(-steps // k): "which is one too many: its last micro-batch is past the end of the "
            "schedule",
        }
        hint = hint_for(
            value, mistakes, "and should not be: what is the count at the first update?"
        )
        require_close(
            value, steps // k, f"for {steps} steps and k = {k}, the number of updates", hint
        )


@exercise
def train(answer: Any) -> None:
    """A function: an epoch of training, (microbatches, w, k, learning_rate) -> the last w."""
    require_changed(answer, _TRAIN)
    constant = lambda update: 0.125  # noqa: E731

    def trained(sizes, k, learning_rate):
        """The student's weight, that of a right loop, and the updates whose learning rates were
        requested."""
        asked = []

        def recorded(update):
            asked.append(int(update))
            return learning_rate(update)

        value = answer(_microbatches(sizes), 1.0, k, recorded)
        return value, _loop()(_microbatches(sizes), 1.0, k, learning_rate), asked

    value, wanted, _ = trained([2, 2, 2, 2], 2, constant)
    require_close(
        value,
        wanted,
        "with two full windows and a constant rate, w",
        "although it was right before you changed the code",
    )

    value, wanted, asked = trained([2, 2, 2, 2], 2, lambda update: 0.125 / (1 + update))
    require(
        list(dict.fromkeys(asked)) == [0, 1],
        f"two updates, counted from 0, asked for the learning rates of {_listed(asked)}",
    )
    require_close(value, wanted, "with a rate that falls, w")

    before = _loop()(_microbatches([2, 2, 2, 2]), 1.0, 2, constant)
    value, wanted, asked = trained([2, 2, 2, 2, 2], 2, constant)
    mistakes = {before: "as if there were no fifth micro-batch"}
    require_close(
        value,
        wanted,
        "with five micro-batches and k = 2, w",
        hint_for(value, mistakes, "look at the last window"),
    )
    require(
        list(dict.fromkeys(asked)) == [0, 1, 2],
        f"five micro-batches with k = 2 asked for the learning rates of {_listed(asked)}",
    )

    value, wanted, _ = trained([4, 4, 2], 3, constant)
    hint = "look at a window of 4, 4 and 2 examples: what is the weight of each micro-batch?"
    require_close(value, wanted, "with micro-batches of 4, 4 and 2, and k = 3, w", hint)
    for sizes, k in (([4, 4, 4, 1], 2), ([3, 3, 1], 5), ([1], 4), ([5, 2, 5, 2, 1], 2)):
        value, wanted, _ = trained(sizes, k, constant)
        require_close(
            value, wanted, f"with micro-batches of {_listed(sizes)} examples, and k = {k}, w"
        )


def _microbatches(sizes) -> list:
    rng = np.random.default_rng(6)
    return [
        (rng.integers(1, 4, size).astype(np.float64), rng.integers(-4, 5, size) / 2)
        for size in sizes
    ]


def _listed(numbers) -> str:
    words = [str(number) for number in numbers] or ["none"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@exercise
def is_right(answer: Any) -> None:
    """A function: loop -> whether it is right. A loop is a function like `train`."""
    for make, what in _RIGHT:
        verdict = _verdict(answer, make)
        require(verdict is not None, "the function returns nothing yet: return True or False")
        require(
            isinstance(verdict, (bool, np.bool_)), f"return True or False. Received: {verdict!r}"
        )
        require(verdict, f"your check rejects a right loop: {what}")
    # A wrong loop may ask for more than the check has, such as a rate past the last one
    passed = [what for loop, what in _BROKEN if _verdict(answer, loop, Exception)]
    if passed:
        more = f" (and {len(passed) - 1} more)" if len(passed) > 1 else ""
        require(False, f"your check accepts a wrong loop: {passed[0]}{more}")


def _verdict(answer, loop, failure=AssertionError):
    """The result of the student's check; a failure counts as False."""
    try:
        return answer(loop)
    except failure:
        return False


def _loop(clip_norm: float | None = None, **rules: Any) -> Callable:
    """A training loop like that of exercise 2.

    Args:
        clip_norm: the largest gradient, or None.
        **rules: the fields of `LoopRules` that differ from those of a right loop.
    """

    def train(microbatches, w, k, learning_rate):
        problem = Problem(
            "one weight",
            {"w": w},
            [list(microbatches)],
            k,
            learning_rate=learning_rate,
            clip_norm=clip_norm,
        )
        *_, last = [w], *trajectory(problem, LoopRules(**rules), _gradient)
        return float(last[0])

    return train


def _gradient(w: np.ndarray, microbatch: tuple) -> np.ndarray:
    x, y = microbatch
    return np.atleast_1d(np.mean((w * x - y) * x))


def _rounded(microbatches, w, k, learning_rate):
    """A right loop with the digits of float32 only."""
    return float(np.float32(_loop()(microbatches, w, k, learning_rate)))


_RIGHT = (
    (_loop(), "it weights by examples, and updates at the end of the epoch"),
    (
        _rounded,
        "it rounds its result to float32, so its last digits differ. Is your comparison too "
        "strict?",
    ),
)
_BROKEN = (
    (
        _loop(alike=True, divisor="none"),
        "it adds the gradients of a window and does not divide",
    ),
    (
        _loop(alike=True),
        "it weights all micro-batches equally. Try micro-batches of different sizes",
    ),
    (
        _loop(tail="dropped"),
        "it forgets a window that is not full. Try a number of micro-batches that k does not "
        "divide",
    ),
    (_loop(divisor="share"), "it divides by k in a window that is not full. Try one"),
    (
        _loop(**KNOWN["schedule_per_microbatch"].variants[0]),
        "it counts micro-batches for the learning rate. Try a rate that changes",
    ),
    (
        _loop(clip_norm=3.0, clip="each"),
        "it clips the gradient of each micro-batch to 3. Try larger gradients",
    ),
)


@exercise
def detective(answer: Any) -> None:
    """A function: experiment -> the bug's name; an experiment is a function of the settings."""
    for seed in DATA:
        for bug in np.random.default_rng(seed).permutation(list(BUGS)):
            used: list[Evidence] = []
            said = answer(_experiments(str(bug), seed, used))
            require(
                said is not None and said is not ...,
                "the function returns nothing yet: return the name of a bug",
            )
            require(
                isinstance(said, str) and said in BUGS,
                f"return one of {', '.join(BUGS)}. Received: {said!r}",
            )
            require(used, "your function names a bug without an experiment")
            last = used[-1]
            hint = f"the last experiment was {last.settings}, of the {last.measure}"
            require(said == bug, f"your function says {said!r} for a loop with another bug; {hint}")


def _experiments(bug: str, seed: int, used: list[Evidence]) -> Callable[..., Evidence]:
    """The experiments on a loop with this bug, of which each is added to `used`."""

    def run(measure: str = "weight", **settings: Any) -> Evidence:
        require(len(used) < MOST, f"your function runs more than {MOST} experiments on a loop")
        used.append(experiment(Settings(**settings), measure, bug, seed))
        return used[-1]

    return run


@exercise
def real_loop(answer: Any) -> None:
    """A function: a problem -> the weights after each update, as `gradlab.audit` calls it."""
    require_changed(answer, _TRAINING)
    found = audit(answer, supports=("clip_norm", "schedule"))
    count = len(found.findings)
    if count:
        first = found.findings[0]
        number = "a bug" if count == 1 else f"{count} bugs, and first"
        require(False, f"the audit finds {number}: {first.sentence} {first.evidence}")
    refused = [why for why in found.skipped.values() if "does not support" not in why]
    require(not refused, f"the audit cannot run your loop: {refused[:1]}")

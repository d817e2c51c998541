"""Checkers for the exercises of notebook 16: a loop of one's own, part by part, judged by the
probes of the audit."""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gradlab.auditing.audit import audit, weights_of
from gradlab.auditing.bugs import CORRECT, Hypothesis
from gradlab.auditing.matching import first_difference
from gradlab.auditing.models import Weights
from gradlab.auditing.probes import PROBES, ProbeTraining
from gradlab.auditing.problem import Problem
from gradlab.auditing.rules import LoopRules
from gradlab.lab.exercises import (
    NotYet,
    exercise,
    filled,
    hint_for,
    require,
    require_close,
    require_unlike,
)
from gradlab.lab.exercises.capstone import ported_loop as ported_loop  # of exercise 9

# What a loop has to do, and the probes that show it.
STEPS = {
    "add up k micro-batches, and divide": ("full windows", "two layers", "embeddings"),
    "weight by examples or tokens": ("a short micro-batch", "texts of different lengths"),
    "update at the end of an epoch": ("a short window", "a short epoch"),
    "one sum over all replicas": ("two replicas",),
    "clip once, after averaging": ("clipping",),
    "count updates, not micro-batches": (
        "a schedule",
        "momentum",
        "momentum, with a rate that falls",
    ),
    "leave out a NaN": ("a NaN",),
}
SUPPORTS = "tokens", "clip_norm", "schedule", "momentum", "replicas", "nonfinite"
_PROBES = {probe.name: probe for probe in PROBES}
_PROBES["momentum, with a rate that falls"] = ProbeTraining(
    "momentum, with a rate that falls",
    ("momentum", "schedule"),
    lambda: replace(_PROBES["momentum"].make(), learning_rate=lambda update: 0.02 / (1 + update)),
)
_ONE_AT_A_TIME = (
    "take the micro-batches one at a time, as a data loader gives them: add up the gradients of each "
    "before you take the next, and don't ask an epoch for its length"
)
_WITHOUT_NAN = Hypothesis(frozenset(), replace(LoopRules(), nonfinite="microbatch"))


class Progress:
    """A table of what a loop does right, one row for each of `STEPS`.

    Args:
        train: a function (problem) -> the weights after each update, as for `gradlab.audit`.

    Example:
        >>> Progress(lambda problem: [])    # doctest: +ELLIPSIS
        red    add up k micro-batches, and divide
        ...
    """

    def __init__(self, train: Callable[[Problem], list]):
        self.green = {
            step: all(not _fault(train, _PROBES[name]) for name in probes)
            for step, probes in STEPS.items()
        }

    def __repr__(self) -> str:
        return "\n".join(
            f"{'green' if green else 'red':6} {step}" for step, green in self.green.items()
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="color: {"#009E73" if green else "#D55E00"}">'
            f"<b>{'&#10003; green' if green else '&#10007; red'}</b></td>"
            f'<td style="text-align: left">{html.escape(step)}</td></tr>'
            for step, green in self.green.items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


def _fault(train: Callable[[Problem], list], probe: ProbeTraining) -> str:
    """What is wrong in a probe, in a sentence; empty if the weights are the large batch's."""
    where = f'in the training run "{probe.name}"'
    try:
        with np.errstate(all="ignore"):  # a warning would show lines of the parts that are right
            found = weights_of(train, probe)
    except NotYet as hint:
        return str(hint)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        if first_line.startswith("train must"):
            return f"{where} the weights cannot be used: {first_line}"
        return f"{where} the loop raised {type(error).__name__}: {first_line}"
    right = _WITHOUT_NAN if probe.name == "a NaN" else CORRECT
    update = first_difference(probe.make(), found, None, probe.is_exact, right)
    if update is None:
        return ""
    return f"{where} the weights differ from the right ones from update {update + 1} on"


# --- the parts of a loop that is right


def loop(problem: Problem, **parts: Callable) -> list[Weights]:
    """A right loop, in which some parts are replaced.

    Args:
        problem: the training run.
        **parts: "windows", "add_up", "combined", "clipped" or "step", as in the notebook.
    """
    windows = parts.get("windows", _windows)
    add_up = parts.get("add_up", _add_up)
    combined = parts.get("combined", _combined)
    clipped = parts.get("clipped", _clipped)
    step = parts.get("step", _step)
    weights = problem.weights
    state: dict = {}
    history: list[Weights] = []
    for epoch in problem.epochs:
        for window in filled(windows(epoch, problem.k * problem.replicas)):
            require(len(window) > 0, "one of your windows is empty")
            shares = [window[i :: problem.replicas] for i in range(problem.replicas)]
            sums = [_pair(add_up(problem, weights, share)) for share in shares if share]
            if not any(count for _, count in sums):
                continue  # nothing was finite
            mean = filled(combined(sums))
            gradient = filled(clipped(mean, problem.clip_norm or np.inf))
            weights = filled(step(problem, weights, gradient, state, len(history)))
            history.append(weights)
    return history


def _pair(value: Any) -> tuple[Weights, float]:
    is_pair = isinstance(filled(value), (tuple, list)) and len(value) == 2
    require(is_pair, "return a pair: a dict with the sum of each gradient, and what it counts for")
    return value


def _windows(epoch: list, size: int) -> list[list]:
    return [epoch[start : start + size] for start in range(0, len(epoch), size)]


def _add_up(problem: Problem, weights: Weights, window: list) -> tuple[Weights, float]:
    total = {name: np.zeros(np.shape(value)) for name, value in weights.items()}
    count = 0.0
    for microbatch in window:
        _, gradients = problem.gradients(weights, microbatch)
        if all(np.isfinite(each).all() for each in gradients.values()):
            size = problem.size(microbatch)
            total = {name: total[name] + size * gradients[name] for name in total}
            count += size
    return total, count


def _combined(sums: list[tuple[Weights, float]]) -> Weights:
    examples = sum(count for _, count in sums)
    return {
        name: np.sum([total[name] for total, _ in sums], axis=0) / examples for name in sums[0][0]
    }


def _clipped(gradient: Weights, limit: float) -> Weights:
    norm = np.sqrt(sum(np.sum(each**2) for each in gradient.values()))
    return {name: each * min(1.0, limit / norm) for name, each in gradient.items()}


def _step(
    problem: Problem, weights: Weights, gradient: Weights, state: dict, number: int
) -> Weights:
    rate = problem.learning_rate(number)
    for name, each in gradient.items():
        keep = 0.9 if problem.optimizer == "momentum" else 0.0
        state[name] = keep * state.get(name, 0.0) + each
    return {name: weights[name] - rate * state[name] for name in weights}


# --- the exercises


def _is_function(answer: Any) -> None:
    require(answer is not None and answer is not ..., "the function is still missing")
    require(callable(answer), f"your answer must be a function. Received: {answer!r:.80}")


def _arrays(value: Any, names: list[str]) -> Weights:
    has_names = isinstance(filled(value), dict) and sorted(value) == names
    require(has_names, f"return a dict of arrays with the names {', '.join(names)}")
    return value


def _judge(part: str, answer: Any, *steps: str) -> None:
    """Try a part in the training runs of the first step, which every loop has to pass, and of these."""
    _is_function(answer)
    train = lambda problem: loop(problem, **{part: answer})  # noqa: E731
    for step in (next(iter(STEPS)), *steps):
        for name in STEPS[step]:
            fault = _fault(train, _PROBES[name])
            require(not fault, fault)


@exercise
def add_up(answer: Any) -> None:
    """A function: (problem, weights, window) -> the sum of the gradients, and how much it holds."""
    _is_function(answer)
    _try_add_up(answer)
    _judge("add_up", answer, "weight by examples or tokens")


@exercise
def windows(answer: Any) -> None:
    """A function: (epoch, size) -> the windows of an epoch."""
    _is_function(answer)
    lengths = [len(window) for window in filled(answer(list(range(10)), 4))]
    require(
        lengths == [4, 4, 2],
        f"ten micro-batches and a size of four make windows of {lengths}, and should make 4, 4 and 2",
    )
    _judge("windows", answer, "update at the end of an epoch")


@exercise
def combined(answer: Any) -> None:
    """A function: (sums of the replicas) -> the mean over all their examples."""
    _is_function(answer)

    def sums() -> list:  # new arrays each time: an answer may add in place
        return [({"w": np.array(6.0)}, 3), ({"w": np.array(6.0)}, 1)]

    mean = _arrays(answer(sums()), ["w"])["w"]
    what = "the mean of sums of 6 over 3 examples and of 6 over 1"
    mistakes = {
        4.0: f"{what} is not the mean of the two means: divide once, by all examples",
        2.0: f"{what} is 2 for your function: where is the second replica?",
        6.0: f"{what} is not a mean over replicas: divide by the examples",
        12.0: "that is the sum: divide it by the examples",
    }
    require_unlike(mean, mistakes)
    require_close(mean, 3, what)
    nothing = {"w": np.array(0.0)}, 0
    with np.errstate(all="ignore"):
        mean = _arrays(answer([*sums(), nothing]), ["w"])["w"]
    require_close(mean, 3, "the same with a replica that has nothing finite, 0 over 0,")
    _judge("combined", answer, "one sum over all replicas")


_GLOBAL_NORM = "the norm is that of all arrays together, not of each one"


@exercise
def clipped(answer: Any) -> None:
    """A function: (gradient, limit) -> the gradient with at most this global norm."""
    _is_function(answer)
    for first, second, limit, right, mistakes in (
        (3.0, 4.0, 1.0, (0.6, 0.8), {(1.0, 1.0): _GLOBAL_NORM, (3.0, 4.0): "their norm is 5"}),
        (0.3, 0.4, 1.0, (0.3, 0.4), {(0.6, 0.8): "they are short enough: nothing changes"}),
        (3.0, 4.0, np.inf, (3.0, 4.0), {}),
    ):
        gradient = {"a": np.array([first]), "b": np.array([second])}
        found = _arrays(answer(gradient, limit), ["a", "b"])
        both = np.ravel([found["a"], found["b"]])
        case = f"the result for {first:g} and {second:g} with a limit of {limit:g}"
        require_close(both, right, case, hint_for(both, mistakes))
    _judge("clipped", answer, "clip once, after averaging")


@exercise
def step(answer: Any) -> None:
    """A function: (problem, weights, gradient, state, number) -> the new weights."""
    _is_function(answer)
    _try_step(answer)
    _judge("step", answer, "count updates, not micro-batches")


def _try_add_up(answer: Callable) -> None:
    problem = _PROBES["texts of different lengths"].make()
    window = problem.epochs[0][:3]
    right, right_count = _add_up(problem, problem.weights, window)
    total, count = _pair(answer(problem, problem.weights, window))
    total = _arrays(total, sorted(right))
    sizes = f"the three micro-batches of {', '.join(f'{problem.size(one):g}' for one in window)}"
    hint = f"{sizes} count for {right_count:g}, not for {count}"
    require(np.shape(count) == () and np.isclose(float(count), right_count), hint)
    for name, wanted in right.items():
        plain = sum(problem.gradients(problem.weights, one)[1][name] for one in window)
        last = problem.gradients(problem.weights, window[-1])[1][name]
        hints = {
            "that is the mean: return the sum, and what it counts for": wanted / right_count,
            "a gradient is a mean: multiply it by what its micro-batch counts for": plain,
            "that is the gradient of the last micro-batch alone": last,
        }
        for said, wrong in hints.items():
            require(not np.allclose(total[name], wrong), f"{name}: {said}")
        require_close(total[name], wanted, f"{name}: the sum over {sizes}")


def _try_step(answer: Callable) -> None:
    """Two updates with momentum, each with a gradient of ones."""
    problem = _PROBES["momentum, with a rate that falls"].make()
    ones = {name: np.ones(np.shape(value)) for name, value in problem.weights.items()}
    weights = problem.weights
    state: dict = {}
    moved = 0.0
    for number in (0, 1):
        before = weights
        gradient = {name: each.copy() for name, each in ones.items()}
        weights = _arrays(answer(problem, before, gradient, state, number), sorted(before))
        moved = np.ravel(before["kernel"] - weights["kernel"])[0]
    first, second = problem.learning_rate(0), problem.learning_rate(1)
    mistakes = {
        second: "the velocity of the second update is 0.9 times that of the first plus the "
        "gradient: keep it in state",
        1.9 * first: "the rate of the second update is learning_rate(1)",
        first: "the rate of the second update is learning_rate(1), and its velocity is 1.9",
        0.9 * first + second: "the velocity adds up gradients: multiply it by the rate of this "
        "update",
        -1.9 * second: "a step goes against the gradient",
        0.0: "return new arrays: `weights[name] -= ...` changes those that you were given",
    }
    require_unlike(moved, mistakes)
    require_close(moved, 1.9 * second, "with gradients of 1, the step of the second update")


@exercise
def without_nan(answer: Any) -> None:
    """A function: `add_up` that leaves out what is not finite."""
    _judge("add_up", answer, "weight by examples or tokens", "leave out a NaN")
    problem = _PROBES["full windows"].make()
    window = problem.epochs[0][:3]
    wanted, right_count = _add_up(problem, problem.weights, [window[0], window[2]])
    for array in problem.weights:
        bad = _WithInfinity(
            problem.model, problem.weights, problem.epochs, problem.k, of=[window[1]], array=array
        )
        total, count = _pair(answer(bad, bad.weights, window))
        require(
            count == right_count and all(np.allclose(total[name], wanted[name]) for name in wanted),
            "with a finite loss and an infinity in one of the arrays of a micro-batch, the sum is "
            "not that of the other micro-batches",
        )
    sums, none = _pair(answer(bad, bad.weights, [window[1]]))
    require(none == 0, f"where nothing is finite, the count is {none}, and should be 0")
    hint = (
        "where nothing is finite, the sums should be zeros: those of another replica are added to "
        "them"
    )
    require(sums, hint)
    require(not any(np.any(each) for each in _arrays(sums, sorted(wanted)).values()), hint)


@dataclass(frozen=True)
class _WithInfinity(Problem):
    """A problem in which some micro-batches have one infinite number in one array only."""

    of: list = field(default_factory=list)
    array: str = "bias"

    def gradients(self, weights: Weights, microbatch: tuple) -> tuple[float, Weights]:
        loss, gradients = super().gradients(weights, microbatch)
        if any(microbatch is one for one in self.of):
            bad = gradients[self.array].copy()
            bad.flat[-1] = -np.inf if self.array == "bias" else np.inf
            gradients = {**gradients, self.array: bad}
        return loss, gradients


class _InHalf(Problem):
    """A problem whose gradients come in half precision."""

    def gradients(self, weights: Weights, microbatch: tuple) -> tuple[float, Weights]:
        loss, gradients = super().gradients(weights, microbatch)
        return loss, {name: each.astype(np.float16) for name, each in gradients.items()}


@exercise
def in_half(answer: Any) -> None:
    """A function: `add_up` for gradients of float16."""
    _judge("add_up", answer, "weight by examples or tokens")
    problem = _PROBES["a long window"].make()
    [[(x, y), *rest]] = problem.epochs
    window = [(np.repeat(x, 32, axis=0), np.repeat(y, 32, axis=0)), *rest]
    half = _InHalf(problem.model, problem.weights, [window], problem.k)
    with np.errstate(all="ignore"):
        total, _ = _pair(answer(half, half.weights, window))
    wanted, _ = _add_up(problem, problem.weights, window)  # of float64
    for name, right in wanted.items():
        found = np.asarray(total[name], np.float64)
        require(
            np.allclose(found, right, rtol=1e-6),
            f"the sum of float16 gradients of {name} is {found.ravel()[0]:,.0f}, and should be "
            f"{right.ravel()[0]:,.0f}: which types do your products and your sum have?",
        )


@exercise
def whole_loop(answer: Any) -> None:
    """A function: (problem) -> the weights after each update, as `gradlab.audit` calls it."""
    _is_function(answer)
    filled(answer(_PROBES["full windows"].make()))
    fault = _fault(answer, _PROBES["full windows"])
    require(not fault, fault)
    problem = _more_epochs()
    found, right = answer(_more_epochs()), loop(problem)
    first = len(problem.epochs[0]) // problem.k
    only_first = _are_equal(found[:first], right[:first]) and not _are_equal(found, right)
    require(not only_first, "momentum and the schedule go on from one epoch to the next")
    verdict = audit(answer, supports=SUPPORTS)
    for one in verdict.findings:
        require(False, f"the audit finds: {one.sentence} {one.evidence}")
    refused = [why for why in verdict.skipped.values() if "does not support" not in why]
    require(not refused, f"the audit cannot run your loop: {refused[:1]}")
    for name in ("momentum, with a rate that falls", "a NaN"):
        fault = _fault(answer, _PROBES[name])
        require(not fault, fault)
    for made, hint in _not_audited():
        with np.errstate(all="ignore"):
            found, right = answer(made()), loop(made())
        require(_are_equal(found, right), hint)
    answer(_one_at_a_time(_PROBES["two replicas"].make()))


def _are_equal(found: list[Weights], right: list[Weights]) -> bool:
    return len(found) == len(right) and all(
        np.allclose(one[name], other[name], rtol=0, atol=1e-4)
        for one, other in zip(found, right)
        for name in other
    )


def _not_audited() -> list[tuple[Callable[[], Problem], str]]:
    """Problems that the audit does not have, and what is said of a loop that is wrong in them."""
    infinite = "a micro-batch can have a finite loss and an infinite gradient of"
    return [
        (
            _together,
            "with two replicas, clipping and a short window at once, the weights are wrong: combine "
            "the replicas first, clip once, and update at the end of an epoch",
        ),
        (
            _lost_window,
            "a window in which nothing is finite is no update, and doesn't count as one",
        ),
        (
            _lost_replica,
            "a replica with nothing finite leaves the sums of the others as they are",
        ),
        (partial(_overflow, "kernel"), f"{infinite} kernel"),
        (partial(_overflow, "bias"), f"{infinite} bias"),
    ]


def _more_epochs() -> Problem:
    """A problem with momentum, a rate that falls, and more than one epoch."""
    problem = _PROBES["momentum, with a rate that falls"].make()
    return replace(problem, epochs=2 * problem.epochs)


def _together() -> Problem:
    """A problem with two replicas, clipping, and a short window at the end of each epoch."""
    problem = _PROBES["two replicas"].make()
    [epoch] = problem.epochs
    return replace(problem, epochs=2 * [epoch[:11]], clip_norm=1.5)


def _lost_window() -> Problem:
    """A problem whose second window has nothing finite, with a rate that falls."""
    problem = _PROBES["a NaN"].make()
    for x, _ in problem.epochs[0][problem.k : 2 * problem.k]:
        x[:] = np.nan
    return replace(problem, optimizer="momentum", learning_rate=lambda update: 0.05 / (1 + update))


def _lost_replica() -> Problem:
    """A problem in whose first window one of two replicas has nothing finite."""
    problem = _PROBES["two replicas"].make()
    for x, _ in problem.epochs[0][: 2 * problem.k : 2]:
        x[:] = np.nan
    return problem


def _overflow(array: str) -> Problem:
    """A problem whose second micro-batch has a finite loss and an infinity in the gradient of an
    array."""
    problem = _PROBES["full windows"].make()
    values = {**vars(problem), "of": [problem.epochs[0][1]], "array": array}
    return _WithInfinity(**values)


def _one_at_a_time(problem: Problem) -> Problem:
    """The same problem, whose epochs raise `NotYet` when micro-batches are collected."""
    waiting: list[tuple] = []
    epochs: list[Any] = [_Loader(epoch, waiting) for epoch in problem.epochs]
    return _Streamed(**{**vars(problem), "epochs": epochs, "waiting": waiting})


@dataclass(frozen=True)
class _Streamed(Problem):
    """A problem that notes which micro-batches wait for their gradients."""

    waiting: list[tuple] = field(default_factory=list)

    def gradients(self, weights: Weights, microbatch: tuple) -> tuple[float, Weights]:
        self.waiting.clear()
        return super().gradients(weights, microbatch)


class _Loader:
    """An epoch that can only be looped over, and of which at most two micro-batches may wait for
    their gradients: loops may look one ahead to find the end."""

    def __init__(self, microbatches: list[tuple], waiting: list[tuple]):
        self._microbatches = microbatches
        self._waiting = waiting

    def __iter__(self) -> Iterator[tuple]:
        for microbatch in self._microbatches:
            require(len(self._waiting) < 2, _ONE_AT_A_TIME)
            self._waiting.append(microbatch)
            yield microbatch

    def __len__(self) -> int:
        raise NotYet(_ONE_AT_A_TIME)

    def __getitem__(self, part: Any) -> Any:
        raise NotYet(_ONE_AT_A_TIME)

"""Which bugs give the weights that a loop gave."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from gradlab.auditing.bugs import CORRECT, Hypothesis, with_one_more
from gradlab.auditing.problem import Problem
from gradlab.auditing.rules import as_vector, trajectory

TOLERANCE = 2e-4  # of the way that the weights went; a bug's trace is at least 1e-2 of it
# Loops that sum in half precision round in their own order; the first probe, which finds that out,
# has exact numbers.
TOLERANCE_OF_HALVES = {"float16": 5e-3, "bfloat16": 3e-2}
EXACT = 1e-3
ROUNDING = 3e-2  # within which weights may be right, computed with few digits


class Seen(NamedTuple):
    """A probe that ran.

    Attributes:
        problem: its problem.
        found: the weights after each update, as vectors.
        gradients: the problem's gradients, as `trajectory` takes them.
        is_exact: whether even sums in half precision are known to the digit.
    """

    problem: Problem
    found: list[np.ndarray]
    gradients: Callable | None = None
    is_exact: bool = False


def explain(seen: list[Seen], known: list[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses with the fewest bugs that give the weights of all probes.

    One bug and two are tried in all combinations; after that, one more beside those that explained
    the earlier probes.

    Args:
        seen: the probes that ran, the last one first: it is the one that may show another bug.
        known: the hypotheses that explain all but the last one.

    Returns:
        The hypotheses; none if no combination gives these weights.
    """
    steps = (
        lambda: known,
        lambda: _combinations()[0],
        lambda: _combinations()[1],
        lambda: _one_more(known),
    )
    for candidates in steps:
        matching = [
            one
            for one in candidates()
            if all(first_difference(*each, one) is None for each in seen)
        ]
        if matching:
            return matching
    return []


@functools.cache
def _combinations() -> tuple[list[Hypothesis], list[Hypothesis]]:
    """All hypotheses with one bug, and all with two."""
    single = _one_more([CORRECT])
    return single, _one_more(single)


def _one_more(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses with one bug more, each once: a pair of bugs is reached in two orders."""
    found = [more for one in hypotheses for more in with_one_more(one)]
    return list({(one.bugs, one.rules): one for one in found}.values())


def first_difference(
    problem: Problem,
    found: list[np.ndarray],
    gradients: Callable | None,
    is_exact: bool,
    hypothesis: Hypothesis,
    tolerance: float = TOLERANCE,
) -> int | None:
    """The first update after which the weights are not those of a hypothesis; None if all of them
    are."""
    rules = hypothesis.rules
    way = 0.0
    if rules.precision is not None:
        tolerance = EXACT if is_exact else TOLERANCE_OF_HALVES[rules.precision]
    start = as_vector(problem, problem.weights)
    number = -1
    for number, expected in enumerate(trajectory(problem, rules, gradients)):
        if number == len(found):
            return number
        if not np.array_equal(np.isfinite(expected), np.isfinite(found[number])):
            return number
        finite = np.isfinite(expected)
        way = max(way, float(np.linalg.norm((expected - start)[finite])))
        if np.linalg.norm((expected - found[number])[finite]) > tolerance * way:
            return number
    return None if number + 1 == len(found) else number + 1


def distance(
    problem: Problem, expected: list[np.ndarray], found: list[np.ndarray], update: int
) -> float:
    """How far weights are from expected ones after an update, as a share of the way that these
    went; NaN if either made fewer updates."""
    if update >= min(len(expected), len(found)):
        return float("nan")
    way = float(np.linalg.norm(expected[update] - as_vector(problem, problem.weights)))
    return float(np.linalg.norm(expected[update] - found[update])) / max(way, 1e-300)


def smallest(hypotheses: list[Hypothesis]) -> list[frozenset[str]]:
    """The smallest sets of bugs among hypotheses."""
    fewest = min(len(one.bugs) for one in hypotheses)
    return sorted({one.bugs for one in hypotheses if len(one.bugs) == fewest}, key=sorted)

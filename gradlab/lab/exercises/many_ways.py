"""Checkers for the exercises of notebook 05, and the small trainings that its last exercise
measures."""

import functools
from typing import Any

import numpy as np

from gradlab import _checks
from gradlab.lab.exercises import NotYet, exercise, filled, require, require_close

WORDS = ("equal", "on average", "not equal")
_RIGHT = {
    "ragged tail": "equal",
    "example weights": "equal",
    "dropout": "on average",
    "batch normalization": "not equal",
    "group normalization": "equal",
}
CASES = tuple(_RIGHT)
EXAMPLES = 20
MICROBATCH_SIZE = 3
SEEDS = 400
_TO_TWO_DECIMALS = 0.005


@exercise
def equal(answer: Any) -> None:
    """A function of two arrays: whether they are equal up to 1e-5 of the largest number of the
    second."""
    ones = np.array([1.0, -2.0, 4.0])
    first = filled(answer(ones, ones))
    require(np.shape(first) == (), "return one True or False, not one for each number")
    for ours, theirs, wanted, hint in _pairs(ones):
        with np.errstate(all="ignore"):
            require(bool(answer(ours, theirs)) == wanted, hint)
    many = np.ones([1000, 1000])
    off = np.ones([1000, 1000])
    off[500, 500] += 1e-3
    require(
        not answer(off, many),
        "one number in a million is off by a thousandth: a mean or a norm does not notice",
    )


def _pairs(ones: np.ndarray) -> list[tuple]:
    """Pairs of arrays, whether they are equal, and a hint."""
    signs = np.array([-0.5, 0.5, -4.0])
    negative = np.array([-4.0, 0.5])
    return [
        (ones, ones, True, "an array equals itself"),
        (2 * ones, ones, False, "twice the gradient is not the gradient"),
        (-ones, ones, False, "a gradient with the opposite sign is not equal"),
        (
            1e-30 * 2 * ones,
            1e-30 * ones,
            False,
            "2e-30 is not 1e-30: nothing may be added to the tolerance or to a divisor",
        ),
        (
            1e-9 * (1 + 1e-7) * ones,
            1e-9 * ones,
            True,
            "tiny numbers that agree in seven digits are equal",
        ),
        (
            1e9 * (1 + 1e-7) * ones,
            1e9 * ones,
            True,
            "huge numbers that agree in seven digits are equal",
        ),
        (
            1e9 * (1 + 1e-3) * ones,
            1e9 * ones,
            False,
            "huge numbers that differ by a thousandth are not equal",
        ),
        (
            ones + [1e-7, 0, 0],
            ones,
            True,
            "where the largest number is 4, a difference of 1e-7 is rounding error",
        ),
        (
            ones - [0, 0, 1e-3],
            ones,
            False,
            "where the largest number is 4, a difference of 1e-3 is no rounding error",
        ),
        (
            ones - [0, 0, 8e-5],
            ones,
            False,
            "where the largest number is 4, a difference of 8e-5 is 2e-5 of it: too much",
        ),
        (
            ones - [0, 0, 2e-5],
            ones,
            True,
            "where the largest number is 4, a difference of 2e-5 is half of what is allowed",
        ),
        (
            0 * ones,
            0 * ones,
            True,
            "two arrays of zeros are equal, but 0 / 0 is NaN: multiply the tolerance instead",
        ),
        (
            np.array([1e-8, 4.0]),
            np.array([0.0, 4.0]),
            True,
            "divide by the largest number, not each difference by its own number",
        ),
        (np.array([0.5, -0.5, -4.0]), signs, False, "one number's error must not cancel another's"),
        (
            negative + [2e-5, 0],
            negative,
            True,
            "the largest number is the one with the largest absolute value",
        ),
        (np.array([np.nan, 4.0]), np.array([1.0, 4.0]), False, "NaN does not equal anything"),
        (
            np.array([np.inf, 4.0]),
            np.array([1.0, 4.0]),
            False,
            "an infinite gradient is not equal: the largest value is that of theirs",
        ),
    ]


@exercise
def differing(answer: Any) -> None:
    """A function of two dictionaries of arrays -> the names of the variables that differ by more
    than rounding."""
    for ours, others, wanted, hint in _dictionaries():
        with np.errstate(all="ignore"):
            got = filled(answer(ours, others))
        named = isinstance(got, (list, tuple, set)) and all(isinstance(name, str) for name in got)
        require(named, 'return a list of names, such as ["norm/scale"]')
        require(sorted(got) == wanted, f"{hint}. The answer was {sorted(got)}")


def _dictionaries() -> list[tuple]:
    """Pairs of dictionaries, the names of the variables that differ, and a hint."""
    generator = np.random.default_rng(0)
    sizes = {
        "conv/kernel": (60, 1.0),
        "conv/bias": (6, 1e-3),
        "norm/scale": (6, 1e-9),
        "dense/kernel": (10**6, 0.1),
    }
    theirs = {name: size * generator.normal(size=count) for name, (count, size) in sizes.items()}
    rounded = {
        name: value * (1 + 1e-7 * generator.normal(size=value.shape))
        for name, value in theirs.items()
    }
    zero = {"frozen/bias": np.zeros(3)}
    half = {name: 0.5 * value for name, value in theirs.items()}
    off = rounded["dense/kernel"].copy()
    swapped = rounded["conv/kernel"].copy()
    off[17] += 2e-4
    close = np.zeros(60)
    close[5] = 2e-5 * np.abs(theirs["conv/kernel"]).max()
    swapped[:2] += [0.1, -0.1]
    hidden = rounded | {"norm/scale": half["norm/scale"]}
    two = hidden | {"conv/kernel": half["conv/kernel"]}
    other_order = {
        name: hidden[name] for name in ("conv/kernel", "norm/scale", "conv/bias", "dense/kernel")
    }
    return [
        (theirs, theirs, [], "for two equal dictionaries, the list is empty"),
        (
            {"dense/bias": np.array([-4.0 + 2e-5, 0.5])},
            {"dense/bias": np.array([-4.0, 0.5])},
            [],
            "an error of 2e-5 is half of what is allowed where the largest absolute value is that of -4",
        ),
        (
            rounded,
            theirs,
            [],
            "a difference of 1e-7 of a variable's largest number is rounding error",
        ),
        (
            rounded | {"conv/kernel": half["conv/kernel"]},
            theirs,
            ["conv/kernel"],
            "half of the gradient of conv/kernel is missing",
        ),
        (
            rounded | {"conv/kernel": theirs["conv/kernel"] + close},
            theirs,
            ["conv/kernel"],
            "one number of conv/kernel is off by 2e-5 of the largest one: twice what is allowed",
        ),
        (
            hidden,
            theirs,
            ["norm/scale"],
            "half of the gradient of norm/scale is missing. Its numbers are a billionth of those "
            "of conv/kernel: compare each variable with its own largest number, and add nothing "
            "to the tolerance",
        ),
        (
            rounded | {"dense/kernel": off},
            theirs,
            ["dense/kernel"],
            "one of a million numbers of dense/kernel is off by 2e-4: a mean or a norm does not "
            "notice",
        ),
        (
            rounded | {"conv/kernel": swapped},
            theirs,
            ["conv/kernel"],
            "two numbers of conv/kernel are off by 0.1 and -0.1: one number's error must not "
            "cancel another's",
        ),
        (
            two,
            theirs,
            ["conv/kernel", "norm/scale"],
            "two variables differ: both names are expected",
        ),
        (
            other_order,
            theirs,
            ["norm/scale"],
            "the two dictionaries may list the variables in different orders: take the arrays by "
            "name",
        ),
        (
            rounded | zero,
            theirs | zero,
            [],
            "where both gradients are 0, nothing differs: 0 / 0 is NaN",
        ),
        (
            rounded | {"frozen/bias": np.full(3, 1e-30)},
            theirs | zero,
            ["frozen/bias"],
            "the gradient of frozen/bias should be 0 and is 1e-30: every number is more than 1e-5 "
            "of 0, so nothing may be added to the tolerance or to a divisor",
        ),
        (
            rounded | {"conv/bias": np.full(6, np.nan)},
            theirs,
            ["conv/bias"],
            "the gradient of conv/bias is NaN",
        ),
        (
            rounded | {"conv/bias": np.full(6, np.inf)},
            theirs,
            ["conv/bias"],
            "the gradient of conv/bias is infinite",
        ),
    ]


@exercise
def order_matters(answer: Any) -> None:
    """A tuple of three numbers."""
    require(
        answer is not ..., "the numbers are still missing: put your answer in place of the dots"
    )
    require(
        isinstance(answer, (tuple, list)) and len(answer) == 3,
        "give three numbers, as in (1.0, 2.0, 3.0)",
    )
    a, b, c = (float(number) for number in answer)
    require(
        np.isfinite([a, b, c]).all() and max(abs(a), abs(b), abs(c)) <= 1000,
        "each number must be at most 1000 in absolute value",
    )
    require(a and b and c, "none of them may be 0")
    ratios = np.sort([abs(a), abs(b), abs(c)]) / min(abs(a), abs(b), abs(c))
    require(
        not np.allclose(ratios, [1, 2, 3]),
        "these are 0.1, 0.2 and 0.3 from above, or a multiple of them: find others",
    )
    same = (
        f"both orders give {a + b + c!r}. Try decimal fractions, whose sums must be rounded, or numbers "
        "of very different sizes"
    )
    require((a + b) + c != a + (b + c), same)


@exercise
def equal_or_not(answer: Any) -> None:
    """A dictionary: for each case two measured differences, and a word."""
    require(
        isinstance(answer, dict) and set(answer) == set(CASES),
        f"the keys should be {', '.join(CASES)}",
    )
    for case in CASES:
        require(answer[case] is not ..., f"{case}: the answer is still missing")
        complete = isinstance(answer[case], (tuple, list)) and len(answer[case]) == 3
        require(
            complete, f"{case}: give a tuple of two numbers and a word, one of {', '.join(WORDS)}"
        )
        one, many, word = answer[case]
        _check_difference(case, 1, float(one))
        _check_difference(case, SEEDS, float(many))
        require(word in WORDS, f"{case}: the word should be one of {', '.join(map(repr, WORDS))}")
    right = sum(answer[case][2] == _RIGHT[case] for case in CASES)
    require(
        right == len(CASES),
        f"all numbers are right, and {right} of the {len(CASES)} words: look at both numbers",
    )


def gradient(case: str, microbatch_size: int, seed: int) -> np.ndarray:
    """The gradient of a window of 20 examples, in float64: the weighted mean over its
    micro-batches.

    The network has 4 hidden units and tanh. In the case "dropout" each unit is dropped with
    probability 0.5. In the cases "batch normalization" and "group normalization" (2 groups of 2
    units) the hidden units are normalized before tanh. In the case "example weights" no two
    examples have the same weight. In all cases, micro-batches of 3 leave a ragged tail of 2.

    Args:
        case: one of `CASES`.
        microbatch_size: the examples of a micro-batch; 20 is the large batch.
        seed: determines the examples, and the dropout masks of each micro-batch.

    Returns:
        The gradient with respect to the 12 weights of the hidden layer.

    Raises:
        ValueError: there is no such case, or microbatch_size is not a positive integer.

    Example:
        >>> gradient("dropout", microbatch_size=20, seed=0).shape
        (12,)
    """
    _checks.one_of("case", case, CASES)
    _checks.positive_integer("microbatch_size", microbatch_size)
    generator = np.random.default_rng(seed)
    x = generator.normal(size=[EXAMPLES, 3])
    y = np.tanh(2 * x[:, 0] - x[:, 1]) + 0.5
    weights = (
        generator.uniform(0.2, 3, EXAMPLES) if case == "example weights" else np.ones(EXAMPLES)
    )
    total = np.zeros(12)
    for number, start in enumerate(range(0, EXAMPLES, microbatch_size)):
        rows = slice(start, start + microbatch_size)
        masks = 2.0 * (np.random.default_rng([seed, number]).random([len(x[rows]), 4]) < 0.5)
        total += _sum_of_gradients(case, x[rows], y[rows], weights[rows], masks)
    return total / weights.sum()


def _sum_of_gradients(
    case: str, x: np.ndarray, y: np.ndarray, weights: np.ndarray, masks: np.ndarray
) -> np.ndarray:
    """The gradient of the weighted sum of the losses of a micro-batch, exact up to rounding.

    Each derivative is the imaginary part of the loss at a weight with an imaginary step (Squire and
    Trapp 1998).
    """
    step = 1e-30
    start = np.random.default_rng(1).normal(size=[3, 4])
    hidden = x @ (start + 1j * step * np.eye(12).reshape(12, 3, 4))
    if case == "batch normalization":
        hidden = _normalized(hidden, axis=1)
    if case == "group normalization":
        hidden = _normalized(hidden.reshape(12, len(x), 2, 2), axis=3).reshape(hidden.shape)
    if case == "dropout":
        hidden = hidden * masks
    losses = (np.tanh(hidden) @ [1.0, -0.5, 0.8, 0.3] - y) ** 2
    return (losses @ weights).imag / step


def _normalized(hidden: np.ndarray, axis: int) -> np.ndarray:
    mean = hidden.mean(axis=axis, keepdims=True)
    variance = ((hidden - mean) ** 2).mean(axis=axis, keepdims=True)
    return (hidden - mean) / np.sqrt(variance + 0.1)


@functools.cache
def _gradients(case: str, microbatch_size: int) -> np.ndarray:
    """The gradients of all seeds, shape (seeds, weights)."""
    return np.array([gradient(case, microbatch_size, seed) for seed in range(SEEDS)])


def _difference(case: str, seeds: int) -> float:
    """The norm of the difference of the mean gradients, relative to the large batch's."""
    large, small = (
        _gradients(case, size)[:seeds].mean(axis=0) for size in (EXAMPLES, MICROBATCH_SIZE)
    )
    return float(np.linalg.norm(small - large) / np.linalg.norm(large))


def _check_difference(case: str, seeds: int, value: float) -> None:
    """Raise `NotYet` unless the value is the difference after averaging over this many seeds."""
    what = (
        f"{case}: the difference for seed 0"
        if seeds == 1
        else f"{case}: the difference for {seeds} seeds"
    )
    wanted = _difference(case, seeds)
    if abs(value - wanted) <= _TO_TWO_DECIMALS and wanted > 1e-9:
        return
    if wanted < 1e-9:
        require(abs(value) < 1e-9, f"{what} is {value:.3g}, and should be rounding error")
        return
    large = _gradients(case, EXAMPLES)[:seeds]
    small = _gradients(case, MICROBATCH_SIZE)[:seeds]
    apart = np.linalg.norm(small - large, axis=1)
    likely = [
        (
            (apart / np.linalg.norm(large, axis=1)).mean(),
            "average the gradients first, and then take the norm",
        ),
        (
            apart.mean() / np.linalg.norm(large.mean(axis=0)),
            "average the gradients first, and then take the norm",
        ),
        (
            wanted * np.linalg.norm(large.mean(axis=0)),
            "divide by the norm of the large batch's gradient",
        ),
        (wanted**2, "it is the square: take the square root"),
        (_difference(case, 1), "it is the difference for seed 0 alone"),
    ]
    if not np.isclose(value, wanted, rtol=1e-3):
        for wrong, hint in likely:
            if np.isclose(value, wrong, rtol=1e-3):
                raise NotYet(f"{what} is {value:.3g}: {hint}")
    formula = "‖small − large‖ / ‖large‖"
    hint = f"and should not be: is it {formula}, with micro-batches of {MICROBATCH_SIZE} and of {EXAMPLES}?"
    require_close(value, wanted, what, hint, 1e-3)

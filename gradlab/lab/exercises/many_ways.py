"""Checkers for the exercises of notebook 05."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_choice, require_close


@exercise
def equal(answer: Any) -> None:
    """A function of two arrays: whether they are equal up to 1e-5 of the largest number of the second."""
    ones = np.array([1.0, -2.0, 4.0])
    first = answer(ones, ones)
    require(first is not None, "the function returns nothing yet")
    require(np.shape(first) == (), "return one True or False, not one for each number")
    cases = [
        (ones, ones, True, "an array equals itself"),
        (2 * ones, ones, False, "twice the gradient is not the gradient"),
        (-ones, ones, False, "a gradient with the opposite sign is not equal"),
        (1e-9 * 2 * ones, 1e-9 * ones, False, "2e-9 is not 1e-9: nothing may be added to the tolerance"),
        (1e-9 * (1 + 1e-7) * ones, 1e-9 * ones, True, "tiny numbers that agree in seven digits are equal"),
        (1e9 * (1 + 1e-7) * ones, 1e9 * ones, True, "huge numbers that agree in seven digits are equal"),
        (1e9 * (1 + 1e-3) * ones, 1e9 * ones, False, "huge numbers that differ by a thousandth are not equal"),
        (ones + [1e-7, 0, 0], ones, True, "a difference of 1e-7 beside a largest number of 4 is rounding error"),
        (
            ones - [0, 0, 1e-3],
            ones,
            False,
            "a difference of 1e-3 beside a largest number of 4 is more than rounding error",
        ),
        (
            np.array([1e-8, 4.0]),
            np.array([0.0, 4.0]),
            True,
            "divide by the largest number, not each difference by its own number",
        ),
        (
            np.array([-0.5, 0.5, -4.0]),
            np.array([0.5, -0.5, -4.0]),
            False,
            "one number's error must not cancel another's",
        ),
        (
            -np.array([4.0, 2.0]) * (1 + 1e-7),
            -np.array([4.0, 2.0]),
            True,
            "the largest number is the one with the largest absolute value",
        ),
        (np.array([np.nan, 4.0]), np.array([1.0, 4.0]), False, "NaN does not equal anything"),
    ]
    for ours, theirs, wanted, hint in cases:
        with np.errstate(all="ignore"):
            require(bool(answer(ours, theirs)) == wanted, hint)
    many, off = np.ones([1000, 1000]), np.ones([1000, 1000])
    off[500, 500] += 1e-3
    require(not answer(off, many), "one number in a million is off by a thousandth: a mean or a norm does not notice")


@exercise
def window_gradient(answer: Any) -> None:
    """A function: (gradients of micro-batches, weights of their examples) -> the gradient of the window."""
    gradients, weights = [np.array([2.0]), np.array([8.0])], [np.array([1.0, 1.0]), np.array([4.0])]
    got = answer(gradients, weights)
    require(got is not None, "the function returns nothing yet")
    value = float(np.ravel(got)[0])
    require(abs(value - 5) > 1e-9, "5 is the unweighted mean, but the micro-batches have different weights")
    require(abs(value - 4) > 1e-9, "4 weights by the number of examples, but each example has its own weight")
    require(abs(value - 36) > 1e-9, "36 is a sum: divide by the sum of all weights")
    require(abs(value - 18) > 1e-9, "18 was divided by the number of micro-batches: divide by the sum of all weights")
    require_close(got, [6.0], "the gradient in the example", "and should be the weighted mean over the three examples")
    three = [np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]]), np.array([[-1.0, 0.0]])]
    unequal = [np.array([0.5]), np.array([1.0, 0.5, 1.5]), np.array([0.25, 0.25])]
    require_close(answer(three, unequal), [[2.25, 4.75]], "the gradient of three micro-batches of 1, 3 and 2 examples")
    require_close(answer([np.array([7.0])], [np.array([3.0])]), [7.0], "the gradient of a single micro-batch")


@exercise
def order_matters(answer: Any) -> None:
    """A tuple of three numbers."""
    require(answer is not ..., "the numbers are still missing: put your answer in place of the dots")
    require(isinstance(answer, (tuple, list)) and len(answer) == 3, "give three numbers, as in (1.0, 2.0, 3.0)")
    a, b, c = (float(number) for number in answer)
    require(np.isfinite([a, b, c]).all() and max(abs(a), abs(b), abs(c)) <= 1000, "each number must be at most 1000")
    require(a and b and c, "none of them may be 0")
    ratios = np.sort([abs(a), abs(b), abs(c)]) / min(abs(a), abs(b), abs(c))
    require(
        not np.allclose(ratios, [1, 2, 3]), "these are 0.1, 0.2 and 0.3 from above, or a multiple of them: find others"
    )
    same = f"both orders give {a + b + c!r}. Try numbers that are not sums of 1/2, 1/4, 1/8: those must be rounded"
    require((a + b) + c != a + (b + c), same)


@exercise
def equal_or_not(answer: Any) -> None:
    """A dictionary of words."""
    wanted = {
        "ragged tail": ("equal", "ragged tail: each micro-batch is weighted by its number of examples"),
        "dropout": ("on average", "dropout: what did its line do when more seeds were averaged?"),
        "batch normalisation": (
            "not equal",
            "batch normalisation: what did its line do when more seeds were averaged?",
        ),
        "group normalisation": ("equal", "group normalisation: does it look at other examples?"),
        "example weights": ("equal", "example weights: all five methods passed the test with seventeen weights"),
    }
    require(isinstance(answer, dict) and set(answer) == set(wanted), f"the keys should be {', '.join(wanted)}")
    for name, (word, hint) in wanted.items():
        value = answer[name]
        spelled = value.strip().lower().replace(" ", "_") if isinstance(value, str) else value
        choices = "equal on_average not_equal"
        if spelled is ... or spelled not in choices.split():
            require(False, f'{name}: answer one of "equal", "on average", "not equal"')
        require_choice(spelled, word.replace(" ", "_"), choices, hint)


@exercise
def bytes_over_the_border(answer: Any) -> None:
    """A function: accumulation_steps and parameters -> bytes."""
    got = answer(5, 101_770)
    require(got is not None, "the function returns nothing yet")
    hints = {
        5 * 101_770 * 4: "what comes back? The mean must be fed to the graph again",
        101_770 * 4 * 2: "the gradient of every micro-batch goes out, not their mean",
        2 * 5 * 101_770 * 4: "k gradients go out, but how many come back?",
        6 * 101_770: "a float32 has more than one byte",
        6 * 101_770 * 8: "that would be float64",
    }
    require(got not in hints, hints.get(got, ""))
    require_close(got, 2_442_480, "the number of bytes for k = 5", "and should be 2442480")
    require_close(answer(64, 10**9), 65 * 4 * 10**9, "the number for a billion parameters and k = 64")
    require_close(answer(1, 10), 80, "the number for k = 1 and 10 parameters", "but one gradient out, one mean in")

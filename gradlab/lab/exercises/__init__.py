"""Checkers of the course's exercises: one module a notebook, one checker an exercise.

A checker takes the student's answer, tries it, and prints "right", or "not yet: ..." with what to look at. It never
raises: an answer that raises is an answer that is not right yet.
"""

import functools
from collections.abc import Callable

import numpy as np


class NotYet(Exception):
    """Says what an answer still lacks."""


def exercise(check: Callable) -> Callable:
    """Makes a checker of a function that raises `NotYet` for an answer that is not right.

    Example:
        >>> @exercise
        ... def half_of_four(answer):
        ...     require_close(answer, 2, "half of 4")
        >>> half_of_four(...)
        not yet: half of 4 is still missing: put your answer in place of the dots
        >>> half_of_four(3)
        not yet: half of 4 is 3, and should not be
        >>> half_of_four(2.0)
        right
    """

    @functools.wraps(check)
    def checker(answer) -> None:
        try:
            check(answer)
        except NotYet as hint:
            print(f"not yet: {hint}")
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            print(f"not yet: your answer raised {type(error).__name__}: {first_line}")
        else:
            print("right")

    return checker


def require(condition, hint: str) -> None:
    """Raises `NotYet` with this hint unless the condition holds."""
    if not condition:
        raise NotYet(hint)


def require_close(value, wanted, what: str, hint: str = "and should not be", rtol: float = 1e-5) -> None:
    """Raises `NotYet` unless a number, or an array, is the one that is wanted.

    Args:
        value: the student's; the dots, or None from a function that is still empty, are "still missing".
        wanted: the right one; it is not told.
        what: what it is, in words: the hint's first half.
        hint: the hint's second half.
        rtol: how near is near enough, relative to the largest element.
    """
    if value is None or value is ...:
        raise NotYet(f"{what} is still missing: put your answer in place of the dots")
    value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
    if value.shape != wanted.shape:
        raise NotYet(f"{what} has the shape {value.shape}, and should have {wanted.shape}")
    if not np.allclose(value, wanted, rtol=0, atol=rtol * max(np.abs(wanted).max(initial=0), 1e-30)):
        raise NotYet(f"{what} is {_short(value)}, {hint}")


def require_choice(value, wanted: str, choices: str, hint: str) -> None:
    """Raises `NotYet` unless the answer is the right one of some words.

    Args:
        value: the student's word.
        wanted: the right one.
        choices: all of them, with blanks between: "more less equal".
        hint: what to think of.
    """
    if value is ... or str(value) not in choices.split():
        raise NotYet(f"answer one of {', '.join(map(repr, choices.split()))}")
    require(value == wanted, hint)


def _short(value: np.ndarray) -> str:
    if not value.ndim:
        return f"{value:.6g}"
    text = np.array2string(value, precision=4, threshold=6, separator=", ")
    return " ".join(text.split())

"""Checkers for the exercises of the course: one module for each notebook, one checker for each
exercise.

A checker takes the student's answer, tries it, and prints "right", or "not yet: " followed by a
hint. It never raises an exception: if the answer raises one, the checker prints that as the hint.
"""

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import numpy as np


class NotYet(Exception):
    """The answer is not right yet; the message is the hint that the student sees."""


def exercise(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Turn a function that raises `NotYet` for a wrong answer into a checker, which prints instead
    of raising.

    Args:
        check: takes the student's answer; raises `NotYet` with a hint, or any exception that the
            answer itself raises.

    Returns:
        The checker, with the name and the docstring of `check`.

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
    def checker(answer: Any) -> None:
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


def require(condition: Any, hint: str) -> None:
    """Raise `NotYet` with this hint unless the condition is true."""
    if not condition:
        raise NotYet(hint)


def filled(value: Any) -> Any:
    """Return what a student's function returned; raise `NotYet` for None and for dots."""
    require(value is not None and value is not ..., "the function returns nothing yet")
    return value


def require_changed(answer: Any, starter: str) -> None:
    """Raise `NotYet` while the answer is the function that the exercise asks to repair.

    The hint says nothing about the bugs, because the notebook is stored with it.

    Args:
        answer: the student's function.
        starter: the code of the exercise's cell that defines the function.
    """
    module = compile(starter, "<starter>", "exec", dont_inherit=True)
    [code] = (each for each in module.co_consts if isinstance(each, CodeType))
    unchanged = _does_the_same(getattr(answer, "__code__", None), code)
    require(not unchanged, "this is still the function with the bug: repair it")


def _does_the_same(one: Any, other: Any) -> bool:
    """Whether two code objects, or two constants of such, are equal but for where they stand."""
    if not (isinstance(one, CodeType) and isinstance(other, CodeType)):
        return bool(one == other)
    return (
        (one.co_code, one.co_names, one.co_varnames)
        == (other.co_code, other.co_names, other.co_varnames)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_does_the_same, one.co_consts, other.co_consts))
    )


def hint_for(
    value: Any,
    mistakes: Mapping[Any, str],
    otherwise: str = "and should not be",
    rtol: float = 1e-5,
) -> str:
    """Return the hint of the first known mistake that leads to this number or array.

    Args:
        value: the student's number or array.
        mistakes: the hint of each wrong number; a tuple stands for an array.
        otherwise: the hint if there is no such mistake.
        rtol: the relative difference up to which numbers are equal.
    """
    if value is not None and value is not ...:
        for wrong, hint in mistakes.items():
            if np.shape(value) == np.shape(wrong) and np.allclose(
                np.asarray(value, np.float64), wrong, rtol=rtol
            ):
                return hint
    return otherwise


def require_unlike(value: Any, mistakes: Mapping[Any, str], rtol: float = 1e-5) -> None:
    """Raise `NotYet` with its hint if a known mistake leads to this number or array; see
    `hint_for`."""
    hint = hint_for(value, mistakes, "", rtol)
    require(not hint, hint)


def require_close(
    value: Any, wanted: Any, what: str, hint: str = "and should not be", rtol: float = 1e-5
) -> None:
    """Raise `NotYet` unless a number or an array is close to the right one.

    Args:
        value: the student's number or array. The dots of the exercise, and None from a function
            that returns nothing yet, are reported as "still missing".
        wanted: the right number or array, which the message does not show.
        what: what the number is, in words: the first half of the message.
        hint: the second half of the message.
        rtol: the largest difference allowed, relative to the largest element of `wanted`.
    """
    if value is None or value is ...:
        raise NotYet(f"{what} is still missing: put your answer in place of the dots")
    value = np.asarray(value, np.float64)
    wanted = np.asarray(wanted, np.float64)
    if value.shape != wanted.shape:
        raise NotYet(f"{what} has the shape {value.shape}, and should have {wanted.shape}")
    if not np.allclose(
        value, wanted, rtol=0, atol=rtol * max(np.abs(wanted).max(initial=0), 1e-30)
    ):
        raise NotYet(f"{what} is {_short(value)}, {hint}")


def require_choice(value: Any, wanted: str, choices: str, hint: str) -> None:
    """Raise `NotYet` unless the answer is the right word.

    Args:
        value: the student's word.
        wanted: the right word.
        choices: the words to choose from, separated by spaces: "more less equal".
        hint: the message for one of the other words.
    """
    if value is ... or str(value) not in choices.split():
        raise NotYet(f"answer one of {', '.join(map(repr, choices.split()))}")
    require(value == wanted, hint)


def _short(value: np.ndarray) -> str:
    if not value.ndim:
        return f"{value:.6g}"
    text = np.array2string(value, precision=4, threshold=6, separator=", ")
    return " ".join(text.split())

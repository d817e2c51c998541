"""Checks of arguments. Each raises an error that states the rule and then the value."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any


def positive_integer(name: str, value: Any, otherwise: str = "") -> None:
    """Raise ValueError unless the value is an integer of 1 or more (True is not one).

    Args:
        name: the argument's name, for the message.
        value: the value to check.
        otherwise: what else the argument may be, for the message, such as '"auto" or '.

    >>> positive_integer("microbatch_size", 0)
    Traceback (most recent call last):
    ValueError: microbatch_size must be a positive integer. Received: 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be {otherwise}a positive integer. Received: {value!r}")


def natural_number(name: str, value: Any) -> None:
    """Raise ValueError unless the value is an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be an integer of 0 or more. Received: {value!r}")


def positive_number(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0. Received: {value!r}")


def one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Raise ValueError, with the list of known names, unless the value is one of them."""
    if value not in tuple(known):
        raise ValueError(f"{name} must be one of {', '.join(known)}. Received: {value!r}")

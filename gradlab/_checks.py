"""Checks of arguments: one sentence that says the rule and quotes the value."""

import math
from numbers import Integral, Real


def positive_integer(name: str, value, otherwise: str = "") -> None:
    """Raises ValueError unless value is an integer of 1 or more (True is not one).

    >>> positive_integer("microbatch_size", 0)
    Traceback (most recent call last):
    ValueError: microbatch_size must be a positive integer. Received: 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be {otherwise}a positive integer. Received: {value!r}")


def natural_number(name: str, value) -> None:
    """Raises ValueError unless value is an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be an integer of 0 or more. Received: {value!r}")


def positive_number(name: str, value) -> None:
    """Raises ValueError unless value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0. Received: {value!r}")


def one_of(name: str, value, known) -> None:
    """Raises ValueError unless value is one of the known names, and lists these."""
    if value not in tuple(known):
        raise ValueError(f"{name} must be one of {', '.join(known)}. Received: {value!r}")

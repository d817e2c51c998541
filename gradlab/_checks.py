"""Checks of arguments. Each raises an error that states the rule and then the value."""

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1  # what TensorFlow's counters hold


def positive_integer(name: str, value: Any, otherwise: str = "", most: float = LARGEST) -> None:
    """Raise ValueError unless the value is an integer from 1 to the most (True is not one).

    Args:
        name: the argument's name, for the message.
        value: the value to check.
        otherwise: what else the argument may be, for the message, such as '"auto" or '.
        most: the largest value.

    >>> positive_integer("microbatch_size", 0)
    Traceback (most recent call last):
    ValueError: microbatch_size must be a positive integer. Received: 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be {otherwise}a positive integer. Received: {value!r}")
    if int(value) > most:
        raise ValueError(f"{name} must be at most {most}. Received: {value!r}")


def natural_number(name: str, value: Any) -> None:
    """Raise ValueError unless the value is an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be an integer of 0 or more. Received: {value!r}")


def positive_number(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a finite number above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"{name} must be a finite number above 0. Received: {value!r}")


def boolean(name: str, value: Any) -> None:
    """Raise ValueError unless the value is True or False, of Python or NumPy."""
    import numpy as np  # here: `import gradlab` must not import it

    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False. Received: {value!r}")


def floating_dtype(name: str, value: Any) -> None:
    """Raise ValueError unless the value is None or a floating-point type of TensorFlow, or its
    name."""
    if value is None:
        return
    import tensorflow as tf  # here: `import gradlab` must not import it

    try:
        is_floating = not isinstance(value, (bool, Integral)) and tf.as_dtype(value).is_floating
    except (TypeError, ValueError):
        is_floating = False
    if not is_floating:
        raise ValueError(
            f"{name} must be None or a floating-point type, such as float32. Received: {value!r}"
        )


def finite_numbers(name: str, values: Any) -> None:
    """Raise ValueError if a nest of dictionaries and sequences holds a number that is not finite,
    or a text or boolean.

    None and objects that are no Python or NumPy numbers, such as tensors, are not checked.
    """
    if isinstance(values, Mapping):
        parts = list(values.values())
    elif isinstance(values, (list, tuple)):
        parts = list(values)
    else:
        if isinstance(values, (bool, str)) or (
            isinstance(values, Real) and not math.isfinite(values)
        ):
            raise ValueError(f"{name} must be finite numbers. Received: {values!r}")
        return
    for part in parts:
        finite_numbers(name, part)


def function(name: str, value: Any, otherwise: str = "") -> None:
    """Raise ValueError unless the value can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be {otherwise}a function. Received: {value!r}")


def sequence(name: str, value: Any, of: str) -> None:
    """Raise ValueError unless the value can be iterated, other than a text, a mapping or a number;
    of says of what."""
    is_other = isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__")
    if is_other or getattr(value, "shape", None) == ():
        raise ValueError(f"{name} must be a list of {of}. Received: {value!r}")


def variables(name: str, values: Collection) -> None:
    """Raise ValueError unless all values are variables of TensorFlow or Keras, or symbolic
    tensors."""
    for value in values:
        if not (hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "name")):
            raise ValueError(
                f"{name} must be variables of TensorFlow or Keras. Received: {value!r}"
            )


def one_of(name: str, value: Any, known: Collection[str] | Collection[float]) -> None:
    """Raise ValueError, with the list of known names or numbers, unless the value is one of
    them."""
    if not isinstance(value, (str, int, float)) or value not in tuple(known):
        listed = ", ".join(map(str, known))
        raise ValueError(f"{name} must be one of {listed}. Received: {value!r}")

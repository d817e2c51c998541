"""A result in a few numbers: means over seeds, and their text for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def spread(values: Sequence[float] | np.ndarray) -> list[float] | None:
    """Return [mean, standard deviation] of the finite values, rounded to three decimals; None if
    there are none.

    >>> spread([1.0, 2.0, 3.0, float("nan")])
    [2.0, 1.0]
    """
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    if not len(array):
        return None
    return [round(float(array.mean()), 3), round(float(array.std(ddof=min(1, len(array) - 1))), 3)]


def text(summary: Mapping[str, Any]) -> str:
    """Format the dictionary that `Result.summary` returns, one line for each number, with units.

    The standard deviation over seeds follows the mean where there are two seeds or more.

    >>> print(text({"endings": ["finished"] * 2, "last_accuracy_percent": [88.3, 0.028],
    ...     "best_accuracy_percent": None, "last_loss_nats": [0.4123, 0.01], "median_update_milliseconds": 3.2,
    ...     "gradient_noise_scale_examples": [23_948.2, 1_213.9]}))
        mean ± standard deviation of 2 seeds:
        last accuracy: 88.30 ± 0.03 %
        best accuracy: not measured
        last loss: 0.412 ± 0.010 nats
        median time per update: 3.20 ms
        gradient noise scale: 23,900 ± 1,200 examples
    """
    endings = summary["endings"]
    several = len(endings) > 1
    lines = [f"mean ± standard deviation of {len(endings)} seeds:"] if several else []
    lines += [
        f"last accuracy: {_plus_minus(summary['last_accuracy_percent'], several, 2, '%')}",
        f"best accuracy: {_plus_minus(summary['best_accuracy_percent'], several, 2, '%')}",
        f"last loss: {_plus_minus(summary['last_loss_nats'], several, 3, 'nats')}",
        f"median time per update: {summary['median_update_milliseconds']:,.2f} ms",
    ]
    scale = summary["gradient_noise_scale_examples"]
    several = endings.count("finished") > 1
    decimals = 0 if scale is None else _decimals(scale)
    lines.append(f"gradient noise scale: {_plus_minus(scale, several, decimals, 'examples')}")
    return "\n".join(f"    {line}" for line in lines)


def _plus_minus(
    mean_and_deviation: Sequence[float] | None, several: bool, decimals: int, unit: str
) -> str:
    if mean_and_deviation is None:
        return "not measured"
    numbers = [
        f"{round(value, decimals):,.{max(0, decimals)}f}"
        for value in mean_and_deviation[: 1 + several]
    ]
    return f"{' ± '.join(numbers)} {unit}"


def _decimals(mean_and_deviation: Sequence[float]) -> int:
    """Decimals that show two digits of the deviation (of the mean without one); negative for
    hundreds and more."""
    mean, deviation = map(abs, mean_and_deviation)
    smallest = deviation or mean
    return min(2, 1 - math.floor(math.log10(smallest))) if smallest else 0

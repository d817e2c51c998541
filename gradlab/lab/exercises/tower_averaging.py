"""Checkers for the exercises of notebook 02."""

from typing import Any
from unittest import mock

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close


@exercise
def mean_over_towers(answer: Any) -> None:
    """A function: a list over towers of arrays of one shape -> their mean."""
    two = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    require_close(
        answer(two),
        [2, 4],
        "the mean of [1, 2] and [3, 6]",
        "and should be (1 + 3) / 2 and (2 + 6) / 2",
    )
    three = [np.full([2, 3], value) for value in (1.0, 2.0, 6.0)]
    moves = ("expand_dims", "concatenate")
    with mock.patch.multiple(np, **{name: mock.Mock(wraps=getattr(np, name)) for name in moves}):
        got = answer(three)
        calls = {name: getattr(np, name).call_count for name in moves}
    require_close(
        got, np.full([2, 3], 3.0), "the mean of three towers' 2 x 3 gradients", "and should be 3"
    )
    require(
        calls["expand_dims"] >= 3,
        "the mean is right. Now give each tower's gradient its axis with np.expand_dims",
    )
    # The mean may also be a method of the array, which cannot be seen
    require(
        calls["concatenate"], "the mean is right. Now put the towers together with np.concatenate"
    )


@exercise
def gradients_by_variable(answer: Any) -> None:
    """A function: lists over towers of (gradient, name of the variable) -> a list over variables,
    in the order of the first tower, of tuples of gradients."""
    got = filled(answer([[(1, "a"), (2, "b")], [(3, "a"), (4, "b")]]))
    got = [tuple(column) for column in got]
    require(len(got) == 2, f"there are two variables, so two tuples. Your answer has {len(got)}")
    require(
        not any(isinstance(item, tuple) for column in got for item in column),
        "take the gradient of each pair",
    )
    require(got == [(1, 3), (2, 4)], f"it should be [(1, 3), (2, 4)], and is {got}")
    other = [[(1, "a"), (2, "b")], [(4, "b"), (3, "a")]]
    require(
        [tuple(c) for c in answer(other)] == [(1, 3), (2, 4)],
        "the second tower lists b first: take the gradients by name",
    )
    other = [[(2, "b"), (1, "a")], [(3, "a"), (4, "b")]]
    require(
        [tuple(c) for c in answer(other)] == [(2, 4), (1, 3)],
        "the first tower lists b first, so the gradients of b come first",
    )
    require(
        [tuple(c) for c in answer([[(7, "a")]] * 3)] == [(7, 7, 7)],
        "it must work for three towers, too",
    )


@exercise
def unequal_towers(answer: Any) -> None:
    """A number: the gradient of four examples."""
    require(
        answer != 4, "4 weights both towers equally, but tower 0 has three of the four examples"
    )
    require_close(
        answer, 3, "the gradient", "but each tower should be weighted by its number of examples"
    )


@exercise
def third_tower(answer: Any) -> None:
    """A dictionary: the effective batch of three towers, and the updates of an epoch with two and
    with three."""
    keys = ("effective batch of three", "updates of two", "updates of three")
    require(
        isinstance(answer, dict) and set(answer) == set(keys),
        f"answer a dictionary with the keys {', '.join(keys)}",
    )
    batch, two, three = (answer[key] for key in keys)
    require(batch != 12, "12 is the effective batch of two towers")
    require_close(
        batch, 18, "the effective batch of three towers", "and should be the examples of all three"
    )
    require(
        two != 600,
        "600 updates would have 6 examples each. Both towers' examples are behind one update",
    )
    require_close(two, 300, "the number of updates with two towers", "and should be 3,600 / 12")
    require_close(three, 200, "the number of updates with three towers", "and should be 3,600 / 18")

"""Checkers for the exercises of notebook 02."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_choice, require_close


@exercise
def mean_over_towers(answer: Any) -> None:
    """A function: a list over towers of arrays of one shape -> their mean."""
    two = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    require_close(answer(two), [2, 4], "the mean of [1, 2] and [3, 6]", "and should be (1 + 3) / 2 and (2 + 6) / 2")
    three = [np.full([2, 3], value) for value in (1.0, 2.0, 6.0)]
    require_close(answer(three), np.full([2, 3], 3.0), "the mean of three towers' 2 x 3 gradients", "and should be 3")


@exercise
def gradients_by_variable(answer: Any) -> None:
    """A function: lists over towers of (gradient, variable) -> a list over variables of tuples of gradients."""
    got = answer([[(1, "a"), (2, "b")], [(3, "a"), (4, "b")]])
    require(got is not None, "the function returns nothing yet")
    got = [tuple(column) for column in got]
    require(len(got) == 2, f"there are two variables, so two tuples. Your answer has {len(got)}")
    require(not any(isinstance(item, tuple) for column in got for item in column), "take the gradient of each pair")
    require(got == [(1, 3), (2, 4)], f"it should be [(1, 3), (2, 4)], and is {got}")
    require([tuple(c) for c in answer([[(7, "a")]] * 3)] == [(7, 7, 7)], "it must work for three towers, too")


@exercise
def unequal_towers(answer: Any) -> None:
    """A number: the gradient of four examples."""
    require(answer != 4, "4 weights both towers equally, but tower 0 has three of the four examples")
    require_close(answer, 3, "the gradient", "but each tower should be weighted by its number of examples")


@exercise
def third_tower(answer: Any) -> None:
    """A word."""
    hint = "the mean of the means of equal shares is the mean of the whole batch, however many towers share it"
    require_choice(answer, "the_same", "larger smaller the_same", hint)

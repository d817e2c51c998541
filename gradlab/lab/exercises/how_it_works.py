"""Checkers for the exercises of notebook 01."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import (
    exercise,
    filled,
    require,
    require_choice,
    require_close,
    require_unlike,
)


@exercise
def gradient_by_hand(answer: Any) -> None:
    """A function: (weight, xs, ys) -> the gradient of the mean of (weight * x - y) ** 2, a
    number."""
    xs = np.array([1.0, 2.0, 3.0, 4.0])
    ys = np.array([1.0, 3.0, 2.0, 5.0])
    got = np.asarray(filled(answer(0.5, xs.copy(), ys.copy())), np.float64)
    require(
        got.shape == (), f"the gradient is one number, and your answer has the shape {got.shape}"
    )
    mistakes = {
        -36: "this is the sum over the examples. The loss is their mean",
        -4.5: "one factor is missing: the derivative of a square is twice what is squared",
        9: "the sign is wrong: what is squared is the weight times x, minus y",
        -3: "the chain rule is missing: each difference is multiplied by its x",
    }
    require_unlike(got, mistakes)
    require_close(got, -9, "the gradient at weight 0.5", "and should be -9, as in the table")
    got = filled(answer(2.0, xs[:3].copy(), ys[:3].copy()))
    require_close(got, 10, "the gradient of the first three examples at weight 2")
    rng = np.random.default_rng()  # other numbers each time: the answer must be computed
    weight, xs, ys = rng.normal(), rng.normal(size=5), rng.normal(size=5)
    got = filled(answer(weight, xs.copy(), ys.copy()))
    require_close(
        got,
        2 * np.mean((weight * xs - ys) * xs),
        f"the gradient of five random examples at weight {weight:.2f}",
    )


@exercise
def weighted_mean(answer: Any) -> None:
    """A function: (list of gradients of one shape, list of their numbers of examples) -> the mean
    over all examples."""
    gradients = [np.array([1.0, 0.0]), np.array([2.0, 4.0]), np.array([6.0, -2.0])]
    examples = [4, 4, 2]
    got = filled(answer([gradient.copy() for gradient in gradients], list(examples)))
    mistakes = {
        (3, 2 / 3): "this is the unweighted mean: the tail of 2 counts as much as a micro-batch "
        "of 4",
        (9, 2): "this is the sum of the gradients, as if each were a mean over all ten examples",
        (24, 12): "the weighted sum is right. Divide it by the sum of the weights",
        (8, 4): "this was divided by the number of micro-batches, which is not the sum of the "
        "weights",
        (2, 1): "this was divided by 12, as if each micro-batch had 4 examples: there are only ten",
    }
    require_unlike(got, mistakes)
    require_close(
        got,
        [2.4, 1.2],
        "the mean of micro-batches of 4, 4 and 2",
        "and should be the mean over all ten examples",
    )
    one = filled(answer([np.array([[3.0, 5.0]])], [7]))
    require_close(
        one, [[3, 5]], "the mean of a single micro-batch", "and should be its own gradient"
    )
    four = filled(answer([np.array(value) for value in (1.0, 2.0, 3.0, 4.0)], [1, 1, 1, 1]))
    require_close(four, 2.5, "the mean of four micro-batches of one example", "and should be 2.5")


@exercise
def which_mistake(answer: Any) -> None:
    """A dictionary: the mistake behind each of three wrong gradients."""
    require(
        isinstance(answer, dict) and set(answer) == {-36, -14, -18},
        "answer a dictionary with the keys -36, -14, -18",
    )
    choices = "sum_of_examples sum_of_microbatches unweighted"
    hints = {
        -36: ("sum_of_examples", "-36 is four times -9, and there are four examples"),
        -14: (
            "unweighted",
            "-14 is the mean of -4 and -24, the gradients of the first three examples and of the "
            "last",
        ),
        -18: (
            "sum_of_microbatches",
            "-18 is the sum of -4.5 and -13.5, the gradients of two micro-batches",
        ),
    }
    for number, (wanted, hint) in hints.items():
        require_choice(answer[number], wanted, choices, hint)

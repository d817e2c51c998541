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
    """A function: (weight, bias, xs, ys) -> the gradient of the mean of (weight * x + bias - y) ** 2
    with respect to the weight and to the bias, a pair of numbers."""
    xs = np.array([1.0, 2.0, 3.0, 4.0])
    ys = np.array([1.0, 3.0, 2.0, 5.0])
    got = np.asarray(filled(answer(0.5, 0.0, xs.copy(), ys.copy())), np.float64)
    require(
        got.shape == (2,),
        f"the gradient is a pair of numbers, and your answer has the shape {got.shape}",
    )
    mistakes = {
        (-36, -12): "these are the sums over the examples. The loss is their mean",
        (-4.5, -1.5): "one factor is missing: the derivative of a square is twice what is squared",
        (9, 3): "the sign is wrong: what is squared is the prediction minus y",
        (
            -3,
            -3,
        ): "the chain rule is missing: the weight is multiplied by x, so each difference is, too",
        (-9, -9): "the bias is not multiplied by x, so its gradient has no factor x",
        (-3, -9): "the gradient with respect to the weight comes first",
    }
    require_unlike(got, mistakes)
    require_close(got, (-9, -3), "the gradient at weight 0.5 and bias 0", "and should be (-9, -3)")
    got = filled(answer(2.0, 1.0, xs[:3].copy(), ys[:3].copy()))
    require_unlike(got, {(10, 4): "the prediction must contain the bias"})
    require_close(got, (14, 6), "the gradient of the first three examples at weight 2 and bias 1")
    rng = np.random.default_rng()  # other numbers each time: the answer must be computed
    weight, bias, xs, ys = rng.normal(), rng.normal(), rng.normal(size=5), rng.normal(size=5)
    got = filled(answer(weight, bias, xs.copy(), ys.copy()))
    difference = weight * xs + bias - ys
    require_close(
        got,
        (2 * np.mean(difference * xs), 2 * np.mean(difference)),
        f"the gradient of five random examples at weight {weight:.2f} and bias {bias:.2f}",
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
        isinstance(answer, dict) and set(answer) == {-6, -3, -11 / 3},
        "answer a dictionary with the keys -6, -3, -11 / 3",
    )
    choices = "sum_of_examples sum_of_microbatches unweighted"
    hints = {
        -6: ("sum_of_examples", "-6 is four times -1.5, and there are four examples"),
        -3: (
            "sum_of_microbatches",
            "-3 is the sum of -2 and -1, the gradients of two micro-batches",
        ),
        -11 / 3: (
            "unweighted",
            "-11/3 is the mean of 2/3 and -8, the gradients of the first three examples and of the "
            "last",
        ),
    }
    for number, (wanted, hint) in hints.items():
        require_choice(answer[number], wanted, choices, hint)

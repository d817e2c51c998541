"""Whether the two passes of a contrastive loop draw the same random masks."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from gradlab.auditing.models import pair_slopes
from gradlab.auditing.problem import Problem
from gradlab.auditing.rules import as_vector, as_weights

TOLERANCE = 1e-3  # of an update; other masks change it by more than 1e-2 of it


def nearest(problem: Problem, found: list[np.ndarray], same: bool) -> list[np.ndarray]:
    """The weights after each update of a loop that draws masks, as near to what a loop did as some
    masks allow.

    The masks are random and the loop's own, but there are only two of them, so all that a window can
    have drawn are tried, for both views at once or for each. Each update begins with the weights
    that the loop had before it.

    Args:
        problem: a training of one epoch by SGD, with masks.
        found: the weights after each update of the loop, as vectors.
        same: whether both passes have the same masks, or any.

    Returns:
        As many vectors as the epoch has windows, however many were found.
    """
    size = problem.k * problem.replicas
    [epoch] = problem.epochs
    before = as_vector(problem, problem.weights)
    weights = []
    for number, start in enumerate(range(0, len(epoch), size)):
        after = found[number] if number < len(found) else before
        rate = problem.learning_rate(number)
        gradients = gradients_with_masks(problem, before, epoch[start : start + size], same)
        candidates = (before - rate * gradient for gradient in gradients)
        weights.append(min(candidates, key=lambda one: float(np.linalg.norm(one - after))))
        before = after
    return weights


def first_other(problem: Problem, found: list[np.ndarray], nearest: list[np.ndarray]) -> int | None:
    """The first update, from 0, that is not the nearest one or is missing; None if there is none."""
    starts = [as_vector(problem, problem.weights), *found]
    for number, (before, after, near) in enumerate(zip(starts, found, nearest)):
        if not np.linalg.norm(after - near) <= TOLERANCE * np.linalg.norm(near - before):
            return number
    return None if len(found) == len(nearest) else min(len(found), len(nearest))


def gradients_with_masks(
    problem: Problem, vector: np.ndarray, window: list[tuple], same: bool
) -> Iterator[np.ndarray]:
    """All gradients that a window can have, with the same masks in both passes or with any: the
    chain rule with factors of both passes.

    The gradients by the embeddings are those of the first pass. As the embeddings are linear, the
    second pass only multiplies them by its own inputs. The scale belongs to the loss, and its
    gradient to the first pass; or to the embeddings of x or of y, and its gradient to the second.
    With the same masks, the three are equal.
    """
    sizes = [len(x) for x, _ in window]
    x, y = (np.concatenate(each) for each in zip(*window))
    weights = as_weights(problem, vector)
    of_one = product(np.asarray(problem.masks), repeat=2)  # of x and y
    of_window = product(of_one, repeat=len(window))
    draws = [np.repeat(masks, sizes, axis=0).transpose(1, 0, 2) for masks in of_window]
    for first in draws:
        shares = np.full(len(x), 1 / len(x))
        inputs = x * first[0], y * first[1]
        slopes = pair_slopes(weights, *inputs, shares, np.arange(len(x)))
        for second in [first] if same else draws:
            gradients = slopes.through(x * second[0], y * second[1])
            yield as_vector(problem, gradients)
            for name in () if same else ("kernel_x", "kernel_y"):
                by_scale = np.sum(gradients[name] * weights[name]).reshape(1)
                yield as_vector(problem, gradients | {"log_scale": by_scale})

"""Whether the two passes of a contrastive loop draw the same random masks."""

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
    have drawn are tried. Each update begins with the weights that the loop had before it.

    Args:
        problem: a training with masks.
        found: the weights after each update of the loop, as vectors.
        same: whether both passes have the same masks, or any.
    """
    size = problem.k * problem.replicas
    epoch = problem.epochs[0]
    windows = [epoch[start : start + size] for start in range(0, len(epoch), size)]
    before = as_vector(problem, problem.weights)
    weights = []
    for number, (window, after) in enumerate(zip(windows, found)):
        draws = list(product(np.asarray(problem.masks), repeat=len(window)))
        pairs = ((one, one) for one in draws) if same else product(draws, draws)
        rate = problem.learning_rate(number)
        candidates = [
            before - rate * gradient_with_masks(problem, before, window, *pair) for pair in pairs
        ]
        weights.append(min(candidates, key=lambda one: float(np.linalg.norm(one - after))))
        before = after
    return weights


def first_other(problem: Problem, found: list[np.ndarray], nearest: list[np.ndarray]) -> int | None:
    """The first update, from 0, that is not the nearest one; None if all are."""
    starts = [as_vector(problem, problem.weights), *found]
    for number, (before, after, near) in enumerate(zip(starts, found, nearest)):
        if not np.linalg.norm(after - near) <= TOLERANCE * np.linalg.norm(near - before):
            return number
    return None if len(found) == len(nearest) else len(nearest)


def gradient_with_masks(
    problem: Problem, vector: np.ndarray, window: list[tuple], first: tuple, second: tuple
) -> np.ndarray:
    """The gradient of a window whose micro-batches have these masks in the first and in the second
    pass: the chain rule with factors from either.

    The gradients by the embeddings are those of the first pass. As the embeddings are linear, the
    second pass only multiplies them by its own inputs.
    """
    sizes = [len(x) for x, _ in window]
    x, y = (np.concatenate(each) for each in zip(*window))
    first_mask, second_mask = (np.repeat(masks, sizes, axis=0) for masks in (first, second))
    weights = as_weights(problem, vector)
    shares = np.full(len(x), 1 / len(x))
    slopes = pair_slopes(weights, x * first_mask, y * first_mask, shares, np.arange(len(x)))
    return as_vector(problem, slopes.through(x * second_mask, y * second_mask))

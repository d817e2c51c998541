"""Checkers for the exercises of notebook 09."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require, require_close


@exercise
def bytes_needed(answer: Any) -> None:
    """A function: (parameters, activations, microbatch_size, accumulation_steps) -> bytes, with Adam, in float32."""
    got = answer(1000, 500, 2, 1)
    what = "the bill"
    for wrong, hint in (
        (6000, "a float32 has 4 bytes"),
        (17_000, "one copy of the weights is missing: gradients and the accumulator are two things"),
        (13_000, "two copies of the weights are missing: Adam keeps two moments, besides gradients and accumulator"),
        (20_500, "each example of a micro-batch has activations of its own"),
    ):
        require(got != wrong, hint)
    require_close(got, 21_000, what, "and should be 21,000")
    what = "the bill for 14,714,688 weights and one example of 180 million bytes"
    require_close(answer(14_714_688, 180_000_000, 1, 1), 474_293_760, what)
    hint = "nothing in the bill grows with the number of micro-batches: each one reuses the memory of the one before"
    require(np.allclose(answer(1000, 500, 2, 64), 21_000), hint)


@exercise
def largest_microbatch(answer: Any) -> None:
    """A function: (memory, parameters, activations) -> the most examples a micro-batch can have."""
    got = answer(21_500, 1000, 500)
    require(got != 43, "the weights, moments, gradients and the accumulator must fit first")
    require_close(got, 3, "the largest micro-batch", "and should be 3")
    part = answer(21_499, 1000, 500)
    hint = "which is more than fits: round down to whole examples" if np.all(part > 2) else "and should be 2"
    require_close(part, 2, "the largest micro-batch in 21,499 bytes", hint)
    hint = "but where not even one example fits, it should be 0"
    require_close(answer(19_000, 1000, 500), 0, "the largest micro-batch in 19,000 bytes", hint)
    require(isinstance(part, (int, np.integer)), f"the number of examples must be an integer. Received: {part!r}")


@exercise
def cut(answer: Any) -> None:
    """A function: (examples, batch_size, microbatch_size) -> a list over windows of lists of sizes."""
    got = answer(50, 20, 8)
    require(got is not None and got is not ..., "the function returns nothing yet")
    nested = len(got) and all(isinstance(window, (list, tuple)) for window in got)
    require(nested, "it should be a list of lists: for each window the sizes of its micro-batches")
    got = [[int(size) for size in window] for window in got]
    require(len(got) != 2, "the last window is missing: it has the 10 examples that are left over")
    require(got[-1] != [8, 8, 4], "the last window has only the 10 examples that are left")
    require(all(size <= 8 for window in got for size in window), "each window is cut into micro-batches of 8 or less")
    require(
        all(sum(window) == wanted for window, wanted in zip(got, (20, 20, 10))),
        f"the windows must hold 20, 20 and 10 examples, and hold {[sum(window) for window in got]}",
    )
    require(got == [[8, 8, 4], [8, 8, 4], [8, 2]], f"it should be [[8, 8, 4], [8, 8, 4], [8, 2]], and is {got}")
    empty = any(not all(window) for window in answer(6, 3, 3))
    require(not empty, "where nothing is left over, there is no micro-batch of 0")
    for case, wanted in (
        ((6, 3, 3), [[3], [3]]),
        ((2, 128, 1), [[1, 1]]),
        ((5, 4, 9), [[4], [1]]),
        ((7, 7, 2), [[2, 2, 2, 1]]),
    ):
        found = [[int(size) for size in window] for window in answer(*case)]
        require(found == wanted, f"{case} should give {wanted}, and gives {found}")


@exercise
def triplet_losses(answer: Any) -> None:
    """A function: three arrays (examples, length) and a margin -> the loss of each example."""
    anchor = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    positive = np.array([[0.6, 0.8], [1.0, 0.0], [0.0, 1.0]])
    negative = np.array([[0.8, 0.6], [0.0, 1.0], [0.28, 0.96]])
    wanted = np.array([0.6, 0.0, 0.12])
    got = answer(anchor, positive, negative)
    if got is not None and got is not ...:
        got = np.asarray(got, np.float64)
        hint = "that is one number for the whole batch. Return one loss for each example"
        require(got.size != 1, hint)
        require(got.shape == (3,), f"there are 3 triplets, and the shape is {got.shape}: sum over the last axis")
        require(not (got < -1e-9).any(), "the loss of a triplet that keeps the margin is 0, not negative")
        root = np.sqrt([0.8, 0.0, 0.0]) - np.sqrt([0.4, 2.0, 0.08]) + 0.2
        require(not np.allclose(got, np.maximum(root, 0)), "use squared distances, without a square root")
        swapped = np.maximum(np.array([0.4, 2.0, 0.08]) - np.array([0.8, 0.0, 0.0]) + 0.2, 0)
        require(not np.allclose(got, swapped), "the loss must grow when the positive moves away, not the negative")
        require(not np.allclose(got, [0.4, 0, 0]), "where is the margin?")
        require(not np.allclose(got, [0.4, 0, 0.16]), "a squared distance is a sum over the last axis, not a mean")
    require_close(got, wanted, "the array of losses", "and the first should be 0.8 - 0.4 + 0.2")
    wide = answer(anchor, positive, negative, 2.5)
    require_close(wide, [2.9, 0.5, 2.42], "with a margin of 2.5 the array of losses", "and should be [2.9, 0.5, 2.42]")


@exercise
def stalled_mean(answer: Any) -> None:
    """A number: the mean of 512 ones that were added up in bfloat16."""
    if answer is not ... and answer is not None and not isinstance(answer, str):
        require(answer != 1, "1 is what float32 gives")
        require(answer != 256, "256 is the sum at which it stalls. Divide it by the number of ones that were added")
        require(answer != 0.25, "a quarter is what 1024 micro-batches gave")
    require_close(answer, 0.5, "the mean", "but look at what counting by ones gave in bfloat16")

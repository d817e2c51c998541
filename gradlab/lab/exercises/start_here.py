"""Checkers for the exercises of notebook 00."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close, require_unlike


@exercise
def effective_batch(answer: Any) -> None:
    """A number: the effective batch of T = 2, k = 8, b = 16."""
    mistakes = {
        128: "128 is the number of examples of one tower. There are two towers",
        32: "32 is the number of examples that two towers process at once. Each tower has k "
        "micro-batches",
        16: "16 is the number of micro-batches. Each has several examples",
        26: "26 is the sum of the three numbers. Each tower computes k micro-batches, each of b "
        "examples",
    }
    require_unlike(answer, mistakes)
    require_close(
        answer, 256, "the effective batch", "and should be all the examples in one update"
    )


@exercise
def smallest_k(answer: Any) -> None:
    """A number: the smallest k for at least 400 examples, with two towers that fit 24 examples
    each."""
    require(
        answer != 8,
        "8 micro-batches on each of two towers with 24 examples are 384: that is fewer than 400",
    )
    require(answer != 17, "this is right for one tower. There are two")
    require(
        answer != 16,
        "16 micro-batches of 24 are 384, fewer than 400, and they are those of one tower. There "
        "are two",
    )
    require_close(
        answer, 9, "the smallest k", "and should be the first whole number with 2 × k × 24 ≥ 400"
    )


@exercise
def noise_of_windows(answer: Any) -> None:
    """A function: (losses of micro-batches in order, k) -> the standard deviation of the means of
    windows of k."""
    losses = np.array([1.0, 3.0, 8.0, 4.0])
    got = np.asarray(filled(answer(losses.copy(), 2)), np.float64)
    require(got.shape == (), f"the noise is one number, and your answer has the shape {got.shape}")
    pairs = "of [1, 3, 8, 4] with k = 2 your answer is"
    law = "this is the law 1/√k, which holds for independent losses. Measure the noise: average each window first"
    mistakes = {
        0.5: f"{pairs} 0.5: a window is k consecutive micro-batches, 1 and 3, then 8 and 4",
        1.5: f"{pairs} 1.5: that is the noise inside a window. Average each window first",
        6.5**0.5: f"{pairs} 2.55: this is the noise of single losses. Average each window first",
        6.5**0.5
        / 2: f"{pairs} 1.27: this is the noise of single losses, divided by k. Average first",
        3.25**0.5: f"{pairs} 1.80: {law}",
        8**0.5: f"{pairs} 2.83: that is ddof=1. Use NumPy's default std",
    }
    require_unlike(got, mistakes)
    require_close(
        got,
        2,
        "the noise of [1, 3, 8, 4] with k = 2",
        "and should be 2, as the windows' means are 2 and 6",
    )
    losses = np.random.default_rng(0).exponential(size=160_000)
    for k in (1, 16):
        wanted = losses.reshape(-1, k).mean(axis=1).std()
        got = filled(answer(losses.copy(), k))
        alone = (
            "the noise of single losses: average each window before you take the standard deviation"
        )
        require(k == 1 or not np.isclose(got, losses.std()), f"with k = {k} your answer is {alone}")
        hint = "and should be the standard deviation of the windows' means"
        require_close(got, wanted, f"the noise of 160,000 losses with k = {k}", hint, rtol=1e-3)

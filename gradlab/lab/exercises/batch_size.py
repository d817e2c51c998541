"""Checkers for the exercises of notebook 12."""

from typing import Any

import numpy as np
from IPython.display import display

from gradlab.lab.exercises import (
    NotYet,
    exercise,
    filled,
    leaderboard,
    require,
    require_close,
    require_unlike,
)

ENOUGH = 95  # percent of the test images that a row of the leaderboard must reach


@exercise
def noise_scale(answer: Any) -> None:
    """A function: (microbatch_norms, window_norms, sizes) -> the gradient noise scale in
    examples."""
    got = answer(np.array([[2.0, 2.0]]), np.array([np.sqrt(3.0)]), np.array([10, 10]))
    wrong = (2 - 3**0.5) * 20 / (2 * 3**0.5 - 2)
    mistakes = {
        wrong: "the equations are about squared norms",
        1.0: "the variance is that of one example, and a micro-batch has b examples",
        5.0: "a window has k times as many examples as a micro-batch",
        0.5: "the variance is that of one example: how many examples does a window have?",
        20.0: "look at the signal again: how much of W is still noise?",
        0.1: "that is signal over noise: invert the ratio",
    }
    require_unlike(got, mistakes, rtol=1e-9)
    what = "the noise scale of one window"
    require_close(got, 10, what, "and should be 10")
    microbatch_norms = np.sqrt(np.array([[5.0, 7.0, 9.0], [4.0, 4.0, 4.0]]))
    window_norms = np.sqrt(np.array([3.0, 2.0]))
    variance = np.array([(7 - 3) * 12 / 2, (4 - 2) * 12 / 2])
    signal = np.array([(3 * 3 - 7) / 2, (3 * 2 - 4) / 2])
    steady = answer(microbatch_norms, window_norms, np.array([4, 4, 4]))
    of_means = microbatch_norms.mean(axis=1) ** 2
    too_small = (of_means - window_norms**2).mean() * 12 / (3 * window_norms**2 - of_means).mean()
    hint = "average the squared norms of the micro-batches; you square the average norm"
    require_unlike(steady, {too_small: hint}, rtol=1e-9)
    require_close(
        steady,
        variance.mean() / signal.mean(),
        "the noise scale of two windows of 3",
        "but should be 18",
    )
    # The estimated signal of the second window is below 0
    microbatch_norms = np.sqrt(np.array([[5.0, 7.0, 9.0], [4.0, 4.0, 4.0], [4.0, 7.0, 10.0]]))
    window_norms = np.sqrt(np.array([3.0, 4 / 3 - 0.1, 2.5]))
    variance = np.array([24, (4 - 4 / 3 + 0.1) * 6, (7 - 2.5) * 6])
    signal = np.array([1.0, -0.15, 0.25])
    positive = variance[signal > 0].mean() / signal[signal > 0].mean()
    noisy = answer(microbatch_norms, window_norms, np.array([4, 4, 4]))
    mistakes = {
        (variance / signal).mean(): "first average the variances and the signals, then take the "
        "ratio of the two",
        positive: "include windows whose signal is below 0: without them the means are biased",
        variance.mean() / np.maximum(signal, 0).mean(): "do not clip a signal below 0 to 0: that "
        "biases the mean",
        np.median(variance) / np.median(signal): "take means: the median of skewed estimates is "
        "biased",
    }
    require_unlike(noisy, mistakes, rtol=1e-9)
    hint = "but the mean signal is 0.367, although it is below 0 in one window"
    require_close(
        noisy, variance.mean() / signal.mean(), "the noise scale of three noisy windows", hint
    )
    # A signal of 1 and a variance of 12, so any estimate that is right on average finds 12
    ragged = answer(np.sqrt([[4.0, 4.0, 7.0]]), np.sqrt([2.2]), np.array([4, 4, 2]))
    mistakes = {
        17.5: "micro-batches of 4, 4 and 2 examples: their noise is variance / b on average, and the "
        "mean of 1 / b is not 1 / the mean of b",
        21.0: "the first micro-batch is not as large as all others",
    }
    require_unlike(ragged, mistakes, rtol=1e-9)
    require_close(ragged, 12, "the noise scale of micro-batches of 4, 4 and 2", "but should be 12")


@exercise
def largest_batch(answer: Any) -> None:
    """A function: (noise_scale, factor) -> the largest batch."""
    got = answer(400, 1.5)
    mistakes = {
        800: "that limits the number of updates. The exercise limits the number of examples",
        600: "the factor is 1 + B / noise scale: do not forget the 1",
    }
    require_unlike(got, mistakes, rtol=1e-9)
    require_close(got, 200, "the largest batch", "and should be 200")
    require_close(
        answer(1000, 3), 2000, "the largest batch for a noise scale of 1,000 and factor 3"
    )


@exercise
def best_accumulation(answer: Any) -> None:
    """A function: (noise_scale, b, devices, microbatch_seconds, update_seconds) -> the k that needs
    the least time."""
    for case, said in _CASES:
        got = filled(answer(*case))
        if isinstance(got, (float, np.floating)) and float(got).is_integer():
            got = int(got)
        whole = isinstance(got, (int, np.integer)) and not isinstance(got, bool)
        require(whole, f"return a whole number. Received: {got!r}")
        require(got >= 1, f"a window has at least one micro-batch. Received: {got!r}")
        times = _training_times(*case)
        best = int(times.argmin()) + 1
        if got == best or (got <= len(times) and times[got - 1] <= times.min() * (1 + 1e-9)):
            continue
        noise_scale, b, devices, microbatch_seconds, update_seconds = case
        hints = {
            _best(
                noise_scale, b, 1, microbatch_seconds, update_seconds
            ): "B is devices * k * b: count the devices",
            _best(
                noise_scale, 1, devices, microbatch_seconds, update_seconds
            ): "B counts examples: each device contributes k * b",
            max(
                int(np.sqrt(_square(*case))), 1
            ): "the best whole number is not always the root rounded down. Compare both neighbors",
        }
        hint = hints.get(int(got), "compute the time for several k and compare")
        raise NotYet(f"{said}: k = {got} is not the fastest; {hint}")


# (noise_scale, b, devices, microbatch_seconds, update_seconds), and the case in words.
_CASES = (
    ((20, 16, 1, 0.1, 0.001), "one GPU with b = 16 and a noise scale of 20"),
    ((100_000, 8, 64, 0.1, 0.7), "64 GPUs with a slow all-reduce and a noise scale of 100,000"),
    (
        (1000, 10, 1, 0.05, 0.05),
        "one GPU, a noise scale of 1,000, and an update that costs as much as a micro-batch",
    ),
    ((1000, 5, 4, 0.2, 0.15), "four GPUs, a noise scale of 1,000 and b = 5"),
    ((5000, 4, 2, 0.01, 0.0), "two GPUs that exchange gradients in no time"),
    ((680, 1, 3, 0.1, 0.5), "three GPUs with b = 1 and an update that costs five micro-batches"),
    ((210, 10, 1, 0.1, 0.01), "one GPU, b = 10 and an update that costs a tenth of a micro-batch"),
)


def _training_times(
    noise_scale: float, b: int, devices: int, microbatch_seconds: float, update_seconds: float
) -> np.ndarray:
    """The time of a training with k = 1, 2, 3 and so on, up to a factor."""
    k = np.arange(1, 5001)
    return (1 + noise_scale / (devices * k * b)) * (k * microbatch_seconds + update_seconds)


def _square(
    noise_scale: float, b: int, devices: int, microbatch_seconds: float, update_seconds: float
) -> float:
    """The square of the best k, which may be a fraction."""
    return noise_scale * update_seconds / (devices * b * microbatch_seconds)


def _best(*case: Any) -> int:
    return int(_training_times(*case).argmin()) + 1


@exercise
def leaderboard_row(answer: Any) -> None:
    """A dictionary of settings, which is trained for a few seconds; the result enters a table of
    the best ones."""
    names = ", ".join(leaderboard.SETTINGS)
    require(isinstance(answer, dict), f"give a dictionary with {names}")
    missing = [name for name in leaderboard.SETTINGS if answer.get(name, ...) in (..., None)]
    require(not missing, f"{', '.join(missing)} must have a value: put yours in place of the dots")
    others = [name for name in answer if name not in leaderboard.SETTINGS]
    require(
        not others, f"only {names} can be chosen here. Received: {', '.join(map(repr, others))}"
    )
    try:
        table = leaderboard.Table()
        table.rows()  # a table that cannot be read is reported before the training
        row = leaderboard.train(answer)
        display(table.add(row))
    except ValueError as error:
        raise NotYet(str(error)) from None
    reached = f"{row.accuracy_percent:.2f}% after {row.updates} updates"
    require(
        row.accuracy_percent >= ENOUGH,
        f"{reached}, and {ENOUGH}% can be reached in {leaderboard.SECONDS:g} seconds",
    )

"""Checkers for the exercises of notebook 11."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import NotYet, exercise, require, require_close


@exercise
def noise_scale(answer: Any) -> None:
    """A function: (microbatch_norms, window_norms, b) -> the gradient noise scale in examples."""
    got = answer(np.array([[2.0, 2.0]]), np.array([np.sqrt(3.0)]), 10)
    wrong = (2 - 3**0.5) * 20 / (2 * 3**0.5 - 2)
    _hint(got, {
        wrong: "the equations are about squared norms",
        1.0: "the variance is that of one example, and a micro-batch has b examples",
        5.0: "a window has k times as many examples as a micro-batch",
        0.5: "the variance is that of one example: how many examples does a window have?",
        20.0: "look at the signal again: how much of W is still noise?",
        0.1: "that is signal over noise: invert the ratio",
    })  # fmt: skip
    what = "the noise scale of one window"
    require_close(got, 10, what, "and should be 10")
    microbatch_norms = np.sqrt(np.array([[5.0, 7.0, 9.0], [4.0, 4.0, 4.0]]))
    window_norms = np.sqrt(np.array([3.0, 2.0]))
    variance = np.array([(7 - 3) * 12 / 2, (4 - 2) * 12 / 2])
    signal = np.array([(3 * 3 - 7) / 2, (3 * 2 - 4) / 2])
    steady = answer(microbatch_norms, window_norms, 4)
    require_close(steady, variance.mean() / signal.mean(), "the noise scale of two windows of 3", "but should be 18")
    window_norms = np.sqrt(np.array([3.0, 4 / 3 - 0.1]))  # the estimated signal of the second window is below 0
    variance = np.array([24, (4 - 4 / 3 + 0.1) * 6])
    signal = np.array([1.0, -0.15])
    noisy = answer(microbatch_norms, window_norms, 4)
    _hint(noisy, {
        (variance / signal).mean(): "first average the variances and the signals, then take the ratio of the two",
        variance[0] / signal[0]: "include windows whose signal is below 0: without them the means are biased",
        variance.mean() / np.maximum(signal, 0).mean(): "do not clip a signal below 0 to 0: that biases the mean",
    })  # fmt: skip
    hint = "but the mean signal is 0.425, although it is below 0 in one window"
    require_close(noisy, variance.mean() / signal.mean(), "the noise scale of two noisy windows", hint)


@exercise
def largest_batch(answer: Any) -> None:
    """A function: (noise_scale, factor) -> the largest batch."""
    got = answer(400, 1.5)
    _hint(got, {
        800: "that limits the number of updates. The exercise limits the number of examples",
        600: "the factor is 1 + B / noise scale: do not forget the 1",
    })  # fmt: skip
    require_close(got, 200, "the largest batch", "and should be 200")
    require_close(answer(1000, 3), 2000, "the largest batch for a noise scale of 1,000 and factor 3")


@exercise
def schedule(answer: Any) -> None:
    """A function: updates made -> micro-batches of the next window."""
    right = {0: 1, 1: 1, 99: 1, 100: 4, 199: 4, 200: 16, 1000: 16}
    got = {updates: answer(updates) for updates in right}
    nothing = any(value is None or value is ... for value in got.values())
    require(not nothing, "the function does not return a number for every update")
    hint = "of the updates already made, 0 to 99 are the first 100: look at 99 and 100, 199 and 200"
    near = all(got[updates] == right[updates] for updates in (0, 1, 1000))
    require(not near or got == right, hint)
    require(got[1000] <= 16, f"it is 16 from update 200 on, and schedule(1000) is {got[1000]}")
    for updates, wanted in right.items():
        require(got[updates] == wanted, f"schedule({updates}) is {got[updates]}, and should be {wanted}")
    whole = all(isinstance(value, (int, np.integer)) for value in got.values())
    require(whole, "the number of micro-batches must be an integer: Trainer refuses 4.0")


@exercise
def scaled_beta_2(answer: Any) -> None:
    """A function: (beta_2, batch, new_batch) -> the new beta_2."""
    got = answer(0.999, 400, 100)
    _hint(got, {
        0.999**4: "a smaller batch needs a longer half-life in updates, so a beta_2 closer to 1",
        0.999 / 4: "beta_2 is not proportional to the batch. How many updates is the half-life?",
        1 - 0.001 / 4: "very close: that is the first-order approximation. The half-life calls for a power",
    })  # fmt: skip
    require_close(got, 0.999**0.25, "beta_2", _LIFE, rtol=1e-8)
    require_close(answer(0.95, 512, 1), 0.95 ** (1 / 512), "beta_2 from 0.95 at 512 to 1 example", _LIFE, rtol=1e-8)
    require_close(answer(0.99, 10, 20), 0.99**2, "beta_2 from 0.99 at 10 to 20 examples", _LIFE, rtol=1e-8)


_LIFE = "but beta_2 to the power of the half-life in updates must stay 1/2"


@exercise
def three_cases(answer: Any) -> None:
    """A list of three words."""
    if answer is ... or not isinstance(answer, (list, tuple)) or len(answer) != 3:
        raise NotYet("answer with a list of three words")
    for word in answer:
        require(word in ("accumulate", "small_batch"), f"answer 'accumulate' or 'small_batch'. Received: {word!r}")
    hints = (
        "(a): with 16 of 20 examples, how much is left to gain, and what does it cost?",
        "(b): what happens once a window, however many micro-batches it has?",
        "(c): from which examples does batch normalization take its statistics when you accumulate?",
    )
    for word, right, hint in zip(answer, ("small_batch", "accumulate", "small_batch"), hints):
        require(word == right, hint)


def _hint(value, hints: dict[float, str]) -> None:
    """Raise `NotYet` with the hint for a known wrong number."""
    if value is None or value is ...:
        return
    for wrong, hint in hints.items():
        require(not np.allclose(value, wrong, rtol=1e-9, atol=0), hint)

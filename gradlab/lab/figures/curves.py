"""The numbers that figures draw, computed from results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.measure import noise
from gradlab.measure.memory import MEBIBYTE
from gradlab.measure.noise import LossNoise

SMOOTHING = 0.95  # of the lab's noise scale
POINT_UPDATES = 8  # fewer say too little about the noise of a run


@dataclass(frozen=True)
class Point:
    """The numbers of one run that are drawn against k.

    Attributes:
        experiment: the experiment of the run.
        window: the standard deviation of the window's loss, in nats; NaN if a seed has fewer than
            `POINT_UPDATES` updates.
        law: the same as predicted from the micro-batches by 1 / sqrt(k), in nats.
        microbatch: the standard deviation of a micro-batch's loss, in nats.
        milliseconds: the median time of an update.
        mebibytes: the peak memory of the process; NaN if it is not known.
    """

    experiment: Experiment
    window: float
    law: float
    microbatch: float
    milliseconds: float
    mebibytes: float

    @property
    def steps(self) -> int:
        """The micro-batches of a window, on all towers."""
        return self.experiment.towers * self.experiment.accumulation_steps

    @classmethod
    def of(cls, result: Result) -> "Point":
        """The point of a run with this result."""
        measured = noise_of(result)
        return cls(
            experiment=result.experiment,
            window=float(measured.window) if min(result.updates) >= POINT_UPDATES else np.nan,
            law=float(measured.law),
            microbatch=float(measured.microbatch),
            milliseconds=1000 * float(np.nanmedian(result.update_seconds)),
            mebibytes=float(np.max(result.peak_memory_bytes)) / MEBIBYTE,
        )


def noise_of(result: Result) -> LossNoise:
    """The noise of the loss in a result: one number each, the root mean square over updates and
    seeds.

    With k = 1 a window is a micro-batch, so the three numbers are equal. They are NaN if no seed
    has more than two updates with finite numbers.
    """
    lengths = [(i, n) for i, n in enumerate(result.sound_updates) if n > 2]
    if not lengths:
        return LossNoise(np.nan, np.nan, np.nan)
    window = _root_mean_square(
        [noise.successive_std(result.window_losses[i, :n], 0.0) for i, n in lengths]
    )
    if result.losses.shape[2] < 2:
        return LossNoise(window, window, window)
    found = [
        noise.loss_noise_along(result.losses[i, :n], result.weights[i, :n], 0.0) for i, n in lengths
    ]
    microbatch = _root_mean_square([each.microbatch for each in found])
    return LossNoise(microbatch, window, law=_root_mean_square([each.law for each in found]))


def mean_and_deviation(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation over the seeds that have a value; seeds that ended early
    have none.

    Args:
        values: one row for each seed, NaN or inf where a seed has no value, shape (seed, update).

    Returns:
        The mean and the standard deviation, shape (update,) each. The deviation is 0 where a single
        seed has a value.
    """
    there = np.isfinite(values)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, values, 0).sum(axis=0) / count
        squares = np.where(there, (values - mean) ** 2, 0).sum(axis=0)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))


def smooth(values: np.ndarray, smoothing: float) -> np.ndarray:
    """The running mean of one seed's values, shape (update,), and NaN where a value is not finite.

    Args:
        values: the values, shape (update,).
        smoothing: from 0 (none) to below 1.
    """
    return np.where(np.isfinite(values), noise.running_mean(values, smoothing), np.nan)


def horizontal(result: Result, against: str) -> np.ndarray:
    """The position of each update on the horizontal axis, shape (seed, update).

    Args:
        result: the result.
        against: the axis: "updates", "examples" or "seconds".
    """
    if against == "updates":
        return np.broadcast_to(
            np.arange(1, result.accuracies.shape[1] + 1.0), result.accuracies.shape
        )
    if against == "examples":
        return result.examples
    return np.cumsum(result.update_seconds, axis=1)


def _root_mean_square(values: Sequence[np.ndarray | float]) -> float:
    squares = np.square(np.concatenate(values))
    return float(np.sqrt(np.mean(squares[np.isfinite(squares)])))

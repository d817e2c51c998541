"""What the page draws of a run: a row of numbers for each update, computed once, when the update is
new.

The numbers are those of the figures, but for the noise scale: a figure shows seeds that finished,
the page also seeds that are under way or were stopped.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Update
from gradlab.lab.experiments.result import AXES, Result
from gradlab.lab.figures.curves import SMOOTHING, mean_and_deviation
from gradlab.measure.noise import RunningMean
from gradlab.measure.noise_scale import estimates

# Means over seeds; accuracies in percent, deviations: one standard deviation over seeds.
COLUMNS = (
    "loss",
    "lossDeviation",
    "accuracy",
    "accuracyDeviation",
    "examples",
    "seconds",
    "noiseScale",
)
DOTS = 8  # At most this many micro-batches of an update are drawn, all of the first seed.

# What is kept of each seed and update
_LOSS, _ACCURACY, _EXAMPLES, _SECONDS, _VARIANCE, _SQUARED = range(6)
_NUMBERS = itertools.count(1)


class ChartRows:
    """The numbers of one run. New updates are added; the numbers of an update and a seed never
    change afterwards.

    Args:
        experiment: the run's experiment.

    Attributes:
        number: a number that no other run has, by which the page knows this one. It changes when a
            seed diverges, which changes all means of the noise scale: the page then gets every row
            again.
        counts: the updates of each seed so far.
    """

    def __init__(self, experiment: Experiment):
        self.number = next(_NUMBERS)
        self._seeds = experiment.seed_numbers
        self._experiment = experiment
        self.counts = [0] * len(self._seeds)
        self._sound = np.full(len(self._seeds), True)
        self._kept = np.full([len(self._seeds), 64, 6], np.nan)
        self._dots = np.full(
            [64, min(DOTS, experiment.towers * experiment.accumulation_steps)], np.nan, np.float32
        )
        self._means = [(RunningMean(SMOOTHING), RunningMean(SMOOTHING)) for _ in self._seeds]

    @classmethod
    def of(cls, result: Result) -> "ChartRows":
        """The rows of a result."""
        made = cls(replace(result.experiment, seeds=result.seeds))
        for number, updates in enumerate(result.updates):
            along = {
                name: getattr(result, name)[number : number + 1, :updates]
                for name in AXES
                if "update" in AXES[name]
            }
            made._add(number, replace(result, **along))
        return made

    def grow(self, updates: Mapping[int, Sequence[Update]]) -> None:
        """Take over the updates that are new.

        Args:
            updates: all updates so far, by seed.
        """
        for seed, made in updates.items():
            number = self._seeds.index(seed)
            if new := made[self.counts[number] :]:
                self._add(
                    number, Result.of_updates(self._experiment, seed, new, "stopped", np.nan, {})
                )

    def first_new(self, known: Sequence[int]) -> int:
        """The first row that a page does not have which knows so many updates of each seed."""
        if len(known) != len(self.counts):
            return 0
        return min(
            (old for old, now in zip(known, self.counts) if old != now), default=max(self.counts)
        )

    def rows(self, first: int) -> np.ndarray:
        """The rows from that update on, with a column for each of `COLUMNS`; float32, NaN where
        there is no number."""
        kept = self._kept[:, first : max(self.counts)]
        loss, accuracy = (mean_and_deviation(kept[..., column]) for column in (_LOSS, _ACCURACY))
        examples, seconds = (
            mean_and_deviation(kept[..., column])[0] for column in (_EXAMPLES, _SECONDS)
        )
        sound = kept[self._sound]
        variance, squared = (
            mean_and_deviation(sound[..., column])[0] for column in (_VARIANCE, _SQUARED)
        )
        scale = np.where(squared > 0, variance / np.where(squared > 0, squared, 1), np.nan)
        return np.stack([*loss, *accuracy, examples, seconds, scale], axis=1).astype(np.float32)

    def dots(self, first: int) -> np.ndarray:
        """Losses of micro-batches of the first seed, evenly chosen: float32, a row for each update
        from that one on."""
        return self._dots[first : self.counts[0]]

    def _add(self, number: int, new: Result) -> None:
        """Add the updates of one seed, given as a result of them alone."""
        first = self.counts[number]
        last = self.counts[number] + new.losses.shape[1]
        if first == last:
            return
        self._reserve(last)
        rows = self._kept[number, first:last]
        examples, seconds = (
            self._kept[number, first - 1, [_EXAMPLES, _SECONDS]] if first else (0.0, 0.0)
        )
        rows[:, _LOSS] = new.window_losses[0]
        rows[:, _ACCURACY] = 100 * new.accuracies[0]
        rows[:, _EXAMPLES] = examples + new.examples[0]
        rows[:, _SECONDS] = seconds + np.cumsum(new.update_seconds[0])
        weights = new.weights[0]
        found = estimates(
            np.where(weights > 0, new.gradient_norms[0], 0), new.window_gradient_norms[0], weights
        )
        for column, mean, values in zip((_VARIANCE, _SQUARED), self._means[number], found):
            rows[:, column] = mean.extend(values)
        if number == 0:
            self._dots[first:last] = self._chosen(new.losses[0])
        self.counts[number] = last
        there = weights > 0
        if (
            self._sound[number]
            and not np.isfinite([*new.losses[0][there], *new.gradient_norms[0][there]]).all()
        ):
            self._sound[number] = False
            self.number = next(_NUMBERS)

    def _chosen(self, losses: np.ndarray) -> np.ndarray:
        """The losses that are drawn as dots, NaN where a window has fewer micro-batches, shape
        (updates, dots)."""
        k = self._experiment.towers * self._experiment.accumulation_steps
        dots = self._dots.shape[1]
        whole = np.full([len(losses), k], np.nan)
        whole[:, : losses.shape[1]] = losses
        return whole[:, np.arange(dots) * k // dots]

    def _reserve(self, rows: int) -> None:
        """Make room for so many updates: twice as many each time, so that adding takes constant
        time."""
        while self._kept.shape[1] < rows:
            self._kept = np.concatenate([self._kept, np.full_like(self._kept, np.nan)], axis=1)
            self._dots = np.concatenate([self._dots, np.full_like(self._dots, np.nan)])

"""What a visitor of a classroom may ask for. A visitor's message can hold any number, so this is
checked before a run is sent to a worker."""

import math
from dataclasses import dataclass

from gradlab import _checks
from gradlab.lab.experiments.experiment import Experiment

BATCH = 10_000  # examples in one update, for all seeds together: what a trainer holds at once


@dataclass(frozen=True)
class Limits:
    """The limits of a classroom.

    Attributes:
        visitors: how many visitors there may be.
        examples: the most examples that a run may use, over all seeds.
        microbatches: the most micro-batches of a run, over all seeds: the losses and norms of each
            are kept.
        seconds: the longest time for which a run may train; a budget that is a time, over all
            seeds, may not be longer.
        idle: the seconds without a run after which a visitor is released.
        gone: the seconds without an answer from a visitor's page after which the visitor is
            released.
    """

    visitors: int = 30
    examples: int = 10_000_000
    microbatches: int = 250_000
    seconds: float = 120.0
    idle: float = 1800.0
    gone: float = 45.0

    def __post_init__(self) -> None:
        for name in ("visitors", "examples", "microbatches"):
            _checks.positive_integer(name, getattr(self, name))
        for name in ("seconds", "idle", "gone"):
            _checks.positive_number(name, getattr(self, name))

    def check(self, experiment: Experiment) -> float:
        """The most seconds for which an experiment of a visitor may train.

        Raises:
            ValueError: it takes too much.
        """
        self._check_batch(experiment)
        self._check_budget(experiment)
        return self.seconds

    def _check_batch(self, experiment: Experiment) -> None:
        seeds = len(experiment.seed_numbers)
        batch = experiment.effective_batch
        if seeds * batch > BATCH:
            raise ValueError(
                f"seeds * towers * accumulation_steps * microbatch_size must be at most {BATCH} in "
                f"this classroom. Received: {seeds} * {batch} = {seeds * batch}"
            )

    def _check_budget(self, experiment: Experiment) -> None:
        seeds = len(experiment.seed_numbers)
        seconds = experiment.seconds
        if seconds is not None:
            if seeds * seconds > self.seconds:
                raise ValueError(
                    f"a run may train for at most {self.seconds:g} seconds in this classroom, over "
                    f"all its seeds. Received: {seeds} * {seconds:g}"
                )
            return
        batch = experiment.effective_batch
        each = experiment.examples
        each = experiment.updates * batch if experiment.updates is not None else each
        assert each is not None  # an experiment has one of the three budgets
        for unit, most, number in (
            ("examples", self.examples, each),
            ("micro-batches", self.microbatches, math.ceil(each / experiment.microbatch_size)),
        ):
            if seeds * number > most:
                raise ValueError(
                    f"a run may use at most {most} {unit} in this classroom, over all its seeds. "
                    f"Received: {seeds} * {number} = {seeds * number}"
                )

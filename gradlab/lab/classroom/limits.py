"""What a visitor of a classroom may ask for. A visitor's message can hold any number, so this is checked at the hub."""

from dataclasses import dataclass

from gradlab import _checks
from gradlab.lab.experiments.experiment import Experiment

BATCH = 10_000  # examples behind one update, for all seeds together: what a trainer holds at once


@dataclass(frozen=True)
class Limits:
    """The limits of a classroom.

    Attributes:
        visitors: how many visitors there may be.
        examples: the most examples that a run may use, over all seeds.
        seconds: the longest training time of a run, over all seeds, if its budget is a time.
        idle: the seconds without a run after which a visitor is released.
        gone: the seconds without an answer from a visitor's page after which the visitor is released.
    """

    visitors: int = 30
    examples: int = 10_000_000
    seconds: float = 60.0
    idle: float = 1800.0
    gone: float = 45.0

    def __post_init__(self) -> None:
        for name in ("visitors", "examples"):
            _checks.positive_integer(name, getattr(self, name))
        for name in ("seconds", "idle", "gone"):
            _checks.positive_number(name, getattr(self, name))

    def check(self, text: str) -> Experiment:
        """The experiment that a visitor asks for.

        Args:
            text: `Experiment.to_json()`.

        Raises:
            ValueError: the text is no experiment, or takes too much.
        """
        experiment = Experiment.from_json(text)
        seeds, batch = len(experiment.seed_numbers), experiment.effective_batch
        if seeds * batch > BATCH:
            raise ValueError(
                f"seeds * towers * accumulation_steps * microbatch_size must be at most {BATCH} in this classroom. "
                f"Received: {seeds} * {batch} = {seeds * batch}"
            )
        each = experiment.examples if experiment.updates is None else experiment.updates * batch
        if each is not None and seeds * each > self.examples:
            raise ValueError(
                f"a run may use at most {self.examples} examples in this classroom, over all its seeds. "
                f"Received: {seeds} * {each} = {seeds * each}"
            )
        if experiment.seconds is not None and seeds * experiment.seconds > self.seconds:
            raise ValueError(
                f"a run may train for at most {self.seconds:g} seconds in this classroom, over all its seeds. "
                f"Received: {seeds} * {experiment.seconds:g}"
            )
        return experiment

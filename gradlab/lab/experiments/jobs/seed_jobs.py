"""The jobs of an experiment, which are trained one after the other, and how each ended."""

from collections.abc import Sequence

from gradlab import runtime
from gradlab.lab.experiments import choices
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Update


def check_experiment(experiment: object) -> None:
    """Raise ValueError unless the argument is an experiment whose towers this machine has devices
    for."""
    if not isinstance(experiment, Experiment):
        raise ValueError(f"an experiment must be a gradlab.Experiment. Received: {experiment!r}")
    runtime.tower_devices(experiment.towers)


def jobs_of(experiment: Experiment) -> list[Experiment]:
    """Split an experiment into jobs: one for each seed, or a single one where all seeds are trained
    together.

    A job is an experiment itself. It is the unit that a sweep runs, caches and submits to an
    executor.
    """
    if can_run_together(experiment):
        return [experiment]
    return [experiment.of_seeds(seed) for seed in experiment.seed_numbers]


def can_run_together(experiment: Experiment) -> bool:
    """Whether the experiment's seeds can be trained together.

    They can if there are several, the model is dense, the method is one compiled function, and the
    budget is not in seconds.
    """
    compiled = not choices.takes_towers(experiment.method)
    several = len(experiment.seed_numbers) > 1 and experiment.model in choices.SEVERAL_SEEDS
    return several and compiled and experiment.seconds is None


def ending(updates: Sequence[Update]) -> str:
    """Tell how a training with these updates ended: "finished", "diverged" or "stopped"."""
    if updates and updates[-1].diverged:
        return "diverged"
    return "finished" if updates and updates[-1].progress >= 1 else "stopped"

"""Run one experiment: all its seeds, one after the other or together."""

from collections.abc import Callable, Iterator

from gradlab.lab.experiments import environment
from gradlab.lab.experiments.batched_seeds import train_together
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.seed_jobs import check_experiment, ending, jobs_of
from gradlab.lab.experiments.progress import Stop, Update
from gradlab.lab.experiments.result import Result
from gradlab.lab.experiments.training import train
from gradlab.measure.memory import PeakMemory

Progress = Callable[[int, Update], None]


def run(
    experiment: Experiment, progress: Progress | None = None, stop: Stop | None = None
) -> Result:
    """Train all seeds of an experiment.

    The seeds of a dense model with a compiled method are trained together, in one computation. The
    seeds of any other experiment are trained one after the other. On the same machine, and after
    `gradlab.setup` with a seed, the same experiment gives bitwise identical numbers.

    Args:
        experiment: the experiment to run.
        progress: called with (seed, update) after each update.
        stop: the run ends within one micro-batch when this is set, from any thread.

    Returns:
        A `Result`. After a stop it holds the seeds that had started; the ending of the last one is
        "stopped".

    Raises:
        ValueError: `experiment` is not an `Experiment`, or needs more towers than there are
            devices.

    Example:
        >>> result = run(Experiment(model="dense", method="microbatched", updates=3, seeds=2))
        >>> result
        Result: microbatched, dense on mnist, k = 5, b = 20; 2 finished
        >>> result.losses.shape     # seed, update, micro-batch
        (2, 3, 5)
    """
    check_experiment(experiment)
    results = []
    for job in jobs_of(experiment):
        results.append(run_job(job, progress, stop))
        if stop is not None and stop.is_set():
            break
    return Result.join(experiment, results)


def run_job(job: Experiment, progress: Progress | None = None, stop: Stop | None = None) -> Result:
    """Train one job: a single seed, or several seeds together. The arguments are those of `run`."""
    seeds = job.seed_numbers
    memory = PeakMemory()
    about = environment.describe() | {"seeds_together": len(seeds)}
    updates: dict[int, list[Update]] = {seed: [] for seed in seeds}
    for made in updates_of(job, stop):
        for seed, update in made:
            updates[seed].append(update)
            if progress is not None:
                progress(seed, update)
    peak = memory.bytes()
    results = [
        Result.of_updates(job, seed, made, ending(made), peak, about)
        for seed, made in updates.items()
    ]
    return Result.join(job, results)


def updates_of(job: Experiment, stop: Stop | None = None) -> Iterator[list[tuple[int, Update]]]:
    """Train one job, and yield after each update a list of (seed, update), with one entry for each
    seed in training."""
    if len(job.seed_numbers) > 1:
        return train_together(job, stop)
    [seed] = job.seed_numbers
    return ([(seed, update)] for update in train(job, seed, stop))

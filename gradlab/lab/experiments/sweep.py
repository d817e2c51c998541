"""Running experiments: one, or many over any executor, with what is finished kept on disk."""

import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf
from tqdm.auto import tqdm

import gradlab
from gradlab import _checks, runtime
from gradlab.lab.experiments import environment, worker
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import FORMAT, Result
from gradlab.lab.experiments.together import can_run_together, train_together
from gradlab.lab.experiments.training import Stop, Update, train

TRAINING = 2  # raised whenever the same experiment comes to give other numbers: what was kept is then trained again


def run(
    experiment: Experiment, progress: Callable[[int, Update], None] | None = None, stop: Stop | None = None
) -> Result:
    """Trains all the seeds of an experiment.

    The seeds of a dense model with a compiled method run together, others one after the other. On the same machine, and
    after `gradlab.setup` with a seed, the same experiment gives the same numbers to the bit.

    Args:
        experiment: what to do.
        progress: called with (seed, update) after each update.
        stop: when it is set, from any thread, the run ends within a micro-batch.

    Returns:
        A `Result`. After a stop it holds the seeds that were begun, the last of them "stopped".

    Example:
        >>> result = run(Experiment(model="dense", method="microbatched", updates=3, seeds=2))
        >>> result
        Result: microbatched, dense on mnist, k = 5, b = 20; 2 finished
        >>> result.losses.shape     # seed, update, micro-batch
        (2, 3, 5)
    """
    check_experiment(experiment)
    results = []
    for part in parts(experiment):
        results.append(run_part(part, progress, stop))
        if stop is not None and stop.is_set():
            break
    return Result.join(experiment, results)


def parts(experiment: Experiment) -> list[Experiment]:
    """What is run, kept and handed to an executor as one: one seed, or all where they run together."""
    if can_run_together(experiment):
        return [experiment]
    return [experiment.of_seeds(seed) for seed in experiment.seed_numbers]


def sweep(
    experiments: Iterable[Experiment],
    executor: concurrent.futures.Executor | None = None,
    cache: str | os.PathLike | None = None,
    progress: bool = True,
) -> list[Result]:
    """Runs experiments, and keeps what is finished: an interrupted sweep goes on where it was.

    Each seed is kept by itself, in a file named by the content of its experiment and the versions of gradlab and
    TensorFlow. A damaged file is trained again, with a warning. Several sweeps may share a cache.

    Args:
        experiments: what to do.
        executor: where to: any concurrent.futures.Executor whose processes are spawned, such as `processes(4)`, or a
            Dask cluster's `client.get_executor()`. Its workers set TensorFlow up as `gradlab.setup` did here. None: in
            this process.
        cache: the folder to keep results in. None: $GRADLAB_CACHE, or .cache/gradlab in the home directory.
        progress: whether to show a bar with the time left.

    Returns:
        A `Result` for each experiment, in order.

    Raises:
        ValueError: something that is no experiment, or an executor whose processes are forked.
        RuntimeError: some runs failed; the message says which and why. All others were finished and kept before.
    """
    experiments = list(experiments)
    for experiment in experiments:
        check_experiment(experiment)
    _check_executor(executor)
    kept = Cache(cache)
    results = {part: kept.read(part) for experiment in experiments for part in parts(experiment)}
    missing = [part for part, result in results.items() if result is None]
    failures = {}
    with tqdm(
        total=len(results),
        initial=len(results) - len(missing),
        disable=not progress,
        desc="runs",
        bar_format="{desc}: {percentage:3.0f} %|{bar}| {n:.1f} of {total} [{elapsed}, {remaining} left]",
    ) as bar:
        for part, outcome in _here(missing, bar) if executor is None else _elsewhere(missing, executor, bar):
            if isinstance(outcome, Result):
                kept.write(outcome)
                results[part] = outcome
            else:
                failures[part] = outcome
    if failures:
        raise RuntimeError(_sentence(failures, len(results))) from next(iter(failures.values()))
    return [Result.join(e, [results[part] for part in parts(e)]) for e in experiments]


def processes(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """An executor for `sweep`: so many processes on this machine, which do not inherit a running TensorFlow."""
    _checks.positive_integer("processes", workers)
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, spawn, initializer=worker.end_with_parent)


class Cache:
    """A folder of results, a file a part. Reading never fails, writing warns: a run is worth more than its file."""

    def __init__(self, folder: str | os.PathLike | None = None):
        folder = folder or os.environ.get("GRADLAB_CACHE") or pathlib.Path.home() / ".cache" / "gradlab"
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: Experiment) -> pathlib.Path:
        """Where the part's result is kept."""
        content = json.dumps(
            [FORMAT, TRAINING, gradlab.__version__, tf.__version__, environment.device(), part.to_json()]
        )
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        return self.folder / f"{part.method}-{part.model}-{part.accumulation_steps}x{part.microbatch_size}-{digest}.npz"

    def read(self, part: Experiment) -> Result | None:
        """The part's result, or None when it must be trained."""
        try:
            result = Result.load(self.path(part))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"a kept run cannot be read and is trained again: {error}", stacklevel=3)
            return None
        return result if result.experiment == part else None

    def write(self, result: Result) -> None:
        """Keeps a result."""
        try:
            result.save(self.path(result.experiment))
        except OSError as error:
            warnings.warn(f"a finished run could not be kept, and the sweep goes on: {error}", stacklevel=3)


def check_experiment(experiment) -> None:
    """Raises ValueError unless it is an experiment, and one that fits the towers there are."""
    if not isinstance(experiment, Experiment):
        raise ValueError(f"an experiment must be a gradlab.Experiment. Received: {experiment!r}")
    runtime.tower_devices(experiment.towers)


def run_part(part: Experiment, progress: Callable | None = None, stop: Stop | None = None) -> Result:
    """Trains a part: its one seed, or its seeds together."""
    seeds = part.seed_numbers
    memory, about = environment.PeakMemory(), environment.describe() | {"seeds_together": len(seeds)}
    updates: dict[int, list[Update]] = {seed: [] for seed in seeds}
    for made in updates_of(part, stop):
        for seed, update in made:
            updates[seed].append(update)
            if progress is not None:
                progress(seed, update)
    peak = memory.bytes()
    results = [Result.of_updates(part, seed, u, _ending(u), peak, about) for seed, u in updates.items()]
    return Result.join(part, results)


def updates_of(part: Experiment, stop: Stop | None = None) -> Iterator[list[tuple[int, Update]]]:
    """Trains a part, and yields for each update a list of (seed, its update): one, or one for each seed."""
    if len(part.seed_numbers) > 1:
        return train_together(part, stop)
    [seed] = part.seed_numbers
    return ([(seed, update)] for update in train(part, seed, stop))


def _ending(updates: list[Update]) -> str:
    if updates and updates[-1].diverged:
        return "diverged"
    return "finished" if updates and updates[-1].progress >= 1 else "stopped"


def _here(missing: list[Experiment], bar: tqdm) -> Iterator[tuple]:
    for part in missing:
        shown = 0.0

        def progress(seed, update):
            nonlocal shown
            bar.update(update.progress - shown)
            shown = update.progress

        try:
            outcome = run_part(part, progress)
        except Exception as error:
            outcome = error
        bar.update(1 - shown)
        yield part, outcome


def _elsewhere(missing: list[Experiment], executor: concurrent.futures.Executor, bar: tqdm) -> Iterator[tuple]:
    futures = {executor.submit(worker.work, part.to_json(), runtime.arguments()): part for part in missing}
    try:
        for future in concurrent.futures.as_completed(futures):
            error = future.exception()
            bar.update(1)
            yield futures[future], error if error is not None else future.result()
    finally:  # interrupted, or the caller had enough
        for future in futures:
            future.cancel()


def _check_executor(executor) -> None:
    if executor is None:
        return
    if not hasattr(executor, "submit"):
        raise ValueError(f"executor must be a concurrent.futures.Executor or None. Received: {executor!r}")
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "executor must spawn its processes, because TensorFlow does not survive a fork: use "
            "gradlab.lab.experiments.sweep.processes(workers). Received: a ProcessPoolExecutor that forks"
        )


def _sentence(failures: dict, total: int) -> str:
    part, error = next(iter(failures.items()))
    more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
    return (
        f"{len(failures)} of {total} runs failed, the others are kept and a new sweep goes on from there: "
        f"{part.method} {part.accumulation_steps}x{part.microbatch_size}, seed {part.seed_numbers[0]}: "
        f"{type(error).__name__}: {error}{more}"
    )

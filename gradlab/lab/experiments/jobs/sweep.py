"""Run many experiments, in this process or on an executor, and cache every finished job on disk."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm.auto import tqdm

from gradlab import _checks, runtime
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import worker
from gradlab.lab.experiments.jobs.cache import Cache
from gradlab.lab.experiments.jobs.seed_jobs import check_experiment, jobs_of
from gradlab.lab.experiments.progress import Update
from gradlab.lab.experiments.result import Result


def sweep(
    experiments: Iterable[Experiment],
    executor: Any = None,
    cache: str | os.PathLike | None = None,
    progress: bool = True,
) -> list[Result]:
    """Run experiments and cache what is finished, so that an interrupted sweep continues where it
    stopped.

    Each seed has its own file in the cache (seeds that are trained together share one), named by a
    hash of its experiment and of the versions of gradlab and TensorFlow. A damaged file causes a
    warning, and its job is trained again. Several sweeps may use one cache at the same time.

    Args:
        experiments: the experiments to run.
        executor: runs the jobs: any concurrent.futures.Executor whose processes are spawned, such
            as `processes(4)`, or a Dask client. Its workers call `gradlab.setup` with the arguments
            that this process called it with. None: run in this process.
        cache: the folder of the cache. None: $GRADLAB_CACHE, or .cache/gradlab in the home
            directory.
        progress: whether to show a progress bar with the time left.

    Returns:
        A `Result` for each experiment, in order.

    Raises:
        ValueError: an item of `experiments` is not an `Experiment`, or the executor forks its
            processes.
        OSError: the folder of the cache cannot be created.
        RuntimeError: some jobs failed; the message says which and why. The others ran and are
            cached.
    """
    experiments = list(experiments)
    for experiment in experiments:
        check_experiment(experiment)
    executor = worker.checked_executor(executor)
    kept = Cache(cache)
    results = {job: kept.read(job) for experiment in experiments for job in jobs_of(experiment)}
    missing = [job for job, result in results.items() if result is None]
    failures: dict[Experiment, BaseException] = {}
    with tqdm(
        total=len(results),
        initial=len(results) - len(missing),
        disable=not progress,
        desc="runs",
        bar_format="{desc}: {percentage:3.0f} %|{bar}| {n:.1f} of {total} [{elapsed}, {remaining} "
        "left]",
    ) as bar:
        for job, outcome in (
            _in_this_process(missing, bar) if executor is None else _on(executor, missing, bar)
        ):
            if isinstance(outcome, Result):
                kept.write(outcome)
                results[job] = outcome
            else:
                failures[job] = outcome
    if failures:
        raise RuntimeError(_sentence(failures, len(results))) from next(iter(failures.values()))
    done = {job: result for job, result in results.items() if result is not None}
    return [
        Result.join(experiment, [done[job] for job in jobs_of(experiment)])
        for experiment in experiments
    ]


def processes(workers: int, **setup: Any) -> concurrent.futures.ProcessPoolExecutor:
    """Make an executor for `sweep` and `AccumulationLab` that runs jobs in several processes on
    this machine.

    The processes are spawned, because TensorFlow does not work in a fork of a process that has
    started it.

    Args:
        workers: how many processes.
        **setup: arguments of `gradlab.setup` for these processes. Without any, they get those of
            this process.

    Raises:
        ValueError: `workers` is not a positive integer.
    """
    _checks.positive_integer("processes", workers)
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, spawn, worker.begin, (setup or None,))


Outcomes = Iterator[tuple[Experiment, Result | BaseException]]


def _in_this_process(jobs: Iterable[Experiment], bar: tqdm) -> Outcomes:
    # TensorFlow, which an executor's process can do without
    from gradlab.lab.experiments.jobs.run import run_job

    for job in jobs:
        shown = 0.0

        def progress(_seed: int, update: Update) -> None:
            nonlocal shown
            bar.update(update.progress - shown)
            shown = update.progress

        outcome: Result | BaseException
        try:
            outcome = run_job(job, progress)
        except Exception as error:
            outcome = error
        bar.update(1 - shown)
        yield job, outcome


def _on(executor: concurrent.futures.Executor, jobs: Iterable[Experiment], bar: tqdm) -> Outcomes:
    futures = {
        executor.submit(worker.work, job.to_json(), runtime.arguments()): job for job in jobs
    }
    try:
        for future in concurrent.futures.as_completed(futures):
            error = future.exception()
            bar.update(1)
            yield futures[future], future.result() if error is None else error
    finally:  # after an interrupt or an error, jobs that have not started must not start
        for future in futures:
            future.cancel()


def _sentence(failures: Mapping[Experiment, BaseException], total: int) -> str:
    job, error = next(iter(failures.items()))
    more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
    return (
        f"{len(failures)} of {total} runs failed. The others are cached, and a new sweep trains "
        f"only these again: {job.method} {job.accumulation_steps}x{job.microbatch_size}, seed "
        f"{job.seed_numbers[0]}: {type(error).__name__}: {error}{more}"
    )

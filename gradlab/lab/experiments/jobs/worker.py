"""The function that an executor's workers call for a sweep. Importing this module does not import
TensorFlow."""

import contextlib
import importlib
import io
import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

from gradlab import runtime

if TYPE_CHECKING:
    from gradlab.lab.experiments.result import Result

_lock = threading.Lock()


def checked_executor(executor: Any) -> Any:
    """The executor that runs jobs for one that was given: None, or with methods as those of
    `concurrent.futures`.

    Raises:
        ValueError: it is no executor, or TensorFlow would not work in its processes.
    """
    if hasattr(executor, "get_executor"):  # a Dask client
        return executor.get_executor(pure=False)
    if executor is not None and not hasattr(executor, "submit"):
        raise ValueError(
            "executor must be a concurrent.futures.Executor, a Dask client or None. Received: "
            f"{executor!r}"
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "executor must spawn its processes, because TensorFlow does not survive a fork: use "
            "`from gradlab.lab.experiments.jobs.sweep import processes`, then processes(workers). "
            "Received: a ProcessPoolExecutor that forks"
        )
    return executor


def begin(setup: dict[str, Any] | None) -> None:
    """Begin the life of a pool's worker: it ends with its parent, and is set up if there are
    arguments."""
    end_with_parent()
    if setup is not None:
        prepare(setup)


def end_with_parent() -> None:
    """End this process as soon as its parent has ended. Otherwise a pool's workers would wait for
    jobs forever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(job: str, setup: dict[str, Any] | None) -> "Result":
    """Train one job of a sweep, in a process that is set up like the process of the sweep.

    Args:
        job: `Experiment.to_json()`.
        setup: the arguments for `gradlab.setup`, or None to leave TensorFlow as it is.

    Returns:
        The job's `Result`.
    """
    prepare(setup)
    from gradlab.lab.experiments.experiment import Experiment
    from gradlab.lab.experiments.jobs.run import run_job

    return run_job(Experiment.from_json(job))


def prepare(setup: dict[str, Any] | None) -> None:
    """Import what trains, and set TensorFlow up unless this process is.

    Args:
        setup: the arguments for `gradlab.setup`, or None to leave TensorFlow as it is.
    """
    # TensorFlow's start-up messages would appear in the terminal of the sweep. The lock is for
    # executors of threads, which must not set TensorFlow up twice.
    with _lock, runtime.without_startup_noise():
        importlib.import_module("gradlab.lab.experiments.jobs.run")
        if setup is not None and runtime.current() is None:
            with contextlib.redirect_stdout(io.StringIO()):
                runtime.setup(**setup)

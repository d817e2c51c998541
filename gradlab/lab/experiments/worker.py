"""The function that an executor's workers call for a sweep. Importing this module does not import TensorFlow."""

import contextlib
import io
import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

from gradlab import runtime

if TYPE_CHECKING:
    from gradlab.lab.experiments.result import Result

_lock = threading.Lock()


def end_with_parent() -> None:
    """End this process as soon as its parent has ended. Otherwise a pool's workers would wait for jobs forever."""

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
    # These modules import TensorFlow, whose start-up messages would appear in the terminal of the sweep. The lock is
    # for executors of threads, which must not set TensorFlow up twice.
    with _lock, runtime.without_startup_noise():
        from gradlab.lab.experiments.experiment import Experiment
        from gradlab.lab.experiments.run import run_job

        if setup is not None and runtime.current() is None:
            with contextlib.redirect_stdout(io.StringIO()):
                runtime.setup(**setup)
    return run_job(Experiment.from_json(job))

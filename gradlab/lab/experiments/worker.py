"""What an executor's worker does for a sweep. Importing it starts nothing: TensorFlow comes with the work."""

import contextlib
import io
import multiprocessing
import os
import threading

from gradlab import runtime

_lock = threading.Lock()


def end_with_parent() -> None:
    """Ends this process when its parent dies: a pool's workers would wait for ever for work that cannot come."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(part: str, setup: dict | None):
    """Trains the part of a sweep that a JSON object describes, in a process set up as the sweep's own was.

    Args:
        part: `Experiment.to_json()`.
        setup: the arguments of `gradlab.setup`, or None.

    Returns:
        A `Result`.
    """
    with _lock, runtime.without_startup_noise():
        from gradlab.lab.experiments import sweep
        from gradlab.lab.experiments.experiment import Experiment

        if setup is not None and runtime.current() is None:
            with contextlib.redirect_stdout(io.StringIO()):
                runtime.setup(**setup)
    return sweep.run_part(Experiment.from_json(part))

"""What an executor's worker does for a sweep. Importing it starts nothing: TensorFlow comes with the work."""

import contextlib
import io
import threading

from gradlab import runtime

_lock = threading.Lock()


def work(part: str, setup: dict | None):
    """Trains the part of a sweep that a JSON object describes, in a process set up as the sweep's own was.

    Args:
        part: `Experiment.to_json()`.
        setup: the arguments of `gradlab.setup`, or None.

    Returns:
        A `Result`.
    """
    with _lock, runtime.without_startup_noise():
        from gradlab.lab import sweep
        from gradlab.lab.experiment import Experiment

        if setup is not None and runtime.current() is None:
            with contextlib.redirect_stdout(io.StringIO()):
                runtime.setup(**setup)
    return sweep.run_part(Experiment.from_json(part))

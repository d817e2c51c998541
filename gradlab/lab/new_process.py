"""Calls a function of a notebook in a new Python process, where its memory can be measured again
and again.

A process keeps much of what TensorFlow has once used. In a notebook that is run twice, the second
training finds that memory ready, and would seem to need none.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import cloudpickle

# With oneDNN, the process kept what was freed, and peaks of the same program differed between
# processes. Without it, and with these settings of glibc, freed memory went back to the system, and
# the peaks repeated.
_ENVIRONMENT = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def call_in_new_process(function: Callable, *arguments: Any) -> Any:
    """The result of `function(*arguments)`, computed on the CPU in a new process that gives freed
    memory back.

    The function travels with everything of the notebook that it uses: other functions, modules,
    arrays.

    Args:
        function: a function of a module or of a notebook.
        *arguments: its arguments. They and the result must be picklable.

    Raises:
        RuntimeError: the function failed. The message is the last line of its traceback.

    Example:
        >>> import os
        >>> call_in_new_process(os.getpid) == os.getpid()
        False
    """
    with tempfile.TemporaryDirectory() as folder:
        work = os.path.join(folder, "work")
        result = os.path.join(folder, "result")
        with open(work, "wb") as file:
            cloudpickle.dump((function, arguments), file)
        command = [sys.executable, "-m", "gradlab.lab.new_process", work, result]
        done = subprocess.run(
            command, env=os.environ | _ENVIRONMENT, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                (done.stderr.strip().splitlines() or ["the process ended without a result"])[-1]
            )
        with open(result, "rb") as file:
            return pickle.load(file)


def peak_memory(function: Callable, *cases: Any) -> list[float]:
    """The most memory that `function(case)` needs, for each case, one after another in one new
    process.

    The first case is run once more before all, so that what TensorFlow needs to start counts
    nowhere.

    Returns:
        The growth of the process's peak memory in MiB for each case; NaN where it cannot be read.

    Raises:
        RuntimeError: the function failed.

    Example:
        >>> import numpy as np
        >>> small, large = peak_memory(np.ones, 2**20, 2**24)
        >>> (round(small), round(large))  # float64 has eight bytes
        (8, 128)
    """
    return call_in_new_process(_peaks, function, cases)


def _peaks(function: Callable, cases: tuple) -> list[float]:
    from gradlab.measure.memory import MEBIBYTE, PeakMemory

    function(cases[0])
    peaks = []
    for case in cases:
        memory = PeakMemory()
        before = memory.bytes()
        function(case)
        peaks.append((memory.bytes() - before) / MEBIBYTE)
    return peaks


def _work(work: str, result: str) -> None:
    with open(work, "rb") as file:
        function, arguments = pickle.load(file)
    found = function(*arguments)
    with open(result, "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    _work(*sys.argv[1:])

"""What a window needs in memory, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = str(Path(__file__).parent / "memory_worker.py")
# glibc keeps freed memory for later, more or less as threads happen to run. Like this it gives large pieces back, so
# that what is measured is what TensorFlow held.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


def growth(micro_batches, updates):
    """MiB by which the peak grew, and MiB of the parameters."""
    command = [sys.executable, WORKER, str(micro_batches), str(updates)]
    done = subprocess.run(command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, check=True)
    return [float(number) for number in re.search(r"growth (\S+) parameters (\S+)", done.stdout).groups()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_a_window_needs_one_example_and_one_accumulator_however_long_it_is():
    """VGG-16, micro-batches of one example, as often in each process: a peak is a matter of chance too."""
    (one, parameters), (short, _), (long, _) = growth(0, 16), growth(8, 16), growth(128, 1)
    limit = one + parameters  # an accumulator is as large as the parameters
    assert long <= 1.05 * short, (one, short, long)
    assert short <= 1.15 * limit and long <= 1.15 * limit, (one, parameters, short, long)

"""The memory that a window needs, measured in separate processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

WORKER = str(SUPPORT / "memory_worker.py")
# glibc keeps freed memory for later use, and how much depends on the timing of the threads. With
# these settings it returns large pieces at once, so the measured peak is what TensorFlow held.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


def growth(micro_batches, updates):
    """The growth of the peak, and the size of the parameters, both in MiB."""
    command = [sys.executable, WORKER, str(micro_batches), str(updates)]
    done = subprocess.run(
        command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, check=True
    )
    return [
        float(number)
        for number in re.search(r"growth (\S+) parameters (\S+)", done.stdout).groups()
    ]


def least(micro_batches, updates, limit):
    """The growth, measured up to three times while it is above the limit: chance can only add to
    what is needed."""
    for _ in range(3):
        found = growth(micro_batches, updates)[0]
        if found <= limit:
            break
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
def test_a_window_needs_one_example_and_one_accumulator_however_long_it_is():
    """VGG-16 with micro-batches of one example; every process trains on the same number of them."""
    one, parameters = growth(0, 4)
    limit = 1.15 * (one + parameters)  # an accumulator is as large as the parameters
    short = least(8, 4, limit)
    long = least(32, 1, min(limit, 1.05 * short))
    assert short <= limit and long <= limit, (one, parameters, short, long)
    assert long <= 1.05 * short, (one, parameters, short, long)


def evaluation(step, microbatch_size):
    command = [sys.executable, str(SUPPORT / "evaluation_worker.py"), step, str(microbatch_size)]
    done = subprocess.run(
        command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, check=True
    )
    return float(re.search(r"growth (\S+)", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
def test_evaluation_and_prediction_need_no_more_than_a_micro_batch():
    """Batches of 64 images, micro-batches of 2; the images themselves are in memory either way."""
    plain = {step: evaluation(step, 0) for step in ("fit", "evaluate", "predict")}
    small = {step: evaluation(step, 2) for step in plain}
    print(plain, small)
    assert all(small[step] < plain[step] / 2 for step in plain), (plain, small)

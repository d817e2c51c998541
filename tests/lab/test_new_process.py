"""Functions of a notebook in a new process: what they use travels along, memory is measured again
each time."""

import os
import sys
import threading

import numpy as np
import pytest

from gradlab.lab.new_process import call_in_new_process, peak_memory

MIB = 2**20


def test_a_function_takes_what_it_uses_along():
    table = np.arange(5)

    def add(x):
        return table + x, os.getpid()

    (total, process), here = call_in_new_process(add, 2), os.getpid()
    assert total.tolist() == [2, 3, 4, 5, 6] and process != here


def test_a_fault_is_told_with_its_last_line():
    def fail():
        raise ValueError("k must be at least 1. Received: 0")

    with pytest.raises(RuntimeError, match=r"^ValueError: k must be at least 1. Received: 0$"):
        call_in_new_process(fail)


def test_what_cannot_travel_is_refused_before_a_process_starts():
    with pytest.raises(TypeError, match="cannot pickle"):
        call_in_new_process(len, threading.Lock())


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the peak of a process can only be read on Linux"
)
def test_memory_is_the_same_each_time_whatever_this_process_holds():
    held = np.ones(64 * MIB, np.uint8)

    def fill(mib):
        return np.ones(mib * MIB, np.uint8).sum()

    assert np.allclose(peak_memory(fill, 16, 64, 16), [16, 64, 16], atol=2)
    del held

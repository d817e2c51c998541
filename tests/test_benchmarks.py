"""The benchmark runs and prints a table; what it measures is not judged here."""

import pathlib
import re
import subprocess
import sys

import pytest

from gradlab.lab import methods

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_it_prints_every_method_for_every_shape():
    command = [sys.executable, str(ROOT / "benchmarks" / "methods.py"), "--repeats", "1", "--models", "dense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("dense:") :].splitlines()
    assert table[1].split() == ["k", "x", "b", *methods.METHODS]
    assert [row.split()[0] for row in table[2:]] == ["1x100", "5x20", "10x10", "20x5"]
    for row in table[2:]:
        assert len(re.findall(r"\d+\.\d\d \(\d+\.\d\d\)", row)) == len(methods.METHODS)
        assert "(1.00)" in row

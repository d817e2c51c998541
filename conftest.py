"""What all tests and doctests share: TensorFlow's setup, the order of the files, a cache of their own, settings of
tools that otherwise depend on how fast the machine is."""

import gc
import os
import signal
import tempfile

import pytest
from hypothesis import settings

import gradlab

# Ready adapters import the libraries that they are for; tests/auditing runs those that are installed.
collect_ignore_glob = ["gradlab/auditing/adapters/*"]

CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()

# By default Hypothesis fails an example that takes longer than 0.2 seconds, and draws other examples in CI than
# elsewhere.
settings.register_profile("gradlab", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("gradlab")

# The longest files, in this order: whichever of several workers got one of them last would end long after the others.
LONGEST_FIRST = (
    "tests/training/test_model.py",
    "tests/browser/test_lab.py",
    "tests/browser/test_course.py",
    "tests/training/test_trainer.py",
)


def pytest_configure(config):
    # A shell starts background jobs with Ctrl-C ignored, and the processes that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    divides = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not divides:  # the process that divides the tests among its workers needs no TensorFlow
        gradlab.setup(towers=3, seed=0)  # three towers on any machine, and repeatable numbers
    config.stash[CACHE] = folder = tempfile.TemporaryDirectory(prefix="gradlab-tests-")
    os.environ["GRADLAB_CACHE"] = folder.name  # runs that a user has kept neither help nor suffer


def pytest_unconfigure(config):
    config.stash[CACHE].cleanup()


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))  # all others keep their order
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = 180  # nbval waits 5 seconds for each message, which is too short on a busy machine
            # The pictures of diagrams are drawn from the Mermaid source, which nbval compares (tests/notebooks).
            item.parent.skip_compare = {*item.parent.skip_compare, "image/svg+xml"}


def pytest_collection_finish():
    """Collect garbage less often. Tracing makes millions of objects, and every collection visits all of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)

"""What all tests and doctests share: TensorFlow's setup, how tests are divided among workers, a
cache of their own, settings of tools that otherwise depend on how fast the machine is."""

import gc
import os
import signal
import tempfile
import time

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import gradlab

# Ready adapters import the libraries that they are for; tests/auditing runs those that are
# installed.
collect_ignore_glob = ["gradlab/auditing/adapters/*"]

CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()

# By default Hypothesis fails an example that takes longer than 0.2 seconds, and draws other
# examples in CI than elsewhere.
settings.register_profile("gradlab", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("gradlab")

BROWSER = "tests/browser/"
PAGES_OF_THEIR_OWN = (f"{BROWSER}test_course.py", f"{BROWSER}test_classroom.py")
# Their cells train for long. `make test-slow` runs them.
LONG_NOTEBOOKS = ("05", "08", "09", "10", "11", "12", "13")
KERAS_SUITE = "tests/keras_suite/"  # one test runs several hundred of Keras' own
BENCHMARKS = "tests/benchmarks/"
SERVERS = ("tests/lab/classroom/test_attacks.py",)  # whose tests share a server
# When to begin no more tests, in seconds since 1970; .ci/run sets it for the slow ones.
DEADLINE = float(os.environ.get("GRADLAB_TEST_DEADLINE", "inf"))


class ByFunction(LoadScopeScheduling):
    """Gives a worker one test function at a time, with all its parameters.

    They share what the function caches, and no file is so long that it ends after all others. What
    is expensive to start stays together: a notebook has one kernel, and most browser tests share
    one page.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file in PAGES_OF_THEIR_OWN + SERVERS or file.endswith(".ipynb"):
            return file
        return BROWSER if file.startswith(BROWSER) else nodeid.split("[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFunction(config, log)


def pytest_configure(config):
    # A shell starts background jobs with Ctrl-C ignored, and the processes that tests interrupt
    # would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    divides = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not divides:  # the process that divides the tests among its workers needs no TensorFlow
        gradlab.setup(towers=3, seed=0)  # three towers on any machine, and repeatable numbers
        import tensorflow as tf

        # A GPU would otherwise round the factors of a float32 product to ten bits
        tf.config.experimental.enable_tensor_float_32_execution(False)
    config.stash[CACHE] = folder = tempfile.TemporaryDirectory(prefix="gradlab-tests-")
    os.environ["GRADLAB_CACHE"] = folder.name  # runs that a user has kept neither help nor suffer


def pytest_unconfigure(config):
    config.stash[CACHE].cleanup()


def _in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The largest units of work first: one that came last would end long after all others.
    Notebooks lie among the tests of the first half, because several kernels at once slow each other
    down. What measures comes last, because that may be left out first."""
    notebooks = [item for item in items if _is_notebook(item)]
    others = sorted(
        (item for item in items if not _is_notebook(item)),
        key=lambda item: (
            BENCHMARKS in item.nodeid,
            BROWSER not in item.nodeid,
            KERAS_SUITE not in item.nodeid,
        ),
    )
    places = {item: place / len(others) for place, item in enumerate(others)}
    files = list(dict.fromkeys(item.path for item in notebooks))
    places |= {item: files.index(item.path) / len(files) / 2 for item in notebooks}
    return sorted(items, key=places.__getitem__)


def _is_notebook(item: pytest.Item) -> bool:
    return item.path.suffix == ".ipynb"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    items[:] = _in_order(items)
    for item in items:
        if hasattr(item, "output_timeout"):
            # Nbval waits 5 seconds for each message, which is too short on a busy machine
            item.output_timeout = 180
            # The pictures of diagrams are drawn from the Mermaid source, which nbval compares
            # (tests/notebooks).
            item.parent.skip_compare = {*item.parent.skip_compare, "image/svg+xml"}
            if item.path.name.startswith(LONG_NOTEBOOKS):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    if time.time() > DEADLINE:
        pytest.skip("left out, because this machine is slow: the time for these tests is over")


def pytest_collection_finish():
    """Collect garbage less often. Tracing makes millions of objects, and every collection visits
    all of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)

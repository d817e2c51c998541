"""A pytest plugin for Keras' own tests: records what every training gives, with or without micro-batches.

It runs in a process of its own, which `suite.py` starts. The environment variable GRADLAB_SUITE holds the mode, "plain"
or "microbatched", and the file for the record.
"""

import functools
import os
import pickle
from pathlib import Path

import keras
import numpy as np
import pytest

import gradlab

MODE, FILE = os.environ["GRADLAB_SUITE"].split(":", 1)
MICROBATCH_SIZE = 2
MOST = 1_000_000  # elements of the weights of one model, of larger ones only the sums are kept

outcomes: dict = {}
trainings: dict = {}
now: list = []  # the trainings of the running test
inside = False


def recorded(name: str) -> None:
    """Replaces a method of all Keras models: it prepares the model, trains, and records the result."""
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        global inside
        if inside:
            return original(self, *args, **kwargs)
        inside, said = True, ""
        try:
            call = functools.partial(original, self)
            if MODE == "microbatched":
                try:
                    call = getattr(gradlab.microbatched(self, MICROBATCH_SIZE), name)
                except ValueError as error:
                    said = str(error)
            result = call(*args, **kwargs)
        finally:
            inside = False
        now.append((name, said, numbers(result), weights(self)))
        return result

    setattr(keras.Model, name, method)


def numbers(result) -> dict:
    """The numbers in a History or in logs."""
    logs = getattr(result, "history", result)
    logs = logs if isinstance(logs, dict) else dict(enumerate(np.ravel(logs)))
    found = {str(key): np.asarray(value, "float64") for key, value in logs.items()}
    return {key: value for key, value in found.items() if "time" not in key}


def weights(model) -> list:
    values = [np.asarray(w.numpy(), "float64") for w in model.weights if "seed" not in w.name and w.dtype != "string"]
    return values if sum(value.size for value in values) <= MOST else [value.sum() for value in values]


def pytest_configure() -> None:
    gradlab.setup(seed=0)
    seed = np.random.seed
    np.random.seed = lambda value=None: seed(1 if value is None else value)  # some tests ask for other data each time
    for name in ("fit", "train_on_batch"):
        recorded(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    now.clear()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    name = item.nodeid.split("site-packages/")[-1]
    if report.when == "call" or report.outcome != "passed":
        reason = str(call.excinfo.value).strip().splitlines()[:1] if call.excinfo else []
        outcomes[name] = report.outcome, "".join(reason)[:300]
        trainings[name] = list(now)


def pytest_sessionfinish() -> None:
    Path(FILE).write_bytes(pickle.dumps((outcomes, trainings)))

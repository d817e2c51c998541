"""A pytest plugin for Keras' own tests: runs each twice, and records what every training gives with
micro-batches and without.

It runs in processes of its own, which `suite.py` starts. Environment variables tell each of them
its part of the tests, GRADLAB_PART ("0 2": every second one, from the first), the file for its
record, GRADLAB_SUITE, and whether to run only the quick part, GRADLAB_QUICK.
"""

import ast
import functools
import gc
import inspect
import os
import pickle
import re
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from _pytest.runner import runtestprotocol
from conditions import BUILT_BEFORE, DECLARED, DENSE_GRADIENTS, LONG, ONE_MICROBATCH, among

import gradlab.fit.program.input_checks

MOST = 1_000_000  # elements of the weights of one model, of larger ones only the sums are kept

MODES = "plain", "microbatched"
outcomes: dict = {mode: {} for mode in MODES}  # by name of a test: (outcome, reason)
trainings: dict = {mode: {} for mode in MODES}
mode = ""
now: list = []  # the trainings of the running test
running = ""  # its name
inside = False


class Absent(types.ModuleType):
    """Stands for a package that a test file imports and that is not installed, so that its other
    tests can run."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


ABSENT = {name: Absent(name) for name in ("jax", "torch", "grain", "conftest")}
# Of the conftest.py in Keras' repository, which its wheel lacks.
ABSENT["conftest"].skip_if_backend = lambda name, reason: pytest.mark.skipif(
    name == "tensorflow", reason=reason
)


def recorded(name: str) -> None:
    """Replaces a method of all Keras models: it prepares the model, trains, and records the
    result."""
    owner = next(parent for parent in keras.Model.__mro__ if name in vars(parent))
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        global inside
        if inside:
            return original(self, *args, **kwargs)
        inside, said = True, ""
        # The tests of several devices reset TensorFlow, which then has no seed
        tf.random.set_seed(1)
        try:
            if among(running, BUILT_BEFORE):
                self.build(np.shape(args[0]))
                self.optimizer.build(self.trainable_variables)
            call = functools.partial(original, self)
            if mode == "microbatched":
                try:
                    size = 10**6 if among(running, ONE_MICROBATCH) else 2
                    declared = next(
                        (kind for word, kind in DECLARED.items() if word in running), None
                    )
                    call = getattr(gradlab.microbatched(self, size, batch_losses=declared), name)
                except ValueError as error:
                    said = str(error)
            result = call(*args, **kwargs)
        finally:
            inside = False
        now.append((said, numbers(result), weights(self), bool(self.variables)))
        return result

    setattr(owner, name, method)


def trainers_count_as_models() -> None:
    """Lets gradlab accept the models of trainer_test.py: layers with Keras' private trainer mixed
    in."""
    vars(gradlab.fit.program.input_checks)["isinstance"] = lambda one, kind: (
        kind is keras.Model or isinstance(one, kind)
    )


def dense_gradients() -> None:
    """Gives optimizers dense gradients, in the tests for which this is a condition."""
    original = keras.Optimizer.apply

    @functools.wraps(original)
    def apply(self, grads, trainable_variables=None):
        if among(running, DENSE_GRADIENTS):
            grads = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads
            ]
        return original(self, grads, trainable_variables)

    keras.Optimizer.apply = apply


class Replay:
    """Does with a GradientAccumulator what an optimizer does with gradient_accumulation_steps."""

    def __init__(self, optimizer, variables: list):
        self._steps, self._added = optimizer.gradient_accumulation_steps, 0
        self._optimizer = type(optimizer).from_config(
            optimizer.get_config() | {"gradient_accumulation_steps": None}
        )
        self.variables = [keras.Variable(variable, name=variable.name) for variable in variables]
        self._accumulator = gradlab.GradientAccumulator(
            [variable.value for variable in self.variables]
        )

    def add(self, gradients: list) -> None:
        self._accumulator.add(gradients)
        self._added += 1
        if self._added == self._steps:
            self._optimizer.apply(self._accumulator.mean(), self.variables)
            self._accumulator.zero()
            self._added = 0


def accumulation_recorded() -> None:
    """Replaces a method of all optimizers: if they accumulate gradients, it records the variables
    after every call."""
    original = keras.Optimizer.apply_gradients
    replays: dict = {}

    @functools.wraps(original)
    def apply_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        if not self.gradient_accumulation_steps or inside or tf.distribute.has_strategy():
            return original(self, pairs)
        variables = [variable for _, variable in pairs]
        if mode == "microbatched":
            if self not in replays:
                replays[self] = Replay(self, variables)
            replays[self].add([gradient for gradient, _ in pairs])
            variables = replays[self].variables
        result = original(self, pairs)
        now.append(
            ("", {}, [np.asarray(variable.numpy(), "float64") for variable in variables], True)
        )
        return result

    keras.Optimizer.apply_gradients = apply_gradients


def numbers(result) -> dict:
    """The numbers in a History or in logs."""
    logs = getattr(result, "history", result)
    logs = logs if isinstance(logs, dict) else dict(enumerate(np.ravel(logs)))
    found = {str(key): np.asarray(value, "float64") for key, value in logs.items()}
    return {key: value for key, value in found.items() if "time" not in key}


def weights(model) -> list:
    values = [
        np.asarray(w.numpy(), "float64")
        for w in model.weights
        if "seed" not in w.name and w.dtype != "string"
    ]
    return (
        values if sum(value.size for value in values) <= MOST else [value.sum() for value in values]
    )


def pytest_configure() -> None:
    gradlab.setup(seed=0)
    # Models run once or twice only
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    seed = np.random.seed
    # Some tests ask for other data each time
    np.random.seed = lambda value=None: seed(1 if value is None else value)
    for name in ("fit", "train_on_batch"):
        recorded(name)
    accumulation_recorded()
    trainers_count_as_models()
    dense_gradients()
    sys.modules.update(ABSENT)


def pytest_collectreport(report) -> None:
    """A file that cannot be read is a fault of the suite."""
    if report.failed:
        outcomes["plain"][report.nodeid] = "error", report.longreprtext[-1000:]
        trainings["plain"][report.nodeid] = []


def pytest_collection_finish() -> None:
    for name in ABSENT:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    gc.disable()


@functools.cache
def training_functions(file: str) -> set[str]:
    """The names of the functions in a file that train a model, themselves or through each other."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef):
            names.setdefault(node.name, set()).update(re.findall(r"\w+", ast.unparse(node)))
    found = {"fit", "train_on_batch", "run_layer_test", "gradient_accumulation_steps"}
    while new := {name for name, used in names.items() if used & found} - found:
        found |= new
    return found


def pytest_collection_modifyitems(items: list) -> None:
    """Keeps the tests that train, and of these the ones of this process."""
    trains = [
        item
        for item in items
        if inspect.unwrap(item.function).__name__ in training_functions(str(item.path))
    ]
    if os.environ["GRADLAB_QUICK"]:
        short = [item for item in trains if not among(item.nodeid, LONG)]
        one_each = {(item.path, item.cls, inspect.unwrap(item.function)): item for item in short}
        trains = list(one_each.values())[::2]
    first, step = map(int, os.environ["GRADLAB_PART"].split())
    items[:] = trains[first::step]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> bool:
    global mode
    for each in MODES:
        mode = each
        runtestprotocol(item, nextitem=nextitem)
        name = item.nodeid.split("site-packages/")[-1]
        if outcomes[mode].get(name, ("",))[0] != "passed" or not any(
            has_variables for *_, has_variables in now
        ):
            break  # there is nothing to compare
    # Automatic collections would visit the millions of objects of a trace again and again.
    # Collecting more rarely takes longer too: deleting an iterator that a test left behind then
    # waits for its threads, for up to 20 s.
    gc.collect()
    gc.freeze()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    global running
    running = item.nodeid
    now.clear()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    name = item.nodeid.split("site-packages/")[-1]
    if report.when == "call" or report.outcome != "passed":
        reason = str(call.excinfo.value).strip().splitlines()[:1] if call.excinfo else []
        outcomes[mode][name] = report.outcome, "".join(reason)[:300]
        trainings[mode][name] = list(now)


def pytest_sessionfinish() -> None:
    Path(os.environ["GRADLAB_SUITE"]).write_bytes(pickle.dumps((outcomes, trainings)))

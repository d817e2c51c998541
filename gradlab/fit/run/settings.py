"""The settings of a training run that a checkpoint contains, and how those of two runs differ."""

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from gradlab import runtime
from gradlab.fit import keras_private as internals

# The settings that must not differ.
FIXED = ("model", "layers", "variables", "optimizer")
# The keys of Keras' configurations that differ from run to run, or only say where a class was
# found.
UNIMPORTANT = ("name", "module", "registered_name", "build_config", "compile_config")


class Change(NamedTuple):
    """A setting that differs between a checkpoint and the run that finds it.

    Attributes:
        setting: the setting's name.
        part: the part of it that differs, such as "layers[2]"; the name itself if it has no parts.
        before, now: its value in the checkpoint and in this run.
    """

    setting: str
    part: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.part} {_short(self.before)} instead of {_short(self.now)}"


def settings_of(model: keras.Model, optimizer: Any, dataset: Any = None, **settings: Any) -> dict:
    """Describes a training run by what changes its results. What is not known is left out.

    The names of models, layers and optimizers do not count, because Keras numbers them. A function
    is described by its name.

    Args:
        model: the model: the classes of its layers, and the shapes and types of its variables.
        optimizer: the optimizer: its class and its settings.
        dataset: the dataset: the number of its batches.
        **settings: other settings of any type.

    Returns:
        A dictionary that JSON can store.
    """
    batches = _batches_of(dataset)
    seed = getattr(runtime.current(), "seed", None)
    return {
        "model": type(model).__name__,
        "layers": [type(layer).__name__ for layer in internals.layers_of(model)],
        "variables": [[*variable.shape, str(variable.dtype)] for variable in model.variables],
        **_settings_of_optimizer(optimizer),
        **{name: described(value) for name, value in settings.items()},
        **({} if seed is None else {"seed": seed}),
        **({} if batches is None else {"batches of the dataset": batches}),
    }


def learning_rate_variable(optimizer: Any) -> keras.Variable | None:
    """The variable that holds an optimizer's learning rate; None if the rate follows a schedule."""
    rate = _inner(optimizer).learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def described(value: Any) -> Any:
    """A value as JSON has it: a function by its name, an object by its class and its Keras
    configuration."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _described_mapping(value)
    if isinstance(value, (list, tuple)):
        return [described(part) for part in value]
    if isinstance(value, tf.DType):
        return value.name
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return np.asarray(value).tolist()
    if callable(getattr(value, "get_config", None)):
        return {"class_name": type(value).__name__, "config": described(_config_of(value))}
    return getattr(value, "__name__", type(value).__name__)


def differences(before: dict, now: dict) -> list[Change]:
    """The settings of two runs that differ, as far as both runs know them."""
    found = []
    for name, value in now.items():
        if name in before:
            found += [Change(name, *parts) for parts in _different_parts(name, before[name], value)]
    return found


def _described_mapping(value: Mapping) -> Any:
    # Its configuration is compiled code, which contains line numbers
    if value.get("class_name") == "__lambda__":
        return "<lambda>"
    return {str(key): described(part) for key, part in value.items() if key not in UNIMPORTANT}


def _config_of(value: Any) -> dict:
    """The Keras configuration of an object; empty if its class does not define one."""
    try:
        with warnings.catch_warnings():
            # Keras warns of functions without a name, which it could not load again
            warnings.simplefilter("ignore")
            return dict(value.get_config())
    except Exception:  # whatever the code of a user raises
        return {}


def _inner(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer holds, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _settings_of_optimizer(optimizer: Any) -> dict:
    inner = _inner(optimizer)
    config = _config_of(inner)
    kind = type(inner).__name__
    if inner is not optimizer:
        kind = f"{type(optimizer).__name__} of {kind}"
        outer = _config_of(optimizer)
        outer.pop("inner_optimizer", None)
        config |= outer
    found = {"optimizer": kind}
    if "learning_rate" in config:
        found["learning_rate"] = described(config.pop("learning_rate"))
    for name, value in _described_mapping(config).items():
        found[f"optimizer.{name}"] = value
    return found


def _batches_of(dataset: Any) -> int | None:
    """The number of batches of a dataset; None if it is unknown or infinite."""
    if isinstance(dataset, tf.data.Dataset):
        number = int(dataset.cardinality())
        return number if number >= 0 else None
    try:
        return len(dataset)
    except TypeError:
        return None


def _different_parts(name: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """For each part that differs, its name and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [
            (f"{name}.{key}", before.get(key), now.get(key))
            for key in dict.fromkeys([*now, *before])
        ]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(before, now))]
    else:
        # As text, because NaN differs from itself.
        return [] if json.dumps(before) == json.dumps(now) else [(name, before, now)]
    return [found for part in parts for found in _different_parts(*part)]


def _short(value: Any) -> str:
    """A value for a message. Seven digits are all that float32 has."""
    text = f"{value:.7g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

"""Bad arguments of the public functions: one clear sentence with the value, before work starts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab

X, Y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
NO_NUMBERS = [
    None,
    "no",
    -1,
    1.5,
    float("nan"),
    10**30,
    [],
    [[1], [2]],
    {"a": 1},
    b"x",
    1j,
    np.array([1, 2]),
]
NO_FUNCTIONS = [one for one in NO_NUMBERS if one is not None]
V = tf.Variable([1.0, 2.0])


def model():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])


def trainer(**changed):
    gradlab.Trainer(
        **{"model": model(), "optimizer": "sgd", "loss": "mse", "microbatch_size": 4} | changed
    )


def fit(**changed):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    gradlab.Trainer(model(), "sgd", "mse", 4).fit(
        **{"dataset": dataset, "updates": 1, "verbose": False} | changed
    )


def step(**changed):
    gradlab.Trainer(model(), "sgd", "mse", 4).step(**{"x": X, "y": Y} | changed)


def gradients(**changed):
    usual = {
        "loss": lambda x: tf.reduce_mean(V * x),
        "variables": V,
        "data": tf.ones([4, 2]),
        "microbatch_size": 2,
    }
    gradlab.value_and_gradients(**usual | changed)


def add(**changed):
    gradlab.GradientAccumulator([V]).add(**{"gradients": [V + 1]} | changed)


def average(**changed):
    towers = [[(V + 1, V)], [(V + 1, V)]]
    gradlab.average_gradients(**{"tower_grads": towers} | changed)


DOORS = [
    (lambda **changed: gradlab.microbatched(model(), **{"microbatch_size": 4} | changed), {
        "microbatch_size": NO_NUMBERS, "in_flight": NO_NUMBERS, "batch_losses": NO_FUNCTIONS,
        "memory": [-1, "no", float("nan")], "skip_nonfinite": NO_NUMBERS,
        "noise_scale": NO_NUMBERS, "sparse": [None, "no", 1, [1], keras.layers.Embedding(4, 2), [model()]],
    }),
    (trainer, {
        "model": NO_NUMBERS, "optimizer": NO_NUMBERS, "loss": NO_FUNCTIONS, "microbatch_size": NO_NUMBERS,
        "strategy": ["no", 1, 1.5, np.array([1, 2])], "accumulation": NO_FUNCTIONS, "weight_fn": NO_FUNCTIONS,
        "skip_nonfinite": NO_NUMBERS, "jit_compile": NO_NUMBERS, "in_flight": NO_NUMBERS, "batch_losses": NO_FUNCTIONS,
        "accumulator_dtype": NO_FUNCTIONS, "loss_weights": [float("nan"), "no", True, [float("inf")]],
    }),
    (fit, {
        "dataset": [None, "no", 1, b"x", {"a": 1}, [[1], [2]], np.array([1, 2])], "updates": NO_NUMBERS,
        "checkpoint_every": NO_NUMBERS, "on_update": NO_FUNCTIONS, "allow_changes": NO_NUMBERS,
        "verbose": [None, "no", -1, 1.5, []],
    }),
    (step, {name: [object(), 10**30] for name in ("x", "y", "sample_weight")}),
    (gradients, {
        "loss": NO_NUMBERS, "variables": NO_NUMBERS, "data": [object(), 10**30, 1.5], "microbatch_size": NO_NUMBERS,
        "reduction": NO_NUMBERS, "in_flight": NO_NUMBERS,
    }),
    (lambda variables: gradlab.GradientAccumulator(variables), {"variables": NO_NUMBERS}),
    (add, {"gradients": NO_NUMBERS, "weight": [-1, "no", float("nan"), 1j, [[1], [2]]]}),
    (average, {"tower_grads": NO_NUMBERS, "weights": [-1, "no", [1j, 1], [-1, 1], [float("nan"), 1], [[1], [2]]]}),
    (lambda **changed: gradlab.WholeBatch(**{"fn": abs} | changed), {
        "fn": NO_NUMBERS, "reduction": [1, "no", [[1]], {"a": 1}], "name": [1, [], {"a": 1}],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("door", "bad"), DOORS, ids=[" ".join(bad)[:40] for _, bad in DOORS])
def test_one_sentence_with_the_value(door, bad):
    faults = []
    for name, values in bad.items():
        for value in values:
            try:
                door(**{name: value})
                faults.append(f"{name}={value!r} was taken")
            except ValueError as error:
                if "Received" not in str(error) or "\n" in str(error).strip():
                    faults.append(f"{name}={value!r}: {error}")
            except Exception as error:
                faults.append(f"{name}={value!r}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)

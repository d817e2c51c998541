"""The step of `fit` that takes one call: used where it may be, with the results of Keras' own."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab.fit.program import compiled_step
from gradlab.fit.program.compiled_step import CompiledStep, in_one_call, types_of

X = np.random.default_rng(0).normal(size=(14, 4)).astype("float32")
Y = X[:, :1]


def model(**settings):
    keras.utils.set_random_seed(0)
    small = gradlab.microbatched(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]), 2)
    small.compile("adam", "mse", metrics=["mae"], **settings)
    return small


@pytest.fixture
def calls(monkeypatch):
    """The elements that steps of one call have seen."""
    found, call = [], CompiledStep.__call__
    monkeypatch.setattr(
        CompiledStep,
        "__call__",
        lambda self, iterator: found.append(iterator) or call(self, iterator),
    )
    return found


def data_sets():
    arrays = {"x": X, "y": Y, "batch_size": 5}
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    return {
        "arrays": arrays,
        "dataset": {"x": batches},
        "unknown size": {"x": batches.filter(lambda x, y: True)},
    }


def trained(data):
    """A model after two epochs, their history, and what an evaluation then finds."""
    made = model()
    validation = {"validation_data": (X, Y), "validation_batch_size": 14}
    history = made.fit(**data, **validation, epochs=2, shuffle=False, verbose=0).history
    return made, history, made.evaluate(X, Y, batch_size=5, verbose=0)


def test_fit_and_evaluate_are_those_of_keras(calls, monkeypatch):
    quick = {}
    for form, data in data_sets().items():
        calls.clear()
        quick[form] = trained(data)
        unseen = 2 if form == "unknown size" else 0  # the calls that find no more data
        assert len(calls) == 2 * 3 + unseen + 2 + 3, form
    calls.clear()
    monkeypatch.setattr("gradlab.fit.microbatched.in_one_call", lambda model, kind, made: made)
    slow, expected, slow_evaluated = trained(data_sets()["arrays"])
    assert not calls
    for form, (made, history, evaluated) in quick.items():
        assert list(history) == list(expected), form
        for name in history:
            np.testing.assert_array_equal(history[name], expected[name], err_msg=f"{form} {name}")
        assert evaluated == slow_evaluated, form
        np.testing.assert_array_equal(made.get_weights()[0], slow.get_weights()[0], err_msg=form)
        assert int(made.optimizer.iterations) == 6, form


@pytest.mark.parametrize("settings", [{"steps_per_execution": 2}, {"run_eagerly": True}])
def test_elsewhere_keras_function_stays(settings, calls):
    model(**settings).fit(X, Y, verbose=0)
    assert not calls


def test_elements_of_another_type_and_missing_parts():
    step = CompiledStep(lambda data: tf.reduce_sum(data[0]), tf.distribute.get_strategy())
    for shape in ((2, 3), (5,)):
        iterator = iter(tf.data.Dataset.from_tensors((np.ones(shape, np.float32),)).repeat(2))
        assert [float(step(iterator)) for _ in range(2)] == [np.prod(shape)] * 2
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    seen = []
    CompiledStep(lambda data: seen.append(data[1]) or data[0], tf.distribute.get_strategy())(
        iter(
            tf.data.Dataset.from_tensors(
                (1.0, tf.experimental.Optional.empty(tf.TensorSpec([], tf.float32)))
            )
        )
    )
    assert seen == [None]


def test_an_iterator_that_is_done_is_not_kept():
    step = CompiledStep(lambda data: data, tf.distribute.get_strategy())
    iterator = iter(tf.data.Dataset.range(2))
    assert int(step(iterator)) == 0 and int(step(iterator)) == 1
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


def test_the_types_of_data_leave_the_data_whole():
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    iterator = iter(batches)
    specs, data = types_of(iterator, 4)
    assert data is iterator and specs == (*batches.element_spec, None)
    specs, data = types_of(iter([(X[:3], Y[:3]), (X[3:], Y[3:])]), 4)
    assert specs == (tf.TensorSpec([3, 4]), tf.TensorSpec([3, 1]), None)
    assert [len(x) for x, _ in data] == [3, 11]
    unknown = tf.data.Dataset.from_generator(lambda: [1.0], output_types=tf.float32)
    assert types_of(iter(unknown), 4)[0] is None


def test_prediction_and_several_devices_keep_keras_function(two_devices):
    made = object()
    assert in_one_call(model(), "predict", made) is made
    with two_devices.scope():
        assert in_one_call(model(), "train", made) is made
    assert compiled_step.in_one_call(model(), "train", made) is not made

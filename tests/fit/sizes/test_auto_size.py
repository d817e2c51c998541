"""microbatch_size="auto": what is chosen, that it changes nothing else, and that a window survives
when memory ends."""

import functools
import inspect
import math
import os
import signal
import subprocess
import sys
import warnings

import forked
import keras
import numpy as np
import pytest
import tensorflow as tf
from events import LIMIT

import gradlab
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.sizes import auto_size, memory_room
from gradlab.fit.sizes.auto_size import AutoSize
from gradlab.measure.memory import MEBIBYTE, plan

layers = keras.layers


class Fails(keras.layers.Layer):
    """Runs out of memory in the calls whose numbers are in `at`; the calls of all objects in graphs
    count together."""

    calls, at = 0, ()

    def call(self, x):
        def count():
            Fails.calls += 1
            if Fails.calls in Fails.at:
                raise MemoryError  # which TensorFlow turns into its ResourceExhaustedError
            return np.float32(0)

        if tf.executing_eagerly():
            return x
        nothing = tf.numpy_function(count, [], tf.float32)
        nothing.set_shape([])
        return x + tf.cast(tf.stop_gradient(nothing), x.dtype)


@pytest.fixture(autouse=True)
def nothing_fails():
    yield
    Fails.calls, Fails.at = 0, ()


def network(*middle):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([4]), layers.Dense(6, "tanh"), *middle, layers.Dense(2)])


def with_state():
    return network(layers.Dropout(0.5, seed=1), layers.BatchNormalization())


def prepared(model, size, memory=None, **compiled):
    model = gradlab.microbatched(model, size, memory=memory, in_flight=1)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
    return model


def rows(examples, width=4, seed=0):
    return np.random.default_rng(seed).normal(size=[examples, width]).astype("float32")


def variables_of(model):
    return [*model.variables, *model.optimizer.variables]


def values_of(model):
    return [variable.numpy() for variable in variables_of(model)]


def has_bits(model, values, case=""):
    """Fails unless the variables of a model and its optimizer have these values."""
    for variable, value in zip(variables_of(model), values, strict=True):
        assert np.array_equal(variable.numpy(), value), (case, variable.path)


def same_bits(one, other):
    has_bits(one, values_of(other))


def choosing(monkeypatch, size):
    """Lets the choice be a size, without a plan, which would have to be traced."""
    monkeypatch.setattr(memory_room, "_plan", lambda update, batch: None)
    monkeypatch.setattr(
        memory_room.Room, "fitting", lambda self, sizes, examples, in_flight: [size]
    )


def set_back(model):
    """A function (values) that gives a model of an automatic size these values, and micro-batches
    of 4."""
    size = inspect.getclosurevars(model.fit).nonlocals["function"].__self__._auto

    def back(values):
        size._set(4, "")
        for variable, value in zip(variables_of(model), values, strict=True):
            variable.assign(value)

    return back


def test_the_choice_is_said_kept_and_changes_nothing_but_the_size(capsys):
    x, y = rows(50), rows(50, 2, seed=1)
    auto = prepared(with_state(), "auto")
    assert auto.microbatch_size is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch normalization
        found = auto.fit(x, y, batch_size=20, epochs=2, verbose=2).history
        said = capsys.readouterr().out
        assert f"gradlab: micro-batches of {auto.microbatch_size}, 1 in flight: " in said
        assert said.count("gradlab:") == 1
        fixed = prepared(with_state(), auto.microbatch_size)
        expected = fixed.fit(x, y, batch_size=20, epochs=2, verbose=0).history
    assert found == expected and int(auto.optimizer.iterations) == 6
    same_bits(auto, fixed)
    auto.fit(x, y, batch_size=50, verbose=0)
    assert capsys.readouterr().out == ""


def wide():
    """A model whose activations take 4 MiB for each example, and its weights next to nothing."""
    keras.utils.set_random_seed(0)
    middle = [layers.Conv2D(16, 3, padding="same", activation="tanh") for _ in range(4)]
    return keras.Sequential(
        [keras.Input([128, 128, 3]), *middle, layers.GlobalAveragePooling2D(), layers.Dense(1)]
    )


@pytest.mark.slow
def test_the_size_fits_the_memory():
    x, y = np.zeros([32, 128, 128, 3], "float32"), np.zeros([32, 1], "float32")
    planned = plan(wide(), "mse", "adam", (x[:1], y[:1]))
    memory = 1.16 * planned.total(9)
    model = prepared(wide(), "auto", memory)
    model.fit(x, y, batch_size=32, verbose=0)
    assert model.microbatch_size <= 8 and planned.largest(memory / 1.16) >= 8
    with pytest.raises(
        ValueError,
        match=r"^memory must be at least \d+ MiB for micro-batches of one example; .*1 MiB$",
    ):
        prepared(wide(), "auto", MEBIBYTE).fit(x, y, verbose=0)
    one, two = (
        memory_room.times_planned()
        * plan(wide(), "mse", "adam", (x[:1], y[:1]), in_flight=k).total(1)
        for k in (1, 2)
    )
    model = gradlab.microbatched(wide(), "auto", memory=(one + two) / 2, in_flight=2)
    model.compile("adam", "mse")
    with pytest.raises(
        ValueError, match=f"^memory must be at least {math.ceil(two / MEBIBYTE)} MiB"
    ):
        model.fit(x, y, batch_size=32, verbose=0)


HALVED = "^Memory ran out with micro-batches of 4 examples. From now on they have 2.$"


def failing(size, in_flight=1, **compiled):
    model = network(layers.Dropout(0.5, seed=1), Fails())
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
    return gradlab.microbatched(model, size, in_flight=in_flight)


@functools.cache
def two_windows_each_of_4_and_of_2():
    """The data, and what a model has and says after two windows in micro-batches of 4, and after
    two more of 2."""
    x, y = rows(68), rows(68, 2, seed=1)
    model = failing(4)
    model.fit(x[:34], y[:34], batch_size=17, verbose=0, shuffle=False)
    middle = values_of(model)
    gradlab.microbatched(model, 2, in_flight=1)
    history = model.fit(x[34:], y[34:], batch_size=17, verbose=0, shuffle=False).history
    return x, y, middle, values_of(model), history


def test_a_window_that_runs_out_of_memory_is_computed_again_with_half_the_size(monkeypatch):
    """The third of the windows of 17 examples fails in one of its five micro-batches of 4."""
    choosing(monkeypatch, 4)
    x, y, middle, expected, history = two_windows_each_of_4_and_of_2()
    for in_flight in (1, 2):
        auto = failing("auto", in_flight)
        back = set_back(auto)
        auto.fit(x[:34], y[:34], batch_size=17, verbose=0, shuffle=False)
        assert auto.microbatch_size == 4
        has_bits(auto, middle)
        for number in range(1, 6):
            case = f"{in_flight} in flight, micro-batch {number} fails"
            back(middle)
            Fails.at = (Fails.calls + number,)
            with pytest.warns(UserWarning, match=HALVED):
                found = auto.fit(x[34:], y[34:], batch_size=17, verbose=0, shuffle=False).history
            assert auto.microbatch_size == 2, case
            assert auto.microbatch_choice == "gradlab: micro-batches of 2: memory ran out with 4", (
                case
            )
            assert found == history and int(auto.optimizer.iterations) == 4, case
            has_bits(auto, expected, case)


@pytest.mark.slow
def test_several_windows_may_run_out_of_memory(monkeypatch):
    choosing(monkeypatch, 4)
    x, y = rows(51), rows(51, 2, seed=1)
    auto, fixed = (prepared(network(Fails()), size) for size in ("auto", 4))
    auto.fit(x[:17], y[:17], batch_size=17, verbose=0, shuffle=False)
    # In the second window, and in the third one
    Fails.at = (Fails.calls + 2, Fails.calls + 2 + 9 + 1)
    with pytest.warns(UserWarning, match="^Memory ran out"):
        auto.fit(x[17:], y[17:], batch_size=17, verbose=0, shuffle=False)
    for size, part in ((4, slice(17)), (2, slice(17, 34)), (1, slice(34, 51))):
        fixed = gradlab.microbatched(fixed, size)
        fixed.fit(x[part], y[part], batch_size=17, verbose=0, shuffle=False)
    assert auto.microbatch_size == 1
    same_bits(auto, fixed)


def test_several_steps_per_execution_survive_too(monkeypatch):
    choosing(monkeypatch, 4)
    x, y, _, expected, _ = two_windows_each_of_4_and_of_2()
    auto = failing("auto", steps_per_execution=2)
    Fails.calls, Fails.at = 0, (5 + 5 + 3,)  # the third window, which begins the second execution
    with pytest.warns(UserWarning, match=HALVED):
        auto.fit(x, y, batch_size=17, verbose=0, shuffle=False)
    assert int(auto.optimizer.iterations) == 4
    has_bits(auto, expected)


@pytest.mark.slow
def test_memory_that_runs_out_on_one_of_two_replicas_is_an_error(two_devices):
    with two_devices.scope():
        model = prepared(network(Fails()), "auto")
    model.fit(rows(16), rows(16, 2), batch_size=16, verbose=0)
    before = model.get_weights()
    Fails.at = (Fails.calls + 1,)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(rows(16), rows(16, 2), batch_size=16, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1 and model.microbatch_size == 8
    for one, other in zip(model.get_weights(), before):
        assert np.array_equal(one, other)


def test_a_dataset_that_runs_out_of_memory_is_an_error(monkeypatch):
    choosing(monkeypatch, 4)
    x, y = rows(51), rows(51, 2, seed=1)

    def third(i):
        if i == 2:
            raise MemoryError
        return np.float32(0)

    def fetched(i, x, y):
        return x + tf.ensure_shape(tf.numpy_function(third, [i], tf.float32), []), y

    data = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(17)
        .enumerate()
        .map(lambda i, xy: fetched(i, *xy))
    )
    auto = prepared(network(), "auto")
    with pytest.raises(
        MemoryError, match="^memory must hold a batch of the dataset. Received: one with which"
    ):
        auto.fit(data, verbose=0)
    assert int(auto.optimizer.iterations) == 2 and auto.microbatch_size == 4


@pytest.mark.parametrize("how", ["an error", "the keyboard"])
def test_what_ends_a_step_in_another_way_is_no_news_for_the_next_one(how, monkeypatch):
    """A step that ends after it has fetched its batch: the next one neither repeats that batch nor
    gives up."""
    choosing(monkeypatch, 4)
    x, y = rows(17), rows(17, 2, seed=1)
    fails_at = {"number": 2, "fetch": None}

    def ends(value):
        fails_at["number"] -= 1
        if fails_at["number"] == 0 and how == "an error":
            raise ZeroDivisionError
        if fails_at["number"] == 0:
            signal.raise_signal(signal.SIGINT)
        return value

    class Ends(keras.layers.Layer):
        def call(self, x):
            if tf.executing_eagerly():
                return x
            same = tf.stop_gradient(tf.numpy_function(ends, [np.float32(0)], tf.float32))
            return x + tf.ensure_shape(same, [])

    def fetched(i, x, y):
        def fetch(i):
            if i == fails_at["fetch"]:
                raise MemoryError
            return np.float32(0)

        return x + tf.ensure_shape(tf.numpy_function(fetch, [i], tf.float32), []), y

    data = (
        tf.data.Dataset.from_tensors((x, y))
        .repeat(3)
        .enumerate()
        .map(lambda i, xy: fetched(i, *xy))
    )
    auto = prepared(network(Fails(), Ends()), "auto")
    with pytest.raises((tf.errors.OpError, KeyboardInterrupt)):
        auto.fit(data, verbose=0)
    done = int(auto.optimizer.iterations)

    Fails.at = (Fails.calls + 2,)
    with pytest.warns(UserWarning, match=HALVED):
        auto.fit(data.take(1), verbose=0)
    assert int(auto.optimizer.iterations) == done + 1

    fails_at.update(number=2)
    with pytest.raises((tf.errors.OpError, KeyboardInterrupt)):
        auto.fit(data, verbose=0)
    done = int(auto.optimizer.iterations)
    fails_at.update(fetch=0)
    with pytest.raises(MemoryError, match="^memory must hold a batch of the dataset"):
        auto.fit(data, verbose=0)
    assert int(auto.optimizer.iterations) == done and auto.microbatch_size == 2


def test_a_trainer_survives_too(monkeypatch):
    choosing(monkeypatch, 4)
    x, y = rows(34), rows(34, 2, seed=1)
    steps, trained = {}, {}
    for size in ("auto", 2):
        model = network(layers.Dropout(0.5, seed=1), Fails())
        trainer = gradlab.Trainer(model, keras.optimizers.Adam(0.01), "mse", size, in_flight=1)
        if size == "auto":
            assert trainer.microbatch_size is None
            Fails.at = (3,)
            with pytest.warns(UserWarning, match="From now on they have 2"):
                steps[size] = [trainer.step(x[:17], y[:17]), trainer.step(x[17:], y[17:])]
        else:
            steps[size] = [trainer.step(x[:17], y[:17]), trainer.step(x[17:], y[17:])]
        assert trainer.microbatch_size == 2
        assert trainer.microbatch_choice.endswith("memory ran out with 4" if size == "auto" else "")
        trained[size] = [*model.variables, *trainer.optimizer.variables]
    for one, other in zip(steps["auto"], steps[2]):
        assert (one.update, one.loss, one.window_gradient_norm) == (
            other.update,
            other.loss,
            other.window_gradient_norm,
        )
        assert np.array_equal(one.losses, other.losses)
    for one, other in zip(trained["auto"], trained[2]):
        assert np.array_equal(one.numpy(), other.numpy()), one.path


def test_what_cannot_be_computed_again_is_an_error(monkeypatch):
    choosing(monkeypatch, 2)

    class FailsToApply(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            def fail():
                raise MemoryError

            super().update_step(
                gradient + tf.ensure_shape(tf.numpy_function(fail, [], tf.float32), []),
                variable,
                0.1,
            )

    model = gradlab.microbatched(network(), "auto")
    model.compile(FailsToApply(0.1), "mse")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    assert model.microbatch_size == 2

    always = prepared(network(Fails()), "auto")
    Fails.at = range(1000)
    with pytest.raises(
        MemoryError,
        match=r"^memory must hold a micro-batch of one example; .* Received: one example",
    ):
        always.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    Fails.at = ()
    before = [variable.numpy() for variable in always.variables]
    for one, other in zip(before, network(Fails()).variables):
        assert np.array_equal(one, other.numpy())
    always.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)  # as if nothing had been
    assert int(always.optimizer.iterations) == 1


def test_prediction_with_as_many_in_flight_as_gradlab_chooses():
    x = rows(20)
    for fitted in (False, True):
        model, plain = network(), network()
        small = gradlab.microbatched(model, "auto")
        small.compile("sgd", "mse")
        if fitted:
            small.fit(x, rows(20, 2), verbose=0)
            plain.set_weights(small.get_weights())
        np.testing.assert_allclose(
            small.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5
        )


@pytest.mark.slow
def test_it_works_wherever_keras_does(monkeypatch):
    """Evaluation and prediction first, datasets of unknown size, several steps per execution, eager
    steps."""
    x, y = rows(50), rows(50, 2, seed=1)
    model, plain = prepared(network(), "auto"), network()
    plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=50, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=50, verbose=0), plain.predict(x, verbose=0), rtol=1e-5
    )
    assert model.microbatch_size is None

    def batches():
        for start in range(0, 50, 20):
            yield x[start : start + 20], y[start : start + 20]

    specs = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2])
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    # Keras alone makes an update too many in each epoch of such a dataset.
    expected = prepared(network(), 20).fit(data, epochs=2, verbose=0).history
    for options in ({}, {"steps_per_execution": 2}, {"run_eagerly": True}, {"jit_compile": True}):
        model = prepared(network(), "auto", **options)
        found = model.fit(data, epochs=2, verbose=0).history
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-3, err_msg=f"{options} {name}")
        assert int(model.optimizer.iterations) == 6
        assert model.microbatch_size <= 20  # chosen for the batches: it was 32 before
        model.train_on_batch(x[:7], y[:7])
        assert int(model.optimizer.iterations) == 7


def test_a_part_of_the_data_may_be_missing(monkeypatch):
    """Keras' generators give an optional in the place of sample weights that are None."""
    choosing(monkeypatch, 4)
    x, y = rows(51), rows(51, 2, seed=1)

    def batches():
        for start in (0, 17, 34):
            yield x[start : start + 17], y[start : start + 17], None

    auto, fixed = prepared(network(Fails()), "auto"), prepared(network(Fails()), 4)
    Fails.at = (2,)  # in the first window, which is repeated with 2
    with pytest.warns(UserWarning, match=HALVED):
        auto.fit(batches(), steps_per_epoch=3, verbose=0)
    gradlab.microbatched(fixed, 2).fit(batches(), steps_per_epoch=3, verbose=0)
    assert int(auto.optimizer.iterations) == int(fixed.optimizer.iterations) == 3
    same_bits(auto, fixed)


@pytest.mark.slow
def test_two_replicas(two_devices, capsys):
    x, y = rows(32), rows(32, 2, seed=1)
    trained = {}
    for size in ("auto", 8):
        with two_devices.scope():
            model = prepared(network(), size)
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=2, shuffle=False).history
        assert model.microbatch_size == 8  # of each replica
        trained[size] = [*(v.numpy() for v in model.variables), history["loss"], history["mae"]]
    assert (
        capsys.readouterr().out.count(
            "gradlab: micro-batches of 8, 1 in flight: the whole batch, which fits"
        )
        == 1
    )
    for one, other in zip(trained["auto"], trained[8]):
        assert np.array_equal(one, other)
    with two_devices.scope():
        model = prepared(network(), "auto", 60 * MEBIBYTE)
    planned = plan(network(), "mse", keras.optimizers.Adam(), (x[:1], y[:1])).total(1)
    least = math.ceil(memory_room.times_planned() * 2 * planned / MEBIBYTE)
    with pytest.raises(
        ValueError, match=f"^memory must be at least {least} MiB for .* Received: 60 MiB$"
    ):
        model.fit(x, y, batch_size=16, verbose=0)


def test_a_loss_over_the_whole_batch():
    def spread(y, y_pred):
        return -tf.reduce_mean((y_pred - tf.reduce_mean(y_pred, 0)) ** 2)

    x, trained = rows(24), {}
    for size in ("auto", 24):
        model = gradlab.microbatched(network(), size)
        model.compile(keras.optimizers.SGD(0.1), gradlab.WholeBatch(spread))
        model.fit(x, batch_size=24, epochs=3, verbose=0)
        trained[size] = model.get_weights()
    for one, other in zip(trained["auto"], trained[24]):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def recurrent():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([5, 3]), layers.LSTM(4), layers.Dense(2)])


def test_a_model_that_hides_its_memory_is_refused():
    data = np.ones([30, 5, 3], "float32"), rows(30, 2)
    model = prepared(recurrent(), "auto")
    refused = pytest.raises(ValueError, match="^microbatch_size must be a number for a model that")
    with refused:
        model.fit(*data, batch_size=30, verbose=0)
    assert model.microbatch_size is None and int(model.optimizer.iterations) == 0
    model.evaluate(*data, verbose=0)
    sparse = keras.Sequential([keras.Input([8], sparse=True), layers.Dense(1)])
    trainer = gradlab.Trainer(sparse, "sgd", "mse", "auto")
    with refused:
        trainer.step(tf.sparse.from_dense(np.eye(8, dtype="float32")), rows(8, 1))


@pytest.mark.slow
def test_one_micro_batch_at_a_time_where_two_do_not_fit(monkeypatch):
    monkeypatch.setattr(gradlab.runtime, "cores", lambda: 2)
    x, y = np.zeros([4, 128, 128, 3], "float32"), np.zeros([4, 1], "float32")
    one, two = (plan(wide(), "mse", "sgd", (x[:1], y[:1]), in_flight=k).total(1) for k in (1, 2))
    memory = memory_room.times_planned() * (one + two) / 2
    model = gradlab.microbatched(wide(), "auto", memory=memory)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    assert (model.microbatch_size, model.in_flight) == (1, 1)


@pytest.mark.slow
def test_the_size_is_chosen_again_for_another_loss_or_a_larger_batch(capsys):
    x, y = rows(64), rows(64, 2)
    model, fixed = prepared(network(), "auto"), prepared(network(), 1)
    model.train_on_batch(x[:1], y[:1])
    assert model.microbatch_size == 1
    model.fit(x, y, batch_size=64, verbose=2, shuffle=False)
    assert model.microbatch_size > 1 and model.microbatch_choice in capsys.readouterr().out
    fixed.train_on_batch(x[:1], y[:1])
    fixed.fit(x, y, batch_size=64, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), fixed.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert int(model.optimizer.iterations) == 2
    model.fit(x, y, batch_size=16, verbose=2)  # smaller batches change nothing
    assert "gradlab" not in capsys.readouterr().out

    model.compile("sgd", "mae")
    assert model.microbatch_size is None and model.microbatch_choice == ""
    model.fit(x, y, batch_size=64, verbose=2)
    assert model.microbatch_choice in capsys.readouterr().out and model.microbatch_size > 1


@pytest.mark.slow
def test_a_size_that_memory_limits_stays(monkeypatch):
    chosen = []
    choose = AutoSize.choose
    monkeypatch.setattr(
        AutoSize, "choose", lambda self, *args: chosen.append(1) or choose(self, *args)
    )
    choosing(monkeypatch, 4)
    model = prepared(network(Fails()), "auto")
    for examples in (8, 16, 32):
        model.fit(rows(examples), rows(examples, 2), batch_size=examples, verbose=0)
    assert len(chosen) == 1 and model.microbatch_size == 4
    choosing(monkeypatch, 8)
    model = prepared(network(Fails()), "auto")
    model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)  # the whole batch
    Fails.at = (Fails.calls + 1,)
    with pytest.warns(UserWarning, match="^Memory ran out with micro-batches of 8 examples"):
        model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    model.fit(rows(32), rows(32, 2), batch_size=32, verbose=0)
    assert len(chosen) == 2 and model.microbatch_size == 4


@pytest.mark.slow
def test_a_larger_batch_for_which_nothing_fits_keeps_the_size(monkeypatch):
    model = prepared(network(), "auto", 500 * MEBIBYTE)
    model.fit(rows(4), rows(4, 2), batch_size=4, verbose=0)
    size, choice, asked = model.microbatch_size, model.microbatch_choice, []
    monkeypatch.setattr(memory_room.Room, "fitting", lambda *args: asked.append(1) or [])
    for _ in range(2):
        model.fit(rows(32), rows(32, 2), batch_size=32, verbose=0)
    assert (model.microbatch_size, model.microbatch_choice) == (size, choice) and len(asked) == 1
    assert int(model.optimizer.iterations) == 3
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="^memory must be at least "):
        model.fit(rows(32), rows(32, 2), batch_size=32, verbose=0)


def test_a_trainer_chooses_again_for_a_larger_window():
    auto, fixed = (gradlab.Trainer(network(), "sgd", "mse", size) for size in ("auto", 8))
    x, y = rows(8), rows(8, 2)
    auto.step(x[:1], y[:1]), fixed.step(x[:1], y[:1])
    assert auto.microbatch_size == 1
    np.testing.assert_allclose(auto.step(x, y).loss, fixed.step(x, y).loss, rtol=1e-5)
    assert auto.microbatch_size > 1


def test_workers_with_unequal_parts_that_all_fit_do_not_speak_of_the_least(monkeypatch):
    choosing(monkeypatch, 9)
    said, batch = {}, (tf.zeros([9, 4]), tf.zeros([9, 2]), None)
    for others in ([1, 28], [0, 5]):
        monkeypatch.setattr(
            auto_size, "over_workers", lambda strategy, own, others=others: np.array([own, others])
        )
        size = AutoSize(None)
        update = WindowUpdate(network(), keras.optimizers.SGD(), Objective("mse"), size.variable)
        size.choose(update, batch, tf.distribute.get_strategy())
        said[int(size.variable.numpy())] = size.choice
    assert "least" not in said[28] and said[5].endswith(", on the worker that allows least; here 9")


def test_accumulators_are_planned_in_the_type_in_which_gradients_are_summed():
    model = network()
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_weights)
    batch = tf.zeros([8, *model.input_shape[1:]]), tf.zeros([8, *model.output_shape[1:]]), None
    planned = {}
    for dtype in (None, "float64"):
        update = WindowUpdate(model, optimizer, Objective("mse"), 1, accumulator_dtype=dtype)
        planned[dtype] = memory_room._plan(update, batch).accumulators
    weights = sum(math.prod(variable.shape) for variable in model.trainable_weights)
    assert planned == {None: 4 * weights, "float64": 8 * weights}


@pytest.mark.slow
def test_a_gpu_begins_with_the_whole_batch_and_survives(monkeypatch):
    """Its allocator reports when memory ends."""
    devices = tf.config.list_logical_devices
    monkeypatch.setattr(
        memory_room.tf.config,
        "list_logical_devices",
        lambda kind=None: ["GPU:0"] if kind == "GPU" else devices(kind),
    )
    model = prepared(network(Fails()), "auto")
    Fails.at = (1, 2)
    with pytest.warns(UserWarning, match="^Memory ran out with micro-batches of 4 examples"):
        model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    assert model.microbatch_size == 2
    monkeypatch.undo()
    fixed = prepared(network(Fails()), 2)
    fixed.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    same_bits(model, fixed)


def test_a_loss_over_the_whole_batch_may_be_what_does_not_fit(monkeypatch):
    choosing(monkeypatch, 4)

    def too_large(y, y_pred):
        def fail():
            raise MemoryError

        return tf.reduce_mean(y_pred) + tf.ensure_shape(tf.numpy_function(fail, [], tf.float32), [])

    model = gradlab.microbatched(network(), "auto")
    model.compile("sgd", gradlab.WholeBatch(too_large))
    with (
        warnings.catch_warnings(),
        pytest.raises(
            MemoryError,
            match="and the loss over the whole batch with its gradient; .* Received: a batch",
        ),
    ):
        warnings.simplefilter("ignore")
        model.fit(rows(8), batch_size=8, verbose=0)


@pytest.mark.slow
def test_two_passes_survive_too(monkeypatch):
    """A window of 17 examples in micro-batches of 4 is computed forward twice: it fails in each of
    the ten."""
    choosing(monkeypatch, 4)

    def spread(y, y_pred):
        return -tf.reduce_mean((y_pred - tf.reduce_mean(y_pred, 0)) ** 2)

    def model(size):
        made = gradlab.microbatched(
            network(layers.Dropout(0.5, seed=1), Fails()), size, in_flight=1
        )
        made.compile(keras.optimizers.Adam(0.01), gradlab.WholeBatch(spread))
        return made

    auto, fixed = model("auto"), model(2)
    fixed.fit(rows(17), batch_size=17, verbose=0, shuffle=False)
    expected = values_of(fixed)
    auto.optimizer.build(auto.trainable_variables)
    untrained = values_of(auto)
    back = set_back(auto)
    for number in range(1, 11):
        back(untrained)
        Fails.calls, Fails.at = 0, (number,)
        with pytest.warns(UserWarning, match=HALVED):
            auto.fit(rows(17), batch_size=17, verbose=0, shuffle=False)
        assert auto.microbatch_size == 2, number
        has_bits(auto, expected, number)


@pytest.mark.slow
def test_averages_of_batch_normalization_move_once_in_a_window_that_fails(monkeypatch):
    choosing(monkeypatch, 4)
    auto, fixed = (
        prepared(network(layers.BatchNormalization(), Fails()), size) for size in ("auto", 2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fixed.fit(rows(17), rows(17, 2), batch_size=17, verbose=0, shuffle=False)
        Fails.calls, Fails.at = 0, (4,)
        auto.fit(rows(17), rows(17, 2), batch_size=17, verbose=0, shuffle=False)
    assert auto.microbatch_size == 2
    same_bits(auto, fixed)


WITHIN = """
import sys
import gradlab
gradlab.setup(seed=0)
import keras, numpy as np
from gradlab.measure.memory import MEBIBYTE, PeakMemory

layers = keras.layers
middle = [layers.Conv2D(16, 3, padding="same", activation="tanh") for _ in range(4)]
inputs, middle = [128, 128, 3], [*middle, layers.GlobalAveragePooling2D()]
x, y = np.zeros([128, *inputs], "float32"), np.zeros([128, 1], "float32")
peak = PeakMemory()
before = peak.bytes()
model = gradlab.microbatched(keras.Sequential([keras.Input(inputs), *middle, layers.Dense(1)]), "auto", memory=MEMORY)
model.compile("adam", "mse")
model.fit(x, y, batch_size=128, epochs=2, verbose=0)
print(model.microbatch_size, (peak.bytes() - before) / MEBIBYTE)
"""


MEMORY = 300  # MiB


@pytest.mark.slow
def test_a_training_stays_within_its_memory():
    """A process of its own: what it adds besides its data, a batch and the next one, is what it was
    given, or less."""
    if not internals.uses_onednn():
        pytest.skip("without oneDNN, gaps in the heap take as much again (benchmarks/NOTES.md)")
    data = 24  # MiB
    program = WITHIN.replace("MEMORY", f"{MEMORY} * MEBIBYTE")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, taken = done.stdout.split()[-2:]
    print(size, taken)
    assert 1 < int(size) < 128 and float(taken) - 2 * data <= MEMORY


LIMITED = """
import pathlib, resource, sys, warnings
import gradlab
gradlab.setup(threads=1, seed=0)
import keras, numpy as np, tensorflow as tf


class Wide(keras.layers.Layer):
    def call(self, x):
        return tf.reduce_mean(tf.tanh(tf.tile(x, [1, 2**19])), axis=1, keepdims=True)


keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), Wide(), keras.layers.Dense(1)])
size = sys.argv[1] if sys.argv[1] == "auto" else int(sys.argv[1])
memory = 64 * 2**30 if size == "auto" else None
model = gradlab.microbatched(model, size, memory=memory, in_flight=1)
model.compile("sgd", "mse")
x, y = np.random.default_rng(0).normal(size=[64, 4]).astype("float32"), np.ones([64, 1], "float32")
if size == "auto":
    model.evaluate(x[:1], y[:1], verbose=0)  # starts TensorFlow's threads
    used = next(int(line.split()[1]) for line in pathlib.Path("/proc/self/status").open() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (1024 * used + 850 * 2**20,) * 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.fit(x, y, batch_size=64, epochs=2, verbose=0)
print([str(one.message) for one in caught if "Memory ran out" in str(one.message)])
print(model.microbatch_size)
print([float(np.abs(w).sum()) for w in model.get_weights()])
"""


@pytest.mark.slow
def test_a_limit_of_the_operating_system_is_survived():
    """Each tensor of 64 examples takes 512 MiB, and the process may take 850 MiB more than it
    has."""

    few = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # others would reserve addresses
    command = [sys.executable, "-c", LIMITED, "auto"]
    limited = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=few)
    assert limited.returncode == 0, limited.stderr[-2000:]
    said, size, weights = limited.stdout.splitlines()[-3:]
    assert "Memory ran out with micro-batches of 64 examples. From now on they have 32." in said
    assert int(size) < 64
    unlimited = forked.run("-c", LIMITED, size)
    assert unlimited.returncode == 0, unlimited.stderr[-2000:]
    assert unlimited.stdout.splitlines()[-2:] == [size, weights]


def test_several_replicas_need_a_memory_that_is_known(two_devices, monkeypatch):
    with two_devices.scope():
        model = prepared(network(), "auto")
    monkeypatch.setattr(gradlab.runtime, "available_memory", lambda: math.inf)
    with pytest.raises(ValueError, match="^memory must be given .* several replicas"):
        model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)


@pytest.mark.slow
def test_a_trainer_says_the_choice(capsys, two_devices):
    data = tf.data.Dataset.from_tensors((rows(16), rows(16, 2)))
    for strategy, in_flight in ((None, 1), (None, "auto"), (two_devices, "auto")):
        with (strategy or tf.distribute.get_strategy()).scope():
            trainer = gradlab.Trainer(
                network(), keras.optimizers.SGD(0.1), "mse", "auto", strategy, in_flight=in_flight
            )
        trainer.fit(data, updates=2)
        assert capsys.readouterr().out.count(trainer.microbatch_choice) == 1
        assert trainer.microbatch_choice.startswith("gradlab: micro-batches of ")


def test_refusals(two_devices):
    rule = '^microbatch_size must be "auto", "given" or a positive integer. Received: '
    for wrong in ("big", 0, True, 2.5, None):
        with pytest.raises(ValueError, match=rule):
            gradlab.microbatched(network(), wrong)
        with pytest.raises(ValueError, match=rule):
            gradlab.Trainer(network(), "sgd", "mse", wrong)
    for wrong in (-1, 0, "1 GiB", float("inf")):
        with pytest.raises(ValueError, match="^memory must be a finite number above 0. Received: "):
            gradlab.microbatched(network(), "auto", memory=wrong)
    with pytest.raises(
        ValueError, match='^memory is for microbatch_size="auto". Received: microbatch_size=4$'
    ):
        gradlab.microbatched(network(), 4, memory=1e9)
    with pytest.raises(ValueError, match='^accumulation must be None with microbatch_size="auto"'):
        gradlab.Trainer(network(), "sgd", "mse", "auto", accumulation=lambda update: 2)

"""microbatch_size="auto": what is chosen, that it changes nothing else, and that a window survives when memory ends."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab.measure.memory import MEBIBYTE, plan
from gradlab.training import size_search

layers = keras.layers


class Fails(keras.layers.Layer):
    """Runs out of memory in the calls whose numbers are in `at`; the calls of all objects in graphs count together."""

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


def same_bits(one, other):
    for a, b in zip([*one.variables, *one.optimizer.variables], [*other.variables, *other.optimizer.variables]):
        assert np.array_equal(a.numpy(), b.numpy()), a.path


def choosing(monkeypatch, size):
    """Lets the search end with a size."""
    monkeypatch.setattr(size_search.Trial, "fitting", lambda self, sizes, room: [size])
    monkeypatch.setattr(size_search.Trial, "fastest", lambda self, sizes: sizes[0])


def test_the_choice_is_said_kept_and_changes_nothing_but_the_size(capsys):
    x, y = rows(50), rows(50, 2, seed=1)
    auto = prepared(with_state(), "auto")
    assert auto.microbatch_size is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch normalization
        found = auto.fit(x, y, batch_size=20, epochs=2, verbose=2).history
        said = capsys.readouterr().out
        assert f"gradlab: micro-batches of {auto.microbatch_size}, 1 in flight: " in said
        assert said.count("gradlab:") == 1 and auto.microbatch_size in (20, 10, 5, 3, 2, 1)
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
    return keras.Sequential([keras.Input([128, 128, 3]), *middle, layers.GlobalAveragePooling2D(), layers.Dense(1)])


def test_the_size_fits_the_memory():
    x, y = np.zeros([32, 128, 128, 3], "float32"), np.zeros([32, 1], "float32")
    planned = plan(wide(), "mse", "adam", (x[:1], y[:1]))
    memory = 1.16 * planned.total(9)
    model = prepared(wide(), "auto", memory)
    model.fit(x, y, batch_size=32, verbose=0)
    assert model.microbatch_size <= 8 and planned.largest(memory / 1.16) >= 8
    with pytest.raises(
        ValueError, match=r"^memory must be at least \d+ MiB for micro-batches of one example; .*1 MiB$"
    ):
        prepared(wide(), "auto", MEBIBYTE).fit(x, y, verbose=0)


def test_the_search_stops_where_smaller_is_slower(monkeypatch):
    seconds = {32: 1.0, 16: 0.9, 8: 0.88, 4: 1.2, 2: 0.1}
    tried = set()

    def time(self, size, examples):
        tried.add(size)
        return seconds[size]

    monkeypatch.setattr(size_search.Trial, "_seconds", time)
    monkeypatch.setattr(size_search.Trial, "__init__", lambda self: vars(self).update(_examples=32, _in_flight=2))
    assert size_search.Trial().fastest([32, 16, 8, 4, 2]) == 16  # 8 is hardly faster
    assert tried == {32, 16, 8, 4}
    seconds[16] = 0.96
    assert size_search.Trial().fastest([32, 16, 8, 4, 2]) == 8
    assert size_search.Trial().fastest([32]) == 32


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_window_that_runs_out_of_memory_is_computed_again_with_half_the_size(number, in_flight, monkeypatch):
    """The third of the windows of 17 examples fails in one of its five micro-batches of 4."""
    choosing(monkeypatch, 4)
    x, y = rows(68), rows(68, 2, seed=1)

    def model():
        made = network(layers.Dropout(0.5, seed=1), Fails())
        made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return made

    auto = gradlab.microbatched(model(), "auto", in_flight=in_flight)
    auto.fit(x[:34], y[:34], batch_size=17, verbose=0, shuffle=False)
    Fails.at = (Fails.calls + number,)
    with pytest.warns(UserWarning, match="^Memory ran out with micro-batches of 4 examples. From now on they have 2.$"):
        found = auto.fit(x[34:], y[34:], batch_size=17, verbose=0, shuffle=False).history
    assert auto.microbatch_size == 2

    fixed = gradlab.microbatched(model(), 4, in_flight=in_flight)
    fixed.fit(x[:34], y[:34], batch_size=17, verbose=0, shuffle=False)
    fixed = gradlab.microbatched(fixed, 2, in_flight=in_flight)
    expected = fixed.fit(x[34:], y[34:], batch_size=17, verbose=0, shuffle=False).history
    assert found == expected and int(auto.optimizer.iterations) == 4
    same_bits(auto, fixed)


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

            super().update_step(gradient + tf.ensure_shape(tf.numpy_function(fail, [], tf.float32), []), variable, 0.1)

    model = gradlab.microbatched(network(), "auto")
    model.compile(FailsToApply(0.1), "mse")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    assert model.microbatch_size == 2

    always = prepared(network(Fails()), "auto")
    Fails.at = range(1000)
    with pytest.raises(MemoryError, match=r"^memory must hold a micro-batch of one example; .* Received: one example"):
        always.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)
    Fails.at = ()
    before = [variable.numpy() for variable in always.variables]
    for one, other in zip(before, network(Fails()).variables):
        assert np.array_equal(one, other.numpy())
    always.fit(rows(8), rows(8, 2), batch_size=8, verbose=0)  # as if nothing had been
    assert int(always.optimizer.iterations) == 1


def test_it_works_wherever_keras_does(monkeypatch):
    """Evaluation and prediction first, datasets of unknown size, several steps per execution, eager steps."""
    x, y = rows(50), rows(50, 2, seed=1)
    model, plain = prepared(network(), "auto"), network()
    plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=50, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(model.predict(x, batch_size=50, verbose=0), plain.predict(x, verbose=0), rtol=1e-5)
    assert model.microbatch_size is None

    def batches():
        for start in range(0, 50, 20):
            yield x[start : start + 20], y[start : start + 20]

    specs = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2])
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    for options in ({}, {"steps_per_execution": 2}, {"run_eagerly": True}, {"jit_compile": True}):
        # Keras alone makes an update too many in each epoch of such a dataset.
        model, fixed = prepared(network(), "auto", **options), prepared(network(), 20)
        one, other = (each.fit(data, epochs=2, verbose=0).history for each in (model, fixed))
        for name, values in other.items():
            np.testing.assert_allclose(one[name], values, rtol=1e-3, err_msg=f"{options} {name}")
        assert int(model.optimizer.iterations) == 6 and model.microbatch_size >= 1
        model.train_on_batch(x[:7], y[:7])
        assert int(model.optimizer.iterations) == 7


def test_two_replicas(two_devices, capsys):
    x, y = rows(32), rows(32, 2, seed=1)
    trained = {}
    for size in ("auto", 8):
        with two_devices.scope():
            model = prepared(network(), size)
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=2, shuffle=False).history
        assert model.microbatch_size == 8  # of each replica
        trained[size] = [*(v.numpy() for v in model.variables), history["loss"], history["mae"]]
    assert capsys.readouterr().out.count("gradlab: micro-batches of 8, 1 in flight: the whole batch, which fits") == 1
    for one, other in zip(trained["auto"], trained[8]):
        assert np.array_equal(one, other)


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


def test_loops_hide_their_memory_and_sizes_are_tried():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([5, 3]), layers.LSTM(4), layers.Dense(2)])
    model = prepared(model, "auto", 500 * MEBIBYTE)
    model.fit(np.ones([30, 5, 3], "float32"), rows(30, 2), batch_size=30, verbose=0)
    assert model.microbatch_size in (30, 15, 8, 4, 2, 1)


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
    with pytest.raises(ValueError, match='^memory is for microbatch_size="auto". Received: microbatch_size=4$'):
        gradlab.microbatched(network(), 4, memory=1e9)
    with pytest.raises(ValueError, match='^accumulation must be None with microbatch_size="auto"'):
        gradlab.Trainer(network(), "sgd", "mse", "auto", accumulation=lambda update: 2)

"""How many micro-batches are computed at once, when nobody says so."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab import runtime, window
from gradlab.fit import evaluation
from gradlab.fit.program import in_flight, window_program
from gradlab.fit.program.in_flight import MEBIBYTE, SMALL, activation_bytes, choose

X, Y = np.random.default_rng(0).normal(size=(24, 6)).astype("float32"), np.arange(24) % 3


def graph_of(function, *shape):
    return (
        tf.function(function, autograph=False)
        .get_concrete_function(tf.TensorSpec(shape, tf.float32))
        .graph
    )


def model_with_state():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    ]
    return keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(3)])


def single_layer():
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])


def fitted(verbose=0, build=model_with_state, **settings):
    model = gradlab.microbatched(build(), 5, **settings)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    model.fit(X, Y, batch_size=12, epochs=2, verbose=verbose, shuffle=False)
    return model


@pytest.fixture
def four_cores(monkeypatch):
    """Four cores, no GPU, and plenty of memory; what a forward pass computes can be set."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 0)
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    monkeypatch.setattr(runtime, "available_memory", lambda: float("inf"))


@pytest.mark.parametrize("examples", [1, 10])
def test_activations_are_counted_tensor_by_tensor(examples):
    weights = tf.ones([4, 8])
    plain = graph_of(lambda x: tf.nn.relu(x @ weights), None, 4)
    # Product, relu, and the result handed on
    assert activation_bytes(plain, examples) == 3 * examples * 8 * 4
    halves = graph_of(lambda x: tf.cast(x, tf.float16), None, 4)
    assert activation_bytes(halves, examples) == 2 * examples * 4 * 2
    # 5 rows for each example
    rows = graph_of(lambda x: tf.reshape(x, [-1, 4]) @ weights, None, 5, 4)
    assert activation_bytes(rows, examples) == 5 * examples * (4 + 2 * 8) * 4
    # As large as x, both times and as a result
    unknown = graph_of(lambda x: tf.reshape(x, [-1])[tf.newaxis], None, 4)
    assert activation_bytes(unknown, examples) == 3 * examples * 4 * 4


def test_a_loop_or_a_function_hides_what_it_computes():
    loop = graph_of(
        lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), (0, x))[1], None, 4
    )
    call = graph_of(tf.function(lambda x: 2 * x), None, 4)
    texts = graph_of(lambda x: 2 * x, None, None)
    assert [activation_bytes(graph, 2) for graph in (loop, call, texts)] == [None] * 3


@pytest.mark.parametrize(
    "change, activations, accumulators, count, reason",
    [
        (
            {},
            MEBIBYTE,
            0,
            4,
            "one for each core, whose activations and gradients take 1.0 MiB each",
        ),
        ({}, SMALL // 3, 0, 4, "one for each core"),
        ({}, SMALL // 2, 0, 3, "whose activations and gradients take 64 MiB each"),
        ({}, SMALL, 0, 2, "whose activations and gradients take 128 MiB each"),
        ({}, SMALL + 1, 0, 1, "whose activations and gradients take 128 MiB each"),
        ({}, SMALL // 4, SMALL // 4, 3, "whose activations and gradients take 64 MiB each"),
        ({}, SMALL, 9 * SMALL, 2, "whose activations and gradients take 1280 MiB each"),
        ({}, 10 * SMALL, 9 * SMALL, 1, "whose activations and gradients take 2432 MiB each"),
        ({"available_memory": 2.0 * SMALL}, SMALL // 4, 0, 3, "because memory is short, whose"),
        ({"available_memory": 0.0}, MEBIBYTE, 0, 1, "because memory is short, whose"),
        ({}, None, 0, 1, "because the size of its activations is unknown"),
        ({"cores": 1}, MEBIBYTE, 0, 1, "because one operation runs at a time"),
        ({"gpu": True}, MEBIBYTE, 0, 1, "because a GPU is faster with one after the other"),
        ({"threads": 3}, MEBIBYTE, 0, 3, "one for each core"),
    ],
)
def test_the_choice(change, activations, accumulators, count, reason, four_cores, monkeypatch):
    for name in ("cores", "available_memory"):
        if name in change:
            monkeypatch.setattr(runtime, name, lambda name=name: change[name])
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind: ["GPU:0"] * change.get("gpu", False)
    )
    monkeypatch.setattr(
        tf.config.threading, "get_inter_op_parallelism_threads", lambda: change.get("threads", 0)
    )
    monkeypatch.setattr(in_flight, "activation_bytes", lambda graph, examples: activations)
    chosen = choose(lambda: None, 2, accumulators)
    assert chosen.count == count and chosen.reason.startswith(reason)


def test_replicas_share_the_cores(two_devices, four_cores):
    with two_devices.scope():
        assert choose(lambda: None, 2, 0) == in_flight.InFlight(
            1, "because 2 replicas share the cores"
        )
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD()
    assert gradlab.Trainer(model, optimizer, "mse", 2, two_devices).in_flight == 1


def test_fit_says_what_it_chose_once_and_the_model_keeps_it(four_cores, capsys):
    quiet = fitted(build=single_layer)
    assert quiet.in_flight == 4 and "in flight" not in capsys.readouterr().out
    model = fitted(verbose=2, build=single_layer)
    said = [line for line in capsys.readouterr().out.splitlines() if "in flight" in line]
    assert len(said) == 1 and said[0].startswith(
        "gradlab: 4 micro-batches in flight, one for each core, whose"
    )
    model.fit(X, Y, verbose=2)
    assert "in flight" not in capsys.readouterr().out
    asked = fitted(verbose=2, build=single_layer, in_flight=3)
    assert asked.in_flight == 3 and "in flight" not in capsys.readouterr().out
    assert gradlab.microbatched(model_with_state(), 5).in_flight is None


def test_trainer_says_it_too(four_cores, capsys):
    model = model_with_state()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = gradlab.Trainer(
        model, keras.optimizers.SGD(), loss, 5, weight_fn=lambda x, y: tf.ones_like(x[:, 0])
    )
    assert trainer.in_flight is None
    trainer.step(X, Y)
    assert trainer.in_flight == 4 and "in flight" not in capsys.readouterr().out
    other = gradlab.Trainer(model, keras.optimizers.SGD(), loss, 5)
    other.fit(tf.data.Dataset.from_tensors((X, Y)), 2)
    assert capsys.readouterr().out.count("gradlab: 4 micro-batches in flight") == 1
    with pytest.raises(
        ValueError, match=r'^in_flight must be "auto" or a positive integer. Received: 0$'
    ):
        gradlab.Trainer(model, keras.optimizers.SGD(), loss, 5, in_flight=0)


def layer_called_twice():
    """Its gradient is a sum, whose parts TensorFlow would add to the accumulator one by one."""
    keras.utils.set_random_seed(0)
    inputs, dense = keras.Input([6]), keras.layers.Dense(6, "tanh")
    return keras.Model(inputs, keras.layers.Dense(3)(dense(dense(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize("build", [model_with_state, layer_called_twice])
def test_the_choice_changes_no_bit(build, four_cores):
    """With dropout, whose masks differ from micro-batch to micro-batch, and moving averages."""
    expected = fitted(build=build, in_flight=1)
    for settings in ({}, {"in_flight": 2}):  # all three micro-batches at once, and two of them
        model = fitted(build=build, **settings)
        for one, other in zip(model.variables, expected.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def loops(monkeypatch):
    """Records how each loop over micro-batches runs: (micro-batches at once, whether it adds in
    place)."""
    found = []

    def recorded(*args, accumulators=None, loop, **kwargs):
        found.append((loop.in_flight, bool(accumulators)))
        return window.accumulate(*args, accumulators=accumulators, loop=loop, **kwargs)

    for module in (window_program, evaluation):
        monkeypatch.setattr(module, "accumulate", recorded)
    return found


def test_the_loop_is_the_chosen_one(four_cores, monkeypatch):
    found = loops(monkeypatch)
    fitted().evaluate(X, Y, verbose=0)
    assert found == [(4, False), (4, False)]
    found.clear()
    monkeypatch.setattr(in_flight, "SMALL", 1)
    fitted().evaluate(X, Y, verbose=0)
    assert found == [(1, True), (1, False)]
    found.clear()
    model = gradlab.microbatched(model_with_state(), 5)
    model.compile("sgd", "mse")
    model.train_on_batch(X, X[:, :3])  # no iterator of tf.data shows the types beforehand
    assert found == [(1, True)] and model.in_flight == 1


def test_an_automatic_size_is_evaluated_one_micro_batch_at_a_time(four_cores, monkeypatch):
    found = loops(monkeypatch)
    for asked, count in (("auto", 1), (2, 2)):
        model = gradlab.microbatched(model_with_state(), "auto", in_flight=asked)
        model.compile("sgd", "mse")
        model.evaluate(X, X[:, :3], verbose=0)
        model.predict(X, verbose=0)
        assert found == [(count, False)] * 2
        found.clear()


class Traced(keras.layers.Layer):
    """Counts its calls in graphs."""

    calls = 0

    def call(self, x):
        if isinstance(x, tf.Tensor) and not tf.executing_eagerly():
            Traced.calls += 1
        return x

    def compute_output_shape(self, shape):
        return shape


def test_a_first_fit_traces_a_layer_twice_and_a_second_one_never(four_cores):
    """To see what it does, and for the micro-batches, whatever their sizes. Keras does it twice,
    too."""

    def build():
        return keras.Sequential([keras.Input([6]), Traced(), keras.layers.Dense(3)])

    Traced.calls = 0
    model = fitted(build=build)
    assert 0 < Traced.calls <= 2
    Traced.calls = 0
    model.fit(X, Y, batch_size=12, verbose=0)
    assert Traced.calls == 0


def test_a_loop_in_the_forward_pass_stays_with_one(four_cores):
    model = keras.Sequential([keras.Input([6, 1]), keras.layers.LSTM(4), keras.layers.Dense(3)])
    small = gradlab.microbatched(model, 5)
    small.compile("sgd", "mse")
    small.fit(X[..., np.newaxis], X[:, :3], verbose=0)
    assert small.in_flight == 1


def test_memory_that_is_left_and_the_limit_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "CONTAINER", tmp_path)
    machine = runtime.available_memory()
    assert machine > 2**20
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert runtime.available_memory() > 2**20
    (tmp_path / "memory.max").write_text("1000\n")
    assert runtime.available_memory() == 300


def test_weights_whose_gradient_has_a_dimension_that_tensorflow_does_not_know():
    """A dense layer over steps of one feature: its kernel has the shape (1, units)."""

    def over_steps():
        keras.utils.set_random_seed(0)
        steps = [keras.layers.Reshape([6, 1]), keras.layers.Dense(4), keras.layers.Flatten()]
        return keras.Sequential([keras.Input([6]), *steps, keras.layers.Dense(3)])

    one, two = (fitted(build=over_steps, in_flight=count).get_weights() for count in (1, 2))
    for weights, others in zip(one, two, strict=True):
        np.testing.assert_array_equal(weights, others)

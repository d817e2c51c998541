"""WholeBatch: losses that see all examples of a batch, in micro-batches, against a tape over the
whole batch."""

import functools
import itertools
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_size import EverySize, examples_in, windows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from large_batch import OPTIMIZERS

import gradlab
from gradlab.fit.losses import whole_batch
from gradlab.fit.program import window_program
from gradlab.fit.variables.carried_variables import CarriedState

layers = keras.layers


def info_nce(y, y_pred):
    """One loss for each example: its second view among all second views."""
    one, other = tf.split(tf.math.l2_normalize(y_pred, -1), 2, axis=-1)
    similarities = tf.matmul(one, other, transpose_b=True) / 0.5
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), similarities)


def clip(y, towers):
    """CLIP: two outputs, each the other's labels, and no targets."""
    assert y is None
    image, text = (tf.math.l2_normalize(tower, -1) for tower in towers)
    similarities, right = (
        tf.matmul(image, text, transpose_b=True) / 0.5,
        tf.range(tf.shape(image)[0]),
    )
    ways = similarities, tf.transpose(similarities)
    return (
        tf.add_n(
            [
                tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(right, way))
                for way in ways
            ]
        )
        / 2
    )


def supervised_contrastive(y, y_pred):
    """Khosla and others: all images of the same class are positives."""
    labels, unit = tf.reshape(y, [-1]), tf.math.l2_normalize(y_pred, -1)
    others = 1 - tf.eye(tf.shape(unit)[0], dtype=unit.dtype)
    logits = tf.matmul(unit, unit, transpose_b=True) / 0.5
    log_odds = logits - tf.math.log(tf.reduce_sum(tf.exp(logits) * others, axis=1, keepdims=True))
    positives = tf.cast(labels[:, tf.newaxis] == labels, unit.dtype) * others
    return -tf.math.divide_no_nan(
        tf.reduce_sum(positives * log_odds, 1), tf.reduce_sum(positives, 1)
    )


def distances(y_pred):
    squares = tf.reduce_sum(y_pred**2, axis=1)
    return squares[:, tf.newaxis] - 2 * tf.matmul(y_pred, y_pred, transpose_b=True) + squares


def hardest_triplets(y, y_pred):
    """Hermans and others: the farthest positive and the nearest negative of each image."""
    same = tf.reshape(y, [-1, 1]) == tf.reshape(y, [1, -1])
    apart = distances(y_pred)
    positive = tf.reduce_max(tf.where(same, apart, 0.0), axis=1)
    negative = tf.reduce_min(tf.where(same, apart.dtype.max, apart), axis=1)
    return tf.nn.relu(positive - negative + 0.5)


def correlation(y, y_pred):
    one, other = (
        part - tf.reduce_mean(part) for part in (tf.reshape(y, [-1]), tf.reduce_sum(y_pred, axis=1))
    )
    return 1 - tf.reduce_sum(one * other) / tf.norm(one) / tf.norm(other)


def balance(y, gates):
    """The load-balancing loss of a mixture of experts: a product of two means."""
    odds = tf.nn.softmax(gates)
    chosen = tf.one_hot(tf.argmax(gates, axis=1), gates.shape[-1], dtype=odds.dtype)
    return gates.shape[-1] * tf.reduce_sum(tf.reduce_mean(chosen, 0) * tf.reduce_mean(odds, 0))


LOSSES = {
    f.__name__: f
    for f in (info_nce, supervised_contrastive, hardest_triplets, correlation, balance, clip)
}
# Losses that differ in kind: a value for each example, one number for the batch, and one number of
# two outputs.
KINDS = ["supervised_contrastive", "correlation", "clip"]
SIZES = (1, 3, 8, 30)


def network(*middle, dtype=None):
    keras.utils.set_random_seed(0)
    outputs = layers.Dense(4, kernel_regularizer="l2", dtype=dtype)
    return keras.Sequential([keras.Input([4]), layers.Dense(6, "tanh"), *middle, outputs])


def two_towers():
    keras.utils.set_random_seed(0)
    image, text = keras.Input([4]), keras.Input([3])
    one = layers.Dense(4)(layers.Dense(6, "tanh")(image))
    return keras.Model([image, text], [one, layers.Dense(4)(text)])


def rows(examples, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=[examples, *shape]).astype(keras.config.floatx())


def labels(examples):
    return np.random.default_rng(3).integers(0, 3, examples).astype(keras.config.floatx())


def large_batch_fit(model, optimizer, loss, windows, loss_weight=1.0):
    """The reference: a tape over each whole window. Returns the losses of the updates."""
    found = []
    for window in windows:
        parts = (*window, None)[:3]
        x, y, sample_weight = (
            None if part is None else tf.nest.map_structure(tf.constant, part) for part in parts
        )
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            if sample_weight is not None:
                value = value * tf.cast(sample_weight, value.dtype)
            total = loss_weight * tf.reduce_mean(value) + sum(model.losses)
            scaled = optimizer.scale_loss(total)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        found.append(float(total))
    return found


def assert_close(found, expected, tolerance=1e-12, case=""):
    scale = max(np.abs(one).max() for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(other).all(), case
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale, err_msg=case)


def held_against(expected, found, start, tolerance=1e-12, case=""):
    """Compares weights, after a check that the updates changed them."""
    assert any(np.abs(new - old).max() > 1e-3 for new, old in zip(expected, start)), case
    assert_close(found, expected, tolerance, case)


def moved(weights, start):
    """How far weights moved, in float32, because older NumPy cannot compare bfloat16."""
    return [np.float32(new) - np.float32(old) for new, old in zip(weights, start)]


def built(name):
    """A new network for a loss."""
    return two_towers() if name == "clip" else network()


def data_of(name, examples):
    """(x, y) for the name of a loss."""
    if name == "clip":
        return [rows(examples, 4), rows(examples, 3, seed=1)], None
    return rows(examples, 4), labels(examples)


class Reference(NamedTuple):
    """The training of the large batch: its weights before and after, and the loss of each
    update."""

    start: list
    weights: list
    losses: list


WEIGHTS = np.linspace(0.2, 2, 19)


def windows_for(name, weighted=False):
    """Two epochs of 19 examples, in batches of 8."""
    weights = WEIGHTS.astype(keras.config.floatx()) if weighted else None
    return windows_of((*data_of(name, 19), weights), batch_size=8, epochs=2)


@functools.cache
def reference(name, floatx, optimizer="sgd", clipnorm=None, weighted=False):
    """The reference for a loss and `windows_for` it; floatx is that of Keras, which the results
    depend on."""
    assert floatx == keras.config.floatx()
    model = built(name)
    start = model.get_weights()
    windows = windows_for(name, weighted)
    losses = large_batch_fit(
        model, OPTIMIZERS[optimizer](global_clipnorm=clipnorm), LOSSES[name], windows
    )
    return Reference(start, model.get_weights(), losses)


def holds_for_every_size(
    name, tolerance=1e-12, optimizer="sgd", clipnorm=None, weighted=False, sizes=SIZES
):
    """Holds the updates in micro-batches of every size against those of the large batch."""
    expected = reference(name, keras.config.floatx(), optimizer, clipnorm, weighted)
    every_size = EverySize(
        built(name),
        OPTIMIZERS[optimizer](global_clipnorm=clipnorm),
        gradlab.WholeBatch(LOSSES[name]),
    )
    for size in sizes:
        found = every_size(size, windows_for(name, weighted))
        held_against(
            expected.weights, found.weights, expected.start, tolerance, f"micro-batches of {size}"
        )
        np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance, err_msg=f"{size}")
    assert every_size.traces == 1


@pytest.mark.parametrize("name", LOSSES)
def test_every_size_makes_the_update_of_the_large_batch(name, float64):
    holds_for_every_size(name)


# Weights need targets, see below
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip"])
def test_every_size_with_weights_and_clipping(name, float64):
    holds_for_every_size(name, optimizer="adamw", clipnorm=0.25, weighted=True)


@pytest.mark.parametrize("name", KINDS)
def test_every_size_in_single_precision(name):
    holds_for_every_size(name, tolerance=1e-5)


def fitted(name, strategy=None, clipnorm=None, weighted=False):
    """The weights and the history after `fit` in micro-batches of 3."""
    x, y = data_of(name, 19)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = gradlab.microbatched(built(name), 3)
        model.compile(OPTIMIZERS["sgd"](global_clipnorm=clipnorm), gradlab.WholeBatch(LOSSES[name]))
    weights = WEIGHTS if weighted else None
    history = model.fit(
        x, y, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return model.get_weights(), history.history["loss"]


@pytest.mark.parametrize("name", KINDS)
def test_fit_makes_the_update_of_the_large_batch(name, float64):
    expected = reference(name, "float64")
    weights, losses = fitted(name)
    held_against(expected.weights, weights, expected.start)
    by_epoch = np.reshape(expected.losses, [2, 3]) @ np.array([8, 8, 3]) / 19
    np.testing.assert_allclose(losses, by_epoch, rtol=1e-6)  # metrics are kept in float32


@pytest.mark.slow
def test_fit_on_two_devices_with_weights_and_clipping(float64, two_devices):
    expected = reference("supervised_contrastive", "float64", clipnorm=0.6, weighted=True)
    weights, _ = fitted("supervised_contrastive", two_devices, clipnorm=0.6, weighted=True)
    held_against(expected.weights, weights, expected.start)


# With two devices, a window of one example leaves one of them without any. One example has no
# correlation.
TRAINER_WINDOWS = {
    "hardest_triplets": [(0, 8), (8, 9), (9, 19)],
    "correlation": [(0, 8), (8, 19)],
    "clip": [(0, 8), (8, 9), (9, 19)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINER_WINDOWS)
def test_trainer(name, float64, two_devices):
    x, y = data_of(name, 19)
    windows = [examples_in((x, y), slice(*ends)) for ends in TRAINER_WINDOWS[name]]
    clipnorm = 0.25 if name == "hardest_triplets" else None
    expected = built(name)
    start = expected.get_weights()
    losses = large_batch_fit(
        expected, OPTIMIZERS["adam"](global_clipnorm=clipnorm), LOSSES[name], windows
    )
    for strategy in (None, two_devices):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = built(name)
            optimizer = OPTIMIZERS["adam"](global_clipnorm=clipnorm)
        trainer = gradlab.Trainer(model, optimizer, gradlab.WholeBatch(LOSSES[name]), 3, strategy)
        steps = [trainer.step(*window) for window in windows]
        held_against(
            expected.get_weights(), model.get_weights(), start, case=f"strategy {strategy}"
        )
        np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-12)
        assert all(np.isnan(step.gradient_norms).all() for step in steps)


@pytest.fixture
def half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", KINDS)
def test_every_size_in_half_precision(name, half_precision):
    """Gradients of float16 have three digits; those of the tape over the batch have the same
    ones."""

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**8)

    def half(y, y_pred):
        return LOSSES[name](y, tf.nest.map_structure(lambda one: tf.cast(one, "float32"), y_pred))

    expected = built(name)
    start = expected.get_weights()
    large_batch_fit(expected, scaled(), half, windows_for(name))
    every_size = EverySize(built(name), scaled(), gradlab.WholeBatch(LOSSES[name]))
    for size in SIZES:
        found = every_size(size, windows_for(name))
        distances = moved(expected.get_weights(), start), moved(found.weights, start)
        held_against(
            *distances, [np.zeros_like(old) for old in start], 3e-2, f"micro-batches of {size}"
        )


def test_two_devices_gather_every_type(two_devices):
    """Also those that TensorFlow does not gather itself, with a different number of rows on each
    device."""
    names = ["bool", "uint8", "int8", "uint16", "int16", "int32", "int64"]
    names += ["float16", "bfloat16", "float32", "float64"]

    @tf.function(autograph=False)
    def gathered():
        def on_replica():
            rows = 1 + tf.distribute.get_replica_context().replica_id_in_sync_group
            values = tf.range(rows)[:, tf.newaxis] + [0, 1]
            return [whole_batch._gathered(tf.cast(values, name)) for name in names]

        return two_devices.run(on_replica)

    for name, of_replicas in zip(names, gathered(), strict=True):
        expected = tf.cast([[0, 1], [0, 1], [1, 2]], name)
        for found in two_devices.experimental_local_results(of_replicas):
            assert found.dtype == name
            np.testing.assert_array_equal(np.float32(found), np.float32(expected), err_msg=name)


def test_two_devices_with_bytes_as_labels_and_outputs_of_bfloat16(two_devices):
    windows = windows_of((rows(19, 4), (labels(19) > 0).astype("uint8")), batch_size=8, epochs=2)
    expected = network(dtype="bfloat16")
    start = expected.get_weights()
    large_batch_fit(expected, OPTIMIZERS["sgd"](), supervised_contrastive, windows)
    with two_devices.scope():
        model = network(dtype="bfloat16")
        optimizer = OPTIMIZERS["sgd"]()
    every_size = EverySize(
        model, optimizer, gradlab.WholeBatch(supervised_contrastive), strategy=two_devices
    )
    found = every_size(3, windows)
    distances = moved(expected.get_weights(), start), moved(found.weights, start)
    held_against(*distances, [np.zeros_like(np.float32(old)) for old in start], 3e-2)


class Towers(keras.Model):
    """CLIP with a temperature that is trained, which only the loss reads."""

    def __init__(self):
        super().__init__()
        self.image, self.text = (
            keras.Sequential([keras.Input([n]), layers.Dense(4)]) for n in (4, 3)
        )
        self.temperature = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(0.7), name="temperature"
        )
        self.built = True

    def call(self, inputs):
        return [self.image(inputs[0]), self.text(inputs[1])]

    def loss_of(self, y, towers):
        image, text = (tf.math.l2_normalize(tower, -1) for tower in towers)
        similarities = tf.matmul(image, text, transpose_b=True) * tf.exp(self.temperature.value)
        right = tf.range(tf.shape(image)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(right, similarities)


@pytest.mark.slow
@pytest.mark.parametrize("replicas, loss_weight", [(1, None), (2, 3.0)])
def test_variables_that_the_loss_reads_are_trained(replicas, loss_weight, float64, two_devices):
    x = [rows(19, 4), rows(19, 3, seed=1)]
    keras.utils.set_random_seed(0)
    expected = Towers()
    start = expected.get_weights()
    windows = windows_of((x, None), batch_size=8, epochs=2)
    large_batch_fit(expected, OPTIMIZERS["sgd"](), expected.loss_of, windows, loss_weight or 1.0)
    with (two_devices if replicas == 2 else tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(0)
        model = gradlab.microbatched(Towers(), 3)
        model.compile(
            OPTIMIZERS["sgd"](), gradlab.WholeBatch(model.loss_of), loss_weights=loss_weight
        )
    model.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    held_against(expected.get_weights(), model.get_weights(), start)
    distances = [
        abs(float(new - old)) for new, old in zip(model.get_weights(), start) if np.ndim(old) == 0
    ]
    assert len(distances) == 1 and distances[0] > 1e-3


def test_a_function_gets_targets_and_predictions_of_one_rank_as_in_compile(float64):
    """Targets of shape (n,) and predictions of shape (n, 1): their product must not be a matrix."""

    def pearson(y, y_pred):
        one, other = y - tf.reduce_mean(y), y_pred - tf.reduce_mean(y_pred)
        return 1 - tf.reduce_sum(one * other) / tf.norm(one) / tf.norm(other)

    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input([4]), layers.Dense(6, "tanh"), layers.Dense(1)])

    x, y = rows(8, 4), labels(8)
    expected = model()
    start = expected.get_weights()
    expected.compile(OPTIMIZERS["sgd"](), pearson, run_eagerly=True)
    found = gradlab.microbatched(model(), 3)
    found.compile(OPTIMIZERS["sgd"](), gradlab.WholeBatch(pearson))
    for each in (expected, found):
        each.fit(x, y, batch_size=8, epochs=2, verbose=0)
    held_against(expected.get_weights(), found.get_weights(), start)


@pytest.mark.slow
def test_any_sizes_and_weights(float64):
    def every_size(in_flight):
        return EverySize(
            network(),
            OPTIMIZERS["adam"](),
            gradlab.WholeBatch(hardest_triplets),
            in_flight=in_flight,
        )

    traced = {in_flight: every_size(in_flight) for in_flight in (1, 2)}
    expected = network()
    start = expected.get_weights()

    @settings(
        max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(
        size=st.integers(1, 12),
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
        in_flight=st.sampled_from([1, 2]),
        weighted=st.booleans(),
    )
    def check(size, lengths, in_flight, weighted):
        examples = sum(lengths)
        weight = np.linspace(0, 2, examples) if weighted else None
        batch = rows(examples, 4), labels(examples), weight
        ends = np.cumsum([0, *lengths])
        windows = [examples_in(batch, slice(*each)) for each in itertools.pairwise(ends)]
        expected.set_weights(start)
        large_batch_fit(expected, OPTIMIZERS["adam"](), hardest_triplets, windows)
        assert_close(traced[in_flight](size, windows).weights, expected.get_weights(), 1e-11)

    check()


@pytest.mark.parametrize("weights", [None, [0.25, 4.0]])
def test_beside_an_ordinary_loss_and_losses_that_layers_add(weights, float64):
    class Adding(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * tf.reduce_mean(inputs**2))
            return inputs

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([4])
        hidden = Adding()(layers.Dense(6, "tanh")(inputs))
        return keras.Model(inputs, [layers.Dense(4)(hidden), layers.Dense(1)(hidden)])

    x, y = rows(13, 4), [labels(13), rows(13, 1, seed=5)]
    share = weights or [1.0, 1.0]

    def both(y, y_pred):
        whole = share[0] * tf.reduce_mean(hardest_triplets(y[0], y_pred[0]))
        return whole + share[1] * tf.reduce_mean((y[1] - y_pred[1]) ** 2)

    expected, optimizer = build(), OPTIMIZERS["adam"]()
    start = expected.get_weights()
    losses = large_batch_fit(expected, optimizer, both, windows_of((x, y), batch_size=8))
    model = gradlab.microbatched(build(), 3, batch_losses="mean")
    model.compile(
        OPTIMIZERS["adam"](), [gradlab.WholeBatch(hardest_triplets), "mse"], loss_weights=weights
    )
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    held_against(expected.get_weights(), model.get_weights(), start)
    np.testing.assert_allclose(history["loss"], np.array(losses) @ np.array([8, 5]) / 13, rtol=1e-6)


def test_evaluate_predict_and_metrics(float64):
    x, y = rows(13, 4), labels(13)[:, np.newaxis]
    model = gradlab.microbatched(network(), 3)
    model.compile("sgd", gradlab.WholeBatch(supervised_contrastive), metrics=["mae"])
    value, _ = model.evaluate(x, y, batch_size=13, verbose=0)
    expected = tf.reduce_mean(supervised_contrastive(tf.constant(y), model(x))) + sum(model.losses)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(model.predict(x, batch_size=13, verbose=0), model(x), rtol=1e-12)
    history = model.fit(x, y, batch_size=13, validation_data=(x, y), verbose=0).history
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}


def squares(y, y_pred):
    return tf.reduce_mean((y_pred - tf.reshape(y, [-1, 1])) ** 2, axis=-1)


def trained_with_state(loss):
    """What there is after two epochs with dropout, noise and batch normalization: weights, averages
    and seeds."""
    keras.utils.set_random_seed(0)  # the layers draw their seeds before `network` begins
    middle = layers.Dropout(0.5), layers.GaussianNoise(0.5), layers.BatchNormalization()
    model = gradlab.microbatched(network(*middle), 3)
    model.compile(OPTIMIZERS["sgd"](), loss)
    with pytest.warns(UserWarning, match="normalizes each micro-batch"):
        model.fit(3 + rows(13, 4), labels(13), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *(v.numpy() for v in model.non_trainable_variables)]


@functools.cache
def trained_with_state_in_one_pass():
    return trained_with_state(squares)


def test_both_passes_draw_the_same_masks_and_averages_move_once(float64):
    """For a mean over the examples, two passes must give what one pass gives, if they draw the same
    masks."""
    assert_close(trained_with_state(gradlab.WholeBatch(squares)), trained_with_state_in_one_pass())


def test_other_masks_in_the_second_pass_are_noticed(monkeypatch, float64):
    expected = trained_with_state_in_one_pass()
    begin, calls = CarriedState.begin, []

    def other_seeds(self):
        calls.append(None)
        seeds = begin(self)
        return seeds if len(calls) % 2 else [seed + 1 for seed in seeds]

    monkeypatch.setattr(CarriedState, "begin", other_seeds)
    with pytest.raises(AssertionError, match="Mismatched"):
        assert_close(trained_with_state(gradlab.WholeBatch(squares)), expected)


def test_prediction_gradients_of_other_rows_are_noticed(monkeypatch, float64):
    original = whole_batch.batch_loss_gradients

    def turned(*args):
        between = original(*args)
        return between._replace(
            prediction_gradients=[
                [tf.reverse(gradient, [0]) for gradient in each]
                for each in between.prediction_gradients
            ]
        )

    monkeypatch.setattr(window_program, "batch_loss_gradients", turned)
    with pytest.raises(AssertionError, match="Mismatched"):
        holds_for_every_size("info_nce", sizes=[3])


def test_half_precision_with_a_loss_scale(half_precision):
    """The slopes are float16 with the loss scale, as in the large batch. Without the scale they
    would be 0."""

    def tiny(y, y_pred):
        return 1e-7 * supervised_contrastive(y, y_pred)

    model = network()
    start = model.get_weights()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(2e6), initial_scale=2.0**20
    )
    every_size = EverySize(model, optimizer, gradlab.WholeBatch(tiny))
    windows = [(rows(12, 4), labels(12))] * 2
    whole, parts = (every_size(size, windows).weights for size in (12, 5))
    held_against(whole, parts, start, 5e-3)


def test_weights_of_a_trainer_divide_the_loss(float64):
    x, y, weight = rows(9, 4), labels(9), np.linspace(0.5, 2, 9)

    def weighted(y, y_pred):
        return tf.reduce_sum(info_nce(y, y_pred) * weight) / weight.sum()

    expected, optimizer = network(), OPTIMIZERS["adam"]()
    start = expected.get_weights()
    large_batch_fit(expected, optimizer, weighted, [(x, y)])
    model = network()
    trainer = gradlab.Trainer(
        model,
        OPTIMIZERS["adam"](),
        gradlab.WholeBatch(info_nce),
        2,
        weight_fn=lambda x, y: tf.constant(weight),
    )
    trainer.step(x, y)
    held_against(expected.get_weights(), model.get_weights(), start)


@pytest.mark.parametrize("replicas", [1, 2])
def test_masks_of_the_outputs_reach_the_loss(replicas, float64, two_devices):
    """The loss of tokens, in which a mean over the batch occurs; padding does not count."""
    tokens = np.array([[1, 2, 3], [4, 1, 0], [2, 0, 0], [3, 3, 1], [2, 2, 0]])

    def centered(y, y_pred):
        return tf.reduce_sum((y_pred - tf.reduce_mean(y_pred[:, 0], axis=0) - 1) ** 2, axis=-1)

    def embedding():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input([3], dtype="int32"), layers.Embedding(5, 2, mask_zero=True)]
        )

    def without_padding(y, y_pred):  # Keras divides what the mask lets through by its number
        counted = tf.cast(tokens > 0, y_pred.dtype)
        return tf.reduce_sum(centered(y, y_pred) * counted) / tf.reduce_sum(counted)

    expected = embedding()
    start = expected.get_weights()
    [loss] = large_batch_fit(
        expected, keras.optimizers.SGD(0.01), without_padding, [(tokens, tokens)]
    )
    strategy = two_devices if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = embedding()
        optimizer = keras.optimizers.SGD(0.01)
    every_size = EverySize(model, optimizer, gradlab.WholeBatch(centered), strategy=strategy)
    for size in (5, 2):
        found = every_size(size, [(tokens, tokens)])
        assert found.losses == pytest.approx(loss, rel=1e-12)
        held_against(expected.get_weights(), found.weights, start, case=f"micro-batches of {size}")


def test_losses_of_keras_over_the_whole_batch(float64):
    x, y = rows(13, 4), (rows(13, 4, seed=2) > 0).astype("float64")
    for loss in (
        keras.losses.Dice(),
        keras.losses.Circle(reduction="sum"),
        keras.losses.MeanSquaredError(),
    ):
        targets = labels(13) if isinstance(loss, keras.losses.Circle) else y
        plain = network(layers.LayerNormalization())
        plain.compile("sgd", loss, run_eagerly=True)
        expected = [plain.train_on_batch(x, targets), *plain.get_weights()]
        every_size = EverySize(
            network(layers.LayerNormalization()), keras.optimizers.SGD(), gradlab.WholeBatch(loss)
        )
        for size in (13, 3):
            found = every_size(size, [(x, targets)])
            assert_close([found.losses[0], *found.weights], expected, case=f"{loss.name}, {size}")


def test_names_of_functions_that_tensorflow_takes_for_no_name():
    def _private(y, y_pred):
        return correlation(y, y_pred)

    for function, name in (
        (_private, "private"),
        (lambda y, y_pred: correlation(y, y_pred), "lambda"),
    ):
        loss = gradlab.WholeBatch(function)
        tf.function(loss, autograph=False)(labels(4), rows(4, 4))
        assert loss.name == name


@keras.saving.register_keras_serializable("gradlab_tests")
def registered(y, y_pred):
    return hardest_triplets(y, y_pred)


def test_a_saved_model_continues(float64, tmp_path):
    x, y = rows(8, 4), labels(8)
    model = gradlab.microbatched(network(), 3)
    model.compile(OPTIMIZERS["adam"](), gradlab.WholeBatch(registered))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = gradlab.microbatched(keras.models.load_model(tmp_path / "model.keras"), 3)
    for one in (model, loaded):
        one.fit(x, y, verbose=0, shuffle=False)
    assert_close(loaded.get_weights(), model.get_weights())
    assert repr(
        gradlab.WholeBatch.from_config(gradlab.WholeBatch(registered).get_config()).fn
    ) == repr(registered)


class MeanOverTheBatch(layers.Layer):
    def call(self, inputs):
        return tf.reduce_mean(inputs, axis=0, keepdims=True)


class OwnNoise(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


class HiddenNoise(layers.Layer):
    """Draws inside of a function, a loop or a branch."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def call(self, inputs):
        noise = lambda: tf.random.normal(tf.shape(inputs)) + tf.random.stateless_normal([6], [1, 2])  # noqa: E731
        return (
            inputs
            + {
                "function": lambda: tf.function(noise)(),
                "loop": lambda: tf.while_loop(
                    lambda i, _: i < 2, lambda i, _: (i + 1, noise()), (0, inputs)
                )[1],
                "branch": lambda: tf.cond(tf.reduce_sum(inputs) > 0, noise, lambda: inputs),
            }[self.where]()
        )


REFUSED = {
    "no function": (
        lambda: gradlab.WholeBatch("mse"),
        "fn must be a function (y, y_pred) -> loss. Received: 'mse'",
    ),
    "a constant": (
        lambda: trained(lambda y, y_pred: tf.reduce_mean(y)),
        "lambda must depend on the predictions. Received: a loss that is constant in them",
    ),
    "no rows": (
        lambda: trained(correlation, MeanOverTheBatch()),
        "correlation needs outputs and targets with a row for each example. Received: a tensor of "
        "shape (1, 4)",
    ),
    "ragged targets": (
        lambda: trained(correlation, y=tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])),
        "correlation needs outputs and targets with a row for each example. Received: a "
        "RaggedTensor",
    ),
    "numbers that cannot be drawn again": (
        lambda: trained(correlation, OwnNoise()),
        "correlation needs random numbers that can be drawn twice: draw them with keras.random "
        "and a keras.random.SeedGenerator instead of tf.random. Received: ",
    ),
    **{
        f"numbers drawn in a {where}": (
            lambda where=where: trained(correlation, HiddenNoise(where)),
            "correlation needs random numbers that can be drawn twice",
        )
        for where in ("function", "loop", "branch")
    },
    "weights that would be ignored": (
        lambda: gradlab.Trainer(
            network(),
            "sgd",
            gradlab.WholeBatch(correlation),
            2,
            weight_fn=lambda x, y: tf.ones(tf.shape(y)),
        ).step(rows(4, 4), labels(4)),
        "correlation must give a loss for each example if sample weights divide it, as those of "
        "weight_fn do. Received: one number for the whole batch",
    ),
    "weights that Keras drops": (
        lambda: compiled(clip).fit(rows(4, 4), sample_weight=np.ones(4)),
        "sample_weight must be None without targets, because Keras drops it then. Give targets "
        "too, such as zeros, if the loss reads none. Received: a sample_weight of shape (4,)",
    ),
    "no reduction": (
        lambda: trained(gradlab.WholeBatch(info_nce, reduction="none")),
        "info_nce must have a reduction for gradlab to know the large batch's loss: "
        "sum_over_batch_size, mean, mean_with_sample_weight or sum. Received: 'none'",
    ),
    "micro-batches left out": (
        lambda: gradlab.Trainer(
            network(), "sgd", gradlab.WholeBatch(correlation), 2, skip_nonfinite=True
        ).step(rows(4, 4), labels(4)),
        "skip_nonfinite must be False with a loss over the whole batch, to which a micro-batch "
        "that is left out would still belong. Received: True",
    ),
}


def compiled(loss, *middle):
    model = gradlab.microbatched(network(*middle), 2)
    model.compile("sgd", loss if isinstance(loss, gradlab.WholeBatch) else gradlab.WholeBatch(loss))
    return model


def trained(loss, *middle, y=None):
    model = compiled(loss, *middle)
    start = model.get_weights()
    try:
        y = labels(4) if y is None else y
        model.fit(tf.data.Dataset.from_tensors((rows(4, 4), y)), verbose=0)
    finally:
        assert_close(model.get_weights(), start, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_before_training(name):
    act, sentence = REFUSED[name]
    with pytest.raises(ValueError) as error:
        act()
    assert str(error.value).startswith(sentence)


MEMORY = """
import sys
import gradlab
gradlab.setup()
import keras, numpy as np, tensorflow as tf
from gradlab.measure.memory import PeakMemory

def info_nce(y, y_pred):
    one, other = tf.split(tf.math.l2_normalize(y_pred, -1), 2, axis=-1)
    similarities = tf.matmul(one, other, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), similarities)

model = keras.Sequential([keras.Input([32, 32, 3])])
for _ in range(6):
    model.add(keras.layers.Conv2D(32, 1, activation="relu"))
model.add(keras.layers.GlobalAveragePooling2D())
model = gradlab.microbatched(model, 8, in_flight=1)
model.compile("sgd", gradlab.WholeBatch(info_nce))
peak = PeakMemory()
for examples in map(int, sys.argv[1:]):
    x = np.zeros([examples, 32, 32, 3], "float32")
    before = peak.bytes()
    model.fit(x, np.zeros(examples), batch_size=examples, epochs=2, verbose=0)
    print(peak.bytes() - before)
"""


@pytest.mark.slow
def test_memory_holds_one_micro_batch_and_the_predictions():
    """Sixteen times the examples: the activations of all of them would take 384 MiB."""
    output = subprocess.check_output([sys.executable, "-c", MEMORY, "32", "512"], text=True)
    more = float(output.splitlines()[-1])  # than the peak with 32 examples
    assert more < 80 * 2**20


def semi_hard_triplets(y, y_pred, margin=0.2):
    """Schroff and others: for each anchor and positive, the nearest negative that is farther away
    than the positive."""
    unit = tf.math.l2_normalize(y_pred, axis=-1)
    apart = 2 - 2 * tf.matmul(unit, unit, transpose_b=True)
    same = tf.reshape(y, [-1, 1]) == tf.reshape(y, [1, -1])
    farther = ~same[:, tf.newaxis, :] & (apart[:, tf.newaxis, :] > apart[:, :, tf.newaxis])
    nearest = tf.reduce_min(
        tf.where(farther, apart[:, tf.newaxis, :], tf.constant(4.0, apart.dtype)), axis=-1
    )
    pairs = tf.cast(same, unit.dtype) - tf.eye(tf.shape(unit)[0], dtype=unit.dtype)
    return tf.reduce_sum(pairs * tf.nn.relu(apart - nearest + margin)) / tf.maximum(
        tf.reduce_sum(pairs), 1
    )


@pytest.mark.slow
def test_vgg_16_with_semi_hard_triplets_over_a_batch_of_128(float64):
    """The model of the question that began gradlab, with negatives from the whole batch."""

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([32, 32, 3])
        trunk = keras.applications.VGG16(include_top=False, weights=None, input_shape=[32, 32, 3])
        return keras.Model(inputs, layers.Dense(32)(layers.Flatten()(trunk(inputs))))

    x, y = rows(128, 32, 32, 3), np.random.default_rng(3).integers(0, 10, 128).astype("float64")
    expected = build()
    start = expected.get_weights()
    losses = large_batch_fit(expected, keras.optimizers.SGD(1.0), semi_hard_triplets, [(x, y)])
    model = gradlab.microbatched(build(), 8)
    model.compile(keras.optimizers.SGD(1.0), gradlab.WholeBatch(semi_hard_triplets))
    history = model.fit(x, y, batch_size=128, verbose=0, shuffle=False).history
    held_against(expected.get_weights(), model.get_weights(), start, 1e-10)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)

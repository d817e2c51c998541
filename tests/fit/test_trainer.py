"""Trainer: its updates against the large batch's, its options against references, its resumption
against bits."""

import functools
import itertools
import math
import re

import keras
import large_batch
import numpy as np
import pytest
import tensorflow as tf
from large_batch import OPTIMIZERS

import gradlab
from gradlab.fit.run.dataset_windows import DatasetWindows
from gradlab.fit.variables import batch_norm


def large_batches(family, windows, optimizer="adam", loss=None, **kwargs):
    """The weights and losses of Keras' own updates, one a window."""
    large = large_batch.LargeBatch(large_batch.build(family))
    large.compile(OPTIMIZERS[optimizer](**kwargs), **(loss or large_batch.loss(family)))
    losses = []
    for window in windows:
        large.reset_metrics()
        losses.append(np.ravel(large.train_on_batch(*window))[0])
    return large.model.get_weights(), losses


def trainer_for(
    family, microbatch_size, strategy=None, optimizer="adam", loss=None, options=(), **kwargs
):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = large_batch.build(family)
        optimizer = OPTIMIZERS[optimizer](**kwargs)
    loss = loss or large_batch.loss(family)
    return gradlab.Trainer(
        model,
        optimizer,
        microbatch_size=microbatch_size,
        strategy=strategy,
        **loss,
        **dict(options),
    )


def rows(nest, start, stop):
    return tf.nest.map_structure(lambda part: part[start:stop], nest)


def assert_equal_weights(found, expected, tolerance=1e-12):
    scale = max(abs(weights).max() for weights in expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale)


@functools.cache
def uneven_windows(family):
    """Windows of 13, 1 and 17 examples, and the weights and losses of the large batch, in
    float64."""
    x, y = large_batch.data(family, 31)
    windows = [rows((x, y), start, stop) for start, stop in ((0, 13), (13, 14), (14, 31))]
    return windows, large_batches(family, windows, global_clipnorm=0.25, weight_decay=0.125)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("family", ["dense", "two_by_two", "masked_and_whole"])
def test_uneven_windows_give_the_update_of_the_large_batch(family, replicas, float64, two_devices):
    """With two devices each sees other examples, in graph mode, and a window of one example leaves
    one without any."""
    windows, (expected, losses) = uneven_windows(family)
    strategy = two_devices if replicas == 2 else None
    trainer = trainer_for(family, 3, strategy, global_clipnorm=0.25, weight_decay=0.125)
    steps = [trainer.step(*window) for window in windows]
    assert_equal_weights(trainer.model.get_weights(), expected)
    # Keras' losses are kept in float32
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-6)
    assert [step.update for step in steps] == [1, 2, 3]


@pytest.mark.parametrize("optimizer", ["adafactor", "lamb"])
def test_optimizers_on_two_devices(optimizer, float64, two_devices):
    """Those that reduce over whole variables; the test above has Adam, and that of `fit` on two
    devices has SGD."""
    x, y = large_batch.data("shared", 19)
    windows = [rows((x, y), 0, 8), rows((x, y), 8, 19)]
    expected, _ = large_batches("shared", windows, optimizer)
    trainer = trainer_for("shared", 3, two_devices, optimizer)
    for window in windows:
        trainer.step(*window)
    assert_equal_weights(trainer.model.get_weights(), expected)


def norm(gradients) -> float:
    return sum(float(tf.reduce_sum(gradient**2)) for gradient in gradients) ** 0.5


def test_what_a_step_shows(float64):
    x, y = large_batch.data("shared", 10)
    trainer = trainer_for("shared", 4)
    model, loss = trainer.model, large_batch.loss("shared")["loss"]
    expected = []
    for start in (0, 4, 8):
        part, target = rows((x, y), start, start + 4)
        with tf.GradientTape() as tape:
            mean = loss(target, model(part))
        gradients = tape.gradient(mean, [v.value for v in model.trainable_variables])
        expected.append((float(mean), norm(gradients)))
    with tf.GradientTape() as tape:
        mean = loss(y, model(x))
    whole = tape.gradient(mean, [v.value for v in model.trainable_variables])
    step = trainer.step(x, y)
    np.testing.assert_allclose(step.window_gradient_norm, norm(whole), rtol=1e-12)
    np.testing.assert_allclose(
        np.transpose([step.losses, step.gradient_norms]), expected, rtol=1e-12
    )
    assert step.weights.tolist() == [4, 4, 2] and step.skipped == 0 and step.applied


def test_norms_are_the_gradients_not_the_scaled_ones():
    """A loss scale of 1024 multiplies the gradients inside, and none of the numbers that a step
    tells."""
    x, y = large_batch.data("shared", 10)
    steps = []
    for scaled in (False, True):
        sgd = keras.optimizers.SGD(0.0)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd, 1024.0) if scaled else sgd
        steps.append(
            gradlab.Trainer(
                large_batch.build("shared"), optimizer, large_batch.loss("shared")["loss"], 4
            ).step(x, y)
        )
    one, other = steps
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(other.gradient_norms, one.gradient_norms, rtol=1e-5)
    np.testing.assert_allclose(other.window_gradient_norm, one.window_gradient_norm, rtol=1e-5)


def test_a_loss_scale_multiplies_regularization_too(float64):
    """The weights after an update are those without a scale, which is a power of two."""
    x, y = large_batch.data("dense", 10)  # a model whose kernel is regularized
    weights = []
    for scaled in (False, True):
        sgd = keras.optimizers.SGD(0.5)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd, 1024.0) if scaled else sgd
        model = large_batch.build("dense")
        loss = large_batch.loss("dense")["loss"]
        trainer = gradlab.Trainer(model, optimizer, loss, 4)
        trainer.step(x, y)
        weights.append(model.get_weights())
    for one, other in zip(*weights):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
    start = large_batch.build("dense").get_weights()
    assert any(np.abs(one - before).max() > 1e-3 for one, before in zip(weights[0], start))


def test_loss_weights_keep_the_digits_of_float64(float64):
    """Those that float32 cannot hold, against NumPy; the loss over the whole batch reads a variable."""
    inputs = keras.Input([4])
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, outputs)
    factor = model.layers[1].bias
    x = np.random.default_rng(0).normal(size=(10, 4))
    y = [x[:, :1], x[:, 1:2]]
    seen = model.predict(x, verbose=0)
    errors = [np.mean((one - right) ** 2) for one, right in zip(seen, y)]

    def whole(y, y_pred):
        return tf.reduce_mean((y_pred - y) ** 2) + 0.1 * factor.value[0]

    losses = ["mse", gradlab.WholeBatch(whole)]
    trainer = gradlab.Trainer(model, keras.optimizers.SGD(1.0), losses, 3, loss_weights=[0.3, 0.7])
    step = trainer.step(x, y)
    np.testing.assert_allclose(step.loss, 0.3 * errors[0] + 0.7 * errors[1], rtol=1e-13)
    gradient = 0.3 * 2 * np.mean(seen[0] - y[0]) + 0.7 * 0.1
    np.testing.assert_allclose(factor.numpy(), [-gradient], rtol=1e-12)


def test_accumulation_grows_while_training(float64):
    """The schedule counts updates; an epoch's last window is what is left of it."""
    x, y = large_batch.data("shared", 31)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    trainer = trainer_for("shared", 3, options={"accumulation": lambda update: 1 + update})
    steps = trainer.fit(dataset, 7, verbose=False)
    sizes = [3, 6, 9, 12, 1, 18, 13]
    assert [step.weights.sum() for step in steps] == sizes
    edges = np.cumsum([0, *sizes[:5]]).tolist()
    windows = [rows((x, y), start, stop) for start, stop in itertools.pairwise(edges)]
    windows += [rows((x, y), 0, 18), rows((x, y), 18, 31)]
    assert_equal_weights(trainer.model.get_weights(), large_batches("shared", windows)[0])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_micro_batch_that_is_not_finite_is_left_out(replicas, float64, two_devices):
    strategy = two_devices if replicas == 2 else None
    x, y = large_batch.data("shared", 12)
    bad = x.copy()
    bad[4, 1], bad[5, 0] = np.nan, np.inf  # both in the second of six micro-batches
    trainer = trainer_for("shared", 2, strategy, options={"skip_nonfinite": True})
    step = trainer.step(bad, y)
    assert (step.skipped, step.applied, step.update) == (1, True, 1) and np.isfinite(step.loss)
    assert sorted(step.weights) == [0, 2, 2, 2, 2, 2]
    kept = np.delete(np.arange(12), [4, 5])
    assert_equal_weights(
        trainer.model.get_weights(), large_batches("shared", [(x[kept], y[kept])])[0]
    )

    before = [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]
    step = trainer.step(np.full_like(x, np.nan), y)
    assert (step.skipped, step.applied, step.update) == (6, False, 1)
    for variable, value in zip((*trainer.model.variables, *trainer.optimizer.variables), before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_without_skipping_one_bad_micro_batch_spoils_the_update():
    x, y = large_batch.data("shared", 12)
    x[4, 1] = np.nan
    trainer = trainer_for("shared", 2)
    assert trainer.step(x, y).skipped == 0
    assert not np.isfinite(trainer.model.get_weights()[0]).all()


def test_accumulator_dtype():
    """4,000 gradients of about 0.1: their sum in float32 has lost digits that a sum in float64
    keeps."""
    x = np.random.default_rng(0).uniform(0.0, 0.2, (4000, 1)).astype("float32")
    exact = x.astype("float64").mean()
    errors = {}
    for dtype in (None, "float64"):
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.zeros((1, 1))])
        mean = keras.losses.MeanAbsoluteError()
        trainer = gradlab.Trainer(
            model, keras.optimizers.SGD(1.0), mean, 1, accumulator_dtype=dtype
        )
        trainer.step(x, np.ones((4000, 1), "float32"))
        errors[dtype] = abs(float(model.get_weights()[0][0, 0]) - exact)
    assert errors["float64"] < 1e-8 < errors[None] < 1e-5


def test_tokens_instead_of_examples(float64):
    ids, _ = large_batch.data("embedding", 13)

    def model():
        return keras.Sequential([keras.Input([5], dtype="int32"), keras.layers.Embedding(7, 3)])

    tokens = np.random.default_rng(0).integers(0, 3, (13, 5))
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    start = np.random.default_rng(1).normal(size=(7, 3))

    small = model()
    small.set_weights([start])
    counted = gradlab.Trainer(
        small,
        keras.optimizers.SGD(0.5),
        entropy,
        3,
        weight_fn=lambda x, y: tf.cast(y > 0, tf.float64),
    )
    step = counted.step(ids, tokens)

    # By hand: softmax minus one-hot, over the tokens whose label is not 0.
    table, gradient, total = start.copy(), np.zeros_like(start), 0.0
    for row, labels in zip(ids, tokens):
        for token, label in zip(row, labels):
            if label > 0:
                odds = np.exp(table[token] - table[token].max())
                total -= np.log(odds[label] / odds.sum())
                gradient[token] += odds / odds.sum() - np.eye(3)[label]
    count = (tokens > 0).sum()
    np.testing.assert_allclose(small.get_weights()[0], start - 0.5 * gradient / count, rtol=1e-12)
    assert step.loss == pytest.approx(total / count, rel=1e-12) and step.weights.sum() == count


def test_batch_normalization_on_two_devices(float64, two_devices):
    generator = np.random.default_rng(0)
    x, y = generator.normal(3, 2, (11, 4)), generator.normal(size=(11, 1))
    with two_devices.scope():
        norm = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input([4]), norm, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.125)
    trainer = gradlab.Trainer(model, optimizer, "mse", 3, two_devices)
    with pytest.warns(UserWarning, match="batch_normalization.* normalizes each micro-batch"):
        trainer.step(x, y)
    np.testing.assert_allclose(norm.moving_mean.numpy(), 0.5 * x.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), 0.5 + 0.5 * x.var(axis=0), rtol=1e-6)
    copies = two_devices.experimental_local_results(norm.moving_mean.value)
    np.testing.assert_array_equal(*(copy.numpy() for copy in copies))


def test_synchronized_batch_normalization_is_refused_on_several_devices(two_devices):
    with two_devices.scope():
        norm = keras.layers.BatchNormalization(synchronized=True, name="norm")
        model = keras.Sequential([keras.Input([4]), norm, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
    with pytest.raises(
        ValueError, match=r"^norm must not be synchronized: .*GroupNormalization.* on 2 replicas$"
    ):
        gradlab.Trainer(model, optimizer, "mse", 3, two_devices).step(
            np.ones((4, 4)), np.ones((4, 1))
        )
    batch_norm.check(model, replicas=1)


def dropped(**options):
    """A model that remembers: dropout's seeds, Adam's moments, a shuffled dataset."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return gradlab.Trainer(model, keras.optimizers.Adam(0.05), entropy, 3, **options)


class Interrupted(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, accumulation", [("dataset", None), ("function", lambda update: 1 + update // 3)]
)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(form, accumulation, tmp_path):
    x, y = large_batch.data("dense", 31)

    def batches():
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        if form == "dataset":
            return whole.shuffle(31, seed=7).batch(8)
        return lambda epoch: whole.shuffle(31, seed=epoch).batch(8)

    def train(interrupted_at=None):
        def on_update(step):
            seen.append(step.update)
            if step.update == interrupted_at:
                raise Interrupted

        trainer = dropped(accumulation=accumulation)
        trainer.fit(
            batches(),
            14,
            checkpoint_dir=tmp_path / str(interrupted_at is None),
            checkpoint_every=4,
            on_update=on_update,
            verbose=False,
        )
        return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]

    seen = []
    whole = train()
    for at in (2, 10):
        with pytest.raises(Interrupted):
            train(interrupted_at=at)
    (tmp_path / "False").rename(tmp_path / "resumed")
    (tmp_path / "True").rename(tmp_path / "whole")
    (tmp_path / "resumed").rename(tmp_path / "True")
    seen.clear()
    for one, other in zip(train(), whole):
        np.testing.assert_array_equal(one, other)
    assert seen[0] == 9  # after the checkpoint at 8


def test_a_finished_run_is_not_run_again(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(large_batch.data("dense", 8)).batch(8)
    first = dropped()
    assert len(first.fit(data, 3, checkpoint_dir=tmp_path, verbose=False)) == 3
    second = dropped()
    assert second.fit(data, 3, checkpoint_dir=tmp_path, verbose=False) == [] and second.updates == 3
    np.testing.assert_array_equal(first.model.get_weights()[0], second.model.get_weights()[0])


def test_windows_hold_every_example_once_an_epoch():
    batches = [(np.arange(start, start + n),) for start, n in ((0, 3), (3, 5), (8, 1))]
    sizes = iter([4, 2, 7, 5])
    windows = DatasetWindows(lambda epoch: batches, lambda: next(sizes))
    assert [next(windows)[0].tolist() for _ in range(4)] == [
        [0, 1, 2, 3],
        [4, 5],
        [6, 7, 8],
        [0, 1, 2, 3, 4],
    ]


def windows_of(array, sizes, batch=3, skip=0):
    """Windows of a dataset of sparse or ragged tensors, as NumPy arrays."""
    sizes = iter(sizes)
    data = tf.data.Dataset.from_tensor_slices((array, np.arange(8))).batch(batch)
    windows = DatasetWindows(data, lambda: next(sizes), 0, skip)
    found = [next(windows) for _ in range(3)]
    as_dense = (
        tf.sparse.to_dense
        if isinstance(array, tf.SparseTensor)
        else lambda part: part.to_tensor(shape=[None, 4])
    )
    return [(as_dense(x).numpy(), y) for x, y, _ in found]


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
@pytest.mark.parametrize("skip", [0, 2])
def test_windows_of_sparse_and_ragged_tensors(kind, skip):
    """They are cut and put together as dense ones are, from any position on."""
    dense = np.triu(np.ones([8, 4], "float32")).T.reshape(8, 4)
    dense = np.array([[1.0] * n + [0.0] * (4 - n) for n in (1, 4, 2, 0, 3, 3, 1, 4)], "float32")
    tensor = (
        tf.sparse.from_dense(dense)
        if kind == "sparse"
        else tf.RaggedTensor.from_tensor(dense, padding=0.0)
    )
    sizes = [4 - skip, 1, 5]
    for (x, y), rows_ in zip(windows_of(tensor, sizes, skip=skip), ([skip, 4], [4, 5], [5, 8])):
        np.testing.assert_array_equal(x, dense[slice(*rows_)])
        np.testing.assert_array_equal(y, np.arange(*rows_))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [None, lambda update: 2])
def test_fit_takes_sparse_tensors(accumulation, replicas, two_devices):
    """A dense model of the same weights makes the same updates."""
    dense = np.random.default_rng(0).integers(0, 2, (13, 4)).astype("float32")
    targets = np.random.default_rng(1).normal(size=(13, 1)).astype("float32")
    strategy = two_devices if replicas == 2 else tf.distribute.get_strategy()
    weights = []
    for x in (dense, tf.sparse.from_dense(dense)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input([4], sparse=x is not dense), keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.SGD(0.1)
        trainer = gradlab.Trainer(model, optimizer, "mse", 2, strategy, accumulation=accumulation)
        steps = trainer.fit(
            tf.data.Dataset.from_tensor_slices((x, targets)).batch(5), 5, verbose=False
        )
        weights.append([np.concatenate([step.losses for step in steps]), *model.get_weights()])
    for one, other in zip(*weights):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


SPOILING = {
    "weights of a wrong shape": lambda x, y: (x, y, np.ones([16, 3])),
    "inputs of a wrong shape": lambda x, y: (np.ones([16, 5], "float32"), y),
    "targets of another structure": lambda x, y: (x, {"a": y, "b": y}),
    "targets of a wrong type": lambda x, y: (x, np.array([["text"]] * 16)),
}


def losses_and_weights(first, weighted_first, spoil=None):
    """Those of five windows or four, the last with weights or without; `spoil` is called before the
    four with the trainer, x and y."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    y = np.ones([16, 1], "float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    trainer = gradlab.Trainer(model, keras.optimizers.SGD(0.1), "mse", 4)
    losses = [] if first else [trainer.step(x, y).loss]
    if spoil is not None:
        spoil(trainer, x, y)
    windows = [(x, y), (x, y, np.arange(16.0))]
    windows = windows[::-1] if weighted_first else windows
    losses += [trainer.step(*window).loss for window in (*windows, *windows)]
    return [*losses, *model.get_weights()]


unspoiled = functools.cache(losses_and_weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILING)
@pytest.mark.parametrize("first", [True, False])
def test_a_window_that_cannot_be_compiled_changes_nothing_for_those_after_it(case, first):
    def spoil(trainer, x, y):
        with pytest.raises(Exception, match="."):
            trainer.step(*SPOILING[case](x, y))

    # The window after it has its structure: what was kept of the wrong one would be used for it.
    weighted_first = case.startswith("weights")
    found = losses_and_weights(first, weighted_first, spoil)
    for one, other in zip(unspoiled(first, weighted_first), found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("place", ["loss", "weight_fn"])
def test_ctrl_c_while_a_step_is_compiled_can_be_followed_by_the_same_step(place):
    x, y = (
        np.random.default_rng(0).normal(size=(16, 4)).astype("float32"),
        np.ones([16, 1], "float32"),
    )
    pressed = []

    def press(here):
        if here == place and len(pressed) < 3:
            pressed.append(here)
            raise KeyboardInterrupt

    def loss(y, y_pred):
        press("loss")
        return (y - y_pred) ** 2

    def weight_fn(x, y):
        press("weight_fn")
        return tf.ones_like(y)[:, 0]

    trainer = gradlab.Trainer(model_of(keras.layers.Dense(1)), "sgd", loss, 4, weight_fn=weight_fn)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trainer.step(x, y)
    assert [trainer.step(x, y).update, trainer.step(x[:7], y[:7]).update] == [1, 2]


@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ([1.0, np.nan, 1, 1], "nan"),
        ([1.0, -1.0, 1, -1], "-1.*"),
        ([1.0, np.inf, 1, 1], "inf"),
        ([3, -2, 1, 1], "-2.*"),
    ],
)
def test_weights_that_are_negative_or_not_finite_are_refused(weights, shown, size):
    """1 and -1 add up to 0: the loss would be 0, and the update would be applied."""
    model = model_of(keras.layers.Dense(1))
    trainer = gradlab.Trainer(
        model, keras.optimizers.SGD(0.1), "mse", size, weight_fn=lambda x, y: tf.constant(weights)
    )
    before = model.get_weights()
    rule = "weight_fn must return weights that are finite and 0 or more. Received:"
    with pytest.raises(ValueError, match=f"^{rule} {shown}$"):
        trainer.step(np.ones([4, 4], "float32"), np.ones([4, 1], "float32"))
    assert trainer.updates == 0
    for one, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("weights", "right"), [([True, False, True, True], [1, 0, 1, 1]), ([3, 0, 2, 1], [3, 0, 2, 1])]
)
def test_weights_may_be_booleans_and_integers(weights, right):
    x, y = (
        np.random.default_rng(0).normal(size=(4, 4)).astype("float32"),
        np.ones([4, 1], "float32"),
    )
    losses = []
    for given in (weights, np.array(right, "float32")):
        keras.utils.set_random_seed(0)
        model = model_of(keras.layers.Dense(1))
        weight_fn = lambda x, y, given=given: tf.constant(given)  # noqa: E731
        losses.append(
            gradlab.Trainer(model, keras.optimizers.SGD(0.1), "mse", 4, weight_fn=weight_fn)
            .step(x, y)
            .loss
        )
    assert losses[0] == losses[1]


def test_texts_of_other_lengths_leave_the_length_open():
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    layers = [keras.Input([None], dtype="int32"), keras.layers.Embedding(7, 3), Counted()]
    layers.append(keras.layers.GlobalAveragePooling1D())
    trainer = gradlab.Trainer(keras.Sequential(layers), "sgd", "mse", 2)
    traced = []
    for length in (4, 5, 6, 7, 4):
        before = len(traces)
        trainer.step(np.ones((3, length), "int32"), np.ones((3, 3), "float32"))
        traced.append(len(traces) > before)
    assert traced == [True, True, False, False, False]


def test_fit_shows_progress(capsys):
    data = tf.data.Dataset.from_tensor_slices(large_batch.data("dense", 8)).batch(8)
    dropped().fit(data, 3)
    assert "3/3" in capsys.readouterr().out


def model_of(*layers):
    return keras.Sequential([keras.Input([4]), *layers])


@functools.cache
def one_trainer():
    """A trainer for all windows that are refused: they change nothing."""
    return trainer_for("shared", 3)


def bad_window(*window):
    return lambda: one_trainer().step(*window)


ONE, SCALED = (
    model_of(keras.layers.Dense(1)),
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
)
TEXTS = large_batch.data("masked_and_whole", 4)
X, Y = large_batch.data("shared", 6)
REFUSED = {
    "lengths": (
        bad_window(X, Y[:5]),
        "x, y and sample_weight must have the same number of examples. Received: 6 5",
    ),
    "labels": (
        bad_window(X, np.array([0, 1, 2, 3, 9, 0])),
        "labels must be classes from 0 to 2. Received: 3",
    ),
    "negative labels": (
        bad_window(X, np.array([0, 1, 2, 0, -1, 0])),
        "labels must be classes from 0 to 2. Received: -1",
    ),
    "empty window": (
        bad_window(X[:0], Y[:0]),
        "A window must hold at least one example. Received: 0",
    ),
    "empty dataset": (
        lambda: trainer_for("shared", 3).fit(
            tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(2), 1
        ),
        "dataset must hold at least one example. Received: none in epoch 0",
    ),
    "not built": (
        lambda: gradlab.Trainer(
            keras.Sequential([keras.layers.Dense(1)], name="open"), "sgd", "mse", 3
        ),
        "model must be built, so that its weights are there: give it an Input, or call it on a "
        "batch once. Received: open, which is not built",
    ),
    "nothing to train": (
        lambda: gradlab.Trainer(model_of(keras.layers.Dense(1, trainable=False)), "sgd", "mse", 3),
        r"A model must have trainable variables to be trained. Received: \S+, with none among its "
        r"2 variables",
    ),
    "not a model": (
        lambda: gradlab.Trainer(3, "sgd", "mse", 3),
        "model must be a keras.Model. Received: 3",
    ),
    "updates": (
        lambda: trainer_for("shared", 3).fit([], 0),
        "updates must be a positive integer. Received: 0",
    ),
    "schedule": (
        lambda: trainer_for("shared", 3, options={"accumulation": lambda update: 1.5}).fit(
            [(X, Y)], 2
        ),
        r"accumulation\(update\) must be a positive integer. Received: 1.5",
    ),
    "scale and skip": (
        lambda: gradlab.Trainer(ONE, SCALED, "mse", 3, skip_nonfinite=True),
        "skip_nonfinite must be False with a LossScaleOptimizer, which learns its scale from what "
        "is not finite. Received: True",
    ),
    "accumulated twice": (
        lambda: gradlab.Trainer(ONE, keras.optimizers.SGD(gradient_accumulation_steps=4), "mse", 3),
        "gradient_accumulation_steps must be None: microbatch_size does its work. Received: 4",
    ),
    **{
        f"{name}={value!r}": (
            lambda name=name, value=value: trainer_for("shared", 3, options={name: value}),
            rf"{name} must be {rule}\. Received: {re.escape(repr(value))}",
        )
        for name, rule, values in [
            ("skip_nonfinite", "True or False", ["no", 1, None]),
            ("jit_compile", "True or False", [5, "auto", None]),
            (
                "accumulator_dtype",
                "None or a floating-point type, such as float32",
                [[], "", "int32", "nonsense", 7],
            ),
            ("loss_weights", "finite numbers", [math.nan, math.inf, "1", True]),
            ("in_flight", "at most 2147483647", [10**30]),
        ]
        for value in values
    },
    "one of several loss weights": (
        lambda: trainer_for("shared", 3, options={"loss_weights": {"a": 1, "b": [2, math.nan]}}),
        "loss_weights must be finite numbers. Received: nan",
    ),
    "large size": (
        lambda: trainer_for("shared", 10**30),
        "microbatch_size must be at most 2147483647. Received: 1" + "0" * 30,
    ),
    "weight_fn": (
        lambda: trainer_for("shared", 3, options={"weight_fn": 3}),
        r"weight_fn must be a function \(x, y\) -> weights, or None. Received: 3",
    ),
    "allow_changes": (
        lambda: trainer_for("shared", 3).fit([(X, Y)], 1, allow_changes="yes"),
        "allow_changes must be True or False. Received: 'yes'",
    ),
    "generator": (
        lambda: trainer_for("shared", 3).fit((batch for batch in [(X, Y)]), 1),
        "dataset must be .* iterated again for each epoch. Received: a generator, which yields "
        "its batches only once",
    ),
    "iterator of a dataset": (
        lambda: trainer_for("shared", 3).fit(iter(tf.data.Dataset.from_tensors((X, Y))), 1),
        r"dataset must be .* for each epoch. Received: a \w*Iterator, which yields its batches "
        r"only once",
    ),
    "not a dataset": (
        lambda: trainer_for("shared", 3).fit(3, 1),
        "dataset must be .* for each epoch. Received: 3",
    ),
    "several divisors and skip": (
        lambda: trainer_for("masked_and_whole", 3, options={"skip_nonfinite": True}).step(*TEXTS),
        "skip_nonfinite needs losses that all divide by the number of examples, or one loss alone. "
        "Received: losses that divide by own, examples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        call()


@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True, None])
def test_microbatch_size_is_auto_or_a_positive_integer(value):
    rule = 'microbatch_size must be "auto", "given" or a positive integer'
    for call in (
        lambda: trainer_for("shared", value),
        lambda: gradlab.microbatched(large_batch.build("shared"), value),
    ):
        with pytest.raises(ValueError, match=f"^{rule}. Received: {value!r}$"):
            call()


def test_a_model_or_optimizer_of_another_scope(two_devices):
    with two_devices.scope():
        inside = large_batch.build("shared")
    outside = large_batch.build("shared")
    rule = "must be made in the strategy's scope: `with strategy.scope\\(\\):`"
    with pytest.raises(
        ValueError, match=f"^model {rule}. Received: .*, made outside of MirroredStrategy's$"
    ):
        gradlab.Trainer(outside, "sgd", "mse", 3, two_devices)
    with pytest.raises(
        ValueError, match=f"^optimizer {rule}. Received: SGD, made outside of MirroredStrategy's$"
    ):
        gradlab.Trainer(inside, keras.optimizers.SGD(name="SGD"), "mse", 3, two_devices)
    with pytest.raises(
        ValueError,
        match="^model must be trained with the strategy in whose scope it was made. Received: "
        "strategy=None$",
    ):
        gradlab.Trainer(inside, "sgd", "mse", 3)


def test_checkpoints_of_another_model(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(large_batch.data("dense", 8)).batch(8)
    dropped().fit(data, 1, checkpoint_dir=tmp_path, verbose=False)
    with pytest.raises(
        ValueError,
        match="^checkpoint_dir must hold checkpoints of this model and optimizer, or none",
    ):
        trainer_for("convolutional", 3).fit(data, 1, checkpoint_dir=tmp_path)


def test_weights_of_a_function_multiply_those_of_the_window():
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    given = np.linspace(0.5, 2, 7).astype("float32")
    trained = []
    for weight_fn, sample_weight in (
        (None, given * np.arange(1, 8, dtype="float32")),
        (lambda x, y: tf.range(1.0, 8.0), given),
    ):
        model = model_of(keras.layers.Dense(1, kernel_initializer="zeros"))
        optimizer = keras.optimizers.SGD(0.1)
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        gradlab.Trainer(model, optimizer, loss, 3, weight_fn=weight_fn).step(x, y, sample_weight)
        trained.append(model.get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)

"""BatchRamp: its batches against slices, its rates against the rules, and `fit` against a loop over
whole batches."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab

SIZES = {0: 4, 3: 6, 7: 12}  # which share no more than 2 examples
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[50, 3]).astype("float32"), RNG.normal(size=[50, 1]).astype("float32")


def examples(count=50):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).repeat()


def slices(updates):
    """The numbers of the examples of each update, from the definition."""
    numbers = itertools.cycle(range(50))
    sizes = [4, 4, 4, 6, 6, 6, 6, *[12] * updates][:updates]
    return [[next(numbers) for _ in range(size)] for size in sizes]


def model_of(optimizer, microbatch_size=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )
    if microbatch_size:
        model = gradlab.microbatched(model, microbatch_size)
    model.compile(optimizer, "mse")
    return model


def test_batches_are_those_of_the_sizes():
    found = gradlab.BatchRamp(SIZES).batches(examples()).take(12)
    for (x, y), numbers in zip(found.as_numpy_iterator(), slices(12), strict=True):
        np.testing.assert_array_equal(x, X[numbers])
        np.testing.assert_array_equal(y, Y[numbers])


@pytest.mark.parametrize("updates", [0, 2, 3, 5, 7, 11])
def test_batches_begin_where_the_optimizer_is(updates):
    optimizer = keras.optimizers.SGD()
    batches = gradlab.BatchRamp(SIZES).batches(examples(), optimizer)
    optimizer.iterations.assign(updates)  # after the dataset was made
    for (x, _), numbers in zip(batches, slices(updates + 4)[updates:]):
        np.testing.assert_array_equal(x, X[numbers])


def test_nested_examples_and_sizes_without_a_common_factor():
    data = tf.data.Dataset.from_tensor_slices({"a": X, "b": (Y, X)}).repeat()
    batches = gradlab.BatchRamp({0: 3, 2: 7}).batches(data).take(3)
    assert [len(batch["b"][1]) for batch in batches] == [3, 3, 7]
    assert batches.element_spec["a"].shape.as_list() == [None, 3]


@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("sqrt", 0.5)])
def test_the_rate_follows_the_batch(rule, power):
    rate = gradlab.BatchRamp(SIZES).learning_rate(0.3, rule)
    expected = [0.3 * (len(numbers) / 4) ** power for numbers in slices(12)]
    np.testing.assert_allclose([float(rate(update)) for update in range(12)], expected, rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_fit_is_a_loop_over_the_whole_batches(replicas, two_devices):
    ramp = gradlab.BatchRamp(SIZES)
    reference = model_of(keras.optimizers.Adam(0.01))
    for numbers in slices(12):
        reference.optimizer.learning_rate = 0.01 * (len(numbers) / 4) ** 0.5
        reference.train_on_batch(X[numbers], Y[numbers])
    with two_devices.scope() if replicas == 2 else contextlib.nullcontext():
        model = model_of(keras.optimizers.Adam(ramp.learning_rate(0.01, "sqrt")), 4)
    batches = ramp.batches(examples(), model.optimizer)
    model.fit(batches, epochs=3, steps_per_epoch=4, verbose=0)
    assert int(tf.convert_to_tensor(model.optimizer.iterations.value)) == 12
    for weight, expected in zip(model.get_weights(), reference.get_weights()):
        np.testing.assert_allclose(weight, expected, atol=1e-6)


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_a_run_continues_with_backup_and_restore(tmp_path):
    """The same bits as without the interruption: sizes, examples and rates go on."""
    ramp = gradlab.BatchRamp(SIZES)

    def train(*callbacks):
        model = model_of(keras.optimizers.SGD(ramp.learning_rate(0.01, "linear"), 0.9), 4)
        shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=0).repeat()
        batches = ramp.batches(shuffled, model.optimizer)
        model.fit(batches, epochs=4, steps_per_epoch=4, verbose=0, callbacks=list(callbacks))
        return model

    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(backup, Stop())
    resumed, whole = train(keras.callbacks.BackupAndRestore(tmp_path)), train()
    assert int(resumed.optimizer.iterations) == 16
    for weight, expected in zip(resumed.get_weights(), whole.get_weights()):
        np.testing.assert_array_equal(weight, expected)


def test_a_trainer_takes_the_batches():
    model = model_of("sgd")
    trainer = gradlab.Trainer(model, keras.optimizers.SGD(0.01), "mse", 4)
    steps = trainer.fit(gradlab.BatchRamp(SIZES).batches(examples()), updates=8, verbose=False)
    assert [step.losses.size for step in steps] == [1, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({0: 64}, "two batch sizes or more"),
        ([64, 128], "two batch sizes or more"),
        ({1: 64, 2: 128}, "updates must rise from 0"),
        ({0: 64, 5: 128, 3: 256}, "updates must rise from 0"),
        ({0: 64, 5: 32}, "batch sizes must rise"),
        ({0: 64, 5: 64}, "batch sizes must rise"),
        ({0: 0, 5: 64}, "positive integer"),
        ({0: 64, 5.5: 128}, "integer of 0 or more"),
    ],
)
def test_bad_sizes(sizes, words):
    with pytest.raises(ValueError, match=words) as caught:
        gradlab.BatchRamp(sizes)
    assert "Received" in str(caught.value)


def test_bad_examples_and_rates():
    ramp = gradlab.BatchRamp(SIZES)
    for data in (tf.data.Dataset.range(5), X):
        with pytest.raises(ValueError, match=r"call its repeat\(\). Received"):
            ramp.batches(data)
    with pytest.raises(ValueError, match="rate must be a finite number above 0. Received: -1"):
        ramp.learning_rate(-1, "linear")
    with pytest.raises(ValueError, match="rule must be .*'cubic'"):
        ramp.learning_rate(1.0, "cubic")

"""What Keras' `fit` takes notice of, `microbatched` must not pass over: methods, states and numbers
of all kinds."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from plain_and_microbatched import assert_equal, history

import gradlab

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")
Y = RNG.normal(size=(20, 2)).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}


def network(*layers):
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(2)])


def fitted(loss="mse", optimizer=None, evaluates=False, y=Y, **compiled):
    def run(model):
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **compiled)
        return history(model.fit(X, y, validation_data=(X, y) if evaluates else None, **FIT))

    return run


# Methods.


def compute_metrics(self, x, y, y_pred, sample_weight=None):
    return {"largest": ops.max(ops.abs(y))} | keras.Model.compute_metrics(
        self, x, y, y_pred, sample_weight
    )


def predict_step(self, data):
    return 2 * self(data)


def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return ops.mean(ops.abs(y - y_pred))


def of_instance(name, method):
    model = network()
    setattr(model, name, types.MethodType(method, model))
    return model


def test_methods_of_the_instance_take_part():
    def run(model):
        model.compile("sgd", "mse")
        model.fit(X, Y, **FIT)
        return {"predicted": model.predict(X, verbose=0)}

    assert_equal(lambda: of_instance("predict_step", predict_step), run, 3)
    constant = np.ones_like(Y)  # an entry that does not depend on how examples are cut
    assert_equal(lambda: of_instance("compute_metrics", compute_metrics), fitted(y=constant), 3)
    assert_equal(
        lambda: of_instance("compute_loss", compute_loss), fitted(), 3, batch_losses="mean"
    )


def test_a_fit_of_the_instance_is_called_however_often_the_model_is_prepared():
    model, seen = network(), []
    fit = model.fit
    model.fit = lambda *args, **kwargs: seen.append(1) or fit(*args, **kwargs)
    for _ in range(2):
        gradlab.microbatched(model, 3)
    model.compile("sgd", "mse")
    model.fit(X, Y, **FIT)
    assert seen == [1]


def test_a_train_step_of_the_instance_is_refused():
    with pytest.raises(ValueError, match="^model must not have a train_step of its own"):
        gradlab.microbatched(of_instance("train_step", lambda self, data: {}), 3)


class CountsCalls(keras.Sequential):
    def make_test_function(self, force=False):
        made = super().make_test_function(force) or self.test_function
        self.calls = getattr(self, "calls", 0)

        def counting(iterator):
            self.calls += 1
            return made(iterator)

        self.test_function = counting
        return counting


def test_a_make_test_function_of_its_own_is_called():
    def run(model):
        found = fitted(evaluates=True)(model)
        return found | {"calls": np.array(model.calls)}

    plain, _ = assert_equal(lambda: CountsCalls(network().layers), run, 3)
    # Three batches in the first epoch; in the second, it counts its own counting
    assert plain["calls"] == 9


class Makes(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


def test_a_make_train_function_needs_a_size():
    model = gradlab.microbatched(Makes(network().layers), "auto")
    model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match="^microbatch_size must be a number for a model with a make_train_function"
    ):
        model.fit(X, Y, **FIT)


class Halves(keras.optimizers.SGD):
    """Halves gradients in `apply_gradients`, which Keras' `fit` calls."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(
            [(gradient / 2, variable) for gradient, variable in grads_and_vars]
        )


def test_optimizers_of_ones_own_and_replaced_ones():
    assert_equal(network, lambda model: fitted(optimizer=Halves(0.1))(model), 3)

    def run(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer = keras.optimizers.Adam(0.01)
        return history(model.fit(X, Y, **FIT))

    assert_equal(network, run, 3)


@pytest.mark.parametrize("name", ["train_step", "compute_loss"])
def test_trainer_refuses_methods_that_it_does_not_call(name):
    model = of_instance(name, compute_loss)
    with pytest.raises(
        ValueError, match=f"^model must not have a {name} of its own, which a Trainer does not call"
    ):
        gradlab.Trainer(model, "sgd", "mse", 3)


class Frozen(keras.Model):
    """Trains every second weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(3), keras.layers.Dense(2)

    def call(self, x):
        return self.other(self.one(x))

    @property
    def trainable_weights(self):
        return super().trainable_weights[::2]


def test_trainable_weights_of_ones_own():
    assert_equal(Frozen, fitted(), 3)


@pytest.mark.parametrize("size", [3, "auto"])
def test_what_becomes_trainable_without_compile_does_not(size):
    def run(model):
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(X, Y, **FIT)
        model.layers[0].trainable = True
        return history(model.fit(X, Y, **FIT | {"batch_size": 20}))

    assert_equal(lambda: network(keras.layers.Dense(3)), run, size, eager=False)


# How the model is called.


class Untold(keras.Model):
    """Its `call` takes no `training`, so Keras does not tell its layers that they train."""

    def __init__(self):
        super().__init__()
        self.noise, self.norm = (
            keras.layers.GaussianNoise(1.0, seed=1),
            keras.layers.BatchNormalization(),
        )
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(self.norm(self.noise(x)))


def test_a_call_without_training():
    def run(model):
        return fitted(evaluates=True)(model) | {"predicted": model.predict(X, verbose=0)}

    assert_equal(Untold, run, 8, 3)


class Auxiliary(keras.Model):
    """Has a second output in training only."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dense = keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)

    def call(self, x, training=False):
        hidden = self.hidden(x)
        return [self.dense(hidden), hidden] if training else [self.dense(hidden)]


def test_outputs_in_training_only():
    assert_equal(Auxiliary, fitted(["mse", "mae"], y=[Y, X[:, :3]]), 3)


class Scales(keras.Sequential):
    """Turns whole numbers into features in its `fit`."""

    def fit(self, x, y=None, **more):
        return super().fit(keras.utils.to_categorical(x, 4), y, **more)


def test_a_fit_that_changes_its_input():
    def run(model):
        model.compile("sgd", "mse")
        return history(model.fit(np.arange(20) % 4, Y, **FIT))

    assert_equal(lambda: Scales(network().layers), run, 3)


class Compiled(keras.Sequential):
    @tf.function
    def call(self, x, training=False):
        return super().call(x, training=training)


def test_a_compiled_call_of_a_model():
    assert_equal(lambda: Compiled(network(keras.layers.Dense(3)).layers), fitted(), 3)


class Linear(keras.layers.Layer):
    """Its call is helped by a compiled function."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    @tf.function
    def product(self, x, training=False):
        return tf.matmul(x, tf.convert_to_tensor(self.kernel))

    def call(self, x, training=False):
        return self.product(x, training=training)


class CompiledLinear(Linear):
    @tf.function
    def call(self, x, training=False):
        return tf.matmul(x, tf.convert_to_tensor(self.kernel))


@pytest.mark.parametrize("layer", [Linear, CompiledLinear])
@pytest.mark.parametrize("metrics", [None, ["mae"]])
def test_a_compiled_call_of_a_layer(layer, metrics):
    def run(model):
        model.compile("sgd", "mse", metrics=metrics)
        return history(model.fit(X, Y, **FIT))

    assert_equal(lambda: network(layer()), run, 3)


class FromOne(keras.losses.SparseCategoricalCrossentropy):
    """Labels begin with 1, and 0 does not count."""

    def call(self, y_true, y_pred):
        return ops.where(y_true == 0, 0.0, super().call(ops.maximum(y_true - 1, 0), y_pred))


def test_labels_of_a_subclass():
    assert_equal(network, fitted(FromOne(from_logits=True), y=np.arange(20) % 3), 3)


def hardest(y, y_pred):
    """The mean of the four largest errors: it needs four examples."""
    return ops.mean(ops.top_k(ops.sum((y - y_pred) ** 2, -1), 4)[0])


def test_one_example_may_be_too_few():
    assert_equal(network, fitted(hardest), 3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [
    lambda: tf.distribute.MirroredStrategy(["CPU:0"]), lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    tf.distribute.experimental.CentralStorageStrategy,
], ids=["mirrored", "one device", "central"])  # fmt: skip
def test_a_strategy_with_one_replica(strategy):
    found = []
    for prepare in (lambda model: model, lambda model: gradlab.microbatched(model, 3)):
        keras.utils.set_random_seed(0)
        with strategy().scope():
            model = prepare(network(keras.layers.Dense(3, "tanh")))
            model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(X, Y, **FIT)
        found.append([*model.get_weights(), model.evaluate(X, Y, verbose=0)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", [keras.layers.GRU, keras.layers.SimpleRNN])
def test_xla_and_loops_are_refused(layer):
    model = keras.Sequential([keras.Input([5, 4]), layer(2, unroll=False)])
    trainer = gradlab.Trainer(model, "sgd", "mse", 3, jit_compile=True)
    with pytest.raises(ValueError, match="^jit_compile must be False for a model with loops"):
        trainer.step(np.random.default_rng(0).normal(size=(20, 5, 4)).astype("float32"), Y)


# Numbers.


@pytest.mark.parametrize("shift", [1e3, 1e6])
def test_batch_normalization_of_large_numbers(shift):
    """As prices or time stamps are: float32 leaves the variance about this many digits."""
    x = (np.random.default_rng(0).normal(size=(24, 4)) * shift / 1e4 + shift).astype("float32")

    def run(model):
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(x, np.ones([24, 2]), **FIT)
        return {"score": model.evaluate(x, np.ones([24, 2]), verbose=0)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch normalization
        assert_equal(lambda: network(keras.layers.BatchNormalization()), run, 3, 8, rtol=1e-3)


def test_batch_normalization_of_large_numbers_on_two_devices(two_devices):
    x = (np.random.default_rng(0).normal(size=(24, 4)) + 1e5).astype("float32")
    with two_devices.scope():
        model = gradlab.microbatched(network(keras.layers.BatchNormalization(momentum=0.0)), 5)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    with pytest.warns(UserWarning, match="normalizes each micro-batch"):
        model.fit(x, np.ones([24, 2]), batch_size=24, verbose=0)
    norm = model.layers[0]
    # Neighbors of float32 are 0.008 apart there, and so are the means of micro-batches.
    np.testing.assert_allclose(norm.moving_variance.numpy(), x.astype("float64").var(0), rtol=2e-2)
    np.testing.assert_allclose(norm.moving_mean.numpy(), x.astype("float64").mean(0), rtol=1e-6)


def test_moving_averages_in_float64(float64):
    def run(model):
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(X.astype("float64"), Y, **FIT | {"epochs": 1})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(
            lambda: network(keras.layers.BatchNormalization(momentum=0.9)), run, 3, 8, rtol=1e-12
        )


class Like(keras.regularizers.Regularizer):
    """Keeps a variable close to another layer's."""

    def __init__(self, layer, name):
        self.layer, self.name = layer, name

    def __call__(self, variable):
        return 0.1 * ops.sum((variable - getattr(self.layer, self.name)) ** 2)


def test_a_regularizer_that_reads_another_layer():
    def build():
        first = keras.layers.Dense(4)
        likes = {f"{name}_regularizer": Like(first, name) for name in ("kernel", "bias")}
        return network(first, keras.layers.Dense(4, **likes))

    assert_equal(build, fitted(), 3)


class Peak(keras.metrics.Metric):
    def __init__(self, name="peak"):
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.mean(ops.abs(y_pred))))

    def result(self):
        return self.most


@pytest.mark.parametrize("trains", [True, False])
def test_a_metric_of_a_class_of_its_own_is_named(trains):
    model = gradlab.microbatched(network(), 3)
    model.compile("sgd", "mse", metrics=[Peak()])
    with pytest.warns(UserWarning, match="^peak is a metric of a class of its own") as warned:
        for _ in range(2):
            model.fit(X, Y, **FIT) if trains else model.evaluate(X, Y, verbose=0)
    assert sum("peak is" in str(one.message) for one in warned) == 1


def test_metrics_that_read_variables_are_updated_after_the_optimizer(recwarn):
    optimizer = []

    def rate(y, y_pred):
        return optimizer[-1].learning_rate

    def updates(y, y_pred):
        return optimizer[-1].iterations

    def run(model):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2, 3], [0.1, 0.05, 0.01])
        optimizer.append(keras.optimizers.SGD(schedule))
        return fitted(optimizer=optimizer[-1], evaluates=True, metrics=[rate, "mae", updates])(
            model
        )

    assert_equal(network, run, 3, 8)
    assert not [one for one in recwarn if "reads variables" in str(one.message)]


def test_a_metric_of_variables_and_examples_is_named():
    model = gradlab.microbatched(network(), 3)

    def scaled(y, y_pred):
        return ops.mean(ops.abs(y - y_pred), -1) * model.optimizer.learning_rate

    model.compile("sgd", "mse", metrics=[scaled])
    with pytest.warns(UserWarning, match="^scaled reads variables, which Keras updates before"):
        model.fit(X, Y, **FIT)


def test_a_metric_of_the_logits_reads_no_variables(recwarn):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3, "softmax")])
    entropy = keras.metrics.SparseCategoricalCrossentropy(name="entropy")
    gradlab.microbatched(model, 3).compile(
        "sgd", "sparse_categorical_crossentropy", metrics=[entropy]
    )
    model.fit(np.ones([8, 2]), np.arange(8) % 3, **FIT)
    assert not [one for one in recwarn if "reads variables" in str(one.message)]


class Reads(keras.Model):
    """Needs a number, in its own code or in that of a branch."""

    def __init__(self, how):
        super().__init__()
        self.dense, self.how = keras.layers.Dense(4), how

    def call(self, x):
        return self.dense(x) if self.how(ops.sum(x)) else -self.dense(x)


@pytest.mark.parametrize(
    "how",
    [lambda total: total.numpy() > 0, lambda total: total > 0, lambda total: float(total) > 0],
)
def test_code_that_needs_numbers_is_refused_in_a_sentence(how):
    plain, model = Reads(how), gradlab.microbatched(Reads(how), 3)
    for each in plain, model:
        each.compile("sgd", "mse", run_eagerly=True)
    plain.fit(X, X, **FIT)
    with pytest.raises(
        ValueError, match="^A model with run_eagerly=True must not need the numbers of a batch"
    ):
        model.fit(X, X, **FIT)


def test_a_layer_that_is_frozen_between_two_fits():
    """Batch normalization then uses its moving averages; the function is made again."""

    def run(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, **FIT)
        model.get_layer("norm").trainable = False
        model.make_train_function(force=True)
        return history(model.fit(X, Y, **FIT))

    norm = lambda: keras.layers.BatchNormalization(momentum=0.5, name="norm")  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(lambda: network(norm()), run, len(X))


class Masked(keras.Model):
    """Counts what the mask of its outputs lets through, which must be there."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(5, 3, mask_zero=True)
        self.count = keras.metrics.Sum("count")

    def build(self, shape):
        self.embed.build(shape)
        self.built = True

    def call(self, x):
        return self.embed(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.count.update_state(ops.cast(y_pred._keras_mask, "float32"))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_metrics_see_the_mask_when_they_are_made():
    def build():
        model = Masked()
        model.build([None, 6])
        return model

    def run(model):
        model.compile("sgd", "mse", metrics=["mae"])
        tokens = np.arange(48).reshape(8, 6) % 5
        return history(model.fit(tokens, np.ones([8, 6, 3]), batch_size=8, verbose=0))

    assert_equal(build, run, 3, but=("mae",))

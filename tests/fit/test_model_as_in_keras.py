"""A microbatched model behaves as the model: numbers, own methods, kinds of data, and clear errors
where it cannot."""

import inspect
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from plain_and_microbatched import assert_equal, differences, history, train

import gradlab
from gradlab import window

ops = keras.ops
GENERATOR = np.random.default_rng(0)
X, Y = (
    GENERATOR.normal(size=(19, 4)).astype("float32"),
    GENERATOR.normal(size=(19, 1)).astype("float32"),
)
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}


def sequential(*layers, units=1):
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(units)])


def fresh(value):
    """A copy of an optimizer or a metric, which belong to one model."""
    return value.from_config(value.get_config()) if hasattr(value, "from_config") else value


def compiled_fit(*args, x=X, y=Y, fit=FIT, evaluates=False, **kwargs):
    """A run for `train`: compiles, fits, and evaluates where the test is about that, because it is
    traced, too."""

    def run(model):
        positional, by_name = keras.tree.map_structure(
            fresh, (args or (keras.optimizers.SGD(0.05), "mse"), kwargs)
        )
        model.compile(*positional, **by_name)
        results = history(model.fit(x, y, **fit))
        scores = (
            model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) if evaluates else {}
        )
        return results | {f"evaluate {k}": np.array(v) for k, v in scores.items()}

    return run


# The model stays what it is.


def test_the_model_stays_itself_and_its_files_load_without_gradlab(tmp_path):
    model = sequential(keras.layers.Dense(3, "tanh"))
    layers, config = list(model.layers), model.get_config()
    assert gradlab.microbatched(model, 3) is model and type(model) is keras.Sequential
    assert (
        model.layers == layers and model.get_config() == config and model.input_shape == (None, 4)
    )
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    model.fit(X, Y, **FIT)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.savez(
        tmp_path / "state.npz", *[v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    )
    program = f"""
import sys, keras, numpy as np
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
assert type(model) is keras.Sequential and not any(name.startswith("gradlab") for name in sys.modules)
state = np.load({str(tmp_path / "state.npz")!r})
for key, variable in zip(state, [*model.weights, *model.optimizer.variables], strict=True):
    np.testing.assert_array_equal(state[key], variable.numpy())
print(int(model.optimizer.iterations))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout == "6\n", done.stderr[-2000:]
    plain = sequential(keras.layers.Dense(3, "tanh"))
    plain.load_weights(tmp_path / "model.weights.h5")  # files of weights cross over
    np.testing.assert_allclose(
        plain.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_a_loaded_model_goes_on_to_the_bit_once_it_is_prepared_again(tmp_path):
    model = gradlab.microbatched(sequential(keras.layers.Dense(3, "tanh")), 3)
    model.compile(keras.optimizers.Adam(), "mse")
    model.fit(X, Y, **FIT)
    model.save(tmp_path / "model.keras")
    loaded = gradlab.microbatched(keras.models.load_model(tmp_path / "model.keras"), 3)
    for one in (model, loaded):
        one.fit(X, Y, **FIT)
    for one, other in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_array_equal(one, other)


def test_checkpoints_and_backups_are_those_of_the_model(tmp_path):
    runs = iter(range(2))

    def run(model):
        folder = tmp_path / str(next(runs))
        model.compile("adam", "mse")
        best = keras.callbacks.ModelCheckpoint(
            folder / "best.keras", monitor="val_loss", save_best_only=True
        )
        backup = keras.callbacks.BackupAndRestore(
            folder / "backup", save_freq=1, delete_checkpoint=False
        )
        fitted = model.fit(X, Y, validation_data=(X[:5], Y[:5]), callbacks=[best, backup], **FIT)
        return history(fitted) | {
            "loaded": keras.models.load_model(folder / "best.keras").predict(X, verbose=0)
        }

    assert_equal(lambda: sequential(keras.layers.Dense(3, "tanh")), run, 3)


def test_copies_and_clones_are_plain_and_the_size_can_be_changed():
    model = gradlab.microbatched(sequential(), 3)
    assert "train_step" not in vars(pickle.loads(pickle.dumps(model)))
    assert "train_step" not in vars(keras.models.clone_model(model))
    gradlab.microbatched(model, 5)
    model.compile("sgd", "mse")
    assert inspect.signature(model.fit) == inspect.signature(sequential().fit)
    model.fit(X, Y, **FIT)
    gradlab.microbatched(model, 2)  # compiled already
    assert len(model.fit(X, Y, **FIT).history["loss"]) == 2


def test_a_compiled_model_is_ready_at_once():
    def build():
        model = sequential()
        model.compile("adam", "mse", metrics=["mae"])
        model.fit(X, Y, **FIT)  # its functions exist already
        return model

    assert_equal(build, lambda model: history(model.fit(X, Y, **FIT)), 3)


# Numbers.


class Noise(keras.layers.Layer):
    """Adds noise without a seed."""

    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x)) if training else x


def test_random_numbers_without_a_seed_differ_between_micro_batches_and_updates():
    seen = []

    class Recorder(keras.layers.Layer):
        """Keeps the numbers that pass through it."""

        def call(self, x):
            seen_by = tf.numpy_function(lambda x: seen.append(x.copy()) or x, [x], x.dtype)
            return x + 0 * tf.ensure_shape(tf.stop_gradient(seen_by), x.shape)

    def build():
        as_it_is = keras.layers.Dense(4, kernel_initializer="identity")
        return keras.Sequential([keras.Input([4]), Noise(), Recorder(), as_it_is])

    def run(model):
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return history(
            model.fit(np.zeros((8, 4)), np.zeros((8, 4)), batch_size=8, epochs=3, verbose=0)
        )

    plain = train(build, run)["history loss"]
    whole = train(build, run, 8)["history loss"]
    # One micro-batch draws what the batch draws
    np.testing.assert_allclose(whole, plain, rtol=1e-6)
    parts = train(build, run, 4)["history loss"]
    assert len({*whole.round(6), *parts.round(6)}) == 6
    drawn = [x for x in seen if x.shape == (4, 4)]
    assert len(drawn) >= 6 and len({x.tobytes() for x in drawn}) == len(drawn)


def test_spectral_normalization_as_in_the_large_batch():
    def build():
        return keras.Sequential([
            keras.Input([4]), keras.layers.SpectralNormalization(keras.layers.Dense(5, "tanh"), power_iterations=2),
            keras.layers.Dense(1),
        ])  # fmt: skip

    plain, _ = assert_equal(build, compiled_fit(), 3)
    assert any("vector_u" in name for name in plain)


class Assigns(keras.layers.Layer):
    """Assigns a counter, a trained variable and a running mean in its forward pass, and uses them
    afterwards."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.scale.assign(self.scale * 0.5 + 0.5)
            self.mean.assign(ops.mean(x, axis=0))
        return x * self.scale + 0 * self.mean / (1 + self.calls)


def test_variables_that_a_forward_pass_assigns():
    """What does not depend on the examples changes once per update; gradients are those of Keras'
    variables."""
    plain, _ = assert_equal(
        lambda: sequential(Assigns()), compiled_fit(), 3, but=["assigns/variable_1"]
    )
    assert any(
        "assigns/variable" in name and value == 6
        for name, value in plain.items()
        if np.shape(value) == ()
    )


def test_an_assigned_value_passes_on_no_gradient():
    class Remembers(keras.layers.Layer):
        def build(self, shape):
            self.inner = keras.layers.Dense(4)
            self.inner.build(shape)
            self.last = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.last.assign(ops.mean(self.inner.kernel))
            return self.inner(x) + self.last

    assert_equal(lambda: sequential(Remembers()), compiled_fit(), 3)


def scalar_mae(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


class OwnCounting(keras.metrics.Metric):
    """Averages over calls, with variables of its own."""

    def __init__(self, name="own_counting", dtype=None):
        super().__init__(name=name)
        self.total, self.calls = self.add_variable((), "zeros"), self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(y_true - y_pred)))
        self.calls.assign_add(1.0)

    def result(self):
        return self.total / self.calls


def test_metrics_as_strings_functions_and_objects():
    metrics = ["mae", scalar_mae, OwnCounting(), keras.metrics.RootMeanSquaredError()]
    for sizes, evaluates in [((1, 8), False), ((3,), True)]:
        run = compiled_fit(
            "sgd", "mse", metrics=metrics, weighted_metrics=[scalar_mae, "mse"], evaluates=evaluates
        )
        plain, _ = assert_equal(sequential, run, *sizes)
        assert len([name for name in plain if name.startswith("history")]) == 7


def test_a_metric_that_counts_calls_in_its_own_way_is_named():
    class Last(OwnCounting):
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign(0.9 * self.total + 0.1 * ops.mean(y_pred))
            self.calls.assign_add(1.0)

    model = gradlab.microbatched(sequential(), 3)
    last = Last()
    model.compile("sgd", "mse", metrics=[last])
    with pytest.warns(
        UserWarning, match="own_counting counts the batches it is given, in a way that"
    ):
        model.fit(X, Y, **FIT)
    assert float(last.calls) == 7  # micro-batches of an epoch: 3 + 3 + 1, as the warning says


class Adds(keras.layers.Layer):
    """Adds a loss: a function of the inputs."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


ADDED = {
    "mean": lambda x: ops.mean(x**2),
    "sum": lambda x: ops.sum(x**2),
    "one for each example": lambda x: ops.sum(x**2, axis=-1),
    "one for each feature": lambda x: ops.mean(x**2, axis=0),
    "integers": lambda x: ops.sum(ops.cast(x > 0, "int32")),
}
ADDED_ARE = {"mean": "mean", "sum": "sum", "example": "sum", "feature": "mean", "integers": "sum"}


@pytest.mark.slow
def test_losses_that_layers_add(recwarn):
    """Each kind has a branch of its own, so that the branch's weights tell which kind is wrong."""

    def dense(kind):
        return keras.layers.Dense(3, "tanh", name=kind.replace(" ", "_"))

    def build():
        inputs = keras.Input([4])
        branches = [
            Adds(function, name=f"adds_{kind.split()[-1]}")(dense(kind)(inputs))
            for kind, function in ADDED.items()
        ]
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(branches)))

    optimizer = keras.optimizers.SGD(0.01)
    said = {f"adds_{kind}": reduction for kind, reduction in ADDED_ARE.items()}
    assert_equal(build, compiled_fit(optimizer, "mse"), 1, 8, batch_losses=said)
    assert_equal(build, compiled_fit(optimizer, "mse", evaluates=True), 3, batch_losses=said)
    assert not [warning for warning in recwarn if "add" in str(warning.message)]


@pytest.mark.slow
def test_an_added_loss_beside_losses_of_other_divisors():
    def build():
        inputs = keras.Input([5], dtype="int32")
        hidden = keras.layers.Embedding(7, 3, mask_zero=True)(inputs)
        hidden = Adds(ADDED["sum"])(keras.layers.GRU(3, return_sequences=True)(hidden))
        return keras.Model(inputs, keras.layers.Dense(1)(hidden))

    tokens = np.where(
        np.arange(5) < GENERATOR.integers(1, 6, (19, 1)), GENERATOR.integers(1, 7, (19, 5)), 0
    )
    run = compiled_fit(
        keras.optimizers.SGD(0.01), "mse", x=tokens, y=GENERATOR.normal(size=(19, 5, 1))
    )
    assert_equal(build, run, 3, batch_losses="sum")


def balance(x):
    """As experts are balanced: the product of two means."""
    return ops.sum(ops.mean(x, axis=0) * ops.mean(x**2, axis=0))


@pytest.mark.parametrize("b", [1, 8])
def test_an_added_loss_that_is_not_additive_is_refused(b):
    model = gradlab.microbatched(sequential(Adds(balance, name="router")), b, batch_losses="mean")
    model.compile("sgd", "mse")
    with pytest.raises(
        ValueError,
        match='^router must be a mean over the examples, as batch_losses="mean" says; .*Received: ',
    ):
        model.fit(X, Y, **FIT)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("trains", [True, False])
def test_an_added_loss_of_which_nothing_is_said_is_refused(trains):
    model = gradlab.microbatched(sequential(Adds(ADDED["mean"], name="adds")), 4)
    model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match='^adds gives one number for the whole batch.* say batch_losses="mean"'
    ):
        model.fit(X, Y, **FIT) if trains else model.evaluate(X, Y, verbose=0)


@pytest.mark.parametrize("said", ["median", {"adds": "both"}, 3])
def test_what_is_said_of_losses_must_be_known(said):
    with pytest.raises(ValueError, match="^batch_losses must be .* Received: "):
        gradlab.microbatched(sequential(), 4, batch_losses=said)


def test_an_added_loss_of_random_numbers_is_not_judged():
    def noisy(x):
        return ops.mean((x + keras.random.normal(ops.shape(x), seed=seed)) ** 2)

    seed = keras.random.SeedGenerator(3)
    layer = Adds(noisy, name="sampler")
    layer.seed = seed
    model = gradlab.microbatched(sequential(layer), 4, batch_losses="mean")
    model.compile("sgd", "mse")
    model.fit(X, Y, **FIT)
    assert int(model.optimizer.iterations) == 6


def test_dropout_before_an_added_loss_is_no_reason_to_warn(recwarn):
    model = gradlab.microbatched(
        sequential(keras.layers.Dropout(0.5), Adds(ADDED["mean"])), 4, batch_losses="mean"
    )
    model.compile("sgd", "mse")
    model.fit(X, Y, **FIT)
    assert not [warning for warning in recwarn if "loss" in str(warning.message)]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_embeddings_get_the_gradient_of_a_dense_layer(optimizer):
    """Keras squares the rows of a token that occurs twice one by one, so Adam differs even if b is
    the batch."""
    tokens, y = np.array([[1, 1, 2], [1, 3, 3]]), np.ones((2, 1))

    def build():
        return keras.Sequential([keras.Input([3], dtype="int32"), keras.layers.Embedding(4, 2),
                                 keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])  # fmt: skip

    def as_dense():
        embedding = keras.layers.Dense(2, use_bias=False, kernel_initializer="uniform")
        model = keras.Sequential([keras.Input([3, 4]), embedding, keras.layers.GlobalAveragePooling1D(),
                                  keras.layers.Dense(1)])  # fmt: skip
        keras.utils.set_random_seed(7)
        model.set_weights(build().get_weights())
        return model

    def run(x):
        def fit(model):
            model.set_weights(
                [np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()]
            )
            model.compile(
                getattr(keras.optimizers, {"adam": "Adam", "sgd": "SGD"}[optimizer])(0.01), "mse"
            )
            model.fit(x, y, verbose=0, epochs=2)
            return {"table": model.get_weights()[0]}

        return fit

    keras_table, dense = (
        train(build, run(tokens))["table"],
        train(as_dense, run(np.eye(4)[tokens]))["table"],
    )
    for b in (1, 2) if optimizer == "adam" else (2,):  # SGD is here for the last line only
        found = train(build, run(tokens), b)["table"]
        np.testing.assert_allclose(found, dense, rtol=1e-5, atol=1e-7)
    assert np.allclose(found, keras_table, atol=1e-6) == (optimizer == "sgd")


# Methods of the model's own.


class OwnMetrics(keras.Sequential):
    """Metrics that the model holds, and logs of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest, self.average = (
            keras.metrics.RootMeanSquaredError("held"),
            keras.metrics.Mean("average"),
        )

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(y, y_pred)
        self.average.update_state(ops.mean(x))  # one number for each batch
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"twice": 2 * logs["mae"], "bias": ops.mean(y_pred - y)}

    def get_metrics_result(self):
        return super().get_metrics_result() | {"one": ops.ones(())}


def test_own_metrics():
    build = lambda: OwnMetrics([keras.Input([4]), keras.layers.Dense(1)])  # noqa: E731
    run = compiled_fit("sgd", "mse", metrics=["mae"], evaluates=True)
    plain, _ = assert_equal(build, run, 3)
    assert {"history held", "history average"} <= set(plain)

    def on_batch(model):
        model.compile("sgd", "mse", metrics=["mae"])
        logs = model.train_on_batch(X, Y, return_dict=True)
        return {f"log {name}": np.array(value) for name, value in logs.items()}

    plain, _ = assert_equal(build, on_batch, 3)
    assert {"log twice", "log bias", "log one"} <= set(plain)


class OwnEvaluation(keras.Sequential):
    def test_step(self, data):
        return super().test_step(data) | {"mine": ops.ones(()) * 3}

    def predict_step(self, data):
        return super().predict_step(data) + ops.sum(data[0])  # of the whole batch


def test_own_evaluation_runs_as_it_is():
    def run(model):
        model.compile("sgd", "mse")
        fitted = model.fit(X, Y, validation_data=(X, Y), **FIT)
        return history(fitted) | {"predicted": model.predict(X, batch_size=8, verbose=0)}

    plain, _ = assert_equal(
        lambda: OwnEvaluation([keras.Input([4]), keras.layers.Dense(1)]), run, 3
    )
    assert "history val_loss" in plain


class OwnLoss(keras.Sequential):
    """A compute_loss that adds to Keras' own, regularization included."""

    reduce = staticmethod(ops.mean)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean("tracked")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        errors = ops.sum((y - y_pred) ** 2, axis=-1)
        if sample_weight is not None:
            errors = errors * sample_weight
        loss = type(self).reduce(errors) + ops.sum(self.losses)
        self.tracker.update_state(type(self).reduce(errors))
        return loss


class SumLoss(OwnLoss):
    reduce = staticmethod(ops.sum)


class MoreThanTheLoss(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(ops.abs(x)) * ops.mean(
            ops.ones_like(y)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"), [(OwnLoss, (1, 8)), (SumLoss, (1,)), (MoreThanTheLoss, ())]
)
def test_own_loss(model, sizes):
    def layers():
        return [
            keras.Input([4]),
            keras.layers.Dense(3, "tanh", kernel_regularizer=None if model is SumLoss else "l2"),
            keras.layers.Dense(1),
        ]

    fit = FIT | {"sample_weight": np.linspace(0.5, 2, 19)}
    loss = "mse" if model is MoreThanTheLoss else None
    said = "sum" if model is SumLoss else "mean"
    for evaluates, some in [(True, (3,)), (False, sizes)]:
        if some:
            run = compiled_fit(keras.optimizers.SGD(0.01), loss, fit=fit, evaluates=evaluates)
            assert_equal(lambda: model(layers()), run, *some, batch_losses=said)


class WholeBatch(keras.losses.Loss):
    """A loss that reduces by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum((y_true - y_pred) ** 2)


@pytest.mark.parametrize("loss", [lambda y, p: ops.mean((y - p) ** 2), WholeBatch(), [scalar_mae, "mse"]],
                         ids=["a function", "an object", "beside another"])  # fmt: skip
# In float32 a bias differs by 1e-5
def test_losses_that_give_one_number_for_a_batch(loss, float64):
    def build():
        if not isinstance(loss, list):
            return sequential(keras.layers.Dense(3, "tanh", activity_regularizer="l2"))
        inputs = keras.Input([4])
        return keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])

    x, one = X.astype("float64"), Y.astype("float64")
    y = [one, one + 1] if isinstance(loss, list) else one
    # See "What is equal": losses of single outputs
    fit = FIT | {"batch_size": 19} if isinstance(loss, list) else FIT
    run = compiled_fit(keras.optimizers.SGD(0.01), loss, x=x, y=y, fit=fit)
    # Keras computes the metrics of History and of `evaluate` in float32.
    assert_equal(build, run, 1, 3, rtol=1e-6)


class Total(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(y_pred)


class RootAboveOne(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.sqrt(y_pred - 1))


class Product(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(y_pred * y_true)


SUMS = {
    "parts cancel": (Total(), lambda **options: keras.layers.LayerNormalization(**options)),
    "zero": (
        Product(),
        lambda **options: keras.layers.Dense(1, kernel_initializer="zeros", **options),
    ),
    "not near by": (
        RootAboveOne(),
        lambda **options: keras.layers.Dense(1, lambda x: 1.5 + ops.sigmoid(x) / 9, **options),
    ),
    "half precision": (
        Total(),
        lambda **options: keras.layers.Dense(
            7, dtype="float16", bias_initializer=keras.initializers.Constant(30.7), **options
        ),
    ),
}


@pytest.mark.parametrize(
    ("kinds", "rtol"), [(["parts cancel", "zero", "not near by"], 1e-5), (["half precision"], 5e-3)]
)
def test_a_sum_is_told_from_a_mean_wherever_it_is_defined(kinds, rtol):
    """Each kind has a branch of its own, so that the branch's weights tell which kind is wrong."""
    losses = [SUMS[kind][0] for kind in kinds]

    def build():
        inputs = keras.Input([4])
        names = [kind.replace(" ", "_") for kind in kinds]
        hidden = [keras.layers.Dense(64, name=f"{name}_hidden")(inputs) for name in names]
        return keras.Model(
            inputs,
            [
                SUMS[kind][1](name=name)(h)
                for kind, name, h in zip(kinds, names, hidden, strict=True)
            ],
        )

    y = [Y] * len(kinds) if len(kinds) > 1 else Y
    run = compiled_fit(keras.optimizers.SGD(0.01), losses, y=y, fit=FIT | {"batch_size": 19})
    assert_equal(build, run, 3, rtol=rtol, but=["loss"])


def test_a_loss_that_is_no_tensor():
    def run(model):
        model.compile("adam", lambda y, y_pred: 0)
        return history(model.fit(X, Y, **FIT))

    assert_equal(
        lambda: keras.Sequential([keras.Input([4]), keras.layers.Activation("tanh")]), run, 3
    )


def test_own_loss_of_several_parts():
    """Keras' own compute_loss, called with two outputs, has a metric for each."""

    class Twice(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return super().compute_loss(x, y, [y_pred, 2 * y_pred], sample_weight)

    build = lambda: Twice([keras.Input([4]), keras.layers.Dense(1)])  # noqa: E731
    run = compiled_fit(
        "sgd", ["mse", "mae"], y=(Y, Y + 1), fit=FIT | {"batch_size": 19}, evaluates=True
    )
    # Eagerly, Keras weights an output's loss over the ragged tail of an evaluation in another way.
    plain, _ = assert_equal(build, run, 3, eager=False, batch_losses="mean")
    assert {"history mse_loss", "history mae_loss"} <= set(plain)


def test_own_loss_eagerly():
    build = lambda: OwnLoss([keras.Input([4]), keras.layers.Dense(1)])  # noqa: E731
    assert_equal(
        build,
        compiled_fit("sgd", run_eagerly=True, fit=FIT | {"epochs": 1}, evaluates=True),
        3,
        batch_losses="mean",
    )


def test_own_loss_with_random_numbers():
    """As in a variational autoencoder: the noise is drawn in call, and compute_loss is a mean."""

    class Sampled(OwnLoss):
        def call(self, x, training=False):
            y = super().call(x, training=training)
            return y + keras.random.normal(ops.shape(y), seed=self.seed) if training else y

    def build():
        model = Sampled([keras.Input([4]), keras.layers.Dense(1)])
        model.seed = keras.random.SeedGenerator(1)
        return model

    assert_equal(build, compiled_fit("sgd", fit=FIT | {"batch_size": 19}), 19, batch_losses="mean")
    small = train(build, compiled_fit("sgd"), 3, batch_losses="mean")
    assert np.isfinite(small["history loss"]).all()


def test_own_loss_that_is_no_mean_and_no_sum():
    class Contrasts(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return ops.mean((y_pred - ops.mean(y_pred)) ** 2)

    model = gradlab.microbatched(
        Contrasts([keras.Input([4]), keras.layers.Dense(1)]), 4, batch_losses="mean"
    )
    model.compile("sgd")
    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"^compute_loss must be a mean over the examples.*Received: \S+ "
    ):
        model.fit(X, Y, **FIT)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


# Kinds of data and of arguments.


def test_train_on_batch_eagerly_with_arrays():
    def run(model):
        model.compile("sgd", "mse", run_eagerly=True)
        logs = [model.train_on_batch(X, Y), model.test_on_batch(X, Y)]
        return {"logs": np.array(logs), "predicted": model.predict_on_batch(X)}

    assert_equal(sequential, run, 4)


def of_sparse(x):
    def run(model):
        model.compile("sgd", "mse")
        results = history(model.fit(x, Y, **FIT))
        return results | {"predicted": model.predict(x, batch_size=8, verbose=0)}

    return run


SPARSE = np.where(np.abs(X) > 0.5, X, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "x", [scipy.sparse.csr_matrix(SPARSE), tf.sparse.from_dense(SPARSE)], ids=["scipy", "tf"]
)
def test_sparse_data(x):
    build = lambda: keras.Sequential([keras.Input([4], sparse=True), keras.layers.Dense(1)])  # noqa: E731
    assert_equal(build, of_sparse(x), 3)


class Pooled(keras.Model):
    """Takes ragged tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.out = keras.layers.Embedding(9, 3), keras.layers.Dense(1)

    def call(self, tokens):
        flat = self.table(tokens.values)
        return self.out(tf.reduce_mean(tokens.with_values(flat), axis=1))


def test_ragged_data():
    tokens = tf.RaggedTensor.from_row_lengths(
        GENERATOR.integers(0, 9, 190), [1 + i for i in range(19)]
    )
    assert_equal(Pooled, of_sparse(tokens), 3)


def test_a_cross_entropy_by_the_shapes():
    """Of one, two and three outputs, by the shape of which Keras chooses the function."""

    def build():
        inputs = keras.Input([4])
        activations = {1: "sigmoid", 2: "softmax", 3: "softmax"}
        heads = [
            keras.layers.Dense(units, kind, name=f"of_{units}")
            for units, kind in activations.items()
        ]
        return keras.Model(inputs, [head(inputs) for head in heads])

    y = [GENERATOR.integers(0, classes, (19, 1)) for classes in (2, 2, 3)]
    # One batch an epoch: see "What is equal" on the losses of single outputs over a ragged tail.
    fit = FIT | {"batch_size": 19}
    assert_equal(
        build,
        compiled_fit("sgd", ["crossentropy"] * 3, metrics=[["accuracy"]] * 3, y=y, fit=fit),
        3,
    )


def test_arguments_of_compile_by_position():
    assert_equal(sequential, compiled_fit("sgd", "mse", None, ["mae"], ["mse"]), 3)


def test_a_model_with_nothing_to_train():
    def build():
        model = sequential(keras.layers.Dropout(0.0))
        model.trainable = False
        return model

    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        assert_equal(build, compiled_fit("sgd", "mse", metrics=["mae"]), 3)


def test_window_gradients_of_keras_variables():
    dense = keras.layers.Dense(1)
    dense.build([None, 4])
    loss = lambda part, number: ops.sum((dense(part[0]) - part[1]) ** 2, axis=-1)  # noqa: E731

    @tf.function(autograph=False)
    def both():
        kinds = dense.trainable_weights, [v.value for v in dense.trainable_weights]
        return [
            window.window_gradients(loss, kind, (X, Y), tf.ones(19), 4).gradients for kind in kinds
        ]

    for one, other in zip(*both(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_predictions_of_every_shape():
    class Several(keras.Model):
        def call(self, x):
            rows = ops.reshape(x, (-1, 2))  # two rows for each example
            return {"x": x, "rows": rows, "both": [x[:, 0], x[:, None, :]]}

    class Whole(keras.Model):
        def call(self, x):
            return x, ops.mean(x, keepdims=True)  # of the whole batch

    for model in (Several(), Whole()):
        plain = model.predict(X, batch_size=8, verbose=0)
        small = gradlab.microbatched(model, 3).predict(X, batch_size=8, verbose=0)
        for one, other in zip(tf.nest.flatten(plain), tf.nest.flatten(small), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


# Refusals.


def test_refusals():
    stateful = keras.Sequential(
        [keras.Input(batch_shape=[8, 3, 2]), keras.layers.LSTM(2, stateful=True, name="lstm")]
    )
    gradlab.microbatched(stateful, 4).compile("sgd", "mse")
    sentence = r"^lstm must not be stateful: it keeps a state .*Received: stateful=True$"
    for call in (
        lambda: stateful.fit(np.ones((8, 3, 2)), np.ones((8, 2)), batch_size=8, verbose=0),
        lambda: stateful.evaluate(np.ones((8, 3, 2)), np.ones((8, 2)), batch_size=8, verbose=0),
        lambda: stateful.predict(np.ones((8, 3, 2)), batch_size=8, verbose=0),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    quantized = sequential(units=4)
    quantized.quantize("float8")
    gradlab.microbatched(quantized, 4).compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"^Variables must not be overwritten .* Received: \S*scale"
    ):
        quantized.fit(X, np.ones((19, 4)), **FIT)


def test_the_comparison_sees_a_difference():
    plain = train(sequential, compiled_fit(evaluates=True))
    other = train(sequential, compiled_fit(fit=FIT | {"batch_size": 9}, evaluates=True))
    assert len(differences(plain, other, 1e-5)) > 3


class Measures(keras.layers.Layer):
    """Updates a metric of its own in its call."""

    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean("size")

    def call(self, x):
        self.size.update_state(ops.abs(x))
        return x


def test_a_metric_inside_a_layer_beside_one_that_is_created_for_the_first_predictions():
    run = compiled_fit(keras.optimizers.SGD(0.01), "mse", metrics=[keras.metrics.R2Score()])
    plain, _ = assert_equal(lambda: sequential(Measures()), run, 3)
    assert "history size" in plain

"""Every layer of Keras that has weights or draws random numbers, trained as it is and in
micro-batches.

A layer that a later release of Keras adds must be put into one of the tables below: a test names
it. The layers that cannot be equal also stand in docs/equality.md.
"""

import inspect
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from large_batch import OPTIMIZERS
from paths import ROOT
from plain_and_microbatched import assert_equal, differences, history, train

L = keras.layers
VECTOR, SEQUENCE, IMAGE, VOLUME, MOVIE, FILM = (
    (6,),
    (5, 4),
    (6, 6, 3),
    (4, 4, 4, 2),
    (3, 5, 5, 2),
    (2, 3, 3, 3, 2),
)

EQUAL = {
    "ActivityRegularization": (lambda: L.ActivityRegularization(0.1, 0.1), VECTOR),
    "AdditiveAttention": (lambda: On(L.AdditiveAttention(), as_list=True), SEQUENCE),
    "Attention": (lambda: On(L.Attention(use_scale=True), as_list=True), SEQUENCE),
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(3)), SEQUENCE),
    "Conv1D": (lambda: L.Conv1D(3, 2), SEQUENCE),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(3, 2), SEQUENCE),
    "Conv2D": (lambda: L.Conv2D(3, 2), IMAGE),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(3, 2), IMAGE),
    "Conv3D": (lambda: L.Conv3D(3, 2), VOLUME),
    "Conv3DTranspose": (lambda: L.Conv3DTranspose(3, 2), VOLUME),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(2, 2), (3, 5, 2)),
    "ConvLSTM2D": (lambda: L.ConvLSTM2D(2, 2), MOVIE),
    "ConvLSTM3D": (lambda: L.ConvLSTM3D(2, 2), FILM),
    "Dense": (lambda: L.Dense(3, "tanh", kernel_regularizer="l2"), VECTOR),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(2), SEQUENCE),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(2), IMAGE),
    "EinsumDense": (lambda: L.EinsumDense("btc,cd->btd", (5, 3), bias_axes="d"), SEQUENCE),
    "Embedding": (lambda: L.Embedding(9, 3), "tokens"),
    "GRU": (lambda: L.GRU(3), SEQUENCE),
    "GRUCell": (lambda: L.RNN(L.GRUCell(3)), SEQUENCE),
    "GroupNormalization": (lambda: L.GroupNormalization(3), IMAGE),
    # The bias of keys has a gradient of zero but for rounding, of which a relative error would say
    # nothing.
    "GroupedQueryAttention": (lambda: On(L.GroupQueryAttention(2, 4, 2, use_bias=False)), SEQUENCE),
    "LSTM": (lambda: L.LSTM(3), SEQUENCE),
    "LSTMCell": (lambda: L.RNN(L.LSTMCell(3)), SEQUENCE),
    "LayerNormalization": (lambda: L.LayerNormalization(), SEQUENCE),
    "MultiHeadAttention": (lambda: On(L.MultiHeadAttention(2, 3, use_bias=False)), SEQUENCE),
    "Normalization": (lambda: L.Normalization(mean=0.5, variance=2.0), VECTOR),
    "PReLU": (lambda: L.PReLU(), VECTOR),
    "RMSNormalization": (lambda: L.RMSNormalization(), SEQUENCE),
    "RNN": (lambda: L.RNN([L.SimpleRNNCell(3), L.GRUCell(2)]), SEQUENCE),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(9, 3), "tokens"),
    "SeparableConv1D": (lambda: L.SeparableConv1D(3, 2), SEQUENCE),
    "SeparableConv2D": (lambda: L.SeparableConv2D(3, 2), IMAGE),
    "SimpleRNN": (lambda: L.SimpleRNN(3), SEQUENCE),
    "SimpleRNNCell": (lambda: L.RNN(L.SimpleRNNCell(3)), SEQUENCE),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(3)), VECTOR),
    "StackedRNNCells": (lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(2), L.LSTMCell(3)])), SEQUENCE),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(3)), SEQUENCE),
}

# Layers that draw random numbers in training: equal if one micro-batch holds the batch, and not
# otherwise.
RANDOM = {
    "AlphaDropout": (lambda: L.AlphaDropout(0.5), VECTOR),
    "CutMix": (lambda: L.CutMix(), IMAGE),
    "Dropout": (lambda: L.Dropout(0.5), VECTOR),
    "GaussianDropout": (lambda: L.GaussianDropout(0.5), VECTOR),
    "GaussianNoise": (lambda: L.GaussianNoise(1.0), VECTOR),
    "MixUp": (lambda: L.MixUp(), IMAGE),
    "RandAugment": (lambda: L.RandAugment(), IMAGE),
    "RandomBrightness": (lambda: L.RandomBrightness(0.5), IMAGE),
    "RandomColorDegeneration": (lambda: L.RandomColorDegeneration(0.9), IMAGE),
    "RandomColorJitter": (lambda: L.RandomColorJitter(brightness_factor=0.5), IMAGE),
    "RandomContrast": (lambda: L.RandomContrast(0.9), IMAGE),
    "RandomCrop": (
        lambda: keras.Sequential([L.RandomCrop(3, 3), L.GlobalAveragePooling2D()]),
        IMAGE,
    ),
    "RandomElasticTransform": (lambda: L.RandomElasticTransform(factor=1.0, scale=1.0), IMAGE),
    "RandomErasing": (lambda: L.RandomErasing(factor=1.0), IMAGE),
    "RandomFlip": (lambda: L.RandomFlip(), IMAGE),
    "RandomGaussianBlur": (lambda: L.RandomGaussianBlur(factor=1.0), IMAGE),
    "RandomGrayscale": (lambda: L.RandomGrayscale(0.5), IMAGE),
    "RandomHue": (lambda: L.RandomHue(0.5), IMAGE),
    "RandomInvert": (lambda: L.RandomInvert(0.5), IMAGE),
    "RandomPerspective": (lambda: L.RandomPerspective(1.0), IMAGE),
    "RandomPosterization": (lambda: L.RandomPosterization(4, value_range=(0, 2)), IMAGE),
    "RandomRotation": (lambda: L.RandomRotation(0.4), IMAGE),
    "RandomSaturation": (lambda: L.RandomSaturation(0.9), IMAGE),
    "RandomSharpness": (lambda: L.RandomSharpness(0.9), IMAGE),
    "RandomShear": (lambda: L.RandomShear(0.4, 0.4), IMAGE),
    "RandomTranslation": (lambda: L.RandomTranslation(0.4, 0.4), IMAGE),
    "RandomZoom": (lambda: L.RandomZoom(0.4), IMAGE),
    "Solarization": (
        lambda: L.Solarization(addition_factor=0.9, threshold_factor=0.5, value_range=(0, 2)),
        IMAGE,
    ),
    "SpatialDropout1D": (lambda: L.SpatialDropout1D(0.5), SEQUENCE),
    "SpatialDropout2D": (lambda: L.SpatialDropout2D(0.5), IMAGE),
    "SpatialDropout3D": (lambda: L.SpatialDropout3D(0.5), VOLUME),
}

# BatchNormalization depends on the other examples of a batch. AugMix chooses its operations with
# Python's `random` when it is traced, so even two plain models can differ.
UNEQUAL = {"BatchNormalization": (L.BatchNormalization, VECTOR), "AugMix": (L.AugMix, IMAGE)}

# Layers without weights and randomness, base classes, and layers that need another framework or a
# file.
NEITHER = {
    "Activation", "AdaptiveAveragePooling1D", "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D",
    "AdaptiveMaxPooling1D", "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D", "Add", "AutoContrast", "Average",
    "AveragePooling1D", "AveragePooling2D", "AveragePooling3D", "CategoryEncoding", "CenterCrop", "Concatenate",
    "ContrastLimitedAdaptiveHistogramEqualization", "Cropping1D", "Cropping2D", "Cropping3D", "Discretization",
    "Dot", "ELU", "Equalization", "Flatten", "FlaxLayer", "GlobalAveragePooling1D", "GlobalAveragePooling2D",
    "GlobalAveragePooling3D", "GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D", "HashedCrossing",
    "Hashing", "Identity", "InputLayer", "IntegerLookup", "JaxLayer", "Lambda", "Layer", "LeakyReLU", "Masking",
    "MaxNumBoundingBoxes", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "Maximum", "MelSpectrogram", "Minimum",
    "Multiply", "Permute", "Pipeline", "ReLU", "RepeatVector", "Rescaling", "Reshape", "Resizing",
    "STFTSpectrogram", "Softmax", "StringLookup", "Subtract", "TFSMLayer", "TextVectorization",
    "TorchModuleWrapper", "UnitNormalization", "UpSampling1D", "UpSampling2D", "UpSampling3D", "Wrapper",
    "ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D",
}  # fmt: skip


class On(L.Layer):
    """Calls a layer, such as attention, with its input as queries and as values."""

    def __init__(self, layer, as_list=False):
        super().__init__()
        self.layer, self.as_list, self.supports_masking = layer, as_list, True

    def build(self, shape):
        self.layer.build([shape, shape]) if self.as_list else self.layer.build(shape, shape)

    def call(self, x):
        return self.layer([x, x]) if self.as_list else self.layer(x, x)


def scalar(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


LOSSES = [
    "mse",
    "mae",
    "huber",
    "log_cosh",
    "cosine_similarity",
    keras.losses.MeanSquaredError(reduction="sum"),
]
METRICS = [
    "mae",
    scalar,
    keras.metrics.MeanSquaredError,
    keras.metrics.RootMeanSquaredError,
    "cosine_similarity",
]
# With an Embedding, Keras gives optimizers a gradient's rows one by one; SGD does not mind
SQUARES_ROWS = "tokens"


def compiled(model, optimizer=None, loss="mse", metrics=("mae",)):
    made = OPTIMIZERS[optimizer]() if optimizer else keras.optimizers.SGD(0.05)
    model.compile(made, loss, metrics=[one() if inspect.isclass(one) else one for one in metrics])


def program(entry, masked=False, batch_size=7, **compile_with):
    """A model with the layer, and data for it, as (build, run)."""
    make, shape = entry
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (7, 5)) * (np.arange(5) < rng.integers(1, 6, (7, 1)))
    x = (
        tokens
        if shape == "tokens" or masked
        else rng.uniform(0, 2, (7, *shape)).astype(keras.config.floatx())
    )

    def build():
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        hidden = L.Embedding(9, 4, mask_zero=True)(inputs) if masked else inputs
        hidden = make()(hidden)
        return keras.Model(inputs, L.Dense(2)(hidden if masked else L.Flatten()(hidden)))

    def run(model):
        compiled(model, **compile_with)
        y = np.random.default_rng(len(model.weights)).normal(size=(7, *model.output_shape[1:]))
        fitted = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return history(fitted) | {"predicted": model.predict(x, verbose=0)}

    return build, run


def test_every_layer_is_in_one_table():
    tables = [set(EQUAL), set(RANDOM), set(UNEQUAL), NEITHER]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    exported = {
        value.__name__ for _, value in inspect.getmembers(L, inspect.isclass) if issubclass(value, L.Layer)
    }  # fmt: skip
    assert exported - set(names) == set(), "put these layers into a table"


def test_the_docs_name_every_layer_that_cannot_be_equal():
    page = (ROOT / "docs/equality.md").read_text()
    missing = [name for name in [*RANDOM, *UNEQUAL] if f"`{name}`" not in page]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_layers_with_weights(name, float64):
    """With a loss, metrics, an optimizer and sizes that are drawn at random for each layer."""
    draw, entry = random.Random(name), EQUAL[name]
    build, run = program(
        entry,
        batch_size=draw.randint(2, 7),
        optimizer="sgd"
        if entry[1] == SQUARES_ROWS
        else draw.choice(sorted(set(OPTIMIZERS) - {"lion"})),
        loss=draw.choice(LOSSES),
        metrics=draw.sample(METRICS, 2),
    )
    assert_equal(build, run, draw.randint(1, 4), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: L.LSTM(3, return_sequences=True),
        lambda: L.GRU(3, return_sequences=True, reset_after=False),
        lambda: L.Bidirectional(L.SimpleRNN(3, return_sequences=True)),
        lambda: L.TimeDistributed(L.Dense(3)),
        lambda: On(L.MultiHeadAttention(2, 3, use_bias=False)),
    ],
    ids=["LSTM", "GRU", "Bidirectional", "TimeDistributed", "MultiHeadAttention"],
)
def test_layers_with_a_mask(make):
    assert_equal(*program((make, SEQUENCE), masked=True), 3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_layers_that_draw_random_numbers(name):
    """In micro-batches of three: batches of three are equal, and a batch of seven is not."""
    build, _ = program(RANDOM[name])
    x = np.random.default_rng(0).uniform(0, 2, (7, *RANDOM[name][1])).astype("float32")

    def run(model):
        compiled(model)
        y = np.random.default_rng(1).normal(size=(7, *model.output_shape[1:]))
        examples = tf.data.Dataset.from_tensor_slices((x, y))
        batches = [part.batch(7) for part in (examples.take(3), examples.skip(4), examples)]
        seen = {}

        def remember(batch, logs):
            state = {v.path: v.numpy() for v in [*model.weights, *model.optimizer.variables]}
            seen.update({f"{batch} {key}": value for key, value in (state | logs).items()})

        after_each = keras.callbacks.LambdaCallback(on_train_batch_end=remember)
        model.fit(
            batches[0].concatenate(batches[1]).concatenate(batches[2]),
            callbacks=[after_each],
            verbose=0,
        )
        return seen

    # Keras computes this layer in another way if the size of the batch is known, as it is eagerly.
    plain = train(build, run, eager=name != "RandomElasticTransform")
    small = train(build, run, 3)

    def after(batches):
        parts = [
            {key: one[key] for key in one if key.startswith(batches)} for one in (plain, small)
        ]
        return differences(*parts, 1e-4)

    found = after(("0 ", "1 "))
    assert not found, "\n".join(found)
    assert after(("2 ",))


@pytest.mark.slow
def test_batch_normalization_depends_on_the_other_examples():
    build, run = program(UNEQUAL["BatchNormalization"])
    with pytest.warns(UserWarning, match="normalizes each micro-batch"):
        plain, _ = assert_equal(build, run, 7, rtol=1e-4)
        assert differences(plain, train(build, run, 3), 1e-3)


CHAIN = [
    "Dense",
    "EinsumDense",
    "GRU",
    "LayerNormalization",
    "MultiHeadAttention",
    "TimeDistributed",
    "Conv1D",
    "LSTM",
]
NOISE = [L.Dropout, L.GaussianDropout, L.GaussianNoise, L.SpatialDropout1D]


@pytest.mark.slow
@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.sampled_from(
        [name for name in CHAIN if EQUAL[name][1] == SEQUENCE and name not in ("GRU", "LSTM")]
    ),
    second=st.sampled_from(
        [name for name in CHAIN if EQUAL[name][1] == SEQUENCE and name != "EinsumDense"]
    ),
    noise=st.none() | st.tuples(st.sampled_from(NOISE), st.none() | st.integers(0, 9)),
    masked=st.booleans(),
    loss=st.sampled_from(LOSSES),
    metrics=st.lists(st.sampled_from(METRICS), max_size=3, unique=True),
    optimizer=st.sampled_from([name for name in OPTIMIZERS if name != "lion"]),
    b=st.integers(1, 8),
    batch_size=st.integers(1, 9),
)
def test_random_models(
    first, second, noise, masked, loss, metrics, optimizer, b, batch_size, float64
):
    """Chains of layers with or without a mask. With noise, seeded or not, one micro-batch holds the
    batch."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, *SEQUENCE)), rng.normal(size=(9, 3))
    if masked:
        x[np.arange(5) >= rng.integers(1, 6, 9)[:, None]] = 0

    def build():
        inputs = keras.Input(SEQUENCE)
        hidden = L.Masking()(inputs) if masked else inputs
        hidden = EQUAL[first][0]()(hidden)
        if noise:
            hidden = noise[0](0.3, seed=noise[1])(hidden)
        hidden = EQUAL[second][0]()(hidden)
        return keras.Model(inputs, L.Dense(3)(L.Flatten()(hidden)))

    def run(model):
        compiled(model, optimizer, loss, metrics)
        fitted = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        # A training that diverges only compares rounding errors
        assume(np.isfinite(fitted.history["loss"]).all())
        return history(fitted)

    assert_equal(build, run, max(b, batch_size) if noise else b, rtol=2e-5)

"""ChunkedHead: training with it against the same model with a dense layer and Keras' loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab

CLASSES = 23
RNG = np.random.default_rng(0)
TEXTS = RNG.integers(1, CLASSES, size=(12, 7))
TEXTS[[0, 3, 8], 3:] = 0  # of which the embedding makes a mask
TEXTS[:, -1] = 0
X, Y = TEXTS[:, :-1], TEXTS[:, 1:]
WEIGHTS = RNG.uniform(0.5, 2, size=Y.shape)


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def models(tied=False, masks=True, chunk=5, **dense):
    """The same model with a dense layer, with a chunked head, and that head."""
    made = []
    for chunked in (False, True):
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(CLASSES, 4, mask_zero=masks)
        tokens = keras.Input([None], dtype="int32")
        hidden = keras.layers.Dense(4, "tanh")(embedding(tokens))
        if tied:
            head = gradlab.ChunkedHead(embedding, chunk)
            logits = keras.layers.Lambda(head.logits, mask=lambda x, mask: mask)
            output = head(hidden) if chunked else logits(hidden)
        else:
            layer = keras.layers.Dense(CLASSES, bias_initializer="normal", **dense)
            head = gradlab.ChunkedHead(layer, chunk)
            output = head(hidden) if chunked else layer(hidden)
        made.append(keras.Model(tokens, output))
    return [*made, head]


def trained(model, loss, size=None, metrics=(), rate=0.5, **data):
    """The weights after three updates, and the losses and metrics of each.

    Not with Adam: Keras squares the rows of an embedding's gradient one by one in the large batch.
    """
    if size is not None:
        model = gradlab.microbatched(model, size)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    # Without micro-batches, a trace would take longer than the updates
    model.compile(optimizer, loss, metrics=list(metrics), run_eagerly=size is None)
    data = {"sample_weight": None, "y": Y} | data
    history = model.fit(X, epochs=3, batch_size=12, shuffle=False, verbose=0, **data).history
    if metrics:
        history |= {"evaluated": model.evaluate(X, verbose=0, batch_size=12, **data)}
    return [weight.numpy() for weight in model.weights], history


def assert_same(found, wanted, tolerance=1e-12):
    for one, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, values in wanted[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=tolerance)


IGNORED = np.where(RNG.random(Y.shape) < 0.3, -1, Y)
CASES = {
    "a mask": ({}, {}, {}),
    "a tied embedding": ({"tied": True}, {}, {}),
    "without a bias": ({"use_bias": False, "chunk": CLASSES}, {}, {}),
    "weights": ({}, {}, {"sample_weight": WEIGHTS}),
    "an ignored class": ({"masks": False}, {"ignore_class": -1}, {"y": IGNORED}),
    "an ignored class and a mask": ({}, {"ignore_class": -1}, {"y": IGNORED}),
    "a sum": ({}, {"reduction": "sum"}, {}),
    "a mean by weights": (
        {}, {"reduction": "mean_with_sample_weight"}, {"sample_weight": WEIGHTS},
    ),
    "a regularizer": ({"kernel_regularizer": keras.regularizers.L2(0.1)}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_dense_layer(case):
    layers, options, data = CASES[case]
    dense, *_ = models(**layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    wanted = trained(dense, loss, metrics=["accuracy"], **data)
    for size in (None, 5) if case == "a mask" else (5,):
        _, model, head = models(**layers)
        metrics = [] if size is None else [head.accuracy()]
        found = trained(model, head.loss(**options), size, metrics, **data)
        assert_same(found, (wanted[0], {name: wanted[1][name] for name in found[1]}))


def test_smoothed_labels():
    dense, *_ = models()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    wanted = trained(dense, loss, y=np.eye(CLASSES)[Y])
    _, model, head = models()
    assert_same(trained(model, head.loss(label_smoothing=0.1), 5), wanted)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    losses = []
    for chunked in (False, True):
        dense, model, head = models()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found = trained(*((model, head.loss(), 4) if chunked else (dense, loss)))
        losses.append(found[1]["loss"])
    tolerance = {"mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}[policy]
    np.testing.assert_allclose(*losses, rtol=tolerance)


def test_low_rank_adapters():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    results = []
    for chunked in (False, True):
        dense, model, head = models()
        layer = head.head if chunked else dense.layers[-1]
        keras.utils.set_random_seed(1)
        layer.enable_lora(2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        case = (model, head.loss(), 5) if chunked else (dense, loss)
        results.append(trained(*case, rate=0.05))
    assert_same(*results[::-1], tolerance=1e-5)


def test_the_trainer_takes_it():
    dense, *_ = models()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    wanted = trained(dense, loss)[0]
    _, model, head = models()
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    trainer = gradlab.Trainer(model, optimizer, head.loss(), microbatch_size=5)
    batch = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
    trainer.fit(batch, updates=3, verbose=0)
    for one, other in zip(model.weights, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_the_chunk_is_a_part_of_the_vocabulary_if_none_is_given():
    assert gradlab.ChunkedHead(keras.layers.Dense(32_768)).chunk == 1024
    assert gradlab.ChunkedHead(keras.layers.Dense(33)).chunk == 2


def test_logits_are_those_of_the_dense_layer():
    for tied in (False, True):
        dense, model, head = models(tied)
        np.testing.assert_allclose(head.logits(model(X)), dense(X), rtol=1e-12)


def test_a_model_is_saved_without_its_loss(tmp_path):
    _, model, head = models()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    [layer] = [each for each in again.layers if isinstance(each, gradlab.ChunkedHead)]
    assert layer.chunk == 5
    np.testing.assert_allclose(layer.logits(again(X)), head.logits(model(X)), rtol=1e-12)
    again.compile("sgd", layer.loss())
    again.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="belongs to the layer of one model"):
        again.save(tmp_path / "compiled.keras")


def test_a_wrong_label_is_refused_before_the_update():
    _, model, head = models()
    labels = Y.copy()
    labels[0, 0] = CLASSES
    with pytest.raises(ValueError, match=f"labels must be classes from 0 to {CLASSES - 1}"):
        trained(model, head.loss(), 5, y=labels)


@pytest.mark.parametrize(
    "metrics", [["accuracy"], [keras.metrics.SparseCategoricalAccuracy()], ["mae"]]
)
def test_a_metric_that_would_take_hidden_states_for_logits_is_refused(metrics):
    _, model, head = models()
    with pytest.raises(ValueError, match="metrics of a model with a ChunkedHead must be its `acc"):
        trained(model, head.loss(), 5, metrics)


@pytest.mark.parametrize(
    ("head", "chunk", "said"),
    [
        (lambda: keras.layers.Conv1D(9, 1), 1, "head must be a keras.layers.Dense without"),
        (lambda: keras.layers.Dense(9, "softmax"), 1, "Received: an activation, softmax"),
        (
            lambda: keras.layers.Dense(9, activity_regularizer="l2"), 1,
            "Received: an activity_regularizer",
        ),
        (
            lambda: keras.layers.ReversibleEmbedding(9, 4, tie_weights=False), 1,
            "Received: an embedding with tie_weights=False",
        ),
        (
            lambda: keras.layers.ReversibleEmbedding(9, 4, logit_soft_cap=30), 1,
            "Received: an embedding with logit_soft_cap=30",
        ),
        (lambda: keras.layers.Dense(9, dtype="int8_from_float32"), 1, "Received: a quantized"),
        (lambda: keras.layers.Dense(9), 10, "at most the size of the vocabulary, 9. Received: 10"),
        (lambda: keras.layers.Dense(9), 0, "chunk must be None or a positive integer. Received: 0"),
    ],
)  # fmt: skip
def test_bad_arguments(head, chunk, said):
    if "an embedding" in said and not hasattr(keras.layers, "ReversibleEmbedding"):
        pytest.skip("new in Keras 3.13")
    with pytest.raises(ValueError, match=said):
        gradlab.ChunkedHead(head(), chunk)

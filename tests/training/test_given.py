"""Windows of `gradlab.token_batches` in `fit` and in a `Trainer`, against Keras on the padded batch."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab import Trainer, microbatched, token_batches

GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(1, 20, 24)
TEXTS = tf.RaggedTensor.from_row_lengths(GENERATOR.integers(1, 9, sum(LENGTHS)), LENGTHS)
NEXT = tf.RaggedTensor.from_row_splits(GENERATOR.integers(1, 9, sum(LENGTHS)), TEXTS.row_splits)
CLASSES = tf.constant(GENERATOR.integers(0, 9, 24))
WEIGHTS = TEXTS.with_values(tf.constant(GENERATOR.uniform(0.1, 2.0, sum(LENGTHS)), tf.float32))
PADDED = TEXTS.to_tensor()

losses = keras.losses
crossentropy = losses.SparseCategoricalCrossentropy


class Traced(keras.layers.Layer):
    """Remembers how often it was traced, and for which sizes."""

    def __init__(self):
        super().__init__()
        self.supports_masking, self.sizes = True, []

    def call(self, x):
        self.sizes.append(tuple(x.shape))
        return x


def network(per_token=True, masked=True, added=None):
    keras.utils.set_random_seed(1)
    tokens = keras.Input([None], dtype="int64")
    hidden = keras.layers.Embedding(9, 6, mask_zero=masked)(tokens)
    hidden = keras.layers.GRU(6, return_sequences=per_token)(Traced()(hidden))
    if added is not None:
        hidden = keras.layers.ActivityRegularization(added)(hidden)
    return keras.Model(tokens, keras.layers.Dense(9, name="next")(hidden))


def two_heads():
    model = network()
    pooled = keras.layers.GlobalAveragePooling1D()(model.layers[-2].output)
    return keras.Model(model.inputs, [model.output, keras.layers.Dense(1, name="whole")(pooled)])


def one_number_a_token():
    model = network()
    return keras.Model(model.inputs, keras.ops.squeeze(keras.layers.Dense(1)(model.layers[-2].output), -1))


def windows(*parts, tokens=40, sort_within=12):
    return token_batches(tf.data.Dataset.from_tensor_slices(parts), tokens, sort_within)


def difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one.get_weights(), other.get_weights()))


def info_nce(y, y_pred):
    unit = tf.math.l2_normalize(y_pred, -1)
    return tf.nn.softmax_cross_entropy_with_logits(tf.eye(tf.shape(unit)[0]), tf.matmul(unit, unit, transpose_b=True))


# For each case: how to build the model, (x, y, sample_weight) as texts, the loss, and the arguments of `compile`.
CASES = {
    "masked tokens": (network, (TEXTS, NEXT), crossentropy(True), {"metrics": ["accuracy"]}),
    "ignore_class": (lambda: network(masked=False), (TEXTS, NEXT), crossentropy(True, ignore_class=0), {}),
    "weights": (
        lambda: network(masked=False),
        (TEXTS, NEXT, WEIGHTS),
        crossentropy(True, reduction="mean_with_sample_weight"),
        {"weighted_metrics": ["accuracy"]},
    ),
    "mask and weights": (network, (TEXTS, NEXT, WEIGHTS), crossentropy(True), {"weighted_metrics": ["accuracy"]}),
    "a sum": (network, (TEXTS, NEXT), crossentropy(True, reduction="sum"), {"optimizer": keras.optimizers.SGD(0.01)}),
    "one label each": (lambda: network(False), (TEXTS, CLASSES), crossentropy(True), {"metrics": ["accuracy"]}),
    "weighted texts": (
        lambda: network(False), (TEXTS, CLASSES, tf.linspace(0.5, 1.5, 24)), crossentropy(True), {}
    ),
    "two losses": (
        two_heads,
        (TEXTS, (NEXT, tf.cast(CLASSES[:, tf.newaxis], tf.float32))),
        [crossentropy(True), "mse"],
        {"loss_weights": [1.0, 0.1]},
    ),
    "the whole batch": (lambda: network(False), (TEXTS, CLASSES), info_nce, {}),
}  # fmt: skip


def padded(parts):
    return [
        tf.nest.map_structure(lambda one: one.to_tensor() if isinstance(one, tf.RaggedTensor) else one, part)
        for part in parts
    ]


@pytest.mark.parametrize("case", CASES)
def test_fit_equals_keras_on_the_padded_batch(case):
    build, parts, loss, options = CASES[case]
    optimizer = options.get("optimizer", keras.optimizers.SGD(0.5)).get_config()
    options = {name: value for name, value in options.items() if name != "optimizer"}
    large, small = build(), microbatched(build(), "given")
    large.compile(keras.optimizers.SGD.from_config(optimizer), loss, **options)
    of_batch = gradlab.WholeBatch(loss) if loss is info_nce else loss
    small.compile(keras.optimizers.SGD.from_config(optimizer), of_batch, **options)
    batches = tf.data.Dataset.from_tensor_slices(tuple(padded(parts))).batch(12)
    expected = large.fit(batches, epochs=2, verbose=0).history
    found = small.fit(windows(*parts), epochs=2, verbose=0).history
    assert difference(small, large) < 1e-5 < difference(small, build())
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    result = small.evaluate(windows(*parts), verbose=0, return_dict=True)
    for name, value in large.evaluate(batches, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(result[name], value, rtol=1e-4)


def test_it_is_equal_in_float64(float64):
    large, small = network(), microbatched(network(), "given")
    for model in (large, small):
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), crossentropy(True))
    large.train_on_batch(PADDED, NEXT.to_tensor())
    small.fit(windows(TEXTS, NEXT, sort_within=24), verbose=0)
    assert difference(small, large) < 1e-12


def test_nothing_is_traced_again_for_other_lengths():
    model = microbatched(network(), "given")
    traced = next(layer for layer in model.layers if isinstance(layer, Traced))
    model.compile("sgd", crossentropy(True))
    model.fit(windows(TEXTS, NEXT, sort_within=3).take(1), verbose=0)
    before = len(traced.sizes)
    model.fit(windows(TEXTS, NEXT, sort_within=5), verbose=0, epochs=2)  # five windows, each of other shapes
    assert len(traced.sizes) == before and int(model.optimizer.iterations) == 11


def test_only_the_tokens_of_a_micro_batch_are_computed():
    sizes = []

    def noted(x):
        tf.py_function(lambda shape: sizes.append(tuple(shape.numpy())), [tf.shape(x)], [])
        return x

    tokens = keras.Input([None], dtype="int64")
    embedded = keras.layers.Embedding(9, 6, mask_zero=True)(tokens)
    hidden = keras.layers.Lambda(noted, output_shape=lambda shape: shape, mask=lambda x, mask: mask)(embedded)
    model = microbatched(keras.Model(tokens, keras.layers.Dense(9)(hidden)), "given")
    model.compile("sgd", crossentropy(True))
    model.fit(windows(TEXTS, NEXT), verbose=0)
    expected = [(*part.shape[:1], int(part.bounding_shape()[1]), 6) for x, _ in windows(TEXTS, NEXT) for part in x]
    assert sizes == expected and max(rows * width for rows, width, _ in sizes) <= 40 < 12 * 20


def test_steps_per_execution_validation_and_several_in_flight():
    whole, parts = windows(TEXTS, NEXT, sort_within=6), microbatched(network(), "given", in_flight=2)
    one = microbatched(network(), "given")
    one.compile("adam", crossentropy(True))
    parts.compile("adam", crossentropy(True), steps_per_execution=2)
    history = one.fit(whole, validation_data=whole, verbose=0).history
    found = parts.fit(whole, validation_data=whole, verbose=0).history
    assert history == found and difference(one, parts) == 0


def test_a_batch_that_is_not_cut_is_one_micro_batch():
    large, small = network(), microbatched(network(), "given")
    for model in (large, small):
        model.compile(keras.optimizers.SGD(0.5), crossentropy(True))
        model.fit(PADDED, NEXT.to_tensor(), batch_size=10, shuffle=False, verbose=0)
    assert difference(small, large) < 1e-6
    np.testing.assert_allclose(small.predict(PADDED, verbose=0), large.predict(PADDED, verbose=0), atol=1e-6)
    assert small.microbatch_size is None and small.in_flight == 1


def test_trainer_equals_keras_and_resumes_to_the_bit(tmp_path):
    large = network()
    large.compile(keras.optimizers.SGD(0.5), crossentropy(True))
    large.fit(PADDED, NEXT.to_tensor(), batch_size=12, shuffle=False, epochs=2, verbose=0)
    found = []
    for updates in (4, 1, 3, 4):  # at once; then stopped twice
        model = network()
        trainer = Trainer(model, keras.optimizers.SGD(0.5), crossentropy(True), "given")
        options = {} if not found else dict(checkpoint_dir=tmp_path, checkpoint_every=1)
        steps = trainer.fit(windows(TEXTS, NEXT), updates, verbose=False, **options)
        found.append(model)
    assert difference(found[0], large) < 1e-5 and difference(found[0], found[-1]) == 0
    assert (
        trainer.microbatch_size is None
        and len(steps[-1].losses) == next(iter(windows(TEXTS, NEXT).skip(1)))[0].shape[0]
    )


def test_trainer_weighs_by_weight_fn():
    models = [network(masked=False) for _ in range(2)]
    loss = crossentropy(True, reduction="mean_with_sample_weight")
    models[0].compile(keras.optimizers.SGD(0.5), loss)
    models[0].train_on_batch(PADDED, NEXT.to_tensor(), tf.cast(PADDED > 0, tf.float32))
    weight_fn = lambda x, y: tf.cast(x > 0, tf.float32)  # noqa: E731
    trainer = Trainer(models[1], keras.optimizers.SGD(0.5), crossentropy(True), "given", weight_fn=weight_fn)
    step = trainer.step(*next(iter(windows(TEXTS, NEXT, sort_within=24))))
    assert difference(*models) < 1e-5 and step.weights.sum() == LENGTHS.sum()


def test_replicas_divide_the_micro_batches(two_devices):
    large = network()
    large.compile(keras.optimizers.SGD(0.5), crossentropy(True))
    with two_devices.scope():
        model = network()
        trainer = Trainer(model, keras.optimizers.SGD(0.5), crossentropy(True), "given", two_devices)
    for x, y in [*windows(TEXTS, NEXT), *windows(TEXTS[:1], NEXT[:1])]:  # the last window has nothing for a replica
        step = trainer.step(x, y)
        large.train_on_batch(x.values.to_tensor(), y.values.to_tensor())
        assert len(step.losses) == x.shape[0] and step.weights.sum() == tf.reduce_sum(tf.cast(x > 0, tf.int32)).numpy()
    assert difference(model, large) < 1e-5


def fit(model, *parts, loss=crossentropy(True), data=None, **options):  # noqa: B008
    model = microbatched(model, "given")
    model.compile("sgd", loss, **options)
    before = model.get_weights()
    try:
        model.fit(windows(*parts) if data is None else data, verbose=0)
    finally:
        assert model.optimizer.iterations == 0 and all(map(np.array_equal, before, model.get_weights()))


def trainer(**options):
    return Trainer(network(), "sgd", crossentropy(True), "given", **options)


def padding_counts(what):
    return f"The {what} must not depend on padding, .* Received: a {what.split()[0]} that counts all positions alike"


REFUSED = {
    "a loss over all positions": (
        lambda: fit(network(masked=False), TEXTS, NEXT), padding_counts("loss sparse_categorical_crossentropy")
    ),
    "a mean over positions": (
        lambda: fit(one_number_a_token(), TEXTS, NEXT, loss=losses.MeanSquaredError(name="mse")),
        padding_counts("loss mse"),
    ),
    "weights for texts": (
        lambda: fit(network(masked=False), TEXTS, NEXT, tf.linspace(0.0, 1.0, 24)),
        padding_counts("loss sparse_categorical_crossentropy"),
    ),
    "weights with another divisor": (
        lambda: fit(network(masked=False), TEXTS, NEXT, WEIGHTS),
        padding_counts("loss sparse_categorical_crossentropy"),
    ),
    "one number": (
        lambda: fit(network(), TEXTS, NEXT, loss=lambda y, y_pred: tf.reduce_mean(y_pred**2)),
        padding_counts("loss lambda"),
    ),
    "an added loss": (lambda: fit(network(added=0.1), TEXTS, NEXT), padding_counts("loss activity_regularization")),
    "outputs of the whole batch": (
        lambda: fit(network(), TEXTS, NEXT, loss=gradlab.WholeBatch(lambda y, y_pred: y_pred[:, 0, 0])),
        padding_counts("loss lambda"),
    ),
    "a metric over all positions": (
        lambda: fit(network(masked=False), TEXTS, NEXT, loss=crossentropy(True, ignore_class=0), metrics=["accuracy"]),
        padding_counts("metric accuracy"),
    ),
    "a metric that heeds no mask": (
        lambda: fit(network(), TEXTS, NEXT, metrics=[keras.metrics.AUC(from_logits=True, name="auc")]),
        padding_counts("metric auc"),
    ),
    "a prediction": (
        lambda: microbatched(network(), "given").predict(windows(TEXTS), verbose=0),
        "x must be padded to be predicted: .* Received: a window of micro-batches",
    ),
    "dense targets beside ragged texts": (
        lambda: fit(network(False), data=windows(TEXTS, CLASSES).map(lambda x, y: (x, y.row_lengths()))),
        "All tensors of a window must be cut into micro-batches, or none. Received: 1 of 2 that are ragged",
    ),
    "targets cut elsewhere": (
        lambda: fit(network(False), data=windows(TEXTS, CLASSES).map(lambda x, y: (x, y[::-1]))),
        "x, y and sample_weight must be cut into micro-batches in the same places. Received: .*",
    ),
    "a text that is too long": (
        lambda: fit(network(), data=windows(TEXTS, NEXT, tokens=10)), "A text must have at most 10 tokens. Received: .*"
    ),
    "a number of bytes": (
        lambda: microbatched(network(), "given", memory=1e9),
        "memory is for microbatch_size=\"auto\". Received: microbatch_size='given'",
    ),
    "a number of micro-batches": (
        lambda: trainer(accumulation=lambda update: 2),
        'accumulation must be None with microbatch_size="given": each batch of the dataset is a window then. Rec.*',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_an_update(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        call()
    assert re.fullmatch(sentence, str(raised.value)), str(raised.value)

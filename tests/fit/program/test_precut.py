"""Windows of `gradlab.token_batches` in `fit` and in a `Trainer`, against Keras on the padded
batch."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradlab
from gradlab import Trainer, microbatched, token_batches
from gradlab.fit.metrics.padded_metrics import means_over_tokens

GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(1, 20, 24)
TEXTS = tf.RaggedTensor.from_row_lengths(GENERATOR.integers(1, 9, sum(LENGTHS)), LENGTHS)
NEXT = tf.RaggedTensor.from_row_splits(GENERATOR.integers(1, 9, sum(LENGTHS)), TEXTS.row_splits)
CLASSES = tf.constant(GENERATOR.integers(0, 9, 24))
WEIGHTS = TEXTS.with_values(tf.constant(GENERATOR.uniform(0.1, 2.0, sum(LENGTHS)), tf.float32))
PADDED = TEXTS.to_tensor()
CLASS_NUMBERS = tf.cast(CLASSES[:, tf.newaxis], tf.float32)
TEXT_WEIGHTS = tf.linspace(0.5, 1.5, 24)
COLUMN = tf.ones([24, 1])
NUMBERS = TEXTS.with_values(tf.cast(TEXTS.values, tf.float32)[:, tf.newaxis] / 9)
SOUNDS = tf.constant(GENERATOR.normal(size=[24, 12, 4]), tf.float32)
WORDS = TEXTS[:, :4]

TARGETS = {
    "next": NEXT,
    "classes": CLASSES,
    "class numbers": CLASS_NUMBERS,
    "numbers": NUMBERS,
    "weights": WEIGHTS,
    "text weights": TEXT_WEIGHTS,
    "column": COLUMN,
}

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


def network(per_token=True, masked=True, added=None, recurrent=False):
    """Predicts a class for each token or text. A recurrent layer takes several times as long to
    trace."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input([None], dtype="int64")
    hidden = Traced()(keras.layers.Embedding(10, 6, mask_zero=masked)(tokens))
    if recurrent:
        hidden = keras.layers.GRU(6, return_sequences=per_token)(hidden)
    else:
        hidden = keras.layers.Dense(6, "tanh")(hidden)
        hidden = hidden if per_token else keras.layers.GlobalAveragePooling1D()(hidden)
    if added is not None:
        hidden = keras.layers.ActivityRegularization(added)(hidden)
    return keras.Model(tokens, keras.layers.Dense(9, name="next")(hidden))


def two_heads():
    model = network()
    pooled = keras.layers.GlobalAveragePooling1D()(model.layers[-2].output)
    return keras.Model(model.inputs, [model.output, keras.layers.Dense(1, name="whole")(pooled)])


def two_tokens_heads():
    model = network()
    return keras.Model(
        model.inputs, [model.output, keras.layers.Dense(9, name="again")(model.layers[-2].output)]
    )


def a_number_for_each_token():
    model = network(masked=False)
    return keras.Model(model.inputs, keras.layers.Dense(1)(model.layers[-2].output))


def one_number_a_token():
    model = network()
    return keras.Model(
        model.inputs, keras.ops.squeeze(keras.layers.Dense(1)(model.layers[-2].output), -1)
    )


def spoken():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([12, 4]), keras.layers.Dense(9)])


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(y_pred**2)


def with_own_loss():
    model = network()
    return OwnLoss(model.inputs, model.outputs)


def token_windows(*parts, tokens=40, sort_within=12, **options):
    return token_batches(tf.data.Dataset.from_tensor_slices(parts), tokens, sort_within, **options)


@functools.cache
def windows_of_all_targets(sort_within):
    """Windows of the texts with `TARGETS`, computed only once: that takes longer than to train on
    them."""
    # No test needs the others in other windows
    targets = TARGETS if sort_within == 12 else {"next": NEXT}
    dataset = token_windows(TEXTS, targets, sort_within=sort_within).cache()
    for _ in dataset:  # now the cache is full
        pass
    return dataset


def windows(x, *parts, sort_within=12):
    """The windows of the texts x with some of `TARGETS`, as targets and weights."""
    assert x is TEXTS
    names = tf.nest.map_structure(
        lambda part: next(name for name, one in TARGETS.items() if one is part), parts
    )
    return windows_of(names, sort_within)


@functools.cache
def windows_of(names, sort_within):
    def chosen(x, targets):
        return x, *tf.nest.map_structure(lambda name: targets[name], names)

    return windows_of_all_targets(sort_within).map(chosen)


@functools.cache
def windows_with_a_text_that_is_too_long():
    return token_windows(TEXTS, NEXT, tokens=10)


def in_keras(model, loss, rate=0.5, **options):
    """The model, compiled to train on large batches; without tracing, which would take longer."""
    model.compile(keras.optimizers.SGD(rate), loss, run_eagerly=True, **options)
    return model


def difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one.get_weights(), other.get_weights()))


def info_nce(y, y_pred):
    unit = tf.math.l2_normalize(y_pred, -1)
    return tf.nn.softmax_cross_entropy_with_logits(
        tf.eye(tf.shape(unit)[0]), tf.matmul(unit, unit, transpose_b=True)
    )


# For each case: how to build the model, (x, y, sample_weight) as texts, the loss, and the arguments
# of `compile`.
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
    "a sum": (network, (TEXTS, NEXT), crossentropy(True, reduction="sum"), {}),
    "one label each": (
        lambda: network(False, recurrent=True), (TEXTS, CLASSES), crossentropy(True), {"metrics": ["accuracy"]}
    ),
    "weighted texts": (
        lambda: network(False), (TEXTS, CLASSES, TEXT_WEIGHTS), crossentropy(True), {}
    ),
    "two losses": (
        two_heads,
        (TEXTS, (NEXT, CLASS_NUMBERS)),
        [crossentropy(True), "mse"],
        {"loss_weights": [1.0, 0.1]},
    ),
    "one metric of two outputs": (
        two_tokens_heads,
        (TEXTS, (NEXT, NEXT)),
        [crossentropy(True), crossentropy(True)],
        lambda: {"metrics": [[keras.metrics.SparseCategoricalAccuracy()]] * 2},
    ),
    "a metric that is told weights": (
        a_number_for_each_token,
        (TEXTS, NUMBERS, WEIGHTS),
        losses.MeanSquaredError("mean_with_sample_weight"),
        lambda: {"weighted_metrics": [keras.metrics.RootMeanSquaredError(name="root")]},
    ),
    "targets of any length": (spoken, (SOUNDS, WORDS), losses.CTC(), {}),
    "the whole batch": (lambda: network(False), (TEXTS, CLASSES), info_nce, {}),
}  # fmt: skip


def padded(parts):
    return [
        tf.nest.map_structure(
            lambda one: one.to_tensor() if isinstance(one, tf.RaggedTensor) else one, part
        )
        for part in parts
    ]


QUICK = ("masked tokens", "two losses", "targets of any length", "the whole batch")


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_fit_equals_keras_on_the_padded_batch(case):
    build, parts, loss, options = CASES[case]
    # The metrics must be new: Keras does not reset those that another model has used before the
    # first epoch.
    new = options if callable(options) else lambda: options
    rate = 0.01 if case == "a sum" else 0.5
    large = in_keras(build(), loss, rate, **new())
    small = microbatched(build(), "given")
    small.compile(
        keras.optimizers.SGD(rate), gradlab.WholeBatch(loss) if loss is info_nce else loss, **new()
    )
    batches = tf.data.Dataset.from_tensor_slices(tuple(padded(parts))).batch(12)
    cut = token_windows(*parts) if build is spoken else windows(*parts)
    expected = large.fit(batches, epochs=2, verbose=0).history
    found = small.fit(cut, epochs=2, verbose=0).history
    assert difference(small, large) < 1e-5 < difference(small, build())
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    result = small.evaluate(cut, verbose=0, return_dict=True)
    for name, value in large.evaluate(batches, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(result[name], value, rtol=1e-4)


@pytest.mark.slow
def test_it_is_equal_in_float64(float64):
    large = network(recurrent=True)
    small = microbatched(network(recurrent=True), "given")
    for model in (large, small):
        model.compile(
            keras.optimizers.SGD(0.5, momentum=0.9), crossentropy(True), run_eagerly=model is large
        )
    large.train_on_batch(PADDED, NEXT.to_tensor())
    small.fit(windows(TEXTS, NEXT, sort_within=24), verbose=0)
    assert difference(small, large) < 1e-12


@pytest.mark.slow
def test_nothing_is_traced_again_for_other_lengths():
    model = microbatched(network(), "given")
    traced = next(layer for layer in model.layers if isinstance(layer, Traced))
    model.compile("sgd", crossentropy(True))
    model.fit(windows(TEXTS, NEXT, sort_within=24), verbose=0)
    before = len(traced.sizes)
    model.fit(windows(TEXTS, NEXT), verbose=0, epochs=2)  # two windows, each of other shapes
    assert len(traced.sizes) == before and int(model.optimizer.iterations) == 5


def test_only_the_tokens_of_a_micro_batch_are_computed():
    sizes = []

    def noted(x):
        tf.py_function(lambda shape: sizes.append(tuple(shape.numpy())), [tf.shape(x)], [])
        return x

    tokens = keras.Input([None], dtype="int64")
    embedded = keras.layers.Embedding(9, 6, mask_zero=True)(tokens)
    hidden = keras.layers.Lambda(
        noted, output_shape=lambda shape: shape, mask=lambda x, mask: mask
    )(embedded)
    model = microbatched(keras.Model(tokens, keras.layers.Dense(9)(hidden)), "given")
    model.compile("sgd", crossentropy(True))
    model.fit(windows(TEXTS, NEXT), verbose=0)
    texts = [part for x, _ in windows(TEXTS, NEXT) for part in x]
    expected = [(*part.shape[:1], int(part.bounding_shape()[1]), 6) for part in texts]
    assert sizes == expected and max(rows * width for rows, width, _ in sizes) <= 40 < 12 * 20


@pytest.mark.slow
def test_steps_per_execution_validation_and_several_in_flight():
    whole = windows(TEXTS, NEXT)
    parts = microbatched(network(), "given", in_flight=2)
    one = microbatched(network(), "given")
    one.compile("adam", crossentropy(True))
    parts.compile("adam", crossentropy(True), steps_per_execution=2)
    history = one.fit(whole, validation_data=whole, epochs=2, verbose=0).history
    found = parts.fit(whole, validation_data=whole, epochs=2, verbose=0).history
    assert history == found and difference(one, parts) == 0


def test_a_batch_that_is_not_cut_is_one_micro_batch():
    large = in_keras(network(), crossentropy(True))
    small = microbatched(network(), "given")
    small.compile(keras.optimizers.SGD(0.5), crossentropy(True))
    for model in (large, small):
        model.fit(PADDED, NEXT.to_tensor(), batch_size=10, shuffle=False, verbose=0)
    assert difference(small, large) < 1e-6
    np.testing.assert_allclose(
        small.predict(PADDED, verbose=0), large.predict(PADDED, verbose=0), atol=1e-6
    )
    assert small.microbatch_size is None and small.in_flight == 1


@pytest.mark.slow
def test_trainer_equals_keras_and_resumes_to_the_bit(tmp_path):
    large = in_keras(network(), crossentropy(True))
    large.fit(PADDED, NEXT.to_tensor(), batch_size=12, shuffle=False, epochs=2, verbose=0)
    found = []
    for updates in (4, 3, 4):  # at once; then stopped amid the second epoch
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
    in_keras(models[0], loss).train_on_batch(
        PADDED, NEXT.to_tensor(), tf.cast(PADDED > 0, tf.float32)
    )
    weight_fn = lambda x, y: tf.cast(x > 0, tf.float32)  # noqa: E731
    trainer = Trainer(
        models[1], keras.optimizers.SGD(0.5), crossentropy(True), "given", weight_fn=weight_fn
    )
    [window] = windows(TEXTS, NEXT, sort_within=24)
    step = trainer.step(*window)
    assert difference(*models) < 1e-5 and step.weights.sum() == LENGTHS.sum()


@pytest.mark.slow
def test_weight_fn_sees_the_padding_of_the_dataset():
    models = [network(masked=False) for _ in range(2)]

    def equally(x, y):
        counts = tf.cast(y != -1, tf.float32)
        return counts / tf.reduce_sum(counts, axis=1, keepdims=True)

    targets = NEXT.to_tensor(-1)
    loss = crossentropy(True, reduction="mean_with_sample_weight", ignore_class=-1)
    in_keras(models[0], loss).train_on_batch(PADDED, targets, equally(PADDED, targets))
    [(x, y)] = token_windows(TEXTS, (NEXT, CLASSES), sort_within=24, padding=(9, -1, 0))
    step = Trainer(models[1], keras.optimizers.SGD(0.5), loss, "given", weight_fn=equally).step(
        x, y[0]
    )
    assert difference(*models) < 1e-5
    np.testing.assert_allclose(step.weights.sum(), 24, rtol=1e-5)

    lengths = lambda x, y: tf.reduce_sum(tf.cast(x != 9, tf.float32), axis=1)  # noqa: E731
    keras.utils.set_random_seed(0)
    first = keras.layers.Lambda(lambda x: x[:, :1], output_shape=(1,))
    model = keras.Sequential([keras.Input([None]), first, keras.layers.Dense(9)])
    trainer = Trainer(model, "sgd", crossentropy(True), "given", weight_fn=lengths)
    assert trainer.step(x, y[1]).weights.sum() == LENGTHS.sum()


@pytest.mark.slow
def test_windows_and_padded_batches_in_turn():
    large = in_keras(network(), crossentropy(True))
    small = network()
    trainer = Trainer(small, keras.optimizers.SGD(0.5), crossentropy(True), "given")
    [window] = windows(TEXTS, NEXT, sort_within=24)
    padded_batch = PADDED, NEXT.to_tensor()
    for each in (window, padded_batch, window):
        trainer.step(*each)
        large.train_on_batch(*padded_batch)
    assert difference(small, large) < 1e-5


def test_long_epochs_keep_the_digits_of_a_metric():
    model = network()
    metric = keras.metrics.SparseCategoricalAccuracy()
    model.compile("sgd", crossentropy(True), weighted_metrics=[metric])
    model.test_on_batch(PADDED, NEXT.to_tensor())
    seen = 2.0**22
    for variable in metric.variables:
        variable.assign(seen)

    @tf.function(
        input_signature=[tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, None, 9])]
    )
    def update(y_true, y_pred):
        with means_over_tokens(model, is_padded=True):
            metric.update_state(y_true, y_pred, tf.ones_like(y_true))

    update(tf.constant([[0] * 10 + [1] * 9], tf.int64), tf.one_hot(tf.zeros([1, 19], tf.int32), 9))
    assert [float(variable.value) - seen for variable in metric.variables] == [10, 19]


def test_fit_on_several_replicas(two_devices):
    with two_devices.scope():
        model = microbatched(network(), "given")
        model.compile(keras.optimizers.SGD(0.5), crossentropy(True))
    with pytest.raises(
        ValueError,
        match="^Keras' fit cannot divide windows .* gradlab.Trainer. Received: 2 replicas$",
    ):
        model.fit(windows(TEXTS, NEXT), verbose=0)


def test_replicas_divide_the_micro_batches(two_devices):
    large = in_keras(network(), crossentropy(True))
    with two_devices.scope():
        model = network()
        trainer = Trainer(
            model, keras.optimizers.SGD(0.5), crossentropy(True), "given", two_devices
        )
    first, second = windows(TEXTS, NEXT)
    one_text = [part[:1, :1] for part in second]  # which leaves nothing for the other replica
    for x, y in (first, second, one_text):
        step = trainer.step(x, y)
        large.train_on_batch(x.values.to_tensor(), y.values.to_tensor())
        assert (
            len(step.losses) == x.shape[0]
            and step.weights.sum() == tf.reduce_sum(tf.cast(x > 0, tf.int32)).numpy()
        )
    assert difference(model, large) < 1e-5


def fit(model, *parts, loss=crossentropy(True), data=None, **options):  # noqa: B008
    model = microbatched(model, "given")
    model.compile("sgd", loss, **options)
    before = model.get_weights()
    try:
        model.fit(windows(*parts) if data is None else data, verbose=0)
    finally:
        assert model.optimizer.iterations == 0 and all(
            map(np.array_equal, before, model.get_weights())
        )


def trainer(**options):
    return Trainer(network(), "sgd", crossentropy(True), "given", **options)


def one_number(name):
    return f"The loss {name} must be a value for each text or token: .* Received: one number"


def padding_counts(what):
    return f"The {what} must not depend on padding, .* Received: a {what.split()[0]} that counts all positions alike"


REFUSED = {
    "a loss over all positions": (
        lambda: fit(network(masked=False), TEXTS, NEXT),
        padding_counts("loss sparse_categorical_crossentropy"),
    ),
    "a mean over positions": (
        lambda: fit(one_number_a_token(), TEXTS, NEXT, loss=losses.MeanSquaredError(name="mse")),
        padding_counts("loss mse"),
    ),
    "weights for texts": (
        lambda: fit(network(masked=False), TEXTS, NEXT, TEXT_WEIGHTS),
        "sample_weight must have as many dimensions as the values of "
        "sparse_categorical_crossentropy, .*",
    ),
    "weights with another divisor": (
        lambda: fit(network(masked=False), TEXTS, NEXT, WEIGHTS),
        padding_counts("loss sparse_categorical_crossentropy"),
    ),
    "a weight for each text": (
        lambda: fit(
            network(masked=False),
            TEXTS,
            NEXT,
            COLUMN,
            loss=crossentropy(True, reduction="mean_with_sample_weight"),
        ),
        padding_counts("loss sparse_categorical_crossentropy"),
    ),
    "targets of any length": (
        lambda: fit(
            network(False),
            TEXTS,
            NEXT,
            loss=lambda y, y_pred: tf.cast(y, tf.float32) * y_pred[:, :1],
        ),
        padding_counts("loss lambda"),
    ),
    "one number": (
        lambda: fit(network(), TEXTS, NEXT, loss=lambda y, y_pred: tf.reduce_mean(y_pred**2)),
        padding_counts("loss lambda"),
    ),
    "a loss of its own": (
        lambda: fit(with_own_loss(), TEXTS, NEXT),
        "compute_loss gives one number for the whole batch, .*None",
    ),
    "an added loss": (
        lambda: fit(network(added=0.1), TEXTS, NEXT),
        one_number("activity_regularization"),
    ),
    "steps that are not compiled": (
        lambda: fit(network(), TEXTS, NEXT, run_eagerly=True),
        "run_eagerly must be False with texts of any length: .* Received: True",
    ),
    "weights of classes": (
        lambda: microbatched(network(), "given").fit(windows(TEXTS, NEXT), class_weight={0: 1.0}),
        "class_weight must be None with windows that are cut already: .* Received: {0: 1.0}",
    ),
    "outputs of the whole batch": (
        lambda: fit(
            network(), TEXTS, NEXT, loss=gradlab.WholeBatch(lambda y, y_pred: y_pred[:, 0, 0])
        ),
        padding_counts("loss lambda"),
    ),
    "a metric over all positions": (
        lambda: fit(
            network(masked=False),
            TEXTS,
            NEXT,
            loss=crossentropy(True, ignore_class=0),
            metrics=["accuracy"],
        ),
        padding_counts("metric accuracy"),
    ),
    "a metric with weights for texts": (
        lambda: fit(
            network(masked=False),
            TEXTS,
            NEXT,
            COLUMN,
            loss=crossentropy(True, ignore_class=0),
            weighted_metrics=["accuracy"],
        ),
        padding_counts("metric accuracy"),
    ),
    "a root of a mean": (
        lambda: fit(
            network(), TEXTS, NEXT, metrics=[keras.metrics.RootMeanSquaredError(name="root")]
        ),
        padding_counts("metric root"),
    ),
    "a metric that uses no mask": (
        lambda: fit(
            network(), TEXTS, NEXT, metrics=[keras.metrics.AUC(from_logits=True, name="auc")]
        ),
        padding_counts("metric auc"),
    ),
    "a prediction": (
        lambda: microbatched(network(), "given").predict(windows(TEXTS), verbose=0),
        "x must be padded to be predicted: .* Received: a window of micro-batches",
    ),
    "dense targets beside ragged texts": (
        lambda: fit(
            network(False), data=windows(TEXTS, CLASSES).map(lambda x, y: (x, y.row_lengths()))
        ),
        "All tensors of a window must be cut into micro-batches, or none. Received: 1 of 2 that "
        "are ragged",
    ),
    "targets cut elsewhere": (
        lambda: fit(network(False), data=windows(TEXTS, CLASSES).map(lambda x, y: (x, y[::-1]))),
        "x, y and sample_weight must be cut into micro-batches in the same places. Received: .*",
    ),
    "a text that is too long": (
        lambda: fit(network(), data=windows_with_a_text_that_is_too_long()),
        "A text must have at most 10 tokens. Received: .*",
    ),
    "a text that is too long, in a loop": (
        lambda: trainer().fit(windows_with_a_text_that_is_too_long(), 1, verbose=False),
        "A text must have at most 10 tokens. Received: .*",
    ),
    "a number of bytes": (
        lambda: microbatched(network(), "given", memory=1e9),
        "memory is for microbatch_size=\"auto\". Received: microbatch_size='given'",
    ),
    "a number of micro-batches": (
        lambda: trainer(accumulation=lambda update: 2),
        'accumulation must be None with microbatch_size="given": each batch of the dataset is a '
        "window then. Rec.*",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_an_update(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        call()
    assert re.fullmatch(sentence, str(raised.value)), str(raised.value)

"""Losses of tables in chunks: values and gradients against the whole table, and their memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradlab import chunked

CLASSES = 23
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(2, 5, 4))
KERNEL = RNG.normal(size=(4, CLASSES))
BIAS = RNG.normal(size=CLASSES)
LABELS = RNG.integers(CLASSES, size=(2, 5))
UPSTREAM = RNG.normal(size=(2, 5))


def by_keras(z, labels, smoothing):
    target = tf.one_hot(labels, z.shape[-1], dtype=z.dtype)
    return keras.losses.categorical_crossentropy(
        target, z, from_logits=True, label_smoothing=smoothing
    )


def in_pairs(z, labels):
    """SigLIP's loss as its authors write it, in NumPy's order of sums."""
    signs = 2.0 * tf.one_hot(labels, z.shape[-1], dtype=z.dtype) - 1.0
    return -tf.reduce_sum(tf.math.log_sigmoid(signs * z), axis=-1)


def with_gradients(loss, *arrays, upstream=UPSTREAM):
    """A loss, and the gradients of a weighted sum of it."""
    variables = [tf.Variable(array) for array in arrays]
    with tf.GradientTape() as tape:
        losses = loss(*variables)
        total = tf.reduce_sum(losses * upstream)
    return [losses, *tape.gradient(total, variables)]


def assert_equal(found, wanted, tolerance=1e-12):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 22, CLASSES, 1000])
def test_it_is_the_loss_of_the_whole_table(chunk, transposed):
    kernel = KERNEL.T if transposed else KERNEL
    options = {"chunk": chunk, "transposed": transposed}

    def table(x, w, b):
        return x @ (tf.transpose(w) if transposed else w) + b

    for smoothing in (0.0, 0.1):
        found = with_gradients(
            lambda x, w, b, part=smoothing: chunked.cross_entropy(
                x, w, LABELS, b, label_smoothing=part, **options
            ),
            INPUTS, kernel, BIAS,
        )  # fmt: skip
        wanted = with_gradients(
            lambda x, w, b, part=smoothing: by_keras(table(x, w, b), LABELS, part),
            INPUTS, kernel, BIAS,
        )  # fmt: skip
        assert_equal(found, wanted)
    found = with_gradients(
        lambda x, w, b: chunked.sigmoid(x, w, LABELS, b, **options), INPUTS, kernel, BIAS
    )
    wanted = with_gradients(lambda x, w, b: in_pairs(table(x, w, b), LABELS), INPUTS, kernel, BIAS)
    assert_equal(found, wanted)
    best = chunked.argmax(INPUTS, kernel, BIAS, **options)
    np.testing.assert_array_equal(best, np.argmax(INPUTS @ KERNEL + BIAS, axis=-1))


def test_equal_logits_have_the_first_class():
    assert chunked.argmax(np.ones([1, 1]), np.zeros([1, 9]), chunk=2).numpy().tolist() == [0]


@pytest.mark.parametrize("jit", [False, True])
def test_in_a_compiled_function(jit):
    shape = [*INPUTS.shape] if jit else [None, None, 4]

    @tf.function(
        jit_compile=jit,
        input_signature=[
            tf.TensorSpec(shape, tf.float64), tf.TensorSpec(shape[:-1], tf.int64),
        ],
    )  # fmt: skip
    def compiled(inputs, labels):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            losses = chunked.cross_entropy(inputs, KERNEL, labels, BIAS, chunk=7)
        return losses, tape.gradient(losses, inputs, UPSTREAM)

    wanted = with_gradients(lambda x: by_keras(x @ KERNEL + BIAS, LABELS, 0.0), INPUTS)
    assert_equal(compiled(INPUTS, LABELS), wanted)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_number_of_classes_may_be_unknown(transposed, jit):
    """As that of a contrastive loss is, whose classes are the examples of a batch."""
    kernel = KERNEL.T if transposed else KERNEL
    specs = [tf.TensorSpec([None] * len(each.shape), tf.float64) for each in (kernel, BIAS)]

    @tf.function(jit_compile=jit, input_signature=specs)
    def compiled(kernel, bias):
        with tf.GradientTape() as tape:
            tape.watch([kernel, bias])
            losses = chunked.cross_entropy(
                INPUTS, kernel, LABELS, bias, chunk=7, label_smoothing=0.1, transposed=transposed
            )
            losses += chunked.sigmoid(INPUTS, kernel, LABELS, bias, chunk=9, transposed=transposed)
        return losses, *tape.gradient(losses, [kernel, bias], UPSTREAM)

    def whole(kernel, bias):
        z = INPUTS @ (tf.transpose(kernel) if transposed else kernel) + bias
        return by_keras(z, LABELS, 0.1) + in_pairs(z, LABELS)

    assert_equal(compiled(kernel, BIAS), with_gradients(whole, kernel, BIAS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_that_of_a_layer(dtype):
    """The products are rounded as in a dense layer, and the loss is computed in float32."""

    def layer(x, w):
        half = tf.cast(x, dtype)
        return by_keras(tf.cast(half @ tf.cast(w, dtype), tf.float32), LABELS, 0.0)

    def chunks(x, w):
        return chunked.cross_entropy(tf.cast(x, dtype), w, LABELS, chunk=7)

    arrays = INPUTS.astype("float32"), KERNEL.astype("float32")
    upstream = UPSTREAM.astype("float32")
    found = with_gradients(chunks, *arrays, upstream=upstream)
    wanted = with_gradients(layer, *arrays, upstream=upstream)
    assert found[0].dtype == found[2].dtype == tf.float32
    assert_equal(found[:1], wanted[:1], 1e-6)
    assert_equal(found[1:], wanted[1:], 4 * float(tf.as_dtype(dtype).as_numpy_dtype(2**-7)))


def test_a_contrastive_loss_in_both_directions():
    """InfoNCE of pairs, as CLIP has it: a row of the table is the classes of the other tower."""
    one, other = RNG.normal(size=(2, 9, 4))
    numbers = np.arange(9)

    def chunks(x, y, scale):
        across = chunked.cross_entropy(scale * x, y, numbers, chunk=4, transposed=True)
        down = chunked.cross_entropy(scale * y, x, numbers, chunk=4, transposed=True)
        return across + down

    def whole(x, y, scale):
        table = scale * x @ tf.transpose(y)
        return by_keras(table, numbers, 0.0) + by_keras(tf.transpose(table), numbers, 0.0)

    arrays = one, other, np.float64(3)
    upstream = np.ones(9)
    assert_equal(
        with_gradients(chunks, *arrays, upstream=upstream),
        with_gradients(whole, *arrays, upstream=upstream),
    )


def test_a_label_that_is_no_class_gives_nan_as_on_a_gpu():
    labels = LABELS.copy()
    labels[0, :3] = CLASSES, -1, 2**32 + 1
    losses = chunked.cross_entropy(INPUTS, KERNEL, labels, chunk=7).numpy()
    assert np.isnan(losses[0, :3]).all() and np.isnan(losses).sum() == 3


def test_a_second_derivative_is_refused():
    """The sums over the chunks would not count in it."""
    inputs = tf.constant(INPUTS)
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            losses = chunked.cross_entropy(inputs, KERNEL, LABELS, chunk=7)
        gradient = tape.gradient(losses, inputs)
    with pytest.raises(LookupError, match="can be differentiated once"):
        outer.gradient(gradient, inputs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk": 0}, "chunk must be a positive integer. Received: 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be from 0 to below 1. Received: 1.0"),
        ({"labels": UPSTREAM}, "labels must be integers. Received: float64"),
    ],
)
def test_bad_arguments(change, said):
    arguments = {"inputs": INPUTS, "kernel": KERNEL, "labels": LABELS, "chunk": 7}
    with pytest.raises(ValueError, match=said):
        chunked.cross_entropy(**arguments | change)

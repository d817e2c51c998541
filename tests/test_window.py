"""The loop over a window's micro-batches."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from paths import SUPPORT

from gradlab.window import Loop, Microbatch, accumulate, window_gradients


def linear(w):
    return lambda batch, number: (tf.linalg.matvec(batch["x"], w) - batch["y"]) ** 2


def data(examples, dtype="float64"):
    generator = np.random.default_rng(examples)
    return {
        "x": tf.constant(generator.normal(size=(examples, 3)), dtype),
        "y": tf.constant(generator.normal(size=examples), dtype),
    }


SIZES = [(12, 4), (13, 4), (3, 4), (5, 1), (1, 1)]  # examples, and those of a micro-batch


@pytest.mark.parametrize("in_flight", [1, 2, 10])
@pytest.mark.parametrize("sizes", ["tensors", "numbers", "XLA"])
def test_it_is_the_gradient_of_the_whole(sizes, in_flight):
    w = tf.Variable([1.0, -2.0, 0.5], dtype=tf.float64)

    def gradients(batch, weights, microbatch_size):
        return window_gradients(
            linear(w), [w], batch, weights, microbatch_size, in_flight=in_flight
        )

    if sizes == "tensors":  # one trace for all of them
        spec = {"x": tf.TensorSpec([None, 3], tf.float64), "y": tf.TensorSpec([None], tf.float64)}
        signature = [spec, tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.int32)]
        compiled = tf.function(gradients, input_signature=signature)
    else:
        compiled = tf.function(gradients, jit_compile=sizes == "XLA")
    for examples, microbatch_size in SIZES:
        if sizes != "tensors" and in_flight != 2 and examples < 12:
            # Each is a trace of its own, and a window of one or five runs as with two in flight
            continue
        batch = data(examples)
        weights = np.random.default_rng(0).uniform(0, 2, examples)
        window = compiled(batch, tf.constant(weights), microbatch_size)
        check_window(window, w.numpy(), batch, weights, microbatch_size)


def check_window(window, w, batch, weights, microbatch_size):
    """Compares a window of the linear model with NumPy, micro-batch by micro-batch."""
    x = batch["x"].numpy()
    residual = x @ w - batch["y"].numpy()
    compare = functools.partial(
        np.testing.assert_allclose,
        rtol=1e-12,
        err_msg=f"{len(x)} examples, {microbatch_size} at a time",
    )
    compare(window.gradients[0], (2 * weights * residual) @ x / weights.sum())
    starts = range(0, len(x), microbatch_size)
    assert len(window.losses) == len(starts)
    for i, start in enumerate(starts):
        rows = slice(start, start + microbatch_size)
        gradient = (2 * weights * residual)[rows] @ x[rows] / weights[rows].sum()
        compare(window.weights[i], weights[rows].sum())
        compare(window.gradient_norms[i], np.linalg.norm(gradient))
        compare(window.losses[i], np.average(residual[rows] ** 2, weights=weights[rows]))


def test_one_trace_for_every_size():
    w, traces = tf.Variable(tf.zeros(3, tf.float64)), []

    @tf.function(reduce_retracing=True, autograph=False)
    def gradients(batch, weights, microbatch_size):
        traces.append(1)
        return window_gradients(linear(w), [w], batch, weights, microbatch_size).gradients

    spec = {"x": tf.TensorSpec([None, 3], tf.float64), "y": tf.TensorSpec([None], tf.float64)}
    concrete = gradients.get_concrete_function(
        spec, tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.int32)
    )
    for k in range(1, 65):
        batch = data(2 * k)
        concrete(batch, tf.ones(2 * k, tf.float64), tf.constant(2))
    assert len(traces) == 1


def test_sizes_that_can_be_known_are_known():
    w, seen = tf.Variable(tf.zeros(3, tf.float64)), []

    def loss(batch, number):
        seen.append(batch["x"].shape.as_list())
        return linear(w)(batch, number)

    def trace(examples, microbatch_size):
        spec = {
            "x": tf.TensorSpec([examples, 3], tf.float64),
            "y": tf.TensorSpec([examples], tf.float64),
        }
        signature = [spec, tf.TensorSpec([examples], tf.float64)]

        def gradients(batch, weights):
            return window_gradients(loss, [w], batch, weights, microbatch_size)

        tf.function(gradients, autograph=False).get_concrete_function(*signature)
        return seen.pop()

    assert trace(12, 4) == [4, 3]
    assert trace(13, 4) == trace(None, 4) == trace(12, tf.constant(4)) == [None, 3]


@pytest.mark.parametrize("norms", [True, False])
def test_norms_that_nobody_wants_are_not_computed(norms):
    w, batch = tf.Variable(tf.ones(3, tf.float64)), data(5)

    @tf.function(autograph=False)
    def gradients(batch):
        return window_gradients(linear(w), [w], batch, tf.ones(5, tf.float64), 2, norms=norms)

    window = gradients(batch)
    residual = batch["x"].numpy() @ w.numpy() - batch["y"].numpy()
    np.testing.assert_allclose(
        window.gradients[0], 2 * residual @ batch["x"].numpy() / 5, rtol=1e-12
    )
    assert (window.gradient_norms is None) is not norms
    body = body_of_loop(gradients.get_concrete_function(batch).graph)
    assert ("L2Loss" in {op.type for op in body.get_operations()}) is norms


def test_the_sums_do_not_begin_as_a_constant():
    """What TensorFlow can fold, zeros of a known shape too, it keeps for good: a copy of the
    gradients (measured)."""
    w = tf.Variable(tf.ones([7, 3]))
    losses = lambda x, number: x * tf.reduce_mean(w * w)  # noqa: E731
    compiled = tf.function(
        lambda x: window_gradients(losses, [w], x, tf.ones(4), 2).gradients, autograph=False
    )
    graph = compiled.get_concrete_function(tf.TensorSpec([4])).graph
    loop = next(op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
    assert "Empty" in [each.op.type for each in loop.inputs if each.shape == [7, 3]]
    assert not [
        each
        for each in loop.inputs
        if each.shape == [7, 3] and each.op.type in ("Const", "Fill", "ZerosLike")
    ]


def body_of_loop(graph):
    loop = next(op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
    return graph._get_function(loop.get_attr("body").name).graph


def test_sparse_half_precision_and_unreached_variables():
    table = tf.Variable(tf.zeros([4, 1]), name="table")
    half = tf.Variable(tf.ones([], tf.bfloat16), name="half")
    unused = tf.Variable(1.0, name="unused")

    def loss(ids, number):
        return tf.gather(table, ids)[:, 0] + tf.cast(half, tf.float32)

    ids = tf.constant([0, 2, 2, 2, 3])
    window = tf.function(
        lambda: window_gradients(loss, [table, half, unused], ids, tf.ones(5), 2)
    )()
    np.testing.assert_allclose(window.gradients[0][:, 0], [0.2, 0, 0.6, 0.2], rtol=1e-6)
    assert window.gradients[1].dtype == tf.bfloat16 and float(window.gradients[1]) == 1.0
    assert window.gradients[2] is None


def test_micro_batches_are_numbered():
    w = tf.Variable(1.0)
    window = tf.function(
        lambda: window_gradients(
            lambda x, number: w * x * tf.cast(number, x.dtype), [w], tf.ones(6), tf.ones(6), 2
        )
    )()
    assert window.losses.numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_sparse_gradient_is_never_made_dense(in_place):
    """Nothing in the loop's body makes a tensor of the table's shape, other than the sum itself."""
    rows = 100_003
    table = tf.Variable(tf.ones([rows, 2]))
    accumulator = tf.Variable(tf.zeros([rows, 2]))

    def forward(ids, number, state):
        return Microbatch(
            tf.reduce_mean(tf.gather(table, ids) ** 2), tf.cast(tf.size(ids), tf.float32)
        )

    @tf.function
    def sums(ids):
        return accumulate(
            forward, [table], ids, 3, accumulators=[accumulator] if in_place else None
        )

    ids = tf.constant([5, 5, 7, 100_002, 5])
    found = sums(ids).gradients[0]
    expected = np.zeros((rows, 2), "float32")
    np.add.at(expected, ids.numpy(), 1.0)
    np.testing.assert_allclose(found, expected)

    body = body_of_loop(sums.get_concrete_function(ids).graph)
    large = {
        op.type
        for op in body.get_operations()
        for out in op.outputs
        if out.shape.as_list()[:1] == [rows]
    }
    passed_on = {"Placeholder", "Identity"}
    assert large - passed_on == (set() if in_place else {"TensorScatterAdd"})
    assert ("ResourceScatterAdd" in {op.type for op in body.get_operations()}) == in_place


def test_in_place_sums_start_anew_each_window():
    w = tf.Variable([1.0, 2.0])
    accumulator = tf.Variable([100.0, 100.0])

    def forward(x, number, state):
        return Microbatch(tf.reduce_mean(x * w[0]), tf.cast(tf.size(x), tf.float32))

    @tf.function
    def sums(x):
        return accumulate(
            forward, [w], x, 2, accumulators=[accumulator], loop=Loop(skip_nonfinite=True)
        )

    for _ in range(2):
        assert sums(tf.constant([1.0, 2.0, 3.0])).gradients[0].numpy().tolist() == [6.0, 0.0]
    found = sums(tf.constant([1.0, 2.0, np.nan]))
    assert found.gradients[0].numpy().tolist() == [3.0, 0.0]
    assert (int(found.skipped), float(found.weight)) == (1, 2.0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("weights", [3, 6])
def test_a_batch_of_different_lengths_is_refused(known, weights):
    """Without the check, weights that are missing would silently count as 0."""
    w = tf.Variable(1.0)
    examples = lambda n: tf.TensorSpec([n if known else None])  # noqa: E731

    @tf.function(input_signature=[examples(4), examples(weights)], autograph=False)
    def gradients(x, weights):
        return window_gradients(lambda x, number: w * x, [w], x, weights, 3).gradients

    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match="must have the same number of examples"
    ):
        gradients(tf.ones(4), tf.ones(weights))


@pytest.mark.parametrize(
    ("loss", "size", "sentence"),
    [
        (lambda x, number: x, 0, "microbatch_size must be a positive integer. Received: 0"),
        (
            lambda x, number: x[:, tf.newaxis],
            2,
            "loss must return one number for each example. Received: a tensor of",
        ),
        (
            lambda x, number: tf.reduce_mean(x),
            2,
            "loss must return one number for each example. Received: a tensor of",
        ),
    ],
)
def test_refusals(loss, size, sentence):
    w = tf.Variable(1.0)
    with pytest.raises(ValueError, match=sentence):
        tf.function(
            lambda: window_gradients(lambda x, n: w * loss(x, n), [w], tf.ones(4), tf.ones(4), size)
        )()


def test_sizes_of_numpy_are_numbers_too():
    w = tf.Variable(1.0)
    window = tf.function(
        lambda: window_gradients(lambda x, n: w * x, [w], tf.ones(4), tf.ones(4), np.int64(2))
    )()
    assert window.losses.shape == [2] and float(window.gradients[0]) == 1


def test_a_convolution_with_another_tensor_added_to_it():
    """TensorFlow's kernel for both at once must not run for two micro-batches at a time."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "residual_worker.py"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "equal True" in done.stdout, (
        done.returncode,
        done.stdout,
        done.stderr[-500:],
    )


def test_a_fused_batch_normalization():
    """It is refused with several in flight, and the default takes one."""

    def losses(x, number):
        one = tf.ones([3])
        return tf.reduce_sum(
            tf.compat.v1.nn.fused_batch_norm(w * x, one, one, is_training=True)[0], [1, 2, 3]
        )

    w, x = tf.Variable(2.0), tf.ones([4, 2, 2, 3])
    for in_flight in (1, 2):
        window = tf.function(
            lambda n=in_flight: (
                window_gradients(losses, [w], x, tf.ones([4]), 2, in_flight=n).losses
            )
        )
        if in_flight == 1:
            assert window().shape == [2]
        else:
            with pytest.raises(
                ValueError,
                match="in_flight must be 1 with a fused batch normalization. Received: 2, ",
            ):
                window()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"in_flight": 0}, "in_flight must be a positive integer. Received: 0"),
        ({"in_flight": 10**30}, "in_flight must be at most 2147483647. Received: 10+"),
        (
            {"dtype": "int32"},
            "dtype must be None or a floating-point type, such as float32. Received: 'int32'",
        ),
        (
            {"weight_dtype": tf.complex64},
            "weight_dtype must be .* floating-point type.* Received: tf.complex64",
        ),
        ({"axis": -1}, "axis must be an integer of 0 or more. Received: -1"),
        ({"skip_nonfinite": "no"}, "skip_nonfinite must be True or False. Received: 'no'"),
    ],
)
def test_settings_of_the_loop_are_checked(setting, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Loop(**setting)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_weights_are_floating_point_numbers(dtype):
    w = tf.Variable(2.0)
    with pytest.raises(
        ValueError, match=f"^weights must be floating-point numbers. Received: {dtype}$"
    ):
        window_gradients(lambda x, number: w * x, [w], tf.ones([4]), tf.ones([4], dtype), 2)

"""GradientAccumulator: eagerly, in a tf.function and in a static graph."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gradlab import GradientAccumulator, static_graph


def variable(name="w", shape=(2,), dtype="float32"):
    return tf.Variable(tf.zeros(shape, dtype), name=name)


@given(
    windows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)
)
def test_the_mean_is_over_what_was_added(windows):
    accumulator = GradientAccumulator([variable(dtype="float64")])
    generator = np.random.default_rng(0)
    for weights in windows:
        accumulator.zero()
        gradients = generator.normal(size=(len(weights), 2))
        for gradient, weight in zip(gradients, weights):
            accumulator.add([tf.constant(gradient)], weight)
        assert float(accumulator.weight) == sum(weights)
        np.testing.assert_allclose(
            accumulator.mean()[0], np.average(gradients, axis=0, weights=weights), rtol=1e-12
        )


def test_equal_weights_are_the_default():
    accumulator = GradientAccumulator([variable()])
    accumulator.add([tf.constant([1.0, 2.0])])
    accumulator.add([tf.constant([3.0, 6.0])])
    assert accumulator.mean()[0].numpy().tolist() == [2, 4]


def test_in_a_function():
    accumulator = GradientAccumulator([variable()])

    @tf.function
    def window(gradients, weights):
        accumulator.zero()
        for i in tf.range(tf.shape(weights)[0]):
            accumulator.add([gradients[i]], weights[i])
        return accumulator.mean()[0]

    for _ in range(2):  # the second window contains nothing of the first
        assert window(
            tf.constant([[1.0, 2.0], [4.0, 8.0]]), tf.constant([2.0, 1.0])
        ).numpy().tolist() == [2, 4]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"mean\(\) needs gradients: none .* for w"
    ):
        window(tf.zeros([0, 2]), tf.zeros([0]))


def test_in_a_static_graph():
    with tf.Graph().as_default() as graph:
        w = tf.compat.v1.get_variable(
            "w", [2], initializer=tf.zeros_initializer(), use_resource=True
        )
        accumulator = GradientAccumulator([w])
        gradient, weight = (
            tf.compat.v1.placeholder("float32", [2]),
            tf.compat.v1.placeholder("float32", []),
        )
        zero, add, mean = (
            accumulator.zero(),
            accumulator.add([gradient], weight),
            accumulator.mean(),
        )
        with static_graph.session(graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"mean\(\) needs gradients: none .* for w"
            ):
                session.run(mean)
            session.run(add, {gradient: [1, 2], weight: 2})
            session.run(add, {gradient: [4, 8], weight: 1})
            assert session.run(mean)[0].tolist() == [2, 4]
            assert session.run(accumulator.weight) == 3
            session.run(zero)
            assert session.run(accumulator.weight) == 0


def test_sparse_gradients_are_added_in_place():
    """Rows are scattered into the sum: no operation converts a sparse gradient to a dense
    tensor."""
    table = variable("table", (4, 1))
    accumulator = GradientAccumulator([table])

    @tf.function
    def add(values, indices):
        accumulator.add([tf.IndexedSlices(values, indices)], 2.0)

    add(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([1, 3, 3]))
    assert accumulator.mean()[0].numpy().ravel().tolist() == [0, 1, 0, 5]
    graph = add.get_concrete_function(tf.constant([[1.0]]), tf.constant([1])).graph
    kinds = {operation.type for operation in graph.get_operations()}
    assert "ResourceScatterAdd" in kinds
    assert not kinds & {"UnsortedSegmentSum", "ScatterNd", "TensorScatterAdd"}


def test_half_precision_is_summed_in_float32():
    """bfloat16 has 8 bits: from 256 on, adding 1 has no effect. A float32 accumulator stays
    exact."""
    ones = [tf.constant(1.0, "bfloat16")] * 1000
    means = {}
    for dtype in (None, "bfloat16"):
        accumulator = GradientAccumulator([variable(shape=(), dtype="bfloat16")], dtype=dtype)
        for one in ones:
            accumulator.add([one])
        means[dtype] = accumulator.mean()[0]
    assert means[None].dtype == tf.bfloat16
    assert float(means[None]) == 1.0
    assert float(means["bfloat16"]) < 0.5


def test_a_variable_without_any_gradient_has_no_mean():
    accumulator = GradientAccumulator([variable("w"), variable("unused")])
    accumulator.add([tf.constant([1.0, 1.0]), None], weight=1)
    accumulator.add([None, None], weight=3)  # None counts as zero
    mean, nothing = accumulator.mean()
    assert mean.numpy().tolist() == [0.25, 0.25]
    assert nothing is None


def test_keras_variables_and_optimizers():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build([None, 2])
    accumulator = GradientAccumulator(layer.trainable_variables)
    accumulator.add([tf.constant([[1.0], [2.0]])], weight=3)
    keras.optimizers.SGD(0.5).apply(accumulator.mean(), layer.trainable_variables)
    assert layer.get_weights()[0].ravel().tolist() == [-0.5, -1]


def test_invalid_input_raises_an_error_with_the_rule_and_the_value():
    accumulator = GradientAccumulator([variable("w"), variable("b")])
    good = tf.ones([2])
    for gradients, weight, sentence in [
        ([good], 1, r"one gradient for each of the 2 variables \(w, b\). Received: 1"),
        (
            [good, tf.ones([3])],
            1,
            r"the gradient of b must have the variable's shape \(2,\). Received: \(3,\)",
        ),
        (
            [good, tf.ones([2], "float64")],
            1,
            "the gradient of b must have the type float32. Received: float64",
        ),
        (
            [good, 1.0],
            1,
            "the gradient of b must be a tensor, tf.IndexedSlices or None. Received: 1.0",
        ),
        ([good, good], -1, "weight must be finite and 0 or more. Received: -1"),
        ([good, good], float("nan"), "weight must be finite and 0 or more. Received: nan"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            accumulator.add(gradients, weight)
    assert float(accumulator.weight) == 0  # nothing was added, not even partly
    with pytest.raises(
        ValueError, match=r"mean\(\) needs gradients: none .* were added since zero\(\) for w, b"
    ):
        accumulator.mean()
    accumulator.add([good, good])
    accumulator.zero()
    with pytest.raises(ValueError, match=r"mean\(\) needs gradients"):
        accumulator.mean()
    with pytest.raises(ValueError, match="at least one variable. Received: an empty list"):
        GradientAccumulator([])
    with pytest.raises(
        ValueError, match="needs a floating-point type for the sum of w. Received: int32"
    ):
        GradientAccumulator([variable("w", dtype="int32")])
    for dtype in ("int32", [], "", 5, "nonsense", True):
        with pytest.raises(
            ValueError,
            match="dtype must be None or a floating-point type, such as float32. Received: ",
        ):
            GradientAccumulator([variable("w")], dtype=dtype)


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices))


# For each kind of input that is refused: a gradient of a table of 3 rows, a weight, and the
# sentence.
WRONG = {
    "a row beyond the last": (
        slices([[1.0, 1.0]], [7]),
        1.0,
        "must have indices from 0 to 2. Received: 7",
    ),
    "a row below 0": (
        slices([[1.0, 1.0]], [-1]),
        1.0,
        "must have indices from 0 to 2. Received: -1",
    ),
    "fewer rows than indices": (
        slices([[1.0, 1.0]], [0, 1]),
        1.0,
        r"must have one row of shape \(2,\) for each index. "
        r"Received: \(1, 2\)",
    ),
    "rows of another length": (
        slices([[1.0]], [0]),
        1.0,
        r"must have one row of shape \(2,\) for each index. Received: "
        r"\(1, 1\)",
    ),
    "a negative weight": (
        tf.ones([3, 2]),
        tf.constant(-2.0),
        r"weight must be finite and 0 or "
        r"more. Received: -2\.0",
    ),
    "a negative integer": (
        tf.ones([3, 2]),
        tf.constant(-2),
        "weight must be finite and 0 or more. Received: -2",
    ),
    "a weight of NaN": (
        tf.ones([3, 2]),
        tf.constant(np.nan),
        "weight must be finite and 0 or more. Received: nan",
    ),
    "an array of inf": (
        tf.ones([3, 2]),
        np.array(np.inf),
        "weight must be finite and 0 or more. Received: inf",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_add_that_raises_leaves_nothing_behind(case):
    """The first variable's gradient is right; neither that nor the weight may be added."""
    gradient, weight, sentence = WRONG[case]
    accumulator = GradientAccumulator([variable("w"), variable("table", (3, 2))])
    accumulator.add([tf.ones([2]), slices([[1.0, 1.0]], [0])])
    before = [v.numpy() for v in accumulator.variables]
    with pytest.raises(ValueError, match=f"{sentence}$"):
        accumulator.add([tf.ones([2]), gradient], weight)
    for was, now in zip(before, accumulator.variables):
        np.testing.assert_array_equal(now.numpy(), was)


@pytest.mark.parametrize("case", WRONG)
def test_an_add_that_fails_in_a_function_leaves_nothing_behind(case):
    """The same where TensorFlow knows neither values nor shapes before the operation runs."""
    gradient, weight, sentence = WRONG[case]
    accumulator = GradientAccumulator([variable("w"), variable("table", (3, 2))])
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    parts = [gradient.values, gradient.indices] if is_sparse else [gradient]
    weight = tf.convert_to_tensor(weight)
    signature = [tf.TensorSpec([None] * part.shape.rank, part.dtype) for part in parts]

    @tf.function(input_signature=[signature, tf.TensorSpec([], weight.dtype)])
    def add(parts, weight):
        accumulator.add([tf.ones([2]), tf.IndexedSlices(*parts) if is_sparse else parts[0]], weight)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=re.sub(r" Received.*", " Received:", sentence)
    ):
        add(parts, weight)
    assert all((v.numpy() == 0).all() for v in accumulator.variables)


def test_an_add_that_fails_in_a_static_graph_leaves_nothing_behind():
    with tf.Graph().as_default() as graph:
        w = tf.compat.v1.get_variable(
            "w", [2], initializer=tf.zeros_initializer(), use_resource=True
        )
        accumulator = GradientAccumulator([w])
        weight, shape = (
            tf.compat.v1.placeholder("float32", []),
            tf.compat.v1.placeholder("float32", [None]),
        )
        add, open_shape = accumulator.add([tf.ones([2])], weight), accumulator.add([shape])
        with static_graph.session(graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for operation, fed, sentence in [
                (add, {weight: np.nan}, "weight must be finite and 0 or more"),
                (open_shape, {shape: [1, 2, 3]}, "."),  # TensorFlow's own error
                (open_shape, {shape: [1]}, "the gradient of w must have the variable"),
            ]:
                with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
                    session.run(operation, fed)
                assert [each.tolist() for each in session.run(accumulator.variables)] == [[0, 0], 0]


@pytest.mark.parametrize(
    "weight", [[[1], [2]], [1.0], np.ones([2]), 1j, tf.constant(1j), "one", None]
)
def test_a_weight_is_one_number(weight):
    accumulator = GradientAccumulator([variable()])
    with pytest.raises(
        ValueError, match=r"^weight must be (one real number|finite and 0 or more)\. Received: "
    ):
        accumulator.add([tf.ones([2])], weight)
    assert float(accumulator.weight) == 0


def test_weights_may_be_integers_of_numpy_and_tensorflow():
    accumulator = GradientAccumulator([variable()])
    for weight in (np.int64(2), tf.constant(2), np.array(2), np.float32(2)):
        accumulator.add([tf.ones([2])], weight)
    assert float(accumulator.weight) == 8

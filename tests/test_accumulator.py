"""GradientAccumulator: eagerly, in a tf.function and in a static graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gradlab import GradientAccumulator, static_graph


def variable(name="w", shape=(2,), dtype="float32"):
    return tf.Variable(tf.zeros(shape, dtype), name=name)


@given(windows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_the_mean_is_over_what_was_added(windows):
    accumulator = GradientAccumulator([variable(dtype="float64")])
    generator = np.random.default_rng(0)
    for weights in windows:
        accumulator.zero()
        gradients = generator.normal(size=(len(weights), 2))
        for gradient, weight in zip(gradients, weights):
            accumulator.add([tf.constant(gradient)], weight)
        assert float(accumulator.weight) == sum(weights)
        np.testing.assert_allclose(accumulator.mean()[0], np.average(gradients, axis=0, weights=weights), rtol=1e-12)


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
        assert window(tf.constant([[1.0, 2.0], [4.0, 8.0]]), tf.constant([2.0, 1.0])).numpy().tolist() == [2, 4]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"mean\(\) needs gradients: none .* for w"):
        window(tf.zeros([0, 2]), tf.zeros([0]))


def test_in_a_static_graph():
    with tf.Graph().as_default() as graph:
        w = tf.compat.v1.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
        accumulator = GradientAccumulator([w])
        gradient, weight = tf.compat.v1.placeholder("float32", [2]), tf.compat.v1.placeholder("float32", [])
        zero, add, mean = accumulator.zero(), accumulator.add([gradient], weight), accumulator.mean()
        with static_graph.session(graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"mean\(\) needs gradients: none .* for w"):
                session.run(mean)
            session.run(add, {gradient: [1, 2], weight: 2})
            session.run(add, {gradient: [4, 8], weight: 1})
            assert session.run(mean)[0].tolist() == [2, 4]
            assert session.run(accumulator.weight) == 3
            session.run(zero)
            assert session.run(accumulator.weight) == 0


def test_sparse_gradients_are_added_in_place():
    """Rows are scattered into the sum: no operation converts a sparse gradient to a dense tensor."""
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
    """bfloat16 has 8 bits: from 256 on, adding 1 has no effect. A float32 accumulator stays exact."""
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
        ([good, tf.ones([3])], 1, r"the gradient of b must have the variable's shape \(2,\). Received: \(3,\)"),
        ([good, tf.ones([2], "float64")], 1, "the gradient of b must have the type float32. Received: float64"),
        ([good, 1.0], 1, "the gradient of b must be a tensor, tf.IndexedSlices or None. Received: 1.0"),
        ([good, good], -1, "weight must be finite and 0 or more. Received: -1"),
        ([good, good], float("nan"), "weight must be finite and 0 or more. Received: nan"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            accumulator.add(gradients, weight)
    assert float(accumulator.weight) == 0  # nothing was added, not even partly
    with pytest.raises(ValueError, match=r"mean\(\) needs gradients: none .* were added since zero\(\) for w, b"):
        accumulator.mean()
    accumulator.add([good, good])
    accumulator.zero()
    with pytest.raises(ValueError, match=r"mean\(\) needs gradients"):
        accumulator.mean()
    with pytest.raises(ValueError, match="at least one variable. Received: an empty list"):
        GradientAccumulator([])
    with pytest.raises(ValueError, match="needs a floating-point type for the sum of w. Received: int32"):
        GradientAccumulator([variable("w")], dtype="int32")

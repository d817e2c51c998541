"""average_gradients: the mean over towers, for dense, sparse, missing and half-precision
gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gradlab import average_gradients, averaging


def variable(name="w", shape=(2,), dtype="float32"):
    return tf.Variable(tf.zeros(shape, dtype), name=name)


@given(towers=st.integers(1, 6), weighted=st.booleans(), seed=st.integers(0, 2**16))
def test_it_equals_the_average_of_numpy(towers, weighted, seed):
    generator = np.random.default_rng(seed)
    gradients = generator.normal(size=(towers, 3, 2))
    weights = generator.uniform(0.1, 5, towers) if weighted else None
    w = variable(shape=(3, 2), dtype="float64")
    [(mean, returned)] = average_gradients([[(tf.constant(g), w)] for g in gradients], weights)
    np.testing.assert_allclose(
        mean, np.average(gradients, axis=0, weights=weights), rtol=1e-12, atol=1e-15
    )
    assert returned is w


def test_none_counts_as_zero_unless_all_are_none():
    w, unused = variable("w"), variable("unused")
    towers = [[(tf.constant([4.0, 8.0]), w), (None, unused)], [(None, w), (None, unused)]]
    (mean, _), (nothing, _) = average_gradients(towers)
    assert mean.numpy().tolist() == [2, 4]
    assert nothing is None
    (weighted, _), _ = average_gradients(towers, weights=[3, 1])
    assert weighted.numpy().tolist() == [3, 6]


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([4, 1]))


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_sparse_gradients_stay_sparse_with_each_row_once(weights):
    table = variable("table", (4, 1))
    towers = [
        [(slices([[1.0], [2.0]], [0, 2]), table)],
        [(slices([[3.0], [5.0], [7.0]], [2, 3, 3]), table)],
    ]
    [(mean, _)] = average_gradients(towers, weights)
    assert isinstance(mean, tf.IndexedSlices)
    assert sorted(mean.indices.numpy()) == [0, 2, 3]
    dense = [np.array([[1.0], [0], [2], [0]]), np.array([[0.0], [0], [3], [12]])]
    np.testing.assert_allclose(
        tf.convert_to_tensor(mean), np.average(dense, axis=0, weights=weights)
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad", "rmsprop"])
def test_the_rows_of_a_window_make_the_update_of_the_summed_gradient(optimizer, float64):
    ids = np.random.default_rng(0).integers(0, 20, [12, 3])  # most rows occur more than once
    sizes = [5.0, 5.0, 2.0]

    def after_an_update(gradient):
        table = keras.Variable(np.linspace(-1, 1, 60).reshape(20, 3))
        rule = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.1}})
        rule.apply([gradient(table)], [table])
        return table.numpy()

    def of_mean_loss(table, rows):
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table.value, rows)
            loss = tf.reduce_mean(tf.reduce_sum((looked_up - 0.3) ** 2, axis=[1, 2]))
        return tape.gradient(loss, table.value)

    def of_rows(table):
        parts = np.split(ids, [5, 10])
        window = [[(of_mean_loss(table, rows), table)] for rows in parts]
        [(mean, _)] = average_gradients(window, sizes)
        assert isinstance(mean, tf.IndexedSlices) and len(mean.indices) == len(np.unique(ids))
        return mean

    def of_batch(table):
        whole = of_mean_loss(table, ids)
        dense = np.zeros([20, 3])
        np.add.at(dense, whole.indices.numpy(), whole.values.numpy())
        return tf.constant(dense)

    by_rows, by_table = after_an_update(of_rows), after_an_update(of_batch)
    np.testing.assert_allclose(by_rows, by_table, rtol=1e-12, atol=1e-12)


def test_sparse_and_dense_together_are_dense():
    table = variable("table", (4, 1))
    [(mean, _)] = average_gradients([[(slices([[2.0]], [1]), table)], [(tf.ones([4, 1]), table)]])
    assert mean.numpy().ravel().tolist() == [0.5, 1.5, 0.5, 0.5]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_averaged_in_float32(dtype):
    w = variable(shape=(), dtype=dtype)
    # In float16 the sum 40,000 + 60,000 is infinite, in bfloat16 256 + 1 is 256.
    values = [40_000.0, 60_000.0] if dtype == "float16" else [256.0] + [1.0] * 255
    [(mean, _)] = average_gradients(
        [[(tf.constant(value, dtype), w)] for value in values], [1.0] * len(values)
    )
    assert mean.dtype == dtype
    assert float(mean) == float(tf.cast(np.mean(values), dtype))


def test_it_works_in_a_function_and_in_a_static_graph():
    w = variable()
    compiled = tf.function(lambda a, b, n: average_gradients([[(a, w)], [(b, w)]], [n, 1])[0][0])
    assert compiled(
        tf.constant([1.0, 2.0]), tf.constant([4.0, 8.0]), tf.constant(2)
    ).numpy().tolist() == [2, 4]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        a = tf.constant([1.0, 2.0])
        v = tf.compat.v1.get_variable("v", [2], initializer=tf.zeros_initializer())
        assert session.run(average_gradients([[(a, v)], [(3 * a, v)]])[0][0]).tolist() == [2, 4]


W, OTHER = variable("w"), variable("other")
G = tf.ones([2])


@pytest.mark.parametrize(
    ("towers", "weights", "sentence"),
    [
        ([], None, "at least one tower. Received: an empty list"),
        (
            [[(tf.ones([3]), W)]],
            None,
            r"tower 0: the gradient of w must have the variable's shape \(2,\).* \(3,\)",
        ),
        (
            [[(tf.ones([2], tf.float64), W)]],
            None,
            "tower 0: the gradient of w must have the type float32. .* float64",
        ),
        (
            [[(1.0, W)]],
            None,
            "tower 0: the gradient of w must be a tensor, tf.IndexedSlices or None. Received: 1.0",
        ),
        ([[(G, W)], [(G, OTHER)]], None, "tower 0 has w. Received: other from tower 1"),
        ([[(G, W)], [(G, W), (G, OTHER)]], None, "tower 0 has 1. Received: 2 from tower 1"),
        ([[(G, W)], [(G, W)]], [1], r"one number for each of the 2 towers. Received: \[1\]"),
        ([[(G, W)], [(G, W)]], [0, 0], r"not all 0. Received: \[0, 0\]"),
        ([[(G, W)], [(G, W)]], [1, -1], r"finite, 0 or more, and not all 0. Received: \[1, -1\]"),
        ([[(G, W)], [(G, W)]], [1, float("nan")], r"finite, .* Received: \[1, nan\]"),
        (
            [[(G, W)], [(G, W)]],
            [1, tf.constant(np.nan)],
            r"finite, .* Received: \[1, <tf.Tensor.*nan>\]",
        ),
        (
            [[(G, W)], [(G, W)]],
            [tf.constant(2), tf.constant(-1)],
            "finite, 0 or more, and not all 0. Received: ",
        ),
        (
            [[(G, W)], [(G, W)]],
            [np.array(0), tf.constant(0.0)],
            "finite, 0 or more, and not all 0. Received: ",
        ),
        (
            [[(G, W)], [(G, W)]],
            [[1], [2]],
            r"weights must be real numbers or scalar tensors. Received: \[1\]",
        ),
        (
            [[(G, W)], [(G, W)]],
            [1j, 2],
            "weights must be real numbers or scalar tensors. Received: 1j",
        ),
        (
            [[(G, W)], [(G, W)]],
            ["1", "2"],
            "weights must be real numbers or scalar tensors. Received: '1'",
        ),
    ],
)
def test_invalid_input_raises_an_error_with_the_rule_and_the_value(towers, weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        average_gradients(towers, weights)


def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one():
    """A row that is named twice is the sum of both."""
    sparse = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]), tf.constant([4, 1]))
    assert float(averaging.squared_norm([sparse, None, tf.constant([4.0])], "float32")) == 9 + 16


def test_weights_that_float32_cannot_hold():
    variable = tf.Variable([0.0, 0.0], dtype=tf.float64)
    towers = [[(tf.constant(g, tf.float64), variable)] for g in ([1.0, 2.0], [3.0, 5.0])]
    [(mean, _)] = average_gradients(towers, weights=[0.1, 0.7])
    expected = (0.1 * np.array([1.0, 2.0]) + 0.7 * np.array([3.0, 5.0])) / 0.8
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-14)

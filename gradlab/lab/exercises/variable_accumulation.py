"""Checkers of notebook 03."""

import numpy as np
import tensorflow as tf

from gradlab.lab.exercises import NotYet, exercise, require, require_close


@exercise
def accumulator(answer) -> None:
    """A class with zero, add and mean, for one gradient."""
    made = answer()
    made.zero()
    made.add(np.array(1.0), 2)
    made.add(np.array(4.0), 1)
    hints = {
        6: "which is the weighted sum: divide by the weight that was added",
        2.5: "which is the plain mean: the weights have not been used",
        3: "which is the sum over the number of micro-batches: divide by the weight that was added",
        5: "which is the plain sum",
        4: "which is the last gradient alone",
    }
    mean = made.mean()
    hint = next((hint for wrong, hint in hints.items() if _is(mean, wrong)), "and should not be")
    require_close(mean, 2, "after 1 with weight 2 and 4 with weight 1 the mean", hint)
    require_close(made.mean(), 2, "asked a second time, the mean", "but asking must not change anything")

    made.zero()
    made.add(np.array(10.0), 1)
    hint = "and should be 10: after zero() nothing of the window before may be left, in the sum or in the weight"
    require_close(made.mean(), 10, "in a second window of the one gradient 10, the mean", hint)

    given = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    other = answer()
    for gradient in given:
        other.add(gradient, 1)
    require_close(
        other.mean(), [2, 4], "the mean of [1, 2] and [3, 6]", "and should be [2, 4], with a fresh accumulator"
    )
    untouched = given[0].tolist() == [1, 2] and given[1].tolist() == [3, 6]
    require(
        untouched, f"the first gradient was [1, 2] and is {given[0].tolist()} now: add wrote into the caller's array"
    )

    reused = answer()
    array = np.array([1.0, 2.0])
    reused.add(array, 1)
    array[...] = [3.0, 6.0]
    reused.add(array, 1)
    hint = "and should be [2, 4]: the array of the first add was filled anew before the second, and was kept, not added"
    require_close(reused.mean(), [2, 4], "the mean of [1, 2] and [3, 6] in one reused array", hint)


@exercise
def repaired_rate(answer) -> None:
    """A number: the rate for the mean that trains as 0.01 did for the sum of 8."""
    require(not _is(answer, 0.01), "with 0.01 every step would be 8 times shorter than before")
    require(not _is(answer, 0.00125), "that goes the wrong way: the mean is shorter than the sum")
    require_close(answer, 0.08, "the learning rate", "and should make rate × mean what 0.01 × sum was")


@exercise
def mean_in_a_loop(answer) -> None:
    """A function for tf.function: (i -> gradient of micro-batch i, weights) -> the weighted mean of the gradients."""
    table = tf.constant([[1.0, 2.0], [4.0, 8.0], [10.0, 0.0], [0.0, 5.0], [3.0, 3.0]])
    calls = []

    def gradient_of(i):
        calls.append(i)
        return tf.gather(table, i)

    eagerly = answer(gradient_of, tf.constant([2.0, 1.0]))
    require(eagerly is not None and eagerly is not ..., "the function returns nothing yet")

    def traced(weights):
        return tf.convert_to_tensor(answer(gradient_of, weights))

    compiled = tf.function(traced, input_signature=[tf.TensorSpec([None], tf.float32)])
    try:
        graph = compiled.get_concrete_function().graph
    except Exception as error:
        hint = "how many micro-batches there are is not known while tracing: loop over tf.range(tf.shape(weights)[0])"
        if any(
            word in str(error) for word in ("shape invariant", "dtype", "int32", "must be defined", "to be defined")
        ):
            hint = "what the loop adds to must exist before it, with its final shape and type: begin with tf.zeros([2])"
        raise NotYet(f"it works eagerly, but cannot be traced: {hint}") from None
    require(calls, "gradient_of was never called")
    require(any("While" in op.type for op in graph.get_operations()), "there is no loop in the graph: use tf.range")
    for weights in ([2.0, 1.0], [1.0, 1.0, 2.0], [1.0, 0.0, 1.0, 3.0, 1.0]):
        wanted = np.average(table.numpy()[: len(weights)], axis=0, weights=weights)
        got = compiled(tf.constant(weights)).numpy()
        why = "and should not be"
        if got.shape == wanted.shape:
            if np.allclose(got, wanted * sum(weights)):
                why = "which is the sum: divide by the weights' sum"
            elif np.allclose(got, table.numpy()[: len(weights)].mean(axis=0)):
                why = "which is the plain mean: use the weights"
            elif np.allclose(got, wanted * sum(weights) / len(weights)):
                why = "which is the sum over k: divide by the weights' sum"
        require_close(got, wanted, f"with the weights {weights} the mean", why, rtol=1e-4)
    traces = compiled.experimental_get_tracing_count()
    require(traces == 1, f"it was traced {traces} times")


@exercise
def is_right(answer) -> None:
    """A function: a method (gradients, weights) -> mean, right or wrong -> True or False."""
    verdict = answer(_right)
    require(verdict is not None and verdict is not ..., "the function returns nothing yet")
    require(verdict, "your test says False to a method that is right. Compare with a tolerance, such as np.allclose")
    for planted, words in _PLANTED:
        try:
            verdict = answer(planted)
        except Exception:
            verdict = False  # a test that fails loudly has failed, too
        require(verdict is not None, f"your test returns nothing for a method that {words}")
        require(not verdict, f"your test lets a method pass that {words}")
    require(answer(_right), "your test says True to a right method at first, and False the second time")


def _right(gradients, weights):
    # computed another way than np.average does, so that the last digits may differ
    total = sum(weight * np.asarray(gradient, np.float64) for gradient, weight in zip(gradients, weights))
    return total * (1 / sum(weights)) * (1 + 1e-13)


def _mean(gradients, weights):
    return np.average(np.stack([np.asarray(g, np.float64) for g in gradients]), axis=0, weights=weights)


_PLANTED = (
    (lambda gradients, weights: _mean(gradients, weights) * sum(weights), "applies the sum"),
    (lambda gradients, weights: _mean(gradients, weights) * sum(weights) / len(weights), "divides by k"),
    (lambda gradients, weights: _mean(gradients, [1] * len(weights)), "ignores the weights"),
    (lambda gradients, weights: _mean(gradients[:-1] or gradients, weights[:-1] or weights), "drops the tail"),
    (lambda gradients, weights: np.asarray(gradients[0], np.float64), "only looks at the first micro-batch"),
)


def _is(value, number: float) -> bool:
    try:
        return np.shape(value) == () and bool(np.isclose(float(value), number))
    except (TypeError, ValueError):
        return False

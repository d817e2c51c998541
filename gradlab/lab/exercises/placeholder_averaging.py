"""Checkers for the exercises of notebook 03."""

import re
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab import static_graph
from gradlab.lab.exercises import NotYet, exercise, filled, hint_for, require, require_close

v1 = tf.compat.v1

# gradients of two variables with the shapes [2] and [], from micro-batches of 4, 4 and 2 examples
_WINDOW = [
    [np.array([1.0, 2.0]), np.array(3.0)],
    [np.array([3.0, 6.0]), np.array(0.0)],
    [np.zeros(2), np.array(9.0)],
]
_WEIGHTS = [4, 4, 2]
_MEANS = [[1.6, 3.2], 3.0]
_RATE = 0.125


@exercise
def one_update(answer: Any) -> None:
    """A function: (session, plan, microbatches) -> one update: k runs that compute and one that
    applies."""
    rng = np.random.default_rng(0)
    window = [(rng.integers(-3, 4, [n, 2]) * 1.0, rng.integers(-3, 4, n) * 1.0) for n in (4, 4, 2)]
    _check_one_update(answer, window)
    _check_one_update(answer, window[:1])


@exercise
def mean_of_stream(answer: Any) -> None:
    """A function: an iterator of (arrays of the variables, weight), the arrays reused -> the list
    of weighted means."""
    one = _list(answer(iter([([np.array(1.0)], 2), ([np.array(4.0)], 1)])), variables=1)
    require_close(
        one[0],
        2,
        "the mean of 1 and 4 with the weights 2 and 1",
        _why(one[0], total=6, plain=2.5, planned=3),
    )
    _check_means(_list(answer(iter(zip(_copies(), _WEIGHTS))), variables=2))
    means = _list(answer(_reusing_stream()), variables=2)
    hint = "but was right when the arrays were not reused: you kept an array that the stream has overwritten"
    for value, wanted in zip(means, _MEANS):
        require_close(value, wanted, "with arrays that are reused, a mean", hint)
    rng = np.random.default_rng(0)
    size = rng.standard_normal(10_000).nbytes
    tracemalloc.start()
    try:
        answer(([rng.standard_normal(10_000)], 1) for _ in range(100))
        most = tracemalloc.get_traced_memory()[1] / size
    finally:
        tracemalloc.stop()
    hint = f"the means are right, but 100 micro-batches need the memory of {most:.0f} gradients: keep their sum only"
    require(most < 10, hint)


@exercise
def mean_to_apply(answer: Any) -> None:
    """A function: (window, sizes, largest norm) -> the clipped weighted mean of the finite
    micro-batches, or None if they have less than half of the examples."""
    with np.errstate(all="ignore"):
        _check_clipping(answer)
        _check_means(_list(answer(_copies(), list(_WEIGHTS), 100.0), variables=2))
        _check_left_out(answer)
        _check_too_few(answer)


def _check_one_update(answer: Any, window: list) -> None:
    plan, initialize = _plan()
    with static_graph.session(plan.graph) as session:
        session.run(initialize)
        watched = _Watched(session, plan)
        answer(watched, plan, list(window))
        _check_runs(watched.runs, plan, window)
        applied = [np.array([1.0, -1.0]) - session.run(plan.w), -session.run(plan.b)]
    sizes = np.array([len(y) for _, y in window])
    each = np.array([_gradient(x, y) for x, y in window])
    mean = np.average(each, axis=0, weights=sizes)
    fed = np.hstack(applied) / _RATE
    hints = {
        "the sum of the gradients was applied: divide by the weights": each.sum(axis=0),
        "the sum of size times gradient was applied: divide by the number of examples": sizes
        @ each,
        f"the unweighted mean was applied, but the micro-batches have {sizes} examples": each.mean(
            axis=0
        ),
        "the gradient of the last micro-batch was applied, not the mean of all": each[-1],
        "the last micro-batch is missing from the mean": np.average(
            each[:-1] if len(each) > 1 else each, axis=0
        ),
    }
    for hint, wrong in hints.items():
        require(np.allclose(wrong, mean) or not np.allclose(fed, wrong, atol=1e-3), hint)
    require_close(
        fed, mean, "what was applied", "and is not the weighted mean of the gradients", rtol=1e-4
    )


def _gradient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean squared error for w and b at their first values, computed without
    TensorFlow."""
    error = x @ [1.0, -1.0] - y
    return np.hstack([2 * x.T @ error / len(y), 2 * error.mean()])


def _check_runs(runs: list, plan: Any, window: list) -> None:
    """Raise `NotYet` unless the runs are one for each micro-batch that computes, then one that
    applies."""
    require(runs, "session.run was never called")
    both = any(run.computes and run.applies for run in runs)
    require(
        not both,
        "one run fetched gradients and train_op together: the mean is not known yet when it starts",
    )
    computing = [run for run in runs if run.computes]
    applying = [run for run in runs if run.applies]
    k = len(window)
    require(applying, f"train_op was never run, after {len(computing)} runs that computed")
    hint = f"train_op ran {len(applying)} times, but must run once, after the last of {k} micro-batches"
    require(len(applying) == 1, hint)
    require(runs[-1].applies, "train_op ran before all gradients were computed: run it last")
    split = len(computing) > k and any(run.computes < len(plan.gradients) for run in computing)
    require(
        not split,
        "fetch all gradients of a micro-batch in one run: a run for each repeats the whole "
        "computation",
    )
    hint = f"runs that computed gradients: {len(computing)}, micro-batches: {k}. Make one run for each micro-batch"
    require(len(computing) == k, hint)
    for run in computing:
        needless = any(mean.name in run.feed for mean in plan.means)
        require(not needless, "a run that computes needs no means: do not feed them")
        hint = "feed True to plan.training while gradients are computed: dropout would be off otherwise"
        require(bool(run.feed.get(plan.training.name, False)), hint)
    sizes = sorted(len(run.feed[plan.y.name]) for run in computing)
    require(
        sizes == sorted(len(y) for _, y in window), "each micro-batch must be fed once, as it came"
    )
    extra = [name for name in ("x", "y", "training") if getattr(plan, name).name in runs[-1].feed]
    hint = f"the run of train_op was fed {', '.join(extra)}: it needs only the means, because no arrow leads there"
    require(not extra, hint)


class _Watched:
    """A session that records what each run fetches and feeds."""

    def __init__(self, session: Any, plan: Any) -> None:
        self._session = session
        self._plan = plan
        self.graph = plan.graph
        self.runs: list[SimpleNamespace] = []

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        try:
            values = self._session.run(fetches, feed_dict)
        except tf.errors.InvalidArgumentError as error:
            missing = re.search(r"must feed a value for placeholder tensor '(\w+)'", str(error))
            if not missing:
                raise
            raise NotYet(f"a run needs the placeholder {missing[1]}, but it was not fed") from None
        found = [self.graph.as_graph_element(each) for each in tf.nest.flatten(fetches)]
        computes = sum(any(each is gradient for each in found) for gradient in self._plan.gradients)
        applies = any(each is self._plan.train_op for each in found)
        feed = {
            self.graph.as_graph_element(key).name: value for key, value in (feed_dict or {}).items()
        }
        self.runs.append(SimpleNamespace(computes=computes, applies=applies, feed=feed))
        return values


def _check_clipping(answer: Any) -> None:
    short = _list(answer([[np.array([3.0, 0.0]), np.array([4.0])]], [1], 30), variables=2)
    require_close(
        short[0], [3, 0], "a mean of the norm 5, clipped to 30,", "and should be left as it is"
    )
    require_close(
        short[1], [4], "a mean of the norm 5, clipped to 30,", "and should be left as it is"
    )
    first, second = _list(answer([[np.array([3.0, 0.0]), np.array([4.0])]], [1], 1), variables=2)
    apart = np.allclose(first, [1, 0]) and np.allclose(second, [1])
    require(not apart, "each array was clipped separately: the norm is that of all arrays together")
    squared = np.allclose(first, [3 / 25, 0]) and np.allclose(second, [4 / 25])
    require(
        not squared, "it was divided by the sum of squares: the norm is the square root of that"
    )
    require_close(
        first, [0.6, 0], "the first array of [[3, 0], [4]], clipped to 1,", "and should be [0.6, 0]"
    )
    require_close(
        second, [0.8], "the second array of [[3, 0], [4]], clipped to 1,", "and should be [0.8]"
    )
    two = [[np.array([12.0, 0.0]), np.array([0.0])], [np.zeros(2), np.array([16.0])]]
    # The mean [6, 0], [8] has the norm 10
    first, second = _list(answer(two, [1, 1], 5), variables=2)
    early = np.allclose(first, [2.5, 0]) and np.allclose(second, [2.5])
    require(not early, "each micro-batch was clipped before averaging: clip the mean, once")
    require_close(
        first,
        [3, 0],
        "the first array of the mean [[6, 0], [8]], clipped to 5,",
        "and should be [3, 0]",
    )
    require_close(
        second,
        [4],
        "the second array of the mean [[6, 0], [8]], clipped to 5,",
        "and should be [4]",
    )
    zeros = _list(answer([[np.zeros(2), np.zeros(1)]], [1], 1), variables=2)
    require(
        np.isfinite(zeros[0]).all(),
        "a gradient of zeros becomes NaN: its norm is 0, and 0 / 0 is NaN",
    )
    require_close(zeros[0], [0, 0], "a gradient of zeros, clipped,", "and should stay zeros")


def _check_left_out(answer: Any) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        window = _copies()
        window[1][1] = np.array(bad)
        vector, scalar = _list(answer(window, [4, 3, 2], 100.0), variables=2)
        whole = f"with {bad} in the second micro-batch,"
        finite = np.isfinite(vector).all() and np.isfinite(scalar).all()
        require(
            finite, f"{whole} the mean is not finite: leave the micro-batch out before averaging"
        )
        kept = np.allclose(vector, [13 / 9, 26 / 9])
        require(
            not kept,
            f"{whole} its other array is still in the mean: leave out the whole micro-batch",
        )
        hint = "but should be 5: 3 and 9 with the weights 4 and 2"
        weighed = "which counts the examples of the micro-batch that was left out: divide by the others' only"
        shifted = "which has the weights 4 and 3: leave out the size of the micro-batch, too"
        mistakes = {10 / 3: weighed, 6: "which is the unweighted mean", 39 / 7: shifted}
        hint = hint_for(scalar, mistakes, hint)
        require_close(scalar, 5, f"{whole} the mean of the second variable", hint)
        require_close(
            vector,
            [2 / 3, 4 / 3],
            f"{whole} the mean of the first variable",
            "and should be [2/3, 4/3]",
        )
    nothing = answer([[np.array([np.nan, 1.0]), np.array(1.0)]], [4], 100.0)
    require(nothing is None, "if every micro-batch is left out, there is no mean: return None")


def _check_too_few(answer: Any) -> None:
    bad = [np.array([np.nan, 1.0]), np.array(1.0)]
    nothing = answer([bad, bad, _copies()[2]], [4, 4, 2], 100.0)
    hint = "8 of 10 examples are left out, more than half: return None"
    require(nothing is None, hint)
    for first, sizes in (bad, [1, 1, 6]), (_copies()[2], [2, 3, 1]):
        value = answer([first, bad, _copies()[2]], sizes, 100.0)
        left = f"{sum(sizes[:2]) if first is bad else sizes[1]} of {sum(sizes)} examples"
        what = f"of the sizes {sizes}, {left} are left out, which is not more than half"
        require(value is not None, f"{what}: return the mean of the others")
        require_close(_list(value, variables=2)[1], 9, f"{what}: the mean of the second variable")


def _plan() -> tuple[SimpleNamespace, tf.Operation]:
    """A graph of two variables for the exercise `one_update`, and the operation that initializes
    it."""
    plan = SimpleNamespace(graph=tf.Graph())
    descent = v1.train.GradientDescentOptimizer(_RATE)
    with plan.graph.as_default(), v1.variable_scope("", use_resource=True):
        plan.x = v1.placeholder(tf.float32, [None, 2], name="x")
        plan.y = v1.placeholder(tf.float32, [None], name="y")
        plan.training = v1.placeholder(tf.bool, [], name="training")
        plan.w = v1.get_variable("w", [2], initializer=v1.constant_initializer([1.0, -1.0]))
        plan.b = v1.get_variable("b", [], initializer=v1.zeros_initializer())
        output = tf.linalg.matvec(plan.x, plan.w) + plan.b
        error = tf.where(plan.training, output, 2 * output) - plan.y
        pairs = descent.compute_gradients(tf.reduce_mean(error**2))
        plan.gradients = [gradient for gradient, _ in pairs]
        plan.means = [v1.placeholder(v.dtype, v.shape, name=f"mean_{v.op.name}") for _, v in pairs]
        plan.train_op = descent.apply_gradients(zip(plan.means, [v for _, v in pairs]))
        return plan, v1.global_variables_initializer()


def _copies() -> list:
    return [[gradient.copy() for gradient in micro_batch] for micro_batch in _WINDOW]


def _reusing_stream():
    """The micro-batches of the window, all in the same arrays, which are overwritten each time."""
    arrays = [np.empty_like(gradient) for gradient in _WINDOW[0]]
    for micro_batch, weight in zip(_WINDOW, _WEIGHTS):
        for array, gradient in zip(arrays, micro_batch):
            array[...] = gradient
        yield arrays, weight
    for array in arrays:
        array[...] = np.nan


def _list(value, variables: int) -> list:
    require(
        isinstance(filled(value), list | tuple | np.ndarray),
        "the result should be a list over variables",
    )
    value = list(value)
    wanted = "one array" if variables == 1 else f"{variables} arrays, one for each variable"
    require(
        len(value) == variables, f"the result should be a list of {wanted}. Yours has {len(value)}"
    )
    return value


def _check_means(means: list) -> None:
    vector, scalar = means
    hint = _why(scalar, total=30, plain=4, planned=10)
    require_close(scalar, _MEANS[1], "the mean of 3, 0 and 9 with the weights 4, 4 and 2", hint)
    hint = "but should be [1.6, 3.2]: take the mean over micro-batches, not over the elements of a gradient"
    require_close(
        vector, _MEANS[0], "the mean of [1, 2], [3, 6] and [0, 0] with the weights 4, 4 and 2", hint
    )


def _why(value, total: float, plain: float, planned: float) -> str:
    """The second half of the message: names the mistake behind a frequent wrong mean."""
    mistakes = {
        total: "which is the weighted sum: divide it by the sum of the weights",
        plain: "which is the unweighted mean: use the weights",
        planned: "which is the weighted sum over the number of micro-batches: divide by the sum "
        "of the weights",
    }
    otherwise = "and should not be: the sum of weight times gradient, over the sum of the weights"
    return hint_for(value, mistakes, otherwise)

"""Checkers for the exercises of notebook 12."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close
from gradlab.lab.widget.course.schedules import PIPELINES, schedule
from gradlab.lab.widget.course.timeline import Timeline, compare
from gradlab.lab.widget.course.timeline_drawing import Drawing

# Of the timelines without names: schedule, devices and micro-batches.
_UNNAMED = {"A": ("1f1b", 3, 6), "B": ("gpipe", 4, 5), "C": ("1f1b", 4, 3)}


@exercise
def mean_of_all(answer: Any) -> None:
    """A function: (a worker's mean gradient, its examples, all_reduce) -> the mean over all
    workers' examples."""
    sums = _check_mean(answer, [([1.0, 1.0], 30), ([5.0, 3.0], 10)], [2, 1.5])
    _check_mean(
        answer, [([1.0, 0.0, 2.0], 2), ([4.0, 1.0, 2.0], 4), ([0.0, 0.0, 0.0], 0)], [3, 2 / 3, 2]
    )
    require(
        sums == 1,
        f"the mean is right, but took {sums} sums: pass everything in one array, such as "
        "np.append makes",
    )


@exercise
def bubble(answer: Any) -> None:
    """A function: (stages, micro-batches, forward, backward) -> the seconds of an update, and the
    idle share."""
    _check_bubble(answer, 4, 8, 0.01, 0.02)
    _check_bubble(answer, 4, 1, 0.1, 0.3)
    _check_bubble(answer, 8, 56, 1.0, 1.0)
    _check_bubble(answer, 1, 5, 1.0, 2.0)


@exercise
def which_schedule(answer: Any) -> None:
    """A dictionary: for each of the unnamed timelines, its schedule and the most activations on
    device 1."""
    require(isinstance(answer, dict) and set(answer) == set(_UNNAMED), "answer for A, B and C")
    for letter, (name, devices, microbatches) in _UNNAMED.items():
        got = answer[letter]
        require(got is not ..., f"{letter} is still missing: put your answer in place of the dots")
        require(
            isinstance(got, tuple) and len(got) == 2,
            f'{letter}: answer a pair such as ("gpipe", 2)',
        )
        require(
            got[0] in PIPELINES,
            f"{letter}: the schedule is one of {', '.join(map(repr, PIPELINES))}",
        )
        held = schedule(name, devices, microbatches).held(0)
        require(
            got[1] == held,
            f"{letter}: device 1 does not hold {got[1]}. Count its forward passes, less its "
            "backward passes that have ended, from left to right",
        )
        require(
            got[0] == name,
            f"{letter}: the number is right, and the schedule is not. Device 1 can do the same in "
            "both: look at the devices below it. Do they wait with their first backward pass "
            "until they have done all forward passes?",
        )


@exercise
def most_devices(answer: Any) -> None:
    """A function: (micro-batches, seconds of each, s, efficiency) -> the largest number of devices
    that reaches it."""
    got = float(filled(answer(64, 0.3, 0.32, 0.75)))
    require(
        got != 11,
        "11 devices would be efficient enough, but 64 micro-batches cannot be divided by 11",
    )
    require(
        got != 16,
        "16 devices reach 67 %: the ring takes 2 (p - 1) / p times s, which is nearly twice s",
    )
    require(
        got != 1,
        "1 device is always 100 % efficient. Which is the largest number that is still efficient "
        "enough?",
    )
    for case, wanted in {
        (64, 0.3, 0.32, 0.75): 8,
        (64, 0.3, 0.32, 0.9): 4,
        (64, 0.3, 0.32, 0.5): 16,
        (12, 1.0, 1.0, 0.5): 6,
        (7, 0.1, 1.0, 0.5): 1,
        (24, 0.1, 0.0, 0.99): 24,
    }.items():
        _check_devices(answer, case, wanted)


def unnamed_timelines() -> Drawing:
    """The timelines of the exercise `which_schedule`, without their names."""
    return compare(
        {f"Timeline {letter}": Timeline(*arguments) for letter, arguments in _UNNAMED.items()}
    )


class _Waits(BaseException):
    """Stop a worker at a sum for which some workers have not passed a value yet."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def _check_mean(answer: Callable, workers: list[tuple], wanted: list[float]) -> int:
    """Raise `NotYet` unless each worker returns the mean; return the number of sums that were
    used."""
    results, sums = _run_workers(answer, workers)
    for result in results:
        filled(result)
    require(sums, "all_reduce was never called, so each worker uses only its own examples")
    gradients, examples = (np.array(column) for column in zip(*workers))
    counts = ", ".join(str(count) for count in examples)
    for result in results:
        got = np.asarray(result, np.float64)
        if got.shape == gradients[0].shape:
            total = examples @ gradients
            require(
                not np.allclose(got, gradients.mean(axis=0)),
                "this is the unweighted mean of the means: the workers have different numbers of "
                "examples",
            )
            require(
                not np.allclose(got, gradients.sum(axis=0)),
                "this is the sum of the means: weight each by its number of examples",
            )
            require(
                not np.allclose(got, total),
                "the weighted sum is right. Divide it by the number of examples on all workers",
            )
            require(
                not np.allclose(got, total / len(examples)),
                "divided by the number of workers: divide by the number of examples on all workers",
            )
        require_close(
            got,
            wanted,
            f"the mean over workers with {counts} examples",
            "and should be the mean over all examples",
        )
    return sums


def _run_workers(answer: Callable, workers: list[tuple]) -> tuple[list, int]:
    """Run a function as several workers would; return the result of each worker, and the number of
    sums.

    The workers run one after the other. At a new sum a worker is stopped; once all have passed a
    value, each one is run again from the beginning, and the sums that are already known are
    returned to it.
    """
    sums: list[np.ndarray] = []
    while True:
        passed = []
        results = []
        for gradient, examples in workers:
            known = iter(sums)

            def all_reduce(value, known=known):
                for total in known:
                    return total.copy()
                raise _Waits(value)

            try:
                results.append(answer(np.array(gradient), examples, all_reduce))
            except _Waits as at:
                passed.append(np.asarray(at.value, np.float64))
        if not passed:
            return results, len(sums)
        require(
            not results,
            "a worker waits forever: all must call all_reduce equally often, even a worker "
            "without examples",
        )
        shapes = {value.shape for value in passed}
        require(
            len(shapes) == 1,
            f"the workers pass arrays of different shapes to all_reduce, {sorted(shapes)}, which "
            "cannot be added",
        )
        sums.append(np.sum(passed, axis=0))
        require(len(sums) < 10, "all_reduce was called ten times: once is enough")


def _check_bubble(answer: Callable, p: int, m: int, forward: float, backward: float) -> None:
    got = filled(answer(p, m, forward, backward))
    require(
        isinstance(got, tuple | list) and len(got) == 2,
        "return two numbers: the seconds, and the idle share",
    )
    case = f"with {p} stages, {m} micro-batches and {forward:g} s and {backward:g} s"
    seconds, share = (float(number) for number in got)
    both = forward + backward
    right = (p - 1) / (m + p - 1)
    hints = {
        m * both: "that is the time without any waiting: when does the last stage begin?",
        p * m * both: "the stages do not work one after the other: they overlap",
        (m + p - 1) * forward: "the backward passes take time, too",
        m * both + (p - 1) * forward: "the first stage waits for backward passes, too",
        (m + p) * both: "the last stage begins p - 1 forward passes late, not p",
    }
    for wrong, hint in hints.items():
        require(
            not np.isclose(seconds, wrong) or np.isclose(wrong, (m + p - 1) * both),
            f"{case}: {hint}",
        )
    require_close(seconds, (m + p - 1) * both, f"{case}: the time of an update")
    require(
        not right or not np.isclose(share, 100 * right),
        "the share is a number from 0 to 1, not a percentage",
    )
    require(
        not right or not np.isclose(share, (p - 1) / m),
        f"{case}: {share:g} is the waiting relative to the computing. Divide by the whole time of "
        "the update",
    )
    require(
        not right or not np.isclose(share, 1 - right),
        f"{case}: {share:g} is the share that is used",
    )
    require_close(share, right, f"{case}: the idle share")


def _check_devices(answer: Callable, case: tuple, wanted: int) -> None:
    microbatches, seconds, ring, efficiency = case
    got = float(filled(answer(*case)))
    said = f"for {microbatches} micro-batches of {seconds:g} s, s = {ring:g} and {100 * efficiency:.0f} %"
    require(
        got == int(got) and 1 <= got <= microbatches,
        f"{said}: {got:g} is not from 1 to {microbatches}",
    )
    require(
        microbatches % got == 0,
        f"{said}: {microbatches} micro-batches cannot be divided by {got:g}",
    )
    work = microbatches * seconds
    reached = work / (work + 2 * (got - 1) * ring)
    require(got <= wanted, f"{said}: {got:g} devices reach only {100 * reached:.1f} %")
    require(
        got >= wanted, f"{said}: {got:g} devices reach {100 * reached:.1f} %, but more would do"
    )


@exercise
def ported_loop(answer: Any) -> None:
    """A function: (model, optimizer, x, y, batch_size, epochs, most) trains the model with at most
    `most` examples."""
    _check_ported(answer, "with SGD", batch_size=8, most=4)
    _check_ported(answer, "with a batch that is not a multiple of `most`", batch_size=8, most=3)
    _check_ported(answer, "with Adam, clipping and a schedule", batch_size=10, most=4, adam=True)
    _check_ported(answer, "with one example at a time", batch_size=22, most=1)


class _Kept:
    """Counts the examples whose activations wait for their backward pass."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # of each call of the model
        self._events: list[tuple[str, int]] = []  # "forward" or "backward", and the call

    def __call__(self, outputs: Any) -> Any:
        """Pass the outputs of a layer on, and note when their gradient comes back."""
        import tensorflow as tf

        def forward(rows):
            self._rows.append(int(rows))
            self._events.append(("forward", len(self._rows) - 1))
            return np.int64(len(self._rows) - 1)

        def backward(call):
            self._events.append(("backward", int(call)))
            return np.int64(0)

        @tf.custom_gradient
        def counted(x):
            call = tf.numpy_function(forward, [tf.shape(x)[0]], tf.int64)

            def gradient(upstream):
                with tf.control_dependencies([tf.numpy_function(backward, [call], tf.int64)]):
                    return tf.identity(upstream)

            with tf.control_dependencies([call]):
                return tf.identity(x), gradient

        return counted(outputs)

    @property
    def _differentiated(self) -> set[int]:
        """The calls with a backward pass. Others, such as those of a check, keep nothing."""
        return {call for event, call in self._events if event == "backward"}

    @property
    def largest_call(self) -> int:
        """The most examples in a call of the model."""
        return max((self._rows[call] for call in self._differentiated), default=0)

    @property
    def most(self) -> int:
        """The most examples that waited at once."""
        now = most = 0
        for event, call in self._events:
            if call in self._differentiated:
                now += self._rows[call] if event == "forward" else -self._rows[call]
                most = max(most, now)
        return most


def _check_ported(
    answer: Callable, case: str, batch_size: int, most: int, adam: bool = False
) -> None:
    import keras
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=[22, 3]).astype("float32")
    y = np.sin(3 * x[:, :1])
    schedule = keras.optimizers.schedules.PolynomialDecay(
        0.1, decay_steps=8, end_learning_rate=0.01
    )

    def made():
        """A model, its optimizer, and what counts its examples."""
        kept = _Kept()

        class Counted(keras.layers.Layer):
            supports_jit = False  # XLA cannot call Python

            def call(self, inputs):
                return kept(inputs) if isinstance(inputs, tf.Tensor) else inputs

        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(4, "tanh")
        model = keras.Sequential([keras.Input([3]), hidden, Counted(), keras.layers.Dense(1)])
        clipped = keras.optimizers.Adam(schedule, global_clipnorm=0.5)
        return model, clipped if adam else keras.optimizers.SGD(0.2), kept

    def large(weighted: bool = True) -> list[np.ndarray]:
        """The weights of the large batch, or of a plain mean over micro-batches."""
        model, optimizer, _ = made()
        for start in [*range(0, 22, batch_size)] * 2:
            end = min(start + batch_size, 22)
            sizes = (
                [end - start] if weighted else [min(most, end - i) for i in range(start, end, most)]
            )
            ends = start + np.cumsum(sizes)
            with tf.GradientTape() as tape:
                losses = [
                    tf.reduce_mean((model(x[e - n : e]) - y[e - n : e]) ** 2)
                    for e, n in zip(ends, sizes)
                ]
                loss = tf.add_n(losses) / len(losses)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
        return [variable.numpy() for variable in model.trainable_variables]

    def close(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all(np.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(one, other))

    model, optimizer, kept = made()
    answer(model, optimizer, x, y, batch_size, 2, most)
    updates = int(optimizer.iterations.numpy())
    wanted = 2 * -(-22 // batch_size)
    require(kept.largest_call > 0, "no gradient of the model was taken")
    require(
        kept.largest_call <= most,
        f"the model was called with {kept.largest_call} examples at once, and only {most} fit",
    )
    require(
        kept.most <= most,
        f"the activations of {kept.most} examples were kept at once, and only {most} fit: take the "
        "gradient of a micro-batch before the next one is computed",
    )
    hint = "apply once for each batch, also for the shorter one at the end of an epoch"
    require(
        updates == wanted,
        f"{case}, the optimizer made {updates} updates in place of {wanted}: {hint}",
    )
    ours = [variable.numpy() for variable in model.trainable_variables]
    if not close(ours, right := large()):
        require(
            not close(ours, large(weighted=False)),
            f"{case}: weight each micro-batch by its number of examples",
        )
        apart = max(np.abs(a - b).max() for a, b in zip(ours, right))
        require(False, f"{case}, a weight differs from the large batch's by {apart:.2g}")

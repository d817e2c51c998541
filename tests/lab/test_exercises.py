"""The exercises' checkers: no wrong answer passes, none raises, and frequent mistakes are named.
That the right ones pass, the solutions show."""

import importlib
import inspect
import json
import math
import pkgutil

import numpy as np
import pytest
import tensorflow as tf
from paths import ROOT

import gradlab
from gradlab.lab import exercises
from gradlab.lab.exercises import (
    batch_size,
    capstone,
    exercise,
    how_it_works,
    many_ways,
    memory,
    noise_and_accuracy,
    pitfalls,
    placeholder_averaging,
    remat_and_half_precision,
    require_choice,
    require_close,
    shards_and_pipelines,
    start_here,
    tokens,
    tower_averaging,
    variable_accumulation,
    whole_batch,
)

MODULES = [module.name for module in pkgutil.iter_modules(exercises.__path__)]
CHECKERS = [
    pytest.param(checker, id=f"{module}.{name}")
    for module in MODULES
    for name, checker in inspect.getmembers(
        importlib.import_module(f"gradlab.lab.exercises.{module}")
    )
    if inspect.isfunction(checker)
    and hasattr(checker, "__wrapped__")
    and checker.__module__ == f"gradlab.lab.exercises.{module}"
]


def mean_of_all(gradient_of, weights):
    numbers = tf.range(tf.shape(weights)[0])
    gradients = tf.map_fn(gradient_of, numbers, fn_output_signature=tf.float32)
    return tf.linalg.matvec(gradients, weights, transpose_a=True) / tf.reduce_sum(weights)


def mean_by_a_loop(gradient_of, weights):
    total = tf.zeros([2])
    for i in tf.range(tf.shape(weights)[0]):
        total += weights[i] * gradient_of(i)
    return total / tf.reduce_sum(weights)


def rate_at_each_microbatch(microbatches, w, k, learning_rate):
    """The right loop, but for a rate that it reads more often than it needs it."""
    total, examples, update = 0.0, 0, 0
    for number, (x, y) in enumerate(microbatches, start=1):
        rate = learning_rate(update)
        total += np.sum((w * x - y) * x)
        examples += len(x)
        if number % k == 0 or number == len(microbatches):
            w -= rate * total / examples
            total, examples, update = 0.0, 0, update + 1
    return w


def check_with_two_rates(train):
    """A check that sees no bug but the loop that asks for a third rate."""
    rates = [0.1, 0.05]
    x, y = np.ones(2), np.zeros(2)
    return train([(x, y)] * 4, 1.0, 2, lambda update: rates[update]) is not None


WRONG = [
    ...,
    None,
    "no",
    -1,
    float("nan"),
    [],
    {},
    lambda *arguments, **options: None,
    lambda *arguments, **options: ...,
    lambda *arguments, **options: 0.0,
    lambda *arguments, **options: 1 / 0,
    lambda *arguments, **options: arguments[0] if arguments else None,
]


def test_every_notebook_has_its_checkers():
    checked = {checker.id.split(".")[0] for checker in CHECKERS}
    assert set(MODULES) - checked == {"leaderboard"}  # the table of an exercise in batch_size
    assert len(checked) == 18 and len(CHECKERS) >= 50


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_wrong_answer_is_told_so_and_never_raises(checker, capsys):
    for answer in WRONG:
        assert checker(answer) is None
        said = capsys.readouterr().out
        assert said.startswith("not yet: ") and said.count("\n") == 1, (answer, said)
    assert checker.__doc__


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2.0000001, "right"),
        (2.1, "not yet: the half is 2.1, and should not be"),
        ([2, 2], "not yet: the half has the shape (2,), and should have ()"),
        ("two", "not yet: your answer raised ValueError: could not convert string to float: 'two'"),
        (float("nan"), "not yet: the half is nan, and should not be"),
    ],
)
def test_numbers(value, said, capsys):
    exercise(lambda answer: require_close(answer, 2, "the half"))(value)
    assert capsys.readouterr().out.strip() == said


def test_words(capsys):
    checker = exercise(
        lambda answer: require_choice(answer, "less", "more less", "think of the sum")
    )
    for answer, said in (
        ("less", "right"),
        ("more", "not yet: think of the sum"),
        (3, "not yet: answer one of 'more', 'less'"),
    ):
        checker(answer)
        assert capsys.readouterr().out.strip() == said


def loop(kept="", size=len, divisor=lambda window, weight: weight, seen=lambda windows: windows):
    """The loop of the last exercise of notebook 04, as a student writes it, with a mistake."""

    def train(w, windows, rate):
        total, weight = np.zeros_like(w), 0
        for window in seen([list(window) for window in windows]):
            total = total if "total" in kept else np.zeros_like(w)
            weight = weight if "weight" in kept else 0
            for x, y in window:
                total = total + size(x) * 2 / len(x) * x.T @ (x @ w - y)
                weight = weight + size(x)
            w = w - rate * total / divisor(window, weight)
        return w

    return train


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (loop(kept="total"), "What does the second window begin with?"),
        (loop(kept="weight"), "as if the weight of earlier windows were still there"),
        (loop(kept="total, weight"), "as if each window went on with the mean of those before"),
        (loop(size=lambda x: 1), "as if all micro-batches counted the same"),
        (
            loop(size=lambda x: 1, divisor=lambda *_: 1),
            "as if mean gradients were added and not divided",
        ),
        (loop(divisor=lambda *_: 1), "as if the sum over the examples were applied"),
        (
            loop(divisor=lambda window, weight: len(window)),
            "as if the sum were divided by the number of micro-batches",
        ),
        (
            loop(seen=lambda windows: [window[-1:] for window in windows]),
            "as if only the last micro-batch of a window counted",
        ),
        (
            loop(seen=lambda windows: [[part] for window in windows for part in window]),
            "as if each micro-batch were a window",
        ),
        (loop(seen=lambda windows: windows[:1]), "as if there were one window only"),
        (loop(divisor=lambda window, weight: 3 * weight), "and should not be. The examples of"),
        (loop(), "when each micro-batch overwrites the one before, w is"),
    ],
)
def test_the_mistake_of_a_loop_is_named(answer, hint, capsys):
    variable_accumulation.repaired(answer)
    assert hint in capsys.readouterr().out


def test_the_starter_of_a_loop_does_not_name_its_own_mistake(capsys):
    cells = json.loads((ROOT / "notebooks/04_variable_accumulation.ipynb").read_text())["cells"]
    starter = "".join(cells[-1]["source"])
    changed = starter.replace("total, weight = zeros, 0", "weight, total = 0, zeros")
    for code, said in (
        (starter, "not yet: this is still the function with the bug: repair it"),
        (changed, "What does the second window begin with?"),
        (starter.replace("zeros, 0", "zeros.copy(), 0"), "right"),
    ):
        exec(code, {"np": np, "check": variable_accumulation})
        assert said in capsys.readouterr().out, code


def in_windows(update):
    """A loop of the capstone of notebook 16, from a function that makes one update."""

    def train(model, optimizer, x, y, batch_size, epochs, most):
        for start in [*range(0, len(x), batch_size)] * epochs:
            rows = slice(start, start + batch_size)
            update(model, optimizer, x[rows], y[rows], most)

    return train


def by_value_and_gradients(model, optimizer, x, y, most):
    variables = model.trainable_variables
    _, gradients = gradlab.value_and_gradients(
        lambda x, y: tf.reduce_mean((model(x) - y) ** 2), variables, (x, y), most
    )
    optimizer.apply(gradients, variables)


def by_one_tape(model, optimizer, x, y, most):
    with tf.GradientTape() as tape:
        parts = [model(x[first : first + most]) for first in range(0, len(x), most)]
        loss = tf.reduce_mean((tf.concat(parts, axis=0) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def beside_the_whole_batch(model, optimizer, x, y, most):
    with tf.GradientTape():
        tf.reduce_mean((model(x) - y) ** 2)  # such as for a log
    by_value_and_gradients(model, optimizer, x, y, most)


def by_shares(share):
    """A loop that weights the mean gradient of n examples, of a batch of so many rows."""

    def train(model, optimizer, x, y, batch_size, epochs, most):
        variables = model.trainable_variables
        for start in [*range(0, len(x), batch_size)] * epochs:
            end = min(start + batch_size, len(x))
            total = [0.0] * len(variables)
            for first in range(start, end, most):
                rows = slice(first, min(first + most, end))
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x[rows]) - y[rows]) ** 2)
                factor = share(rows.stop - rows.start, end - start, batch_size, most)
                total = [t + factor * g for t, g in zip(total, tape.gradient(loss, variables))]
            optimizer.apply(total, variables)

    return train


def without_zero(model, optimizer, x, y, batch_size, epochs, most):
    accumulator = gradlab.GradientAccumulator(model.trainable_variables)
    for start in [*range(0, len(x), batch_size)] * epochs:
        end = min(start + batch_size, len(x))
        for first in range(start, end, most):
            rows = slice(first, min(first + most, end))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[rows]) - y[rows]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulator.add(gradients, rows.stop - rows.start)
        optimizer.apply(accumulator.mean(), model.trainable_variables)


def without_a_new_sum(model, optimizer, x, y, batch_size, epochs, most):
    variables = model.trainable_variables
    total = [0.0] * len(variables)
    for start in [*range(0, len(x), batch_size)] * epochs:
        end = min(start + batch_size, len(x))
        for first in range(start, end, most):
            rows = slice(first, min(first + most, end))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x[rows]) - y[rows]) ** 2)
            total = [t + g for t, g in zip(total, tape.gradient(loss, variables))]
        optimizer.apply([each / (end - start) for each in total], variables)


def by_fit(model, optimizer, x, y, batch_size, epochs, most):
    gradlab.microbatched(model, most).compile(optimizer, "mse")
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (in_windows(by_value_and_gradients), "right\n"),
        (by_fit, "right\n"),
        (in_windows(by_one_tape), "not yet: the activations of 8 examples were kept at once"),
        (in_windows(beside_the_whole_batch), "called with 8 examples at once, and only 4 fit"),
        (by_shares(lambda n, rows, batch, most: 1 / -(-rows // most)), "weight each micro-batch"),
        (by_shares(lambda n, rows, batch, most: 1), "add up, and then divide"),
        (by_shares(lambda n, rows, batch, most: n / batch), "really has"),
        (by_shares(lambda n, rows, batch, most: n / most / -(-rows // most)), "really has"),
        (without_zero, "set it to zero"),
        (without_a_new_sum, "set it to zero"),
        (by_shares(lambda n, rows, batch, most: 1.1 * n / rows), "in their order?"),
    ],
)
def test_the_capstone_accepts_every_way_that_keeps_one_micro_batch(answer, said, capsys):
    capstone.ported_loop(answer)
    assert said in capsys.readouterr().out


def test_the_three_moves_may_end_with_a_method(capsys):
    def mean(gradients):
        expanded = [np.expand_dims(g, 0) for g in gradients]  # as in the notebook
        return np.concatenate(expanded, axis=0).mean(axis=0)

    tower_averaging.mean_over_towers(mean)
    tower_averaging.mean_over_towers(lambda gradients: sum(gradients) / len(gradients))
    right, other = capsys.readouterr().out.splitlines()
    assert right == "right" and "np.expand_dims" in other


def test_gradients_are_taken_by_the_name_of_their_variable(capsys):
    def by_name(tower_grads):
        towers = [{name: gradient for gradient, name in tower} for tower in tower_grads]
        return [tuple(tower[name] for tower in towers) for name in sorted(towers[0])]

    tower_averaging.gradients_by_variable(
        lambda tower_grads: [tuple(g for g, _ in pairs) for pairs in zip(*tower_grads, strict=True)]
    )
    tower_averaging.gradients_by_variable(by_name)
    by_position, by_alphabet = capsys.readouterr().out.splitlines()
    assert "the second tower lists b first: take the gradients by name" in by_position
    assert "the first tower lists b first" in by_alphabet


def test_a_gradient_by_hand_is_computed_and_not_remembered(capsys):
    how_it_works.gradient_by_hand(
        lambda weight, bias, xs, ys: (-9, -3) if weight == 0.5 else (14, 6)
    )
    assert "the gradient of five random examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("by_hand", "hint"),
    [
        (lambda d, xs: np.mean(2 * d * xs), "a pair of numbers"),
        (lambda d, xs: (np.mean(2 * d), np.mean(2 * d * xs)), "comes first"),
        (lambda d, xs: [np.mean(2 * d * xs)] * 2, "has no factor x"),
        (lambda d, xs: (np.mean(2 * d), np.mean(2 * d)), "chain rule"),
        (lambda d, xs: (np.sum(2 * d * xs), np.sum(2 * d)), "sums over the examples"),
    ],
)
def test_the_mistake_of_a_gradient_by_hand_is_named(by_hand, hint, capsys):
    how_it_works.gradient_by_hand(lambda weight, bias, xs, ys: by_hand(weight * xs + bias - ys, xs))
    assert hint in capsys.readouterr().out


def test_a_gradient_by_hand_depends_on_the_bias(capsys):
    def without_bias(weight, bias, xs, ys):
        difference = weight * xs - ys
        return np.mean(2 * difference * xs), np.mean(2 * difference)

    how_it_works.gradient_by_hand(without_bias)
    assert "must contain the bias" in capsys.readouterr().out


def test_the_bill_has_an_accumulator_only_for_several_micro_batches(capsys):
    def bill(parameters, activations, microbatch_size, accumulation_steps, copies=4):
        copies = copies + (accumulation_steps > 1)
        return 4 * copies * parameters + microbatch_size * activations

    memory.bytes_needed(bill)
    assert capsys.readouterr().out == "right\n"
    memory.bytes_needed(lambda *sizes: bill(*sizes[:3], 2))
    assert "a single micro-batch needs no accumulator" in capsys.readouterr().out


def test_hints_do_not_lead_away_or_give_away(capsys):
    many_ways.order_matters((1.0, 2.0, 4.0))
    assert "Try decimal fractions" in capsys.readouterr().out
    many_ways.order_matters((0.1, 0.7, 0.3))
    assert capsys.readouterr().out.startswith("right")
    many_ways.order_matters((1000.0, 4e-14, 4e-14))
    assert capsys.readouterr().out.startswith("right")
    right = {"mse": True, "correlation": False, "weighted": True, "f1": False, "max": False}
    whole_batch.can_be_accumulated(right)
    assert capsys.readouterr().out.startswith("right")
    said = set()
    for wrong in [right | {"f1": True}, dict.fromkeys(right, True), dict.fromkeys(right, False)]:
        whole_batch.can_be_accumulated(wrong)
        said.add(capsys.readouterr().out)
    assert len(said) == 1 and "on two micro-batches of two numbers" in said.pop()


def microbatches_before(problem, epoch, step):
    """How many micro-batches of a training run came before this one of an epoch."""
    number = next(i for i, each in enumerate(problem.epochs) if each is epoch)
    return sum(map(len, problem.epochs[:number])) + step - 1


def test_a_loop_is_repaired_one_bug_at_a_time(capsys):
    cells = json.loads((ROOT / "notebooks/solutions/07_pitfalls.ipynb").read_text())["cells"]
    right = "".join(cells[-1]["source"])
    for old, new, said in (
        ("", "", "right"),
        ("len(history)", "step - 1", "a bug: The learning-rate schedule counts micro-batches"),
        (" or step == len(epoch)", "", "a bug: The micro-batches that are left at the end"),
        ("total / seen", "total / seen * 2", "no known bug or pair of bugs"),
        (
            "len(history)",
            "microbatches_before(problem, epoch, step) // problem.k",
            "the audit finds",
        ),
        (
            "    running, seen",
            "    if problem.clip_norm:\n            raise NotImplementedError\n        running, seen",
            "the audit cannot run your loop",
        ),
    ):
        code = right.replace(old, new, 1) if old else right
        names = {"np": np, "check": pitfalls, "microbatches_before": microbatches_before}
        exec(code, names)
        printed = capsys.readouterr().out
        assert said in printed, (old, printed)
        assert printed.startswith("right" if said == "right" else "not yet: ")


@pytest.mark.parametrize(
    ("notebook", "module", "name", "old", "new", "hint"),
    [
        (
            "06_noise_and_accuracy",
            noise_and_accuracy,
            "rows_of_window",
            "k)]",
            "k)][:]",
            "the same",
        ),
        ("07_pitfalls", pitfalls, "train", "total = 0.0", "total = 0", "rates of 2 and 4"),
        ("07_pitfalls", pitfalls, "real_loop", "step - 1", "step - 2", "the audit finds"),
        ("08_tokens", tokens, "repaired_loop", "- rate * mean", "- mean * rate", "as if padding"),
    ],
)
def test_a_function_to_repair_gets_a_hint_of_its_bug_only_when_it_was_changed(
    notebook, module, name, old, new, hint, capsys
):
    cells = json.loads((ROOT / f"notebooks/{notebook}.ipynb").read_text())["cells"]
    [code] = ("".join(c["source"]) for c in cells if f"check.{name}(" in "".join(c["source"]))
    names = {"np": np, "check": module, "gradient": lambda w, x, y: np.mean((w * x - y) * x)}
    exec(code, dict(names))
    assert (
        capsys.readouterr().out == "not yet: this is still the function with the bug: repair it\n"
    )
    assert old in code
    exec(code.replace(old, new), dict(names))
    assert hint in capsys.readouterr().out


def apart_of(differences, count, ddof=1):
    """By how many standard errors the mean of so many differences is apart from 0."""
    return differences.mean() / (differences.std(ddof=ddof) / count**0.5)


def step_over_tokens(count=np.sum, masked=lambda mask: mask, per_part=False, divided=True):
    """The training step of notebook 08, as a student writes it, with a mistake."""

    def training_step(w, micro_batches, rate):
        sums, counts = [], []
        for x, y, mask in micro_batches:
            sums.append(np.tensordot((x @ w - y) * masked(mask), x, axes=2))
            counts.append(count(mask))
        if per_part:
            return w - rate * np.mean([each / n for each, n in zip(sums, counts)], axis=0)
        return w - rate * sum(sums) / (sum(counts) if divided else 1)

    return training_step


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (step_over_tokens(), "right"),
        (step_over_tokens(count=np.size), "as if padding were counted"),
        (step_over_tokens(count=np.size, per_part=True), "as if padding were counted"),
        (step_over_tokens(per_part=True), "as if each micro-batch counted the same"),
        (step_over_tokens(masked=np.ones_like), "as if the errors at the padding counted"),
        (
            step_over_tokens(count=np.size, masked=np.ones_like),
            "as if the padding were tokens",
        ),
        (step_over_tokens(divided=False), "as if the sum over the tokens were applied"),
        (lambda w, micro_batches, rate: w, "although it was right before you changed"),
    ],
)
def test_each_bug_of_the_step_over_tokens_is_named(answer, hint, capsys):
    tokens.repaired_loop(answer)
    assert hint in capsys.readouterr().out


def mean_of_finite(enough):
    """The exercise's function, which returns None unless enough(sizes left, all sizes)."""

    def mean_to_apply(window, sizes, longest):
        pairs = [
            (each, size) for each, size in zip(window, sizes) if np.isfinite(np.hstack(each)).all()
        ]
        left = [size for _, size in pairs]
        if not pairs or not enough(left, sizes):
            return None
        columns = zip(*(each for each, _ in pairs))
        mean = [np.average(column, axis=0, weights=left) for column in columns]
        scale = min(1, longest / max(np.linalg.norm(np.hstack(mean)), 1e-30))
        return [scale * array for array in mean]

    return mean_to_apply


def accumulator_of(
    own_weights=False, in_place=False, zero_weight=True, scales=False, means_stay=False
):
    """The exercise's class, with a weight for each variable, or another mistake."""

    class Accumulator:
        def __init__(self, count):
            self.sums, self.weights = [None] * count, [0.0] * count

        def zero(self):
            self.sums = [None] * len(self.sums)
            if zero_weight:
                self.weights = [0.0] * len(self.sums)

        def add(self, gradients, weight):
            for i, gradient in enumerate(gradients):
                if gradient is not None or not own_weights:
                    self.weights[i] += weight
                if gradient is None:
                    continue
                if scales:
                    gradient *= weight
                    self.sums[i] = gradient + (0.0 if self.sums[i] is None else self.sums[i])
                elif self.sums[i] is None:
                    self.sums[i] = gradient if in_place and weight == 1 else weight * gradient
                elif in_place:
                    self.sums[i] += weight * gradient
                else:
                    self.sums[i] = self.sums[i] + weight * gradient

        def mean(self):
            means = [total / weight for total, weight in zip(self.sums, self.weights)]
            if means_stay:
                self.sums, self.weights = means, [1.0] * len(means)
            return means

    return Accumulator


def of_squared_mean(microbatch_norms, window_norms, sizes):
    """The noise scale, but for the square of the mean norm in place of the mean square."""
    k, b = len(sizes), sizes[0]
    small, large = microbatch_norms.mean(axis=1) ** 2, window_norms**2
    variance, signal = (small - large) * k * b / (k - 1), (k * large - small) / (k - 1)
    return variance.mean() / signal.mean()


def of_medians(microbatch_norms, window_norms, sizes):
    """The noise scale, but for medians over the windows in place of means."""
    k, b = len(sizes), sizes[0]
    small, large = (microbatch_norms**2).mean(axis=1), window_norms**2
    variance, signal = (small - large) * k * b / (k - 1), (k * large - small) / (k - 1)
    return np.median(variance) / np.median(signal)


def stage_of_copies(averages=2, bytes_each=4, last_resort=None):
    """A function that finds the first stage, from so many averages of Adam and bytes."""

    def first_stage(parameters, devices, memory):
        copies = [averages, 1, 1]
        for stage in range(4):
            kept = sum(copies[:stage]) / devices + sum(copies[stage:])
            if bytes_each * parameters * kept <= memory:
                return stage
        return last_resort

    return first_stage


@pytest.mark.parametrize(
    ("checker", "answer", "said"),
    [
        (
            many_ways.equal,
            lambda ours, theirs: np.abs(ours - theirs).max() / np.abs(theirs).max() <= 1e-5,
            "two arrays of zeros are equal",
        ),
        (
            many_ways.equal,
            lambda ours, theirs: np.abs(ours - theirs).max() <= 3e-5 * np.abs(theirs).max(),
            "8e-5 is 2e-5 of it",
        ),
        (
            many_ways.equal,
            lambda ours, theirs: np.abs(ours - theirs).max() <= 4e-6 * np.abs(theirs).max(),
            "half of what is allowed",
        ),
        (
            many_ways.differing,
            lambda ours, theirs: [
                name
                for name, value in theirs.items()
                if not np.abs(ours[name] - value).max() <= 3e-5 * np.abs(value).max()
            ],
            "twice what is allowed",
        ),
        (
            many_ways.equal,
            lambda ours, theirs: np.abs(ours - theirs).max() <= 1e-5 * abs(theirs.max()),
            "the one with the largest absolute value",
        ),
        (
            many_ways.differing,
            lambda ours, theirs: [
                name
                for name, value in theirs.items()
                if not np.abs(ours[name] - value).max() <= 1e-5 * abs(value.max())
            ],
            "the largest absolute value is that of -4",
        ),
        (
            many_ways.equal,
            lambda ours, theirs: np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max(),
            "an infinite gradient is not equal",
        ),
        (
            many_ways.differing,
            lambda ours, theirs: [
                name
                for name, value in theirs.items()
                if not np.abs(ours[name] - value).max() <= 1e-5 * np.abs(ours[name]).max()
            ],
            "the gradient of conv/bias is infinite",
        ),
        (
            many_ways.equal,
            lambda ours, theirs: (
                np.abs(ours - theirs).max() / (np.abs(theirs).max() + 1e-12) <= 1e-5
            ),
            "2e-30 is not 1e-30",
        ),
        (
            many_ways.differing,
            lambda ours, theirs: [
                name
                for name, value in theirs.items()
                if not np.abs(ours[name] - value).max() <= 1e-5 * np.abs(value).max() + 1e-15
            ],
            "is 1e-30",
        ),
        (
            placeholder_averaging.mean_to_apply,
            mean_of_finite(lambda left, sizes: 2 * sum(left) >= sum(sizes)),
            "right",
        ),
        (
            placeholder_averaging.mean_to_apply,
            mean_of_finite(lambda left, sizes: True),
            "8 of 10 examples are left out",
        ),
        (
            placeholder_averaging.mean_to_apply,
            mean_of_finite(lambda left, sizes: 2 * len(left) >= len(sizes)),
            "2 of 8 examples are left out, which is not more than half",
        ),
        (
            placeholder_averaging.mean_to_apply,
            mean_of_finite(lambda left, sizes: 2 * sum(left) > sum(sizes)),
            "3 of 6 examples are left out, which is not more than half",
        ),
        (variable_accumulation.accumulator, accumulator_of(), "right"),
        (
            variable_accumulation.accumulator,
            accumulator_of(means_stay=True),
            "after one more add in the same window",
        ),
        (
            variable_accumulation.accumulator,
            accumulator_of(scales=True),
            "the first gradient was [1, 2] and is [2.0, 4.0] now",
        ),
        (
            variable_accumulation.accumulator,
            accumulator_of(own_weights=True),
            "its weight belongs to the divisor, too",
        ),
        (
            variable_accumulation.accumulator,
            accumulator_of(zero_weight=False),
            "zero() must reset the sums and the weight",
        ),
        (
            variable_accumulation.accumulator,
            accumulator_of(in_place=True),
            "add must not change the caller's array",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation * (n / (n - 1)) ** 0.5 / n**0.5,
            "right",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation / n**0.5,
            "which one should be divided by √n",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation * ((n - 1) / n) ** 0.5 / n**0.5,
            "this makes it smaller",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation * n / (n - 1) / n**0.5,
            "needs a square root, too",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation / (n - 1),
            "divide a standard deviation by a square root",
        ),
        (
            noise_and_accuracy.standard_error,
            lambda deviation, n: deviation / 2**0.5,
            "the standard error of seven runs is",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(second - first, len(first)),
            "right",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: (
                (second.mean() - first.mean())
                / ((first.var(ddof=1) + second.var(ddof=1)) / len(first)) ** 0.5
            ),
            "subtract seed by seed first",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(first - second, len(first)),
            "the sign",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(second - first, 1),
            "in standard deviations",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(second - first, len(first), ddof=0),
            "see ddof",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(second - first, len(first) ** 2),
            "the square root of the number of seeds",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: abs(apart_of(second - first, len(first))),
            "it should be negative",
        ),
        (
            noise_and_accuracy.seed_by_seed,
            lambda first, second: apart_of(second - first, 3),
            "the distance of two rows of five seeds is",
        ),
        (start_here.noise_of_windows, lambda losses, k: losses.std(), "noise of single losses"),
        (
            start_here.noise_of_windows,
            lambda losses, k: losses.reshape(-1, k).std(axis=1).mean(),
            "noise inside a window",
        ),
        (
            start_here.noise_of_windows,
            lambda losses, k: losses.reshape(k, -1).mean(axis=0).std(),
            "k consecutive micro-batches",
        ),
        (start_here.noise_of_windows, lambda losses, k: losses.std() / k**0.5, "the law 1/√k"),
        (
            start_here.noise_of_windows,
            lambda losses, k: losses.reshape(-1, k).mean(axis=1).std(ddof=1),
            "that is ddof=1",
        ),
        (start_here.smallest_k, 16, "16 micro-batches of 24 are 384"),
        (start_here.smallest_k, 17, "this is right for one tower"),
        (variable_accumulation.mean_in_a_loop, tf.function(mean_by_a_loop), "right"),
        (
            variable_accumulation.mean_in_a_loop,
            mean_of_all,
            "keeps the gradients of all micro-batches",
        ),
        (
            variable_accumulation.is_right,
            lambda mean: np.isclose(mean(np.array([1.0, 4, 3]), np.array([1, 2, 1.0])), 3),
            "your test accepts a method that drops the tail",
        ),
        (pitfalls.train, rate_at_each_microbatch, "right"),
        (pitfalls.is_right, check_with_two_rates, "your check accepts a wrong loop"),
        (
            batch_size.best_accumulation,
            lambda noise, b, devices, one, update: max(
                1, round((noise * update / (devices * b * one)) ** 0.5)
            ),
            "b = 10 and an update that costs a tenth",
        ),
        (
            batch_size.best_accumulation,
            lambda *case: float(batch_size._best(*case)) + 0.5,
            "return a whole number. Received: 1.5",
        ),
        (batch_size.best_accumulation, lambda *case: math.inf, "return a whole number"),
        (
            batch_size.best_accumulation,
            lambda *case: np.float64(batch_size._best(*case)),
            "right",
        ),
        (batch_size.noise_scale, of_squared_mean, "average the squared norms"),
        (batch_size.noise_scale, of_medians, "the median of skewed estimates is biased"),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: math.ceil((p - 1) * (1 - share) / share),
            "with 4 stages and a share of 0.2: 13 are enough, and so are fewer: a rounding error",
        ),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: math.ceil((p - 1) / share - 1e-9),
            "not m",
        ),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: round((p - 1) * (1 - share) / share),
            "with 4 stages and a share of 0.9: without a micro-batch",
        ),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: max(1, round((p - 1) * (1 - share) / share)),
            "16 micro-batches leave 0.3043 of the time idle",
        ),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: int((p - 1) * (1 - share) / share + 1e-9),
            "39 micro-batches leave 0.1522 of the time idle",
        ),
        (
            shards_and_pipelines.enough_microbatches,
            lambda p, share: p * (1 - share) / share,
            "not p",
        ),
        (
            shards_and_pipelines.which_schedule,
            {"A": ("1F1B", 3), "B": ("gpipe", ...), "C": ("1f1b", 3)},
            "B: for how many micro-batches",
        ),
        (shards_and_pipelines.first_stage, stage_of_copies(averages=1), "stage 1 needs"),
        (shards_and_pipelines.first_stage, stage_of_copies(bytes_each=8), "stage 1 does, too"),
        (shards_and_pipelines.first_stage, stage_of_copies(last_resort=3), "should be None"),
        (
            shards_and_pipelines.first_stage,
            lambda n, p, memory: None if memory == 2e8 else stage_of_copies()(n, p, memory),
            "Stage 3 needs 200,000,000 bytes",
        ),
        (remat_and_half_precision.best_block, lambda layers: 1, "input of each layer is kept"),
        (remat_and_half_precision.best_block, lambda layers: layers, "all are kept"),
        (remat_and_half_precision.best_block, lambda layers: layers**0.5, "not a whole number"),
        (
            remat_and_half_precision.best_block,
            lambda layers: max(layers // 8, 1),
            "keep 10 outputs",
        ),
        (remat_and_half_precision.stalled_mean, 1.5, "adding 3 still raises the sum"),
        (remat_and_half_precision.stalled_mean, 1024, "Divide it by the number of threes"),
        (remat_and_half_precision.largest_scale, lambda largest: 2**15, "float16 ends at 65,504"),
        (remat_and_half_precision.largest_scale, lambda largest: 2**14, "keeps smaller entries"),
        (remat_and_half_precision.largest_scale, lambda largest: 65_504 / largest, "power of two"),
        (
            memory.largest_microbatch,
            lambda limit, parameters, activations: (limit - 16 * parameters) // activations,
            "has an accumulator, too",
        ),
    ],
)
def test_an_answer_that_is_nearly_right_is_named(checker, answer, said, capsys):
    checker(answer)
    assert said in capsys.readouterr().out


def test_measured_differences_may_be_rounded_to_two_decimals(capsys):
    answers = {
        case: (*(round(many_ways._difference(case, n), 2) for n in (1, many_ways.SEEDS)), word)
        for case, word in many_ways._RIGHT.items()
    }
    many_ways.equal_or_not(answers)
    assert capsys.readouterr().out == "right\n"
    one, many, word = answers["dropout"]
    many_ways.equal_or_not(answers | {"dropout": (one + 0.02, many, word)})
    assert "dropout: the difference for seed 0 is" in capsys.readouterr().out

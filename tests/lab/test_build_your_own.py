"""The exercises of notebook 16: each usual mistake is red in its own step, and the parts that are right
are green."""

from dataclasses import replace

import numpy as np
import pytest

from gradlab.lab.exercises import build_your_own as build
from gradlab.lab.exercises.build_your_own import STEPS, Progress, loop


def means(problem, weights, window):
    """Adds means, so a short micro-batch counts as much as a full one."""
    found = [problem.gradients(weights, microbatch)[1] for microbatch in window]
    found = [one for one in found if all(np.isfinite(each).all() for each in one.values())]
    return {name: sum(each[name] for each in found) for name in weights}, len(found)


def with_nan(problem, weights, window):
    parts = [(problem.size(each), problem.gradients(weights, each)[1]) for each in window]
    total = {name: sum(size * one[name] for size, one in parts) for name in weights}
    return total, sum(size for size, _ in parts)


def first_replica(sums):
    total, count = sums[0]
    return {name: each / count for name, each in total.items()}


def full_windows(epoch, size):
    return [epoch[i : i + size] for i in range(0, len(epoch) - size + 1, size)]


def constant_rate(problem, weights, gradient, state, number):
    return {name: weights[name] - problem.learning_rate(0) * gradient[name] for name in weights}


# The part, the function, and what its checker says.
MISTAKES = {
    "weight by examples or tokens": ("add_up", means, "count for 30, not for 3"),
    "update at the end of an epoch": ("windows", full_windows, "windows of [4, 4], and should"),
    "one sum over all replicas": ("combined", first_replica, "where is the second replica?"),
    "clip once, after averaging": ("clipped", lambda gradient, limit: gradient, "norm is 5"),
    "count updates, not micro-batches": ("step", constant_rate, "is learning_rate(1)"),
    "leave out a NaN": ("add_up", with_nan, 'in the training run "a NaN"'),
}


def test_the_loop_that_the_checkers_complete_is_right():
    assert all(Progress(loop).green.values())
    assert "red" in repr(Progress(lambda problem: [])) and "green" in repr(Progress(loop))
    assert Progress(loop)._repr_html_().count("green") == len(STEPS)


@pytest.mark.parametrize("step", MISTAKES)
def test_a_mistake_is_red_in_its_step_only(step, capsys):
    part, mistake, hint = MISTAKES[step]
    green = Progress(lambda problem: loop(problem, **{part: mistake})).green
    # A sum that is not weighted is wrong wherever micro-batches differ
    also = {"one sum over all replicas"} if mistake is means else set()
    if mistake is full_windows:  # the probe "a schedule" has a short window, too
        also = {"count updates, not micro-batches"}
    assert {name for name, is_green in green.items() if not is_green} == {step} | also
    checker = "without_nan" if mistake is with_nan else part
    getattr(build, checker)(mistake)
    said = capsys.readouterr().out
    assert said.startswith("not yet: ") and hint in said
    build.whole_loop(lambda problem: loop(problem, **{part: mistake}))
    assert capsys.readouterr().out.startswith("not yet: ")


def test_a_sum_in_half_precision_is_told_from_one_in_single(capsys):
    build.in_half(build._add_up)
    assert "is inf, and should be 131,135" in capsys.readouterr().out

    def single(problem, weights, window):
        total, count = dict.fromkeys(weights, np.float32(0)), 0.0
        for microbatch in window:
            _, gradients = problem.gradients(weights, microbatch)
            size = problem.size(microbatch)
            for name in total:
                total[name] = total[name] + size * gradients[name].astype("float32")
            count += size
        return total, count

    build.in_half(single)
    assert capsys.readouterr().out == "right\n"


def leaving_out(is_bad):
    """`add_up` that leaves out what a function (loss, gradients) finds bad."""

    def add_up(problem, weights, window):
        total = {name: np.zeros(np.shape(value)) for name, value in weights.items()}
        count = 0.0
        for microbatch in window:
            loss, gradients = problem.gradients(weights, microbatch)
            if not is_bad(loss, gradients):
                size = problem.size(microbatch)
                total = {name: total[name] + size * gradients[name] for name in total}
                count += size
        return total, count

    return add_up


def test_half_a_check_for_bad_numbers_is_not_enough(capsys):
    said = {}
    for name, is_bad in {
        "all": lambda loss, found: not all(np.isfinite(one).all() for one in found.values()),
        "NaN": lambda loss, found: any(np.isnan(one).any() for one in found.values()),
        "the loss": lambda loss, found: not np.isfinite(loss),
        "one array": lambda loss, found: (
            not np.isfinite(found["kernel"]).all() if "kernel" in found else False
        ),
        "the last array": lambda loss, found: not np.isfinite(list(found.values())[-1]).all(),
        "positive infinity": lambda loss, found: any(
            np.isnan(one).any() or np.max(one) == np.inf for one in found.values()
        ),
        "first numbers": lambda loss, found: (
            not all(np.isfinite(np.ravel(one)[0]) for one in found.values())
        ),
    }.items():
        build.without_nan(leaving_out(is_bad))
        said[name] = capsys.readouterr().out
    assert said.pop("all") == "right\n"
    assert all("an infinity in one of the arrays" in one for one in said.values()), said


def test_a_velocity_of_rates_is_found(capsys):
    def of_rates(problem, weights, gradient, state, number):
        keep = 0.9 if problem.optimizer == "momentum" else 0.0
        for name, each in gradient.items():
            state[name] = keep * state.get(name, 0.0) + problem.learning_rate(number) * each
        return {name: weights[name] - state[name] for name in weights}

    build.step(of_rates)
    assert "the velocity adds up gradients" in capsys.readouterr().out
    build.whole_loop(lambda problem: loop(problem, step=of_rates))
    assert "momentum, with a rate that falls" in capsys.readouterr().out


def test_a_velocity_may_be_kept_in_place(capsys):
    def in_place(problem, weights, gradient, state, number):
        moved = {}
        for name, each in gradient.items():
            if problem.optimizer == "momentum" and name in state:
                state[name] *= 0.9
                state[name] += each
            else:
                state[name] = each
            moved[name] = weights[name] - problem.learning_rate(number) * state[name]
        return moved

    build.step(in_place)
    assert capsys.readouterr().out == "right\n"


def test_a_replica_with_nothing_finite_changes_nothing(capsys):
    def of_means(sums):
        examples = sum(count for _, count in sums)
        return {
            name: sum(total[name] / count * (count / examples) for total, count in sums)
            for name in sums[0][0]
        }

    build.combined(of_means)
    assert "with a replica that has nothing finite" in capsys.readouterr().out


def test_replicas_may_be_combined_in_place(capsys):
    def in_place(sums):
        total, count = sums[0]
        for more, examples in sums[1:]:
            for name in total:
                total[name] = total[name] + more[name]
            count += examples
        return {name: total[name] / count for name in total}

    build.combined(in_place)
    assert capsys.readouterr().out == "right\n"


def test_sums_of_nothing_are_zeros(capsys):
    def empty(problem, weights, window):
        total, count = build._add_up(problem, weights, window)
        return (total, count) if count else ({}, 0)

    build.without_nan(empty)
    assert "the sums should be zeros" in capsys.readouterr().out

    def without_shapes(problem, weights, window):
        total, count = build._add_up(problem, weights, window)
        return (total, count) if count else (dict.fromkeys(weights, 0.0), 0)

    build.without_nan(without_shapes)
    assert capsys.readouterr().out == "right\n"


def streamed(
    forgets=False,
    restarts=False,
    counts_lost=False,
    clips_replicas=False,
    drops_short=False,
    spreads_lost=False,
    slows_lost=False,
    add_up=build._add_up,
):
    """A loop that takes the micro-batches one at a time, with a mistake."""

    def train(problem):
        weights, history, number = problem.weights, [], 0
        state, size = {}, problem.k * problem.replicas
        zeros = {name: np.zeros(np.shape(value)) for name, value in weights.items()}
        limit = problem.clip_norm or np.inf

        def alone(total, count):
            gradient = build._clipped(build._combined([(total, count)]), limit)
            return {name: value * count for name, value in gradient.items()}, count

        def update(parts, number):
            if not any(count for _, count in parts):
                if slows_lost:
                    state.update({name: 0.9 * value for name, value in state.items()})
                return weights, number + counts_lost
            if clips_replicas:
                gradient = build._combined([alone(*part) for part in parts if part[1]])
            elif spreads_lost and not all(count for _, count in parts):
                return weights, number
            else:
                gradient = build._clipped(build._combined(parts), limit)
            history.append(build._step(problem, weights, gradient, state, number))
            return history[-1], number + 1

        for epoch in problem.epochs:
            number = 0 if restarts else number
            if forgets:
                state.clear()
            parts, seen = [(zeros, 0)] * problem.replicas, 0
            for microbatch in epoch:
                more, examples = add_up(problem, weights, [microbatch])
                total, count = parts[seen % problem.replicas]
                total = {name: total[name] + more[name] for name in total}
                parts[seen % problem.replicas] = total, count + examples
                seen += 1
                if seen == size:
                    weights, number = update(parts, number)
                    parts, seen = [(zeros, 0)] * problem.replicas, 0
            if seen and not (drops_short and problem.replicas > 1):
                weights, number = update(parts, number)
        return history

    return train


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("forgets", "go on from one epoch to the next"),
        ("restarts", "go on from one epoch to the next"),
        ("counts_lost", "is no update, and doesn't count as one"),
        ("slows_lost", "is no update, and doesn't count as one"),
        ("clips_replicas", "combine the replicas first, clip once"),
        ("drops_short", "update at the end of an epoch"),
        ("spreads_lost", "a replica with nothing finite leaves the sums"),
    ],
)
def test_what_the_audit_does_not_see_of_a_whole_loop(mistake, hint, capsys):
    build.whole_loop(streamed(**{mistake: True}))
    assert hint in capsys.readouterr().out


@pytest.mark.parametrize(
    "is_bad",
    [
        lambda loss, found: not np.isfinite(loss),
        lambda loss, found: any(np.isnan(one).any() for one in found.values()),
        lambda loss, found: any(np.max(one) == np.inf for one in found.values()),
    ],
)
def test_a_whole_loop_checks_all_numbers_of_the_gradients(is_bad, capsys):
    add_up = leaving_out(lambda loss, found: not np.isfinite(loss) or is_bad(loss, found))
    build.whole_loop(streamed(add_up=add_up))
    assert "a finite loss and an infinite gradient of" in capsys.readouterr().out


def with_length(problem):
    [len(epoch) for epoch in problem.epochs]
    return loop(problem)


def in_lists(problem):
    """Collects windows from a loader."""
    epochs = [[microbatch for microbatch in epoch] for epoch in problem.epochs]
    return loop(replace(problem, epochs=epochs))


def test_a_whole_loop_takes_the_microbatches_one_at_a_time(capsys):
    build.whole_loop(streamed())
    assert capsys.readouterr().out == "right\n"
    for answer in (loop, with_length, in_lists):  # the first is `train` of the notebook
        build.whole_loop(answer)
        assert "not yet: take the micro-batches one at a time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "answer", "said"),
    [
        ("add_up", lambda *_: {}, "return a pair"),
        ("windows", lambda epoch, size: [epoch, []], "make windows of [10, 0], and should"),
        (
            "windows",
            lambda epoch, size: [epoch[i : i + size] for i in range(0, len(epoch) + 1, size)],
            "one of your windows is empty",
        ),
        ("clipped", lambda gradient, limit: None, "the function returns nothing yet"),
        ("step", lambda problem, weights, *_: weights, "return new arrays"),
        ("step", lambda *_: [], "return a dict of arrays with the names"),
        ("combined", lambda sums: {"w": 4.0}, "is not the mean of the two means"),
        ("clipped", lambda g, limit: {n: np.clip(v, -1, 1) for n, v in g.items()}, "of all arrays"),
    ],
)
def test_what_cannot_be_used_is_said(part, answer, said, capsys, recwarn):
    getattr(build, part)(answer)
    assert said in capsys.readouterr().out
    assert not recwarn.list


def test_a_window_in_which_nothing_is_finite_makes_no_update():
    problem = build._PROBES["a NaN"].make()
    alone = replace(problem, k=1)
    history = loop(alone)
    assert len(history) == 11  # of twelve micro-batches
    assert all(np.isfinite(value).all() for weights in history for value in weights.values())

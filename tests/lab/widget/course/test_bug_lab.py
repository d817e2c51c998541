"""The game of eight bugs: its loops beside an independent computation, what experiments tell apart,
and the score."""

import html
import itertools
import subprocess
import sys

import numpy as np
import pytest

from gradlab.lab.widget.course.bug_code import LINES, SUSPECTS, listing
from gradlab.lab.widget.course.bug_figures import draw, draw_all, table, verdict
from gradlab.lab.widget.course.bug_lab import BugLab, Game, points
from gradlab.lab.widget.course.bug_loops import data, experiment, is_clear
from gradlab.lab.widget.course.bugs import BUGS, EVERYTHING, OPTIMIZERS, STEPS, SWITCHES, Settings

ALL = [
    Settings(optimizer, k, *switches)
    for optimizer in OPTIMIZERS
    for k in STEPS
    for switches in itertools.product((False, True), repeat=len(SWITCHES))
]
WRONG = [bug for bug in BUGS if bug != "in_flight"]
CLEAR = [seed for seed in range(20) if is_clear(seed)]


def normalized(x, groups):
    """Each input, normalized over the tokens of its group."""
    z = x.copy()
    for group in np.unique(groups):
        members = x[groups == group]
        z[groups == group] = (members - np.mean(members)) / np.sqrt(
            np.mean(members**2) - np.mean(members) ** 2 + 1e-3
        )
    return z


def window_gradient(w, window, settings, bug):
    """One sum over the tokens of a window, each with the share that the loop gives it."""
    x, y = (np.hstack([getattr(part, name)[part.mask] for part in window]) for name in "xy")
    lengths = np.array([np.sum(part.mask) for part in window])
    number = np.repeat(np.arange(len(window)), lengths)
    if settings.normalization:
        x = normalized(x, number if bug == "batch_norm" else 0 * number)
    texts = np.array([len(part.x) for part in window])
    share = np.full(len(x), 1 / len(x))
    if bug == "mean_of_means":
        share = (texts / texts.sum() / lengths)[number]
    share = share * {"sum": len(window), "tail_by_k": len(window) / settings.k}.get(bug, 1.0)
    each = w * x**2 - x * y
    if settings.clipping and bug == "clip_each":
        means = np.bincount(number, each) / lengths
        return np.average(np.maximum(np.minimum(means, 3), -3), weights=lengths)
    gradient = np.dot(share, each)
    return gradient * min(1, 3 / max(abs(gradient), 1e-300)) if settings.clipping else gradient


def reference(settings, bug, seed):
    """The weight after each window, by formulas in closed form over all updates so far."""
    windows, w, path, gradients, clocks = 2 * data(settings, seed), 0.0, [0.0], [], []
    seen = 0
    for window in windows:
        seen += len(window)
        if bug == "tail_dropped" and len(window) < settings.k:
            path.append(w)
            continue
        gradients.append(window_gradient(w, window, settings, bug))
        clocks.append(seen - 1 if bug == "clocks" else len(clocks))
        rate = 0.1 * (max(0, len(windows) - clocks[-1]) / len(windows) if settings.schedule else 1)
        step, count = gradients[-1], clocks[-1] + 1
        if settings.optimizer == "Adam":
            ages, past = np.arange(len(gradients))[::-1], np.array(gradients)
            mean = 0.1 * np.sum(0.9**ages * past) / (1 - 0.9**count)
            square = 0.001 * np.sum(0.999**ages * past**2) / (1 - 0.999**count)
            step = mean / (square**0.5 + 1e-8)
        w = w - rate * step
        path.append(w)
    return np.array(path)


def test_without_a_bug_the_loop_equals_the_large_batch():
    for settings, seed in itertools.product(ALL, range(2)):
        shown = experiment(settings, seed=seed)
        assert np.abs(shown.loop - shown.large).max() < 1e-12 and shown.equal, settings
        np.testing.assert_allclose(shown.large, reference(settings, None, seed), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_gives_the_weights_of_an_independent_computation(bug):
    for settings in ALL:
        shown = experiment(settings, bug=bug, seed=3)
        np.testing.assert_allclose(
            shown.loop, reference(settings, bug, 3), rtol=0, atol=1e-10, err_msg=str(settings)
        )
        np.testing.assert_allclose(shown.large, reference(settings, None, 3), rtol=0, atol=1e-10)


class Listed:
    """What the names in the listing mean, for one experiment."""

    def __init__(self, settings, seed):
        self.settings = settings
        self.windows = [[Texts(*part) for part in window] for window in 2 * data(settings, seed)]
        self.calls = 0
        self.moments = np.zeros(2)
        self.steps = 0
        self.path = {}

    def normalized(self, window):
        if not self.settings.normalization:
            return window
        lengths = [np.sum(part.mask) for part in window]
        x = normalized(np.hstack([part.x[part.mask] for part in window]), np.zeros(sum(lengths)))
        found = []
        for part, of_part in zip(window, np.split(x, np.cumsum(lengths)[:-1])):
            filled = np.zeros(part.x.shape)
            filled[part.mask] = of_part
            found.append(Texts(filled, part.y, part.mask))
        return found

    def __call__(self, w, microbatch):
        self.calls += 1
        x, y = microbatch.x[microbatch.mask], microbatch.y[microbatch.mask]
        return np.mean((w * x - y) * x), len(x)

    def clip(self, gradient):
        return np.clip(gradient, -3, 3) if self.settings.clipping else gradient

    def step(self, w, mean, number):
        step = mean
        if self.settings.optimizer == "Adam":
            self.moments = self.moments * [0.9, 0.999] + [0.1 * mean, 0.001 * mean**2]
            first, second = self.moments / (1 - np.array([0.9, 0.999]) ** (number + 1))
            step = first / (second**0.5 + 1e-8)
        left = max(0, len(self.windows) - number) / len(self.windows)
        self.steps += 1
        self.path[self.steps] = w - 0.1 * (left if self.settings.schedule else 1) * step
        return self.path[self.steps]


class Texts:
    """A micro-batch of as many texts as `len` says."""

    def __init__(self, x, y, mask):
        self.x, self.y, self.mask = x, y, mask

    def __len__(self):
        return len(self.x)


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_the_listing_is_the_loop_that_is_trained(bug):
    lines = list(LINES)
    if bug is not None:
        number, lines[number] = SUSPECTS[bug]
        assert lines[number] != LINES[number]
    for settings in ALL:
        given = Listed(settings, 3)
        names = {"windows": given.windows, "k": settings.k, "w": 0.0}
        names |= {"normalized": given.normalized, "clip": given.clip}
        names |= {"grad": given, "optimizer": given}
        exec("\n".join(lines), names)
        wanted = experiment(settings, bug=bug, seed=3).loop[1:]
        if bug == "tail_dropped":
            wanted = [w for w, window in zip(wanted, given.windows) if len(window) == settings.k]
        np.testing.assert_allclose(
            list(given.path.values()), wanted, rtol=0, atol=1e-10, err_msg=str(settings)
        )


def test_the_listing_marks_the_suspected_line_and_then_the_wrong_one():
    for bug, (number, wrong) in SUSPECTS.items():
        marked = listing(suspected=bug).splitlines()[number]
        assert marked.removeprefix("<pre>").startswith("<mark>") and "<b>" not in listing(bug)
        assert html.escape(wrong) not in listing(suspected=bug)
        found = listing(suspected="sum", hidden=bug)
        assert f"</del>\n<b>{html.escape(wrong)}</b>" in found and "<mark>" not in found


@pytest.mark.parametrize("bug", WRONG)
def test_one_switch_shows_each_bug(bug):
    for seed in CLEAR:
        assert not experiment(BUGS[bug].shown_by, bug=bug, seed=seed).equal


def test_one_experiment_with_everything_tells_all_bugs_of_the_weight_apart():
    assert len(CLEAR) >= 5
    for seed in CLEAR:
        paths = [experiment(EVERYTHING, bug=bug, seed=seed).loop for bug in [None, *WRONG]]
        assert all(
            np.abs(one - other).max() > 0.005 for one, other in itertools.combinations(paths, 2)
        )


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (
            Settings(
                k=1, unequal=False, ragged=True, clipping=True, schedule=True, normalization=True
            ),
            [],
        ),
        (Settings(), ["sum"]),
        (Settings("Adam"), ["clocks"]),
        (Settings(ragged=True), ["sum", "tail_by_k", "tail_dropped"]),
        (Settings(unequal=True), ["sum", "mean_of_means"]),
        (Settings("Adam", normalization=True), ["clocks", "batch_norm"]),
        (Settings(schedule=True, clipping=True), ["sum", "clip_each", "clocks"]),
    ],
)
def test_what_is_off_hides_its_bug(settings, shown):
    assert [bug for bug in BUGS if not experiment(settings, bug=bug, seed=CLEAR[0]).equal] == shown


@pytest.mark.parametrize(("k", "most"), [(1, 2), (2, 4), (4, 8), (16, 20)])
def test_only_memory_shows_ten_in_flight(k, most):
    settings = Settings(k=k)
    for bug in [None, *WRONG]:
        shown = experiment(settings, "memory", bug)
        assert (
            shown.loop.tolist() == [0, *(k * [2, 0])]
            and shown.large.tolist() == [0, 2 * k, 0]
            and shown.equal
        )
    shown = experiment(settings, "memory", "in_flight")
    assert shown.loop.max() == most and shown.loop[-1] == 0 and shown.equal == (k == 1)
    assert len(shown.loop) == 2 * k + 1 and set(np.abs(np.diff(shown.loop))) == {2}


def test_the_tail_is_short_and_its_last_micro_batch_has_one_text():
    for k, tail in ((1, [1]), (2, [1]), (4, [2, 1]), (16, [2] * 7 + [1])):
        even, ragged = data(Settings(k=k)), data(Settings(k=k, ragged=True))
        assert [len(window) for window in even] == 3 * [k]
        assert [len(part.x) for part in ragged[2]] == tail
    assert {part.mask.sum() for window in data(Settings()) for part in window} == {8}
    assert len({part.mask.sum() for window in data(Settings(unequal=True)) for part in window}) > 3


def hidden_bug(game):
    """The bug that a computer finds by one experiment with everything, and a second one of the
    memory."""
    path, data_seed = game.experiment(EVERYTHING).loop, game.data_seed
    if not game.experiment(EVERYTHING, "memory").equal:
        return "in_flight"
    [found] = [
        bug
        for bug in WRONG
        if np.allclose(experiment(EVERYTHING, bug=bug, seed=data_seed).loop, path)
    ]
    return found


def rounds(seed, count):
    """The bug and the data of each of the first rounds of a game."""
    game = Game(seed)
    found = []
    for _ in range(count):
        found.append((hidden_bug(game), game.data_seed))
        assert found[-1][0] == game.hidden and is_clear(game.data_seed)
        game.next_round()
    return found


@pytest.mark.slow
def test_rounds_differ_and_a_seed_repeats_them():
    found = rounds(seed=0, count=30)
    assert rounds(seed=0, count=8) == found[:8] != rounds(seed=1, count=8)
    bugs = [bug for bug, _ in found]
    assert set(bugs) == set(BUGS) and all(one != other for one, other in itertools.pairwise(bugs))


def spoken(bug):
    number, title = BUGS[bug].name.split(". ")
    return f"bug {number}, {title}"


def test_fewer_experiments_bring_more_points():
    assert [points(number) for number in range(1, 9)] == [5, 4, 3, 2, 1, 1, 1, 1]
    game = Game(4)
    bug = hidden_bug(game)
    game.experiment(EVERYTHING)  # again: not counted
    said = game.name(bug)
    assert said.startswith(f"Right, {spoken(bug)}: 4 points for 2 experiments.") and game.score == 4
    game.experiment(Settings())  # the round is over: not counted
    assert len(game.tried) == 2
    with pytest.raises(
        ValueError, match="bug must be named once in a round, after an experiment. Received: "
    ):
        game.name(bug)

    game.next_round()
    right = hidden_bug(game)
    wrong = next(bug for bug in BUGS if bug != right)
    said = game.name(wrong)
    assert said.startswith(
        f"No, not {spoken(wrong)}: this loop has {spoken(right)}. {BUGS[right].does}"
    )
    assert (game.round, game.score) == (2, 4)


def test_a_round_played_with_the_controls():
    lab = BugLab(seed=2)
    controls = lab.controls
    assert lab.name() == "Choose one of the eight bugs first."
    controls["bug"].value = "sum"
    assert lab.name() == "Run at least one experiment before you name the bug."
    for name in SWITCHES:
        controls[name].value = True
    controls["run"].click()
    assert lab.said.startswith(
        "SGD, k = 4, ragged tail, unequal lengths, clipping at 3, falling rate, normalization: "
    )
    controls["optimizer"].value, controls["k"].value, controls["measure"].value = (
        "Adam",
        16,
        "memory",
    )
    assert lab.run().settings.k == 16 and "The loop holds at most" in lab.said
    assert lab._code.value.count("<mark>") == 1 and "<b>" not in lab._code.value
    controls["bug"].value = hidden_bug(lab.game)
    controls["name"].click()
    assert html.escape(SUSPECTS[lab.game.hidden].wrong) in lab._code.value
    assert lab.said.startswith("Right") and "score 3, experiments 3" in repr(lab)
    assert lab.name() == "This round is over. Press Next round."
    controls["next"].click()
    assert (
        repr(lab) == "BugLab: round 2, score 3, experiments 0, seed 2"
        and controls["bug"].value == ""
        and lab._code.value.endswith(listing())
    )
    lab.close()


def test_before_the_first_experiment_only_the_large_batch_is_drawn():
    lab = BugLab()
    pictures = [
        widget.value for widget in lab.view.children if "<img" in getattr(widget, "value", "")
    ]
    assert len(pictures) == 1 and 'alt="The large batch alone: its weight ends at' in pictures[0]
    lab.run()
    assert not any(
        "The large batch alone" in getattr(widget, "value", "") for widget in lab.view.children
    )
    lab.close()


def test_every_control_has_a_label_and_a_tooltip():
    lab = BugLab()
    assert all(widget.description and widget.tooltip for widget in lab.controls.values())
    lab.close()


def test_pages_without_a_kernel_show_an_example_and_then_the_last_experiment():
    lab = BugLab()
    fresh, again = lab._repr_mimebundle_(), BugLab()._repr_mimebundle_()
    assert fresh["text/plain"] == again["text/plain"] and lab.game.tried == {}
    assert fresh["text/plain"].startswith(
        "BugLab: round 1, score 0, experiments 0, seed 0. Experiment: SGD, k = 4, "
    )
    assert (
        fresh["image/png"].startswith(b"\x89PNG")
        and "application/vnd.jupyter.widget-view+json" in fresh
    )
    assert (
        '<img src="data:image/png' in fresh["text/html"] and fresh["text/html"].count("<tr>") == 8
    )
    lab.controls["measure"].value = "memory"
    lab.run()
    assert "texts in memory at most" in lab._repr_mimebundle_()["text/plain"]
    lab.close()


def test_pictures_say_what_they_show():
    shown = experiment(Settings(ragged=True), bug="tail_dropped", seed=CLEAR[0])
    assert verdict(shown).startswith("The loop and the large batch differ from window 3 on.")
    assert draw(shown).alt == verdict(shown)
    assert (
        verdict(experiment(Settings())) == "The loop and the large batch agree after every window."
    )
    memory = experiment(Settings(), "memory", "in_flight")
    assert verdict(memory).startswith(
        "The loop holds at most 8 texts in memory, the large batch 8."
    )
    assert table(memory).splitlines()[1].split() == ["loop", "8"]
    assert table(shown).splitlines()[3].split()[-1] == "0.0000"
    assert all(bug.name in draw_all(seed=CLEAR[0]).alt for bug in BUGS.values())


def test_it_needs_no_tensorflow():
    play = "from gradlab.lab.widget.course.bug_lab import BugLab; BugLab().run()"
    subprocess.run(
        [sys.executable, "-c", f"import sys; {play}; assert 'tensorflow' not in sys.modules"],
        check=True,
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: BugLab(-1), "seed must be an integer of 0 or more. Received: -1"),
        (lambda: Settings("sgd"), "optimizer must be one of SGD, Adam. Received: 'sgd'"),
        (lambda: Settings(k=3), "k must be one of 1, 2, 4, 16. Received: 3"),
        (lambda: Settings(ragged=1), "ragged must be True or False. Received: 1"),
        (
            lambda: experiment(Settings(), "speed"),
            "measure must be one of weight, memory. Received: 'speed'",
        ),
        (
            lambda: experiment(Settings(), bug="typo"),
            "bug must be one of sum, .*in_flight. Received: 'typo'",
        ),
        (
            lambda: experiment(Settings(), seed=0.5),
            "seed must be an integer of 0 or more. Received: 0.5",
        ),
        (lambda: Game().name("typo"), "bug must be one of sum, .*in_flight. Received: 'typo'"),
        (lambda: Game().name("sum"), "after an experiment. Received: 'sum' after 0 experiments"),
        (lambda: points(0), "experiments must be a positive integer. Received: 0"),
    ],
)
def test_bad_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

"""The exercises' checkers: no wrong answer passes, none raises, and frequent mistakes are named.
That the right ones pass, the solutions show."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

from gradlab.lab import exercises
from gradlab.lab.exercises import exercise, require_choice, require_close, variable_accumulation

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
    assert len(checked) == 13 and len(CHECKERS) >= 40


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

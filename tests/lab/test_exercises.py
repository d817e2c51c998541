"""The exercises' checkers: no wrong answer passes, none raises. That the right ones pass, the
solutions show."""

import importlib
import inspect
import pkgutil

import pytest

from gradlab.lab import exercises
from gradlab.lab.exercises import exercise, require_choice, require_close

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

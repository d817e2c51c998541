"""The table of planted bugs fits the code, and its runner tells a bug that is caught from one that
is not."""

import ast
import re

import pytest

from tests.planted_bugs import BUGS, ROOT, Bug, examine, main, planted_text, report

MEANS = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n"
TEST = "from benchmarks.means import mean\n\n\ndef test_the_mean_of_two():\n    assert mean([1, 3]) == 2\n"


def bug(old="/ len(numbers)", new="", **others):
    values = {"file": "benchmarks/means.py", "targets": ("tests/test_means.py",)} | others
    return Bug("sum_for_mean", old=old, new=new, **values)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts sooner without them
    for name, text in {
        "benchmarks/means.py": MEANS,
        "tests/test_means.py": TEST,
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
    }.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def test_every_bug_can_be_planted_and_has_its_targets():
    for bug in BUGS:
        assert bug.new != bug.old, bug.name
        text = planted_text(ROOT, bug)
        if bug.file.endswith(".py"):
            ast.parse(text)
        tests = ""
        for target in bug.targets:
            file, _, function = target.partition("::")
            content = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {function or 'test_'}" in content, (bug.name, target)
            tests += content
        words = bug.words.replace(" or ", "|")
        assert re.search(rf"def test_\w*({words})", tests), (bug.name, bug.words)


def test_names_and_changes_differ():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (bug(), "caught by tests/test_means.py::test_the_mean_of_two"),
        (bug("len(numbers)", "2"), "MISSED"),
        (
            bug("numbers"),
            "NOT RUN: sum_for_mean: the old text must occur once in benchmarks/means.py. "
            "Received: 3",
        ),
        (bug("def mean", "def median"), "NOT RUN: pytest ended with 2:"),
        (bug(words="median"), "NOT RUN: pytest ended with 5:"),
    ],
    ids=["caught", "missed", "in several places", "not importable", "no test of that name"],
)
def test_a_bug_is_caught_only_by_a_test_that_fails(bug, said, project):
    assert str(examine(project, bug)).startswith(said)
    assert (project / "benchmarks" / "means.py").read_text() == MEANS


def test_tests_that_do_not_end_have_not_said_anything(project):
    outcome = examine(project, bug("return sum", "while True: sum"), longest=0.5)
    assert str(outcome) == "NOT RUN: the tests took more than 0.5 seconds"


def test_the_report_and_its_exit_status(project, capsys):
    assert report(project, [bug(), bug("len(numbers)", "2")], jobs=2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["sum_for_mean: MISSED", "1 of 2 bugs caught"]
    assert lines[0].startswith("sum_for_mean: caught by ")
    assert report(project, [bug()]) == 0


def test_a_test_that_fails_without_the_bug_catches_none(project, capsys):
    test = project / "tests" / "test_means.py"
    test.write_text(TEST + "\n\ndef test_that_fails_anyway():\n    assert mean([1, 2]) == 0\n")
    assert report(project, [bug(words="anyway")]) == 1
    last = capsys.readouterr().out.splitlines()[1:]
    name = "tests/test_means.py::test_that_fails_anyway"
    assert last == [
        f"sum_for_mean: NOT RUN: {name} fails without the bug, too",
        "0 of 1 bugs caught",
    ]


def test_words_choose_bugs(project, capsys):
    assert main(["no_such_bug", "--project", str(project)]) == 2
    assert "no bug has one of the words no_such_bug" in capsys.readouterr().err

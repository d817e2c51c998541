"""The course's exercises as assignments: right answers pass, the dots do not, and both graders give
the points."""

import itertools
import json
import linecache
import re
import subprocess
import sys

import pytest

from gradlab.lab import grading
from gradlab.lab.exercises import leaderboard, start_here

TRAINS_FOR_LONG = ("09", "12")
NUMBERS = [f"{number:02}" for number in range(13)]
_cells = itertools.count()


def run(source: str, names: dict) -> None:
    """Run a cell whose source AutoGraph can find."""
    name = f"<assignment {next(_cells)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), names)


def code_of(made: dict) -> list[str]:
    """The code cells of an assignment, without TensorFlow's setup, which this process has."""
    sources = [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"]
    return [source.replace("_ = gradlab.setup(seed=0)", "") for source in sources]


def without_solutions(source: str) -> str:
    """A cell as the graders give it to students."""
    kept, inside = [], False
    for line in source.splitlines():
        inside = inside or "# BEGIN SOLUTION" in line
        if not inside:
            kept.append(line)
        inside = inside and "# END SOLUTION" not in line
    return "\n".join(kept)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each in TRAINS_FOR_LONG else [])
        for each in NUMBERS
    ],
)
def test_right_answers_pass_and_the_dots_do_not(number, capsys, monkeypatch):
    monkeypatch.setattr(leaderboard, "SECONDS", 30.0)  # a slow machine needs more than 5
    setup, *cells = code_of(grading.assignment(number, "nbgrader"))
    assert code_of(grading.assignment(number, "otter"))[0] == setup
    names: dict = {"display": lambda *shown: None}
    run(setup, names)
    assert len(cells) in (6, 8, 10)  # three to five exercises, each with a test
    for answer, test in zip(cells[::2], cells[1::2]):
        assert test.startswith("grade(check.")
        run(without_solutions(answer), names)
        with pytest.raises(Exception):  # noqa: B017 - an AssertionError, or what the dots raise
            run(test, names)
        run(answer, names)
        run(test, names)
    assert "right" not in capsys.readouterr().out


def test_a_wrong_answer_is_an_error_with_the_hint():
    grading.grade(start_here.effective_batch, 256)
    with pytest.raises(AssertionError, match="^the effective batch is 512, and should be all"):
        grading.grade(start_here.effective_batch, 512)


def test_each_cell_says_what_it_is():
    for number in NUMBERS:
        made = grading.assignment(number, "nbgrader")
        marks = [cell["metadata"].get("nbgrader") for cell in made["cells"]]
        marks = [mark for mark in marks if mark]
        ids = [mark["grade_id"] for mark in marks]
        assert len(set(ids)) == len(ids)
        assert [mark["solution"] for mark in marks] == [True, False] * (len(marks) // 2)
        assert all(("points" in mark) == mark["grade"] == mark["locked"] for mark in marks)
        raw = [
            cell["source"].splitlines()[0]
            for cell in grading.assignment(number, "otter")["cells"]
            if cell["cell_type"] == "raw"
        ]
        question = ["# BEGIN QUESTION", "# BEGIN SOLUTION", "# END SOLUTION"]
        question += ["# BEGIN TESTS", "# END TESTS", "# END QUESTION"]
        assert raw == ["# ASSIGNMENT CONFIG"] + question * (len(marks) // 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["99", "otter", "a.ipynb"], "number must be one of 00, 01, .* Received: '99'"),
        (["04", "paper", "a.ipynb"], "grader must be one of nbgrader, otter. Received: 'paper'"),
        (["04", "otter", "there.ipynb"], "file must not exist yet. Received: there.ipynb"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.ipynb").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["grading", *arguments])
    with pytest.raises(SystemExit) as ended:
        grading.main()
    assert ended.value.code == 2 and (tmp_path / "there.ipynb").read_text() == "kept"
    assert re.search(sentence, capsys.readouterr().err)


def write(number: str, grader: str, file, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grading", number, grader, str(file)])
    assert grading.main() == 0


def answered(notebook: dict, wrong: str) -> dict:
    """A student's notebook with the solutions of the instructor's, but for one."""
    made = grading.assignment("00", "nbgrader")
    right = {
        cell["metadata"]["nbgrader"]["grade_id"]: cell["source"].split("### BEGIN SOLUTION\n")[1]
        for cell in made["cells"]
        if cell["metadata"].get("nbgrader", {}).get("solution")
    }
    names = iter(right)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        is_answer = cell["cell_type"] == "code" and "answer = ..." in source
        if is_answer or source.startswith("def noise_of_windows"):
            name = next(names)
            cell["source"] = "answer = -1" if name == wrong else right[name].split("### END")[0]
    return notebook


@pytest.mark.slow
def test_nbgrader_gives_the_points(tmp_path, monkeypatch):
    pytest.importorskip("nbgrader")
    monkeypatch.chdir(tmp_path)
    write("00", "nbgrader", tmp_path / "source" / "first" / "first.ipynb", monkeypatch)
    grader = [sys.executable, "-m", "nbgrader"]
    subprocess.run([*grader, "generate_assignment", "first"], check=True, timeout=300)
    released = tmp_path / "release" / "first" / "first.ipynb"
    assert "SOLUTION" not in released.read_text()
    student = tmp_path / "submitted" / "anna" / "first" / "first.ipynb"
    student.parent.mkdir(parents=True)
    student.write_text(json.dumps(answered(json.loads(released.read_text()), "exercise_2")))
    subprocess.run([*grader, "autograde", "first"], check=True, timeout=600)
    from nbgrader.api import Gradebook

    with Gradebook("sqlite:///gradebook.db") as book:
        points = [
            grade.score for grade in book.find_submission("first", "anna").notebooks[0].grades
        ]
    assert sorted(points) == [0, 1, 1]


@pytest.mark.slow
def test_otter_gives_the_points(tmp_path, monkeypatch):
    pytest.importorskip("otter")
    write("00", "otter", tmp_path / "first.ipynb", monkeypatch)
    otter = [sys.executable, "-m", "otter"]
    subprocess.run(
        [*otter, "assign", "--no-run-tests", "first.ipynb", "dist"],
        check=True,
        cwd=tmp_path,
        timeout=300,
    )
    student = tmp_path / "dist" / "student" / "first.ipynb"
    assert "SOLUTION" not in student.read_text()
    student.write_text(json.dumps(answered(json.loads(student.read_text()), "exercise_2")))
    zipped = next((tmp_path / "dist" / "autograder").glob("*.zip"))
    done = subprocess.run(
        [*otter, "run", "--no-logo", "-a", str(zipped), str(student)],
        cwd=tmp_path,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert sum(test.get("score", 0) for test in results["tests"]) == 2

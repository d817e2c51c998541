"""The exercises of a notebook as an assignment that nbgrader or Otter-Grader grades.

    python -m gradlab.lab.grading 04 nbgrader source/variables/variables.ipynb
    python -m gradlab.lab.grading 04 otter variables.ipynb

The file is the instructor's: it has the solutions, which `nbgrader generate_assignment` and `otter assign`
take out, and a test for each exercise, which is the course's own checker.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradlab import _checks
from gradlab.lab.course import course_folder
from gradlab.lab.exercises import NotYet

GRADERS = ("nbgrader", "otter")

_CHECK = re.compile(r"\s*^check\.(\w+)\((\w+)\)\s*\Z", re.MULTILINE)
_IMPORT = re.compile(r"^from gradlab\.lab\.exercises import (\w+) as check\n*", re.MULTILINE)
_IMAGE = re.compile(r"<img [^>]*>")
_SETUP = """import keras
import numpy as np
import tensorflow as tf

import gradlab
from gradlab.lab.exercises import {module} as check
from gradlab.lab.grading import grade

_ = gradlab.setup(seed=0)"""

Cell = dict[str, Any]


@dataclass
class Exercise:
    """An exercise of the course.

    Attributes:
        texts: what it asks, as Markdown: one or more cells.
        stub: the code with dots that students begin with.
        checker: the name of its checker.
        answer: the name of what the checker is given.
        solution: code that defines the right answer.
    """

    texts: list[str] = field(default_factory=list)
    stub: str = ""
    checker: str = ""
    answer: str = ""
    solution: str = ""


def grade(checker: Callable[[Any], None], answer: Any) -> None:
    """Raise an AssertionError with the checker's hint unless an answer is right.

    Args:
        checker: one of the checkers of `gradlab.lab.exercises`.
        answer: the student's answer.

    Raises:
        AssertionError: the answer is not right. An error of the answer itself is passed on.

    Example:
        >>> from gradlab.lab.exercises import start_here as check
        >>> grade(check.effective_batch, 256)
        >>> grade(check.effective_batch, 512)
        Traceback (most recent call last):
        AssertionError: the effective batch is 512, and should be all the examples in one update
    """
    try:
        checker.__wrapped__(answer)  # type: ignore[attr-defined]
    except NotYet as hint:
        raise AssertionError(str(hint)) from None


def assignment(number: str, grader: str) -> dict[str, Any]:
    """A notebook's exercises as an instructor's notebook.

    Args:
        number: the two digits with which the notebook's name begins, such as "04".
        grader: "nbgrader" or "otter".

    Returns:
        The notebook, in the format 4.5.

    Raises:
        ValueError: there is no such notebook or grader.
    """
    _checks.one_of("grader", grader, GRADERS)
    known = {path.name[:2]: path for path in sorted(course_folder().glob("[0-9][0-9]_*.ipynb"))}
    _checks.one_of("number", number, known)
    path = known[number]
    title, module, exercises = _exercises(path)
    cells = [
        _markdown(f"# {title}\n\nEach exercise brings a point."),
        _code(_SETUP.format(module=module)),
    ]
    if grader == "otter":
        cells.insert(0, _raw(f"# ASSIGNMENT CONFIG\nname: {path.stem}"))
    for place, exercise in enumerate(exercises, start=1):
        make = _for_nbgrader if grader == "nbgrader" else _for_otter
        cells += make(exercise, f"exercise_{place}")
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _for_nbgrader(exercise: Exercise, name: str) -> list[Cell]:
    solution = f"{exercise.stub}\n### BEGIN SOLUTION\n{exercise.solution}\n### END SOLUTION"
    common = {"schema_version": 3, "task": False}
    answered = common | {"grade": False, "grade_id": name, "locked": False, "solution": True}
    tested = common | {"grade": True, "grade_id": f"{name}_test", "locked": True, "points": 1}
    return [
        *map(_markdown, exercise.texts),
        _code(solution, nbgrader=answered),
        _code(_test(exercise), nbgrader=tested | {"solution": False}),
    ]


def _for_otter(exercise: Exercise, name: str) -> list[Cell]:
    hidden = f"# BEGIN SOLUTION NO PROMPT\n{exercise.solution}\n# END SOLUTION"
    return [
        _raw(f"# BEGIN QUESTION\nname: {name}\npoints: 1"),
        *map(_markdown, exercise.texts),
        _raw("# BEGIN SOLUTION"),
        _code(f"{exercise.stub}\n{hidden}"),
        _raw("# END SOLUTION"),
        _raw("# BEGIN TESTS"),
        _code(_test(exercise)),
        _raw("# END TESTS"),
        _raw("# END QUESTION"),
    ]


def _test(exercise: Exercise) -> str:
    return f"grade(check.{exercise.checker}, {exercise.answer})"


def _exercises(path: pathlib.Path) -> tuple[str, str, list[Exercise]]:
    """The title of a notebook, the name of the module with its checkers, and its exercises."""
    cells = _cells(path)
    title = cells[0][1].splitlines()[0].removeprefix("# ")
    first = next(i for i, (_, source, _) in enumerate(cells) if source.startswith("## Exercises"))
    imports = (_IMPORT.search(source) for _, source, _ in cells[first:])
    module = next(found[1] for found in imports if found)
    solutions = _solutions(path.parent / "solutions" / path.name)
    found: list[Exercise] = []
    now = Exercise()
    for kind, source, image in cells[first + 1 :]:
        if kind == "markdown":
            now.texts.append(source)
        elif match := _CHECK.search(source):
            now.stub = _IMPORT.sub("", source[: match.start()])
            now.checker, now.answer = match.groups()
            now.solution = solutions[now.checker]
            found.append(now)
            now = Exercise()
        elif image:
            now.texts.append(image)  # its code needs the notebook
    return title, module, found


def _solutions(path: pathlib.Path) -> dict[str, str]:
    """The code of each solution by the name of its checker, with what it uses."""
    found = {}
    used: list[str] = []
    for kind, source, _ in _cells(path):
        if kind != "code":
            continue
        match = _CHECK.search(source)
        if match:
            found[match[1]] = "\n\n\n".join([*used, source[: match.start()]])
            used = []
        elif _IMPORT.search(source):
            used = []  # what comes before is the setup
        else:
            used.append(source)
    return found


def _cells(path: pathlib.Path) -> list[tuple[str, str, str]]:
    """The kind and source of each cell of a notebook, and the image that it shows, or ""."""
    return [
        (cell["cell_type"], "".join(cell["source"]), next(_images(cell), ""))
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]


def _images(cell: Cell) -> Iterator[str]:
    for output in cell.get("outputs", ()):
        yield from _IMAGE.findall("".join(output.get("data", {}).get("text/html", ())))


def _markdown(source: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _raw(source: str) -> Cell:
    return {"cell_type": "raw", "metadata": {}, "source": source}


def _code(source: str, **metadata: Any) -> Cell:
    return _markdown(source) | {
        "cell_type": "code",
        "metadata": metadata,
        "execution_count": None,
        "outputs": [],
    }


def main() -> int:
    """Write an assignment. Returns the exit status: 2 for invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m gradlab.lab.grading", description=__doc__.splitlines()[0]
    )
    parser.add_argument("number", help='the first two digits of the notebook: "04"')
    parser.add_argument("grader", help="nbgrader or otter")
    parser.add_argument("file", type=pathlib.Path, help="the notebook to write")
    asked = parser.parse_args()
    try:
        made = assignment(asked.number, asked.grader)
        asked.file.parent.mkdir(parents=True, exist_ok=True)
        with asked.file.open("x", encoding="utf-8") as file:
            json.dump(made, file, indent=1, ensure_ascii=False)
    except FileExistsError:
        parser.error(f"file must not exist yet. Received: {asked.file}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

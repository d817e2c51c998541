"""The notebooks with the solutions, run in this process: each cell shows what is committed.

nbval runs all other notebooks, each in a kernel of its own (`make test`).
"""

import json
import os
import re
import subprocess

import nbformat
import pytest
from notebook_in_process import differences
from paths import ROOT

NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
LONG = ("09", "12")


def solution(path):
    """A solution as a parameter; those that train for long are slow."""
    marks = [pytest.mark.slow] if path.name.startswith(LONG) else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.usefixtures("no_retracings_yet")
@pytest.mark.parametrize("path", [solution(path) for path in SOLUTIONS])
def test_the_cells_of_a_solution_show_what_is_committed(path, request, capfd):
    found = differences(request.session, path)
    assert not found, "\n\n".join(found)
    assert capfd.readouterr() == ("", "")  # nor did TensorFlow's C++ code write anything


@pytest.mark.parametrize("target", ["test", "test-slow"])
def test_both_recipes_name_every_notebook(target):
    """Those that the recipe names are run by nbval, the long ones by the second recipe; the
    solutions here."""
    own = ("MAKE", "MFLAGS")  # what a make around this test passes on
    outside = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = ["make", "--dry-run", "--old-file=.venv/dev", target]
    said = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    run = set(SOLUTIONS)
    for argument in re.findall(r"(?<=\s)notebooks\S*", said.stdout):
        for path in ROOT.glob(argument):
            run |= set(path.rglob("*.ipynb")) if path.is_dir() else {path}
    every = {path for path in NOTEBOOKS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert every <= run


def test_a_wrong_digit_is_found(tmp_path, request):
    notebook = json.loads(SOLUTIONS[0].read_text())
    text = json.dumps(notebook)
    wrong = text.replace("falls by a factor of 4", "falls by a factor of 5")
    assert wrong != text
    path = tmp_path / SOLUTIONS[0].name
    path.write_text(wrong)
    [found] = differences(request.session, path)
    assert "00_start_here.ipynb, cell [6] shows something else" in found
    assert "falls by a factor of 4" in found and "falls by a factor of 5" in found


# A cell, the output that was committed, and words of the fault that must be found, if any.
CELLS = {
    "a result": ("6 * 7", {"result": "42"}, None),
    "another result": ("6 * 7", {"result": "43"}, "43"),
    "no result": ("6 * 7", {}, "Unexpected output fields"),
    "a result that is missing": ("_ = 42", {"result": "42"}, "Missing output fields"),
    "a display": ("display('shown')", {"display": "'shown'"}, None),
    "a second display": ("display(1, 1)", {"display": "1"}, "dissimilar number"),
    "a magic": ("%pwd\nprint('here')", {"stdout": "here\n"}, None),
    "a warning": ("import warnings\nwarnings.warn('look')", {}, "stderr"),
    "an ignored output": ("# NBVAL_IGNORE_OUTPUT\nprint(2)", {"stdout": "1\n"}, None),
    "devices": ("print('(GPU:0, GPU:1)')", {"stdout": "(CPU:0)\n"}, None),
    "functions": ("f = lambda: g()\ng = lambda: __name__\nf()", {"result": "'__main__'"}, None),
    "an error": ("1 / 0", {}, "ZeroDivisionError"),
}


def test_each_kind_of_output_is_compared(tmp_path, request):
    def output(kind: str, text: str):
        if kind == "stdout":
            return nbformat.v4.new_output("stream", name=kind, text=text)
        name = "execute_result" if kind == "result" else "display_data"
        return nbformat.v4.new_output(name, data={"text/plain": text})

    for name, (source, shown, fault) in CELLS.items():
        outputs = [output(kind, text) for kind, text in shown.items()]
        cell = nbformat.v4.new_code_cell(source, execution_count=1, outputs=outputs)
        path = tmp_path / "one cell.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        found = differences(request.session, path)
        assert len(found) == (fault is not None), (name, found)
        assert fault is None or fault in found[0], (name, found)

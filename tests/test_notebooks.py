"""The notebooks as they are committed; nbval runs them (make test), here is what nbval does not look at."""

import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if path.parent.name != "app")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return json.loads(path.read_text())["cells"]


def source(cell) -> str:
    return "".join(cell["source"])


def test_there_are_notebooks():
    assert NOTEBOOKS[0].name == "00_start_here.ipynb"


def test_executed_top_to_bottom_from_a_fresh_kernel(cells):
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(source(cell).strip() for cell in code)


def test_no_error_and_no_stderr_is_committed(cells):
    for cell in cells:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"


def test_no_path_of_a_machine_and_no_stored_widgets(path):
    text = path.read_text()
    assert not re.search(r"/(home|root|Users|work|tmp)/", text)
    assert len(text) < 1_000_000
    assert "widget-state" not in text


def test_headings_begin_with_one_title_and_skip_no_level(cells):
    levels = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            levels += [len(marks) for marks in re.findall(r"^(#+) ", source(cell), flags=re.M)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_first_cell_promises_and_says_how_long(cells):
    assert "You will be able to" in source(cells[0]) and re.search(r"\*\*Time\*\*: \d+ minutes", source(cells[0]))


def test_cells_are_short(cells):
    lengths = sorted(len(source(cell).splitlines()) for cell in cells if cell["cell_type"] == "code")
    assert lengths[len(lengths) // 2] <= 6 and lengths[-1] <= 25


def test_the_kernel_is_named_so_that_no_dialog_opens(path):
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.slow
def test_a_wrong_output_makes_the_check_fail(tmp_path):
    """The check that make test runs on the notebooks is seen to fail on an output that is wrong by one digit."""
    recipe = (ROOT / "Makefile").read_text()
    assert "--nbval --nbval-sanitize-with tests/nbval_sanitize.cfg" in recipe
    text = NOTEBOOKS[0].read_text()
    wrong = text.replace("numpy=array([-16.5, -21.5]", "numpy=array([-16.5, -21.6]", 1)
    assert wrong != text
    codes = {}
    for name, content in (("right.ipynb", text), ("wrong.ipynb", wrong)):
        (tmp_path / name).write_text(content)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
        command += ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg"), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        codes[name] = done.returncode
        if name == "wrong.ipynb":
            assert "-21.6" in done.stdout
    assert codes == {"right.ipynb": 0, "wrong.ipynb": 1}

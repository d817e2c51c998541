"""The committed notebooks: their form, their prose and their exercises. nbval runs them (make test)."""

import importlib
import importlib.util
import inspect
import itertools
import json
import re
import subprocess
import sys
import tomllib
import types
from collections import Counter

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from paths import ROOT

import gradlab

COURSE = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
NOTEBOOKS = [*COURSE, *SOLUTIONS]
BOTH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
ONLY_COURSE = pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)


@pytest.fixture
def cells(path):
    return json.loads(path.read_text())["cells"]


INSTALL = """# Installs gradlab where it is missing, as on hosted services.
import importlib.util

if importlib.util.find_spec("gradlab") is None:
    %pip install --quiet "gradlab[lab]\""""


def source(cell) -> str:
    return "".join(cell["source"])


def code(cells) -> list:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def prose(cells) -> str:
    return "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")


def printed(cell) -> str:
    return "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))


def test_thirteen_notebooks_and_their_solutions():
    assert [path.name[:2] for path in COURSE] == [f"{number:02d}" for number in range(13)]
    assert [path.name for path in SOLUTIONS] == [path.name for path in COURSE]


@BOTH
def test_executed_top_to_bottom_from_a_fresh_kernel(cells):
    assert [cell["execution_count"] for cell in code(cells)] == list(range(1, len(code(cells)) + 1))
    assert all(source(cell).strip() for cell in code(cells))


@BOTH
def test_no_error_and_no_stderr_is_committed(cells):
    for cell in cells:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"


@BOTH
def test_no_path_of_a_machine_and_no_stored_widgets(path):
    text = path.read_text()
    assert not re.search(r"/(home|root|Users|work|tmp)/", text)
    assert len(text) < 1_000_000
    assert "widget-state" not in text


@BOTH
def test_headings_begin_with_one_title_and_skip_no_level(cells):
    levels = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            levels += [len(marks) for marks in re.findall(r"^(#+) ", source(cell), flags=re.M)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@ONLY_COURSE
def test_the_beginning_promises_and_says_how_long(cells):
    """The first text says it; in notebook 00 the second, because there the lab comes first."""
    beginning = prose(cells[:4])
    assert "You will be able to" in beginning and re.search(r"\*\*Time\*\*: \d+ minutes", beginning)


@BOTH
def test_the_first_cell_installs_gradlab_where_it_is_missing(cells):
    first = code(cells)[0]
    assert source(first) == INSTALL and cells[1] is first
    assert first["metadata"] == {"jupyter": {"source_hidden": True}, "tags": ["hide-input", "remove-cell"]}


@pytest.mark.parametrize("missing", [False, True])
def test_the_first_cell_installs_nothing_where_gradlab_is_there(missing, monkeypatch):
    asked = []
    shell = types.SimpleNamespace(run_line_magic=lambda *words: asked.append(words))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing else object())
    exec(TransformerManager().transform_cell(INSTALL), {"get_ipython": lambda: shell})
    assert asked == [("pip", 'install --quiet "gradlab[lab]"')] * missing


@ONLY_COURSE
def test_cells_are_short(cells):
    assert len(cells) <= 46  # 45, and the one that installs

    shown = [cell for cell in code(cells) if "hide-input" not in cell["metadata"].get("tags", [])]
    lengths = sorted(len(source(cell).splitlines()) for cell in shown)
    assert lengths[len(lengths) // 2] <= 6, lengths
    assert max(len(source(cell).splitlines()) for cell in code(cells)) <= 25
    assert max(len(line) for cell in code(cells) for line in source(cell).splitlines()) <= 95


@ONLY_COURSE
def test_the_reader_is_asked_before_being_told(cells):
    asked = len(re.findall(r"\*\*Predict", prose(cells)))
    asked += len(re.findall(r"with predict\(", "\n".join(map(source, code(cells)))))
    assert asked >= 3 or "Predict, then try" in prose(cells)
    assert "## What you have seen" in prose(cells)


def test_every_question_is_asked_once_and_in_order():
    """A saved result stands inside the choices only; what the page shows otherwise does not contain it."""
    for path in COURSE:
        file = ROOT / "gradlab" / "lab" / "predictions" / f"{path.stem}.toml"
        questions = tomllib.loads(file.read_text()) if file.exists() else {}
        asked = []
        for cell in code(json.loads(path.read_text())["cells"]):
            if names := re.findall(r'with predict\("(.*?)"\)', source(cell)):
                asked += names
                [output] = cell["outputs"]  # one question a cell, and nothing beside it
                page = "".join(output["data"]["text/html"])
                assert page.count("<details") == len(questions[names[0]]["choices"])
        assert asked == list(questions)


@BOTH
def test_pictures_can_be_read_aloud(cells):
    """Every figure has a text alternative, and every diagram and every lab a description."""
    for cell in code(cells):
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if "image/png" in data and "application/vnd.jupyter.widget-view+json" not in data:
                assert re.match(r'<img alt="[^"]{20,}"', "".join(data["text/html"]))
            if "application/vnd.jupyter.widget-view+json" in data:
                assert {"image/png", "image/svg+xml"} & data.keys()  # for pages without a kernel
            if "text/vnd.mermaid" in data:
                assert "accDescr: " in "".join(data["text/vnd.mermaid"]) and data["text/plain"]


@BOTH
def test_diagrams_have_a_picture_of_the_present_diagram(cells):
    """Pages that do not draw Mermaid show it. `make notebooks` makes it."""
    for cell in code(cells):
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if "text/vnd.mermaid" in data:
                diagram, picture = "".join(data["text/vnd.mermaid"]), "".join(data["image/svg+xml"])
                shown = Counter(re.findall(r"[\w:]+", " ".join(re.findall(r"<tspan[^>]*>([^<]*)</tspan>", picture))))
                boxes = dict.fromkeys(diagram.splitlines())  # a box that is written twice is named twice
                labels = " ".join(re.findall(r'"(.*?)"', "\n".join(boxes))).replace("<br/>", " ")
                assert not Counter(re.findall(r"[\w:]+", labels)) - shown
                arrows = len(re.findall(r"^    \w+ (?:-->|-\.->|==)", diagram, flags=re.M))
                assert picture.count('data-edge="true"') == arrows
                assert "foreignObject" not in picture


@BOTH
def test_links_inside_the_repository_resolve(path, cells):
    for address in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose(cells)):
        if not address.startswith("http"):
            assert (path.parent / address).resolve().exists(), address


@ONLY_COURSE
def test_exercises_have_their_form_their_checkers_and_their_solutions(path, cells):
    """Each states what, why and what to expect, and its cell prints "not yet"; in the solutions it prints "right"."""
    start = next(number for number, cell in enumerate(cells) if source(cell).startswith("## Exercises")) + 1
    tasks = [cell for cell in cells[start:] if re.match(r"### \d+\. ", source(cell))]
    assert 3 <= len(tasks) <= 5
    for task in tasks:
        assert re.findall(r"^- \*\*(\w+)\*\*: ", source(task), flags=re.M) == ["What", "Why", "Expected"]
    checked = [re.findall(r"check\.(\w+)\(", source(cell)) for cell in code(cells[start:])]
    asked = [name for names in checked for name in names]
    assert len(asked) == len(tasks) == len(set(asked))
    for cell in code(cells[start:]):
        if "check." in source(cell):
            assert "..." in source(cell) and printed(cell).startswith("not yet: ")

    solved = json.loads((path.parent / "solutions" / path.name).read_text())["cells"]
    answers = {name: printed(cell) for cell in code(solved) for name in re.findall(r"check\.(\w+)\(", source(cell))}
    assert answers == dict.fromkeys(asked, "right\n")


def _used(text: str) -> set[str]:
    return set(re.findall(r"\bgradlab\.([A-Za-z_]\w*)", text))


def test_every_public_name_exists_and_is_taught():
    every = {path.stem: json.loads(path.read_text())["cells"] for path in COURSE}
    run = {stem: _used("\n".join(source(cell) for cell in code(cells))) for stem, cells in every.items()}
    for stem, names in run.items():
        for name in names:
            assert hasattr(gradlab, name) or importlib.import_module(f"gradlab.{name}"), f"{stem}: gradlab.{name}"
    taught = set().union(*run.values())
    results = {"Audit", "Diagram", "NoiseScale", "Problem", "Runtime", "Step"}  # what other names return and pass on
    modules = {name for name in gradlab.__all__ if inspect.ismodule(getattr(gradlab, name))}
    assert set(gradlab.__all__) - results - modules <= taught


def test_the_learning_path_in_readme_lists_each_with_its_minutes():
    readme = (ROOT / "README.md").read_text()
    for path in COURSE:
        minutes = re.search(r"\*\*Time\*\*: (\d+) minutes", path.read_text()).group(1)
        assert re.search(rf"\| \[{path.name[:2]} [^]]+\]\(notebooks/{path.name}\) \| {minutes} \| .{{20,}} \|", readme)


@BOTH
def test_the_kernel_is_named_so_that_no_dialog_opens(path):
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"


def test_a_wrong_output_makes_the_check_fail(tmp_path):
    """The check that make test runs on the notebooks is seen to fail on an output that is wrong by one digit.

    The beginning of notebook 01 is run with one wrong output: that cell fails, and all others pass.
    """
    recipe = (ROOT / "Makefile").read_text()
    assert "--nbval --nbval-sanitize-with tests/nbval_sanitize.cfg" in recipe
    notebook = json.loads(COURSE[1].read_text())
    outputs = [json.dumps(cell.get("outputs", [])) for cell in notebook["cells"]]
    number = next(number for number, text in enumerate(outputs) if "micro-batches: -4.5 -13.5" in text)
    wrong = outputs[number].replace("-13.5", "-13.6", 1)
    notebook["cells"] = notebook["cells"][: number + 3]
    notebook["cells"][number]["outputs"] = json.loads(wrong)
    (tmp_path / "wrong.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    command += ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg"), str(tmp_path / "wrong.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 1 and "-13.6" in done.stdout
    assert f"1 failed, {len(code(notebook['cells'])) - 1} passed" in done.stdout

"""The committed notebooks: how they were run, what a reader needs of them, and their exercises.

nbval runs them (make test). Each test reads all of them, and its message names every one that is
wrong.
"""

import functools
import html
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
INSTALL = """# Installs gradlab where it is missing, as on hosted services.
import importlib.util

if importlib.util.find_spec("gradlab") is None:
    %pip install --quiet "gradlab[lab]\""""


@functools.cache
def cells_of(path) -> list:
    """The cells of a notebook."""
    return json.loads(path.read_text())["cells"]


def outputs_of(path) -> list:
    """The outputs of a notebook's cells."""
    return [output for cell in code(cells_of(path)) for output in cell["outputs"]]


def named(path) -> str:
    """A notebook's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def report(wrong: list[str]) -> None:
    """Fails if there is a sentence about something wrong."""
    assert not wrong, "\n" + "\n".join(wrong)


def source(cell) -> str:
    return "".join(cell["source"])


def code(cells) -> list:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def prose(cells) -> str:
    return "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")


def printed(cell) -> str:
    return "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))


def test_notebooks_are_numbered_and_have_solutions():
    assert [path.name[:2] for path in COURSE] == [f"{number:02d}" for number in range(len(COURSE))]
    assert COURSE and [path.name for path in SOLUTIONS] == [path.name for path in COURSE]


def test_executed_top_to_bottom_from_a_fresh_kernel():
    wrong = []
    for path in NOTEBOOKS:
        counts = [cell["execution_count"] for cell in code(cells_of(path))]
        if counts != list(range(1, len(counts) + 1)):
            wrong.append(f"{named(path)}: executed in the order {counts}")
        if not all(source(cell).strip() for cell in code(cells_of(path))):
            wrong.append(f"{named(path)}: an empty cell")
    report(wrong)


def test_no_error_and_no_stderr_is_committed():
    report(
        [
            f"{named(path)}: {output}"
            for path in NOTEBOOKS
            for output in outputs_of(path)
            if output["output_type"] == "error" or output.get("name") == "stderr"
        ]
    )


def test_no_path_of_a_machine_and_no_stored_widgets():
    wrong = []
    for path in NOTEBOOKS:
        text = path.read_text()
        wrong += [
            f"{named(path)}: {found}"
            for found in re.findall(r"/(?:home|root|Users|work|tmp)/.{,40}", text)
        ]
        if "widget-state" in text or len(text) >= 1_500_000:
            wrong.append(f"{named(path)}: stored widgets, or more than 1.5 MB")
    report(wrong)


def test_headings_begin_with_one_title_and_skip_no_level():
    wrong = []
    for path in NOTEBOOKS:
        levels = [len(marks) for marks in re.findall(r"^(#+) ", prose(cells_of(path)), flags=re.M)]
        skips = any(after > before + 1 for before, after in itertools.pairwise(levels))
        if skips or levels[0] != 1 or levels.count(1) != 1:
            wrong.append(f"{named(path)}: {levels}")
    report(wrong)


def test_the_first_cell_installs_gradlab_where_it_is_missing():
    hidden = {"jupyter": {"source_hidden": True}, "tags": ["hide-input", "remove-cell"]}
    wrong = []
    for path in NOTEBOOKS:
        first = code(cells_of(path))[0]
        if (
            source(first) != INSTALL
            or cells_of(path)[1] is not first
            or first["metadata"] != hidden
        ):
            wrong.append(f"{named(path)}: {first['metadata']} {source(first)}")
    report(wrong)


def test_hidden_code_is_collapsed_in_jupyterlab_too():
    """The tag is for the website, the metadata for JupyterLab."""
    wrong = []
    for path in NOTEBOOKS:
        for cell in code(cells_of(path)):
            is_tagged = "hide-input" in cell["metadata"].get("tags", [])
            if is_tagged != cell["metadata"].get("jupyter", {}).get("source_hidden", False):
                wrong.append(f"{named(path)}: {cell['metadata']} {source(cell):.60}")
    report(wrong)


@pytest.mark.parametrize("missing", [False, True])
def test_the_first_cell_installs_nothing_where_gradlab_is_there(missing, monkeypatch):
    asked = []
    shell = types.SimpleNamespace(run_line_magic=lambda *words: asked.append(words))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing else object())
    exec(TransformerManager().transform_cell(INSTALL), {"get_ipython": lambda: shell})
    assert asked == [("pip", 'install --quiet "gradlab[lab]"')] * missing


def test_code_can_be_read_without_scrolling():
    wrong = []
    for path in COURSE:
        for cell in code(cells_of(path)):
            lines = source(cell).splitlines()
            if len(lines) > 25 or max(map(len, lines)) > 95:
                wrong.append(f"{named(path)}: {lines[0]}")
    report(wrong)


def test_every_question_is_asked_once_and_in_order():
    """A saved result stands inside the choices only; what the page shows otherwise does not contain
    it."""
    for path in COURSE:
        file = ROOT / "gradlab/lab/widget/course/predictions" / f"{path.stem}.toml"
        questions = tomllib.loads(file.read_text()) if file.exists() else {}
        asked = []
        for cell in code(cells_of(path)):
            if names := re.findall(r'with predict\("(.*?)"\)', source(cell)):
                asked += names
                [output] = cell["outputs"]  # one question a cell, and nothing beside it
                page = "".join(output["data"]["text/html"])
                question = questions[names[0]]
                assert page.count("<details") == len(question["choices"])
                assert page.count(f"<p>{html.escape(question['why'])}</p>") == page.count(
                    "<details"
                )
                assert f"</b> {html.escape(question['question'])}</p>" in page
        assert asked == list(questions)


def test_pictures_can_be_read_aloud():
    """Every figure has a text alternative, and every diagram and every lab a description."""
    widget = "application/vnd.jupyter.widget-view+json"
    wrong = []
    for path in NOTEBOOKS:
        for data in (output.get("data", {}) for output in outputs_of(path)):
            if widget in data and not {"image/png", "image/svg+xml"} & data.keys():
                wrong.append(
                    f"{named(path)}: a widget without a picture for pages without a kernel"
                )
            if "image/png" in data and widget not in data:
                html = "".join(data["text/html"])
                if not re.match(r'<img alt="[^"]{20,}"', html):
                    wrong.append(f"{named(path)}: a figure without a text alternative, {html:.80}")
            if "text/vnd.mermaid" in data:
                diagram = "".join(data["text/vnd.mermaid"])
                if "accDescr: " not in diagram or not data["text/plain"]:
                    wrong.append(f"{named(path)}: a diagram without a description, {diagram:.80}")
    report(wrong)


def test_no_output_has_svg_in_its_html():
    """JupyterLab takes it out of a notebook that is not trusted, and shows the text of the picture
    without order."""
    wrong = []
    for path in NOTEBOOKS:
        for data in (output.get("data", {}) for output in outputs_of(path)):
            html = re.sub(
                r"<script\b.*?</script>", "", "".join(data.get("text/html", "")), flags=re.S
            )
            wrong += [f"{named(path)}: {html:.80}"] if "<svg" in html else []
    report(wrong)


def test_diagrams_have_a_picture_of_the_present_diagram():
    """Pages that do not draw Mermaid show it. `make notebooks` makes it."""
    wrong = []
    for path in NOTEBOOKS:
        for data in (output.get("data", {}) for output in outputs_of(path)):
            if "text/vnd.mermaid" in data:
                fault = fault_of_picture(
                    "".join(data["text/vnd.mermaid"]), "".join(data["image/svg+xml"])
                )
                wrong += [f"{named(path)}: {fault}"] if fault else []
    report(wrong)


def fault_of_picture(diagram: str, picture: str) -> str:
    """How the SVG differs from its Mermaid source; an empty string if it does not."""
    shown = Counter(
        re.findall(r"[\w:]+", " ".join(re.findall(r"<tspan[^>]*>([^<]*)</tspan>", picture)))
    )
    boxes = dict.fromkeys(diagram.splitlines())  # a box that is written twice is named twice
    labels = " ".join(re.findall(r'"(.*?)"', "\n".join(boxes))).replace("<br/>", " ")
    missing = Counter(re.findall(r"[\w:]+", labels)) - shown
    arrows = len(re.findall(r"^    \w+ (?:-->|-\.->|==)", diagram, flags=re.M))
    drawn = picture.count('data-edge="true"')
    if missing or drawn != arrows or "foreignObject" in picture:
        return f"a picture with {drawn} of {arrows} arrows, without {list(missing)}: {diagram:.80}"
    return ""


def test_links_inside_the_repository_resolve():
    wrong = []
    for path in NOTEBOOKS:
        for address in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose(cells_of(path))):
            if not address.startswith("http") and not (path.parent / address).resolve().exists():
                wrong.append(f"{named(path)}: {address}")
    report(wrong)


def test_exercises_have_their_form_their_checkers_and_their_solutions():
    """Each states what, why and what to expect, and its cell prints "not yet"; in the solutions it
    prints "right"."""
    report([f"{named(path)}: {fault}" for path in COURSE for fault in faults_of_exercises(path)])


def faults_of_exercises(path) -> list[str]:
    """What is wrong with the exercises of a notebook and with their solutions."""
    cells = cells_of(path)
    start = (
        next(number for number, cell in enumerate(cells) if source(cell).startswith("## Exercises"))
        + 1
    )
    tasks = [cell for cell in cells[start:] if re.match(r"### \d+\. ", source(cell))]
    faults = []
    for task in tasks:
        if re.findall(r"^- \*\*(\w+)\*\*: ", source(task), flags=re.M) != [
            "What",
            "Why",
            "Expected",
        ]:
            faults.append(f"no What, Why and Expected in {source(task):.60}")
    asked = [
        name for cell in code(cells[start:]) for name in re.findall(r"check\.(\w+)\(", source(cell))
    ]
    if not tasks or len(asked) != len(tasks) or len(asked) != len(set(asked)):
        faults.append(f"{len(tasks)} exercises with the checkers {asked}")
    for cell in code(cells[start:]):
        if "check." in source(cell) and not (
            "..." in source(cell) and printed(cell).startswith("not yet: ")
        ):
            faults.append(f"not an open exercise: {source(cell)} prints {printed(cell)}")
    solved = cells_of(path.parent / "solutions" / path.name)
    answers = {
        name: printed(cell)
        for cell in code(solved)
        for name in re.findall(r"check\.(\w+)\(", source(cell))
    }
    if answers != dict.fromkeys(asked, "right\n"):
        faults.append(f"the solutions print {answers}")
    return faults


def _used(text: str) -> set[str]:
    return set(re.findall(r"\bgradlab\.([A-Za-z_]\w*)", text))


def test_every_public_name_exists_and_is_taught():
    run = {path.stem: _used("\n".join(map(source, code(cells_of(path))))) for path in COURSE}
    for stem, names in run.items():
        for name in names:
            assert hasattr(gradlab, name) or importlib.import_module(f"gradlab.{name}"), (
                f"{stem}: gradlab.{name}"
            )
    taught = set().union(*run.values())
    # What other names return and pass on
    results = {"Audit", "Diagram", "NoiseScale", "Problem", "Runtime", "UpdateRecord"}
    modules = {name for name in gradlab.__all__ if inspect.ismodule(getattr(gradlab, name))}
    assert set(gradlab.__all__) - results - modules <= taught


def test_the_learning_path_in_readme_lists_each_with_its_minutes():
    readme = (ROOT / "README.md").read_text()
    for path in COURSE:
        stated = r"\*\*Time\*\*: (\d+) minutes, and (\d+) for the exercises"
        reading, exercises = re.search(stated, path.read_text()).groups()
        assert re.search(
            rf"\| \[{path.name[:2]} [^]]+\]\(notebooks/{path.name}\) "
            rf"\| {reading}\+{exercises} \| .{{20,}} \|",
            readme,
        )


def test_the_kernel_is_named_so_that_no_dialog_opens():
    kernels = {
        named(path): json.loads(path.read_text())["metadata"]["kernelspec"]["name"]
        for path in NOTEBOOKS
    }
    assert set(kernels.values()) == {"python3"}, kernels


def test_a_wrong_output_makes_the_check_fail(tmp_path):
    """The check that make test runs on the notebooks is seen to fail on an output that is wrong by
    one digit.

    The beginning of notebook 01 is run with one wrong output: that cell fails, and all others pass.
    """
    recipe = (ROOT / "Makefile").read_text()
    assert "--nbval --nbval-sanitize-with tests/nbval_sanitize.cfg" in recipe
    notebook = json.loads(COURSE[1].read_text())
    outputs = [json.dumps(cell.get("outputs", [])) for cell in notebook["cells"]]
    number = next(
        number for number, text in enumerate(outputs) if "micro-batches: -4.5 -13.5" in text
    )
    wrong = outputs[number].replace("-13.5", "-13.6", 1)
    notebook["cells"] = notebook["cells"][: number + 3]
    notebook["cells"][number]["outputs"] = json.loads(wrong)
    (tmp_path / "wrong.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    command += [
        "--nbval-sanitize-with",
        str(ROOT / "tests" / "nbval_sanitize.cfg"),
        str(tmp_path / "wrong.ipynb"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 1 and "-13.6" in done.stdout
    assert f"1 failed, {len(code(notebook['cells'])) - 1} passed" in done.stdout

"""The site's sources, without building them: `make docs` builds the site, and fails on a
warning."""

import ast
import csv
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from markdown_pages import broken_links, headings, links, python_blocks
from paths import ROOT

import gradlab
from gradlab._parser import STUDIES

DOCS = ROOT / "docs"
COPIED = ("_build", "course", "benchmarks")  # folders that the build writes
PAGES = sorted(
    path
    for pattern in ("*.md", "*/*.md")
    for path in DOCS.glob(pattern)
    if path.relative_to(DOCS).parts[0] not in COPIED
    and path.name not in ("changelog.md", "contributing.md")
)
REFERENCE = sorted((DOCS / "api").glob("*.rst"))
# Files from elsewhere in the repository that become pages: conf.py copies them.
SOURCES = [
    ROOT / name
    for name in ("benchmarks/RESULTS.md", "benchmarks/NOTES.md", "CHANGELOG.md", "CONTRIBUTING.md")
    if (ROOT / name).exists()
]
GENERATED = {"benchmarks/results", "benchmarks/notes", "changelog", "contributing"}


def toctree(path) -> list[str]:
    """The pages that a page's toctrees list, as paths without a suffix, relative to docs/; globs
    stay globs."""
    entries = []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), flags=re.S | re.M):
        entries += [line for line in block.splitlines() if line and not line.startswith(":")]
    return [(path.parent.relative_to(DOCS) / entry).as_posix() for entry in entries]


def documented() -> dict[str, str]:
    """Each name that the API reference documents -> its directive."""
    found = {}
    for path in REFERENCE:
        for directive, name in re.findall(
            r"^\.\. auto(\w+):: (gradlab[\w.]*)(?:\(.*\))?$", path.read_text(), flags=re.M
        ):
            found[name] = directive
    return found


def resolve(name: str):
    """The object that a dotted name means to a reader who has imported gradlab."""
    found, *rest = name.split(".")
    value = importlib.import_module(found)
    for attribute in rest:
        found = f"{found}.{attribute}"
        value = (
            getattr(value, attribute)
            if hasattr(value, attribute)
            else importlib.import_module(found)
        )
    return value


def test_every_page_is_in_a_toctree():
    listed = [entry for page in PAGES for entry in toctree(page)]
    ours = {path.relative_to(DOCS).with_suffix("").as_posix() for path in [*PAGES, *REFERENCE]}
    assert sorted(listed) == sorted(
        (ours - {"index"}) | GENERATED | {"course/*", "course/solutions/*"}
    )


def test_links_resolve():
    broken = {page.relative_to(ROOT).as_posix(): broken_links(page) for page in [*PAGES, *SOURCES]}
    assert not any(broken.values()), {page: found for page, found in broken.items() if found}


def test_a_broken_link_is_found():
    for link in (
        "nowhere.md",
        "evidence.md#no-such-heading",
        "../tests/test_window.py#test_that_does_not_exist",
    ):
        assert broken_links(DOCS / "index.md", f"[x]({link})") == [link]
    assert "memory-of-a-window" in headings((DOCS / "evidence.md").read_text())


def test_every_public_name_is_in_the_api_reference():
    names = documented()
    for name in set(gradlab.__all__) - {"__version__"}:
        assert any(
            full == f"gradlab.{name}" or full.startswith(f"gradlab.{name}.") for full in names
        ), name


def test_every_name_in_the_api_reference_exists():
    for name in documented():
        assert resolve(name) is not None
    for name in re.findall(r"`(gradlab\.\w+(?:\.\w+)*)", (DOCS / "api" / "index.md").read_text()):
        assert resolve(name) is not None


@pytest.mark.slow
def test_python_of_every_page_runs_as_pasted(tmp_path):
    """README and all pages in one process, each with names of its own."""
    pages = [ROOT / "README.md", *PAGES]
    pages = {
        page.relative_to(ROOT).as_posix(): "\n".join(python_blocks(page.read_text()))
        for page in pages
    }
    pages = {name: code for name, code in pages.items() if code}
    assert len(pages) >= 7
    program = """
import json, sys
for name, code in json.load(sys.stdin).items():
    print("page", name, flush=True)
    exec(compile(code, name, "exec"), {"__name__": "page"})
"""
    environment = {**os.environ, "GRADLAB_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(pages),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    # README: three epochs of eight updates, as its comment says
    assert done.stdout.count("8/8") >= 3


def test_the_course_page_lists_each_notebook_with_its_minutes():
    course = (DOCS / "course.md").read_text()
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        stated = r"\*\*Time\*\*: (\d+) minutes, and (\d+) for the exercises"
        reading, exercises = re.search(stated, path.read_text()).groups()
        assert re.search(
            rf"\| \[{path.name[:2]} [^]]+\]\(\.\./notebooks/{path.name}\) "
            rf"\| {reading} \+ {exercises} \| .+ \|",
            course,
        )
    assert sum(link.startswith("../notebooks/") for link in links(course)) == len(notebooks)


def test_the_published_table_is_the_committed_one():
    rows = list(csv.DictReader((ROOT / "data" / "results" / "reproduce.csv").open()))
    wanted = [
        ("placeholders", "as published"),
        ("microbatched", "as published"),
        ("microbatched", "equal looks"),
        ("microbatched", "last value"),
    ]
    text = (DOCS / "evidence.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    for k, b in ((1, 100), (5, 20), (10, 10), (20, 5)):
        [line] = [line for line in text.splitlines() if line.startswith(f"| {k} × {b} |")]
        found = {(r["method"], r["protocol"]): r for r in rows if r["accumulation_steps"] == str(k)}
        cells = [
            f"{float(found[key]['mean']):.2f} ± {float(found[key]['std']):.2f}" for key in wanted
        ]
        first = found[wanted[0]]
        published = f"{first['published_mean']} ± {float(first['published_std']) + 1e-9:.2f}"
        cells = [published, *cells[:2], first["looks"], *cells[2:]]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == cells


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "averaging"])
def test_the_page_of_evidence_counts_the_claims_that_agree(name):
    text = (DOCS / "evidence.md").read_text()
    holds = [
        claim["holds"]
        for claim in json.loads((ROOT / "data/results" / f"{name}.json").read_text())["claims"]
    ]
    agree = "agrees" if sum(holds) == 1 else "agree"
    [line] = [line for line in text.splitlines() if f"| `gradlab reproduce {name}` |" in line]
    counted = re.sub(r" claims", "", line.split("|")[4].strip())
    assert counted == f"{sum(holds)} of {len(holds)} {agree}"
    assert f"../data/results/{name}.png" in text


@pytest.mark.parametrize(
    ("repository", "found"), [("", ""), ("owner/name", "owner/name/blob/main/notebooks/x.ipynb")]
)
def test_badges_need_an_address(repository, found):
    parts = {}  # of docs/conf.py, which only Sphinx can import as a whole
    for node in ast.parse((DOCS / "conf.py").read_text()).body:
        named = getattr(node, "name", None) or ast.unparse(node).partition(" = ")[0]
        parts[named] = ast.unparse(node)
    names: dict = {"pathlib": pathlib}
    exec("\n".join(parts[name] for name in ("KEYS", "badges", "top")), names)
    made = names["badges"]("notebooks/x.ipynb", repository)
    assert (
        bool(made) == bool(repository)
        and found in made
        and made.count("](https://") == 4 * bool(repository)
    )
    top = names["top"]("# Memory\n\nText.", "notebooks/09_memory.ipynb", repository)
    assert top.startswith("# 09. Memory\n") and top.endswith("\n\nText.")
    assert top.count("](https://") == 4 * bool(repository)
    first = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())["cells"][0]
    page = names["top"]("".join(first["source"]), "notebooks/00_start_here.ipynb", repository)
    assert "in this page. Move **k**" in page and "Shift+Enter" not in page


def test_the_comparison_links_every_row_to_a_test_of_gradlab():
    text = (DOCS / "comparison.md").read_text()
    tables = re.findall(r"^\| \| gradlab \|.*?\n\n", text, flags=re.S | re.M)
    rows = [line.split("|")[2] for table in tables for line in table.splitlines()[2:] if line]
    assert rows
    assert all(re.search(r"\]\(\.\./tests/[\w/]+\.py#test_\w+\)", cell) for cell in rows)


def test_warnings_are_errors_in_the_build():
    makefile = (ROOT / "Makefile").read_text()
    assert "SPHINX := -m sphinx --fail-on-warning" in makefile
    assert (
        "$(SPHINX) -b html docs docs/_build/html" in makefile
        and "$(SPHINX) -b linkcheck" in makefile
    )

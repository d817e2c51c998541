"""Adds a picture to each diagram in saved notebooks, for pages that do not draw Mermaid.

    python tests/support/draw_diagrams.py NOTEBOOK ...

JupyterLab draws the diagrams in a Chromium, and the SVG that it shows is stored beside the Mermaid
source.
"""

import json
import pathlib
import shutil
import sys
import tempfile
import urllib.parse
import xml.dom.minidom

from lab_page import jupyterlab, launch, open_notebook, set_setting, until
from playwright.sync_api import sync_playwright

MERMAID, SVG = "text/vnd.mermaid", "image/svg+xml"
TALL = {"width": 1280, "height": 3000}


def diagrams(notebook: dict) -> list[dict]:
    """The outputs of a notebook that are diagrams, as dictionaries by MIME type."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [output["data"] for output in outputs if MERMAID in output.get("data", {})]


def drawn(browser, server: str, name: str, count: int) -> list[str]:
    """The SVG of each diagram of a notebook."""
    page = open_notebook(browser, server, name, TALL)
    images = page.locator(".jp-RenderedMermaid img")
    sources: list[str] = []

    def is_complete() -> bool:
        sources[:] = images.evaluate_all("(all) => all.map((each) => each.src)")
        return len(sources) == count

    until(is_complete, lambda: f"{len(sources)} of {count} diagrams")
    page.context.close()
    return [element_of(urllib.parse.unquote(source.partition(",")[2])) for source in sources]


def element_of(document: str) -> str:
    """The SVG element of a document, in its own size, on white ground.

    It has no prolog, because a page of HTML cannot contain one.
    """
    element = xml.dom.minidom.parseString(document).documentElement
    *_, width, height = element.getAttribute("viewBox").split()
    element.setAttribute("width", f"{float(width):.0f}")
    element.setAttribute("height", f"{float(height):.0f}")
    element.setAttribute("style", "max-width: 100%; background-color: white;")
    return element.toxml()


def draw(paths: list[pathlib.Path]) -> None:
    """Add the pictures to notebooks."""
    notebooks = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    notebooks = {path: notebook for path, notebook in notebooks.items() if diagrams(notebook)}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        copies, home = pathlib.Path(folder, "notebooks"), pathlib.Path(folder, "jupyter")
        copies.mkdir()
        home.mkdir()
        for path in notebooks:
            shutil.copy(path, copies)
        browser = launch(playwright)
        with jupyterlab(copies, home) as server:
            set_setting(server, "notebook-extension:tracker", windowingMode="none")
            for path, notebook in notebooks.items():
                found = diagrams(notebook)
                for data, svg in zip(
                    found, drawn(browser, server, path.name, len(found)), strict=True
                ):
                    data[SVG] = svg.splitlines(keepends=True)
                text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
                path.write_text(text, encoding="utf-8")
                print(f"{path}: {len(found)} diagrams")
        browser.close()


if __name__ == "__main__":
    draw([pathlib.Path(argument) for argument in sys.argv[1:]])

"""Configuration of the site: pages in docs/, the API from the docstrings, and files from elsewhere
in the repository.

Those files, such as the notebooks, are copied into docs/ before each build (`COPIES`), because
Sphinx reads only files below its source folder. Links are written as on GitHub, relative to the
file in the repository: `rewrite_links` turns a link to a copied file into a link to its page. Every
other link to a file becomes a download.
"""

import json
import logging
import os
import pathlib
import re
import tomllib

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from pygments.lexers.special import TextLexer
from sphinx.domains.python import PyClasslike
from sphinx.ext.napoleon.docstring import GoogleDocstring

import gradlab
from gradlab.lab.widget import presets, saved_page

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "gradlab"
author = "The gradlab authors"
project_copyright = author
version = release = gradlab.__version__

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the outputs that are saved in the notebooks
# No kernel behind a page
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]
suppress_warnings = ["mystnb.unknown_mime_type"]  # Mermaid: a page shows the SVG beside it

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
highlight_language = "none"  # a block without a language is a shell command or a formula
default_role = "py:obj"  # `name` in a docstring links to that name if it is documented

html_theme = "furo"
html_title = f"gradlab {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["gradlab.css"]
html_js_files = [("verdicts.js", {"defer": "defer"})]
html_copy_source = False
linkcheck_timeout = 20
linkcheck_retries = 2

# Pages that are copies: the folder or file in the repository -> the folder or file in docs/.
COPIES = {
    "notebooks/*.ipynb": "course",
    "notebooks/solutions/*.ipynb": "course/solutions",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "benchmarks/NOTES.md": "benchmarks/notes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# Owner and name on GitHub. If they are set, pages of notebooks get badges that open them on hosted
# services.
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["gradlab"]["repository"]
# What notebook 00 says of keys, and what its page says, where there are none to press.
KEYS = (
    "Press **Shift+Enter** three times. A network trains below. Then move",
    "A network trains below, in this page. Move",
)
LINK = re.compile(r"(\]\()([^)\s\\#:]+)")


def copies() -> dict[pathlib.Path, pathlib.Path]:
    """Each file of the repository that becomes a page -> the page's path."""
    found = {}
    for pattern, target in COPIES.items():
        for source in ROOT.glob(pattern):
            found[source] = DOCS / target / source.name if "*" in pattern else DOCS / target
    return found


def copy_pages() -> None:
    """Copies files that have changed, so that Sphinx reads only those again, and removes copies
    without a source."""
    pages = copies()
    for old in set((DOCS / "course").rglob("*.ipynb")) - set(pages.values()):
        old.unlink()
    for source, page in pages.items():
        content = source.read_bytes()
        if not page.exists() or page.read_bytes() != content:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_bytes(content)


def write_front_lab() -> None:
    """Writes the lab of the front page, which index.md includes."""
    page = saved_page.page(presets.experiment(0, {"accumulation_steps": 1}), tour=True)
    target = DOCS / "_build" / "lab.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(page, encoding="utf-8")


def rewrite_links(app, docname: str, content: list[str]) -> None:
    """Makes links that are relative to a file of the repository relative to its page."""
    pages = {**copies(), ROOT / "README.md": DOCS / "index.md"}
    page = pathlib.Path(app.env.doc2path(docname))
    origin = next(
        (source for source, copy in pages.items() if copy == page and source.name != "README.md"),
        page,
    )

    def new(match: re.Match) -> str:
        target = pathlib.Path(os.path.normpath(origin.parent / match.group(2)))
        if not target.is_file():
            return match.group(0)
        download = target not in pages and DOCS not in target.parents
        scheme = "path:" if download and target.suffix in (".md", ".ipynb") else ""
        return match.group(1) + scheme + os.path.relpath(pages.get(target, target), page.parent)

    if page.suffix != ".rst":
        content[0] = LINK.sub(new, content[0])


def badges(notebook: str, repository: str) -> str:
    """Badges that open a notebook in Colab and on Binder, as Markdown; empty without a
    repository."""
    if not repository:
        return ""
    colab = f"https://colab.research.google.com/github/{repository}/blob/main/{notebook}"
    binder = f"https://mybinder.org/v2/gh/{repository}/main?labpath={notebook}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open on Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def top(text: str, notebook: str, repository: str) -> str:
    """The first cell of a notebook as its page shows it: with its number in the title, by which the
    course refers to it, with the badges below, and without keys to press."""
    title, *rest = text.replace(*KEYS).split("\n")
    number = pathlib.Path(notebook).name[:2]
    return "\n".join(
        [f"# {number}. {title.removeprefix('# ')}", "", badges(notebook, repository), *rest]
    )


def change_top(app, docname: str, content: list[str]) -> None:
    """Changes the first cell of a notebook's page."""
    sources = {page: source for source, page in copies().items()}
    source = sources.get(pathlib.Path(app.env.doc2path(docname)))
    if source is not None and source.suffix == ".ipynb":
        notebook = json.loads(content[0])
        first = notebook["cells"][0]
        path = source.relative_to(ROOT).as_posix()
        first["source"] = top("".join(first["source"]), path, REPOSITORY)
        content[0] = json.dumps(notebook)


def whole_docstring(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    """The docstring of a property as ("", its lines). Napoleon would read the part before a colon
    as a type."""
    return "", GoogleDocstring(docstring._consume_to_end(), docstring._config).lines()


def setup(app) -> None:
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    copy_pages()
    write_front_lab()
    app.add_lexer("mermaid", TextLexer)
    for field in PyClasslike.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # Sphinx calls them variables
    app.connect("source-read", rewrite_links)
    app.connect("source-read", change_top)
    GoogleDocstring._consume_inline_attribute = whole_docstring

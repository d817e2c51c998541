"""A lab for pages without a kernel: a picture, a table, and recorded runs among which a slider
moves (recorded.js)."""

import base64
import functools
import html
import json
import re

from gradlab.lab.widget.js_bundle import FOLDER, module

# record.py writes them
RECORDED = FOLDER / "recorded.json"
PICTURE = FOLDER / "recorded.png"

# A page without scripts shows the picture and the table. Where scripts run, they replace both by
# the lab.
_PAGE = """<div class="gradlab-lab gradlab-recorded">
{still}
</div>
<style>{css}</style>
<script type="module">
{javascript}
for (const root of document.querySelectorAll(".gradlab-recorded:not([data-shown])")) {{
  root.dataset.shown = "";
  showRecorded(root, {recorded});
}}
</script>"""


@functools.cache
def recorded() -> dict:
    """The recorded runs, as record.py wrote them."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@functools.cache
def picture() -> bytes:
    """The views of the recorded default run, as PNG."""
    return PICTURE.read_bytes()


def still(picture: bytes, alt: str, sentence: str, table: str) -> str:
    """HTML without scripts.

    Args:
        picture: as PNG.
        alt: what the picture shows, for readers who cannot see it.
        sentence: what the picture and the table show.
        table: lines of cells, which two or more spaces separate; the first line has the headings.
    """
    cells = [re.split(r" {2,}", html.escape(line)) for line in table.splitlines()]
    tags = ["th", *["td"] * len(cells)]
    rows = ["".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(tags, cells)]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    content = base64.b64encode(picture).decode()
    image = f'<img src="data:image/png;base64,{content}" alt="{html.escape(alt)}">'
    return f"{image}\n<p>{html.escape(sentence)}</p>\n<table>\n{body}\n</table>"


def standalone(svg: str) -> str:
    """An SVG element of a page as a picture by itself, on white ground, because it has no text
    color to follow."""
    style = 'xmlns="http://www.w3.org/2000/svg" color="black" '
    return svg.replace("<svg ", f"<svg {style}", 1).replace(
        'style="', 'style="background: white; ', 1
    )


def image(svg: str) -> str:
    """An SVG element with an aria-label as an image, for a saved notebook.

    JupyterLab takes SVG out of the HTML of a notebook that is not trusted, as every new one is, and
    leaves its text.
    """
    words = re.search(r'aria-label="([^"]*)"', svg)
    style = re.search(r'style="([^"]*)"', svg)
    assert words and style  # every drawing has both
    content = base64.b64encode(standalone(svg).encode()).decode()
    return f'<img alt="{words[1]}" style="{style[1]}" src="data:image/svg+xml;base64,{content}">'


@functools.cache
def page() -> str:
    """The recorded lab as one piece of HTML, which loads nothing."""
    about = recorded()
    names = ("charts", "one_update", "recorded")
    return _PAGE.format(
        still=still(picture(), about["sentence"], about["sentence"], about["table"]),
        css="".join((FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in names),
        javascript=module("canvas", "one_update", "plots", "charts", "recorded"),
        recorded=RECORDED.read_text(encoding="utf-8").strip(),
    )

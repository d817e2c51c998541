"""A lab for pages without a kernel: a picture, a table, and recorded runs among which a slider moves (recorded.js)."""

import base64
import functools
import json

from gradlab.lab.widget.bundle import FOLDER, module

RECORDED, PICTURE = FOLDER / "recorded.json", FOLDER / "recorded.png"  # record.py writes them

# A page without scripts shows the picture and the table. Where scripts run, they replace both by the lab.
_PAGE = """<div class="gradlab-lab gradlab-recorded">
<img src="data:image/png;base64,{picture}" alt="{sentence}">
<pre>{table}</pre>
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


@functools.cache
def html() -> str:
    """The recorded lab as one piece of HTML, which loads nothing."""
    about = recorded()
    names = ("charts", "one_update", "recorded")
    return _PAGE.format(
        picture=base64.b64encode(picture()).decode(),
        sentence=about["sentence"],
        table=about["table"],
        css="".join((FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in names),
        javascript=module("canvas", "one_update", "plots", "charts", "recorded"),
        recorded=RECORDED.read_text(encoding="utf-8").strip(),
    )

"""Widgets for pages without a kernel: what does not move, in whose place scripts put what does. For
a lab that is a picture and a table of recorded runs, and a training in the page (offline/)."""

import base64
import functools
import html
import json
import re
from collections.abc import Collection
from typing import Any

import ipywidgets

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures import toy
from gradlab.lab.widget import presets
from gradlab.lab.widget.js_bundle import FOLDER, module, script
from gradlab.lab.widget.offline import digits
from gradlab.lab.widget.one_update import OneUpdate

# record.py writes them
RECORDED = FOLDER / "recorded.json"
PICTURE = FOLDER / "recorded.png"

# A page without scripts shows the picture and the table. Where scripts run, they replace both by
# the lab.
_PAGE = """<div class="gradlab-lab gradlab-offline">
{still}
</div>
<style>{css}</style>
<script type="module">
{javascript}
// Scripts run in the order of the page, each after the whole page was read
const root = document.querySelector(".gradlab-offline:not([data-shown])");
if (root) {{
  root.dataset.shown = "";
  showOffline(root, {facts});
}}
</script>"""
MOST_STEPS = 50  # of the slider for k in a page
# Each seed has a worker, and all numbers are computed again for each drawing
MOST_SEEDS = 10
MOST_UPDATES = 10_000
_STYLES = ("charts", "one_update", "offline/offline")
_MODULES = (
    "canvas",
    "race",
    "one_update",
    "plots",
    "offline/digits",
    "offline/run_rows",
    "offline/page_run",
    "charts",
    "offline/offline_lab",
)


@functools.cache
def recorded() -> dict:
    """The recorded runs, as record.py wrote them."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@functools.cache
def recorded_picture() -> bytes:
    """The views of the recorded default run, as PNG."""
    return PICTURE.read_bytes()


def still(picture: bytes, alt: str, sentence: str, table: str) -> str:
    """HTML without scripts.

    Args:
        picture: as PNG.
        alt: what the picture shows, for readers who cannot see it.
        sentence: what the picture and the table show.
        table: lines of cells, which two or more spaces separate; the first line has the headings.
            Empty: no table.
    """
    cells = [re.split(r" {2,}", html.escape(line)) for line in table.splitlines()]
    tags = ["th", *["td"] * len(cells)]
    rows = ["".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(tags, cells)]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    content = base64.b64encode(picture).decode()
    image = f'<img src="data:image/png;base64,{content}" alt="{html.escape(alt)}">'
    shown = f"{image}\n<p>{html.escape(sentence)}</p>"
    return f"{shown}\n<table>\n{body}\n</table>" if table else shown


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


# A picture in whose place scripts put controls and what they change.
_LIVE = """<div class="gradlab-saved-{name}">{still}</div>
<style>{css}</style>
<script type="module">
{javascript}
const root = document.querySelector(".gradlab-saved-{name}:not([data-shown])");
if (root) {{
  root.dataset.shown = "";
  {function}(root, {facts});
}}
</script>"""


def live(
    name: str, function: str, still: str, facts: dict[str, Any], controls: dict[str, Any]
) -> str:
    """A widget of the course as one piece of HTML, which loads nothing, and follows its controls
    where scripts run.

    Args:
        name: of the JavaScript file in course/.
        function: what the file exports to draw the widget.
        still: HTML without scripts, for other pages.
        facts: what the function needs beside the controls.
        controls: the ipywidgets by their names.
    """
    known = facts | {"controls": [_control(name, each) for name, each in controls.items()]}
    return _LIVE.format(
        name=name,
        function=function,
        still=still,
        css=(FOLDER / "offline" / "offline.css").read_text(encoding="utf-8"),
        javascript=module("course/saved_controls", f"course/{name}"),
        facts=json.dumps(known),
    )


def _control(name: str, control: Any) -> dict[str, Any]:
    """What saved_controls.js needs to know of an ipywidget."""
    if isinstance(control, ipywidgets.Checkbox):
        options: list[tuple[str, Any]] = [("", False), ("", True)]
    elif hasattr(control, "options"):
        options = [
            each if isinstance(each, tuple) else (str(each), each) for each in control.options
        ]
    else:
        steps = range(round((control.max - control.min) / control.step) + 1)
        values = [control.min + step * control.step for step in steps]
        options = [(f"{value:g}", value) for value in values]
    return {
        "name": name,
        "label": control.description,
        "options": options,
        "value": control.value,
        "slider": not isinstance(control, ipywidgets.Dropdown | ipywidgets.Checkbox),
    }


def page(
    e: Experiment,
    hide: Collection[str] = (),
    lock: Collection[str] = (),
    against: str = "updates",
    tour: bool = False,
    without_scripts: str | None = None,
) -> str:
    """The lab as one piece of HTML, which loads nothing.

    Args:
        e: the lab's experiment. Where a page cannot train it, the page begins with the lab's default
            instead, and says so.
        hide: names of controls and views to leave out.
        lock: names of controls that cannot be changed.
        against: what the accuracy is drawn against at first.
        tour: whether k moves by itself until somebody touches the page.
        without_scripts: HTML that is shown where scripts do not run. None: the recorded runs.
    """
    about = recorded()
    needs = needs_kernel(e)
    facts = trained(presets.experiment(0, {}) if needs else e) | {
        "instead": needs,
        "hide": list(hide),
        "lock": list(lock),
        "against": against,
        "tour": tour,
        "toy": toy_facts(),
    }
    return _PAGE.format(
        still=without_scripts
        or still(recorded_picture(), about["sentence"], about["sentence"], about["table"]),
        css=css(),
        javascript=javascript(),
        facts=json.dumps(facts),
    )


def css() -> str:
    """The style of the lab in a page."""
    return "".join((FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in _STYLES)


def javascript() -> str:
    """The module that shows a lab in a page: `showOffline`, and what it consists of."""
    return module(*_MODULES)


def trained(e: Experiment) -> dict[str, Any]:
    """What page_run.js needs to train an experiment that a page can train."""
    assert e.updates is not None
    return {
        "settings": {
            "k": e.accumulation_steps,
            "b": e.microbatch_size,
            "learningRate": e.learning_rate,
            "optimizer": e.optimizer,
        },
        "updates": e.updates,
        "evaluateEvery": e.eval_every or max(1, e.updates // 10),
        "seeds": min(MOST_SEEDS, len(e.seed_numbers)),
        "trainingExamples": digits.TRAINING,
        "testExamples": digits.TEST,
        **sources(),
    }


def needs_kernel(e: Experiment) -> str:
    """What of an experiment a page cannot train, or ""."""
    reasons = []
    if (e.model, e.dataset) != ("dense", "mnist"):
        reasons.append(f"{e.model} on {e.dataset}")
    if e.towers > 1:
        reasons.append(f"on {e.towers} towers")
    if e.updates is None:
        reasons.append(f"for {e.examples:,} examples" if e.examples else f"for {e.seconds:g} s")
    elif e.updates > MOST_UPDATES:
        reasons.append(f"for {e.updates:,} updates")
    return ", ".join(reasons)


@functools.cache
def sources() -> dict[str, str]:
    """What the workers of a page get: the digits, and the source that unpacks them and trains."""
    packed = base64.b64encode(digits.PACKED.read_bytes()).decode()
    return {"digits": packed, "worker": script("offline/digits", "offline/training")}


@functools.cache
def toy_facts() -> dict[str, Any]:
    """What the view of one update needs, with noise for as many micro-batches as k can be."""
    view = OneUpdate()
    noise = toy.draws()[:, :MOST_STEPS].astype("<i2")
    return {
        "noise": base64.b64encode(noise.tobytes()).decode(),
        "constants": view.constants | {"most": MOST_STEPS},
        "start": view.start,
        "looked_at": view.looked_at,
    }

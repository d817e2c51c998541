"""The lab's page: buttons, switches, views and words, laid out; no behaviour."""

import html
import io
from collections.abc import Collection

import ipywidgets as widgets

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures.plots import X_AXES
from gradlab.lab.widget.controls import GOES_ON
from gradlab.lab.widget.views import VIEWS

# name: label, icon, tooltip
BUTTONS = {
    "run": ("Run", "play", "Train from the beginning."),
    "stop": ("Stop", "stop", "End the run within a micro-batch; what was drawn stays."),
    "step_microbatch": ("Step: micro-batch", "step-forward", "Pause, and show one micro-batch more."),
    "step_update": ("Step: update", "fast-forward", "Pause, and show the rest of the window, to its update."),
    "reset": ("Reset", "undo", "Controls and plots as they were at first; pinned runs stay."),
    "pin": ("Pin", "thumb-tack", "Keep this run in the plots and in the table, to compare."),
    "csv": ("CSV", "download", "Write this run and the pinned ones to a CSV file beside the notebook."),
    "png": ("PNG", "image", "Write the views to a PNG file beside the notebook."),
}
SWITCHES = {
    "pause": ("Pause", "pause", "Hold the run before its next update, or let it go on."),
    "slow": ("Slow", "hourglass-half", "Name each micro-batch as it is computed, accumulated, averaged and applied."),
    "code": ("Show code", "code", "The Python that repeats this run."),
}
OTHERS = ("rerun", "against", "pins")
NAMES = (*BUTTONS, *SWITCHES, *OTHERS, *VIEWS)  # what can be hidden beside the controls

_HIDDEN = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)"
_CSS = """<style>
.gradlab-lab :focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.gradlab-view { background: white; border-radius: 4px; padding: 2px; box-sizing: border-box; }
.gradlab-lab .widget-html-content { line-height: 1.5; }
</style>"""
# In JupyterLab's command mode plain keys act on cells: the arrows leave the lab, d d deletes its cell. JupyterLab
# listens at the document, so that a key that goes to a control of the lab is kept below it; Ctrl+S still saves.
_KEYS = """
if (!window.gradlabKeys) {
  window.gradlabKeys = true;
  document.body.addEventListener("keydown", (event) => {
    const modified = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
    if (!modified && event.target.closest(".gradlab-lab")) event.stopPropagation();
  });
}"""


def _script(text: str) -> widgets.Widget:
    """JavaScript that runs on the page; the only widget of ipywidgets that may carry it is an Output."""
    output = {"output_type": "display_data", "data": {"application/javascript": text}, "metadata": {}}
    return widgets.Output(outputs=(output,), layout={"display": "none"})


class Panel:
    """The widgets, by name, and all of them as `view`."""

    def __init__(
        self, controls: widgets.Widget, pins: widgets.Widget, rerun: bool, against: str, hide: Collection[str]
    ):
        self.buttons = {
            name: widgets.Button(description=label, icon=icon, tooltip=tooltip, layout={"width": "auto"})
            for name, (label, icon, tooltip) in BUTTONS.items()
        }
        self.switches = {
            name: widgets.ToggleButton(description=label, icon=icon, tooltip=tooltip, layout={"width": "auto"})
            for name, (label, icon, tooltip) in SWITCHES.items()
        }
        for name, widget in (self.buttons | self.switches).items():
            widget.add_class(f"gradlab-{name}")
        self.rerun = widgets.Checkbox(
            rerun,
            description="rerun when a control moves",
            indent=False,
            layout={"width": "210px", "margin": "2px 2px 2px 12px"},
        )
        self.rerun.tooltip = "Off: a moved control waits for Run."
        self.rerun.add_class("gradlab-rerun")
        self.against = widgets.Dropdown(
            options=list(X_AXES), value=against, description="accuracy against", layout={"width": "240px"}
        )
        self.against.style = {"description_width": "125px"}
        self.against.tooltip = "The axis on which all runs are compared."
        self.against.add_class("gradlab-against")
        self.progress = widgets.FloatProgress(min=0, max=1, layout={"width": "200px"}).add_class("gradlab-progress")
        self.batch = widgets.HTML().add_class("gradlab-batch")
        self._status = widgets.HTML().add_class("gradlab-status")
        self._narration = widgets.HTML().add_class("gradlab-narration")
        self.code = widgets.HTML().add_class("gradlab-listing")
        self.shown = [name for name in VIEWS if name not in hide]
        self._images, self._words, boxes = {}, {}, []
        for name in self.shown:
            self._images[name] = widgets.Image(format="png", layout={"width": "100%", "height": "auto", "margin": "0"})
            self._images[name].add_class("gradlab-view").add_class(f"gradlab-view-{name}")
            self._words[name] = widgets.HTML().add_class(f"gradlab-words-{name}")
            boxes.append(widgets.VBox([self._images[name], self._words[name]]))

        def row(*names):
            shown = [(self.buttons | self.switches)[name] for name in names if name not in hide]
            return widgets.Box(shown, layout={"flex_flow": "row wrap", "align_items": "center"})

        compare = [] if "against" in hide else [self.against, widgets.HTML(GOES_ON)]
        compare += [] if "rerun" in hide else [self.rerun]
        lines = [
            widgets.HTML(_CSS),
            _script(_KEYS),
            controls,
            self.batch,
            row("run", "pause", "step_microbatch", "step_update", "slow", "stop", "reset"),
            widgets.Box(
                [self.progress, *compare, row("pin", "csv", "png", "code")],
                layout={"flex_flow": "row wrap", "align_items": "center"},
            ),
            self._status,
            self._narration,
            self.code,
            widgets.GridBox(
                boxes,
                layout={"grid_template_columns": "repeat(auto-fill, minmax(max(290px, 30%), 1fr))", "grid_gap": "3px"},
            ),
            *([] if "pins" in hide else [pins]),
        ]
        self.view = widgets.VBox(lines, layout={"overflow": "hidden"}).add_class("gradlab-lab")

    def say(self, state: str, text: str, details: str = "") -> None:
        """Shows the state, a sentence, and details to fold away."""
        folded = f"<details><summary>details</summary><pre>{html.escape(details)}</pre></details>" if details else ""
        self._status.value = f'<div role="status"><b>{state}</b>: {html.escape(text)}{folded}</div>'

    def say_batch(self, e: Experiment) -> None:
        """Shows the effective batch as a product, and the law for its window."""
        factors = [e.towers] * (e.towers > 1) + [e.accumulation_steps, e.microbatch_size]
        product = " × ".join(str(factor) for factor in factors)
        law = (e.towers * e.accumulation_steps) ** -0.5
        self.batch.value = (
            f"effective batch {product} = <b>{e.effective_batch}</b> examples an update; the law: a window's loss "
            f"is 1/√k = <b>{law:.2f}</b> times as noisy as a micro-batch's"
        )

    def narrate(self, text: str) -> None:
        """Shows what slow motion says."""
        value = f'<div role="log" aria-live="polite">{html.escape(text)}</div>' if text else ""
        if value != self._narration.value:
            self._narration.value = value

    def list_code(self, text: str) -> None:
        """Shows a listing, or none."""
        self.code.value = f"<pre>{html.escape(text)}</pre>" if text else ""

    def paint(self, name: str, png: bytes, words: str) -> None:
        """Shows a view, and its words to those who do not see it."""
        self._images[name].value = png
        # An Image with a tooltip is not shown at all by ipywidgets 8.1; so the words stand beside it, unseen.
        self._words[name].value = f'<span style="{_HIDDEN}">{html.escape(words)}</span>'

    def picture(self) -> bytes:
        """The views as they are shown now, side by side, as one PNG image."""
        from PIL import Image

        images = [Image.open(io.BytesIO(bytes(self._images[name].value))) for name in self.shown]
        columns = max(1, min(3, len(images)))
        width, height = (max((getattr(image, side) for image in images), default=1) for side in ("width", "height"))
        sheet = Image.new("RGB", (columns * width, max(1, -(-len(images) // columns)) * height), "white")
        for number, image in enumerate(images):
            sheet.paste(image, (number % columns * width, number // columns * height))
        content = io.BytesIO()
        sheet.save(content, "PNG")
        return content.getvalue()

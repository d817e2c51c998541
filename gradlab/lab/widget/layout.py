"""The lab's page: its buttons, switches, views and text, and where they stand. The layout reacts to
nothing by itself."""

import html
from collections.abc import Collection

import ipywidgets as widgets
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures.shown import VIEWS, X_AXES
from gradlab.lab.widget.charts import Charts
from gradlab.lab.widget.controls import Controls, summary
from gradlab.lab.widget.live_run import Status
from gradlab.lab.widget.one_update import OneUpdate
from gradlab.lab.widget.page import Page, close, live_beside_cells

# name: label, icon, tooltip
BUTTONS = {
    "run": ("Run", "play", "Train from the beginning."),
    "stop": ("Stop", "stop", "Stop the run within one micro-batch. The plots stay."),
    "step_microbatch": ("micro-batch", "step-forward", "Pause, and show one more micro-batch."),
    "step_update": (
        "update",
        "fast-forward",
        "Pause, and show the rest of the window and its update.",
    ),
    "reset": ("Reset", "undo", "Restore the initial controls. Pinned runs stay."),
    "pin": ("Pin", "thumb-tack", "Keep this run in the plots and in the table, for comparison."),
    "csv": (
        "CSV",
        "download",
        "Download this run and the pinned runs as a CSV file.",
    ),
    "png": ("PNG", "image", "Download all views as a PNG file."),
}
SWITCHES = {
    "pause": ("Pause", "pause", "Pause the run before its next update, or resume it."),
    "slow": (
        "Slow",
        "hourglass-half",
        "Slow motion: describe each micro-batch and each update as it is computed.",
    ),
    "code": ("Show code", "code", "Show the Python code that repeats this run."),
    "more": ("", "sliders", "Model, data, optimizer, method, seeds, length, export and code."),
}
OTHERS = ("rerun", "against", "pins")
# The states of the page, for those of the lab that have other names
STATES = {
    "waiting": "idle",
    "starting": "running",
    "stopping": "running",
    "not run": "stopped",
    "not shown": "failed",
}
FIRST_VIEWS = 3  # the others wait behind a button
ROOM = 50  # examples, of the imagined card beside the effective batch
# Everything that can be hidden, besides the controls
NAMES = (*BUTTONS, *SWITCHES, *OTHERS, *VIEWS)

_CSS = """<style>
.gradlab-lab :focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.gradlab-refusal { border-left: 4px solid #D55E00; padding-left: 6px; font-weight: bold; }
.gradlab-lab .widget-readout { min-width: 48px; max-width: 60px; }
.gradlab-lab .widget-html-content { line-height: 1.5; }
.gradlab-listing .k, .gradlab-listing .kn { color: var(--jp-mirror-editor-keyword-color, #008000); }
.gradlab-listing .s1 { color: var(--jp-mirror-editor-string-color, #BA2121); }
.gradlab-listing .mi, .gradlab-listing .mf { color: var(--jp-mirror-editor-number-color, #080); }
</style>"""


_COPY = '<button class="gradlab-copy" title="Copy this code.">Copy</button>'  # page.js listens


class Layout:
    """The widgets of the page. Each carries the CSS class "gradlab-" followed by its name.

    Args:
        controls: the controls, of which a few come first and the others wait behind the switch
            "more".
        rerun: whether the checkbox "rerun" is ticked.
        against: the choice in the list "accuracy against".
        hide: names of buttons, switches, views and others that are left out.

    Attributes:
        buttons: the buttons, by name.
        switches: the toggle buttons, by name.
        rerun: the checkbox.
        against: the list of horizontal axes.
        progress: the progress bar, from 0 to 1.
        one_update: the view of one update, or None if it is hidden.
        charts: the other views.
        view: all widgets in one box.
    """

    def __init__(self, controls: Controls, rerun: bool, against: str, hide: Collection[str]):
        wide = widgets.Layout(width="auto")
        self.buttons = {
            name: _named(name, widgets.Button, wide, *look) for name, look in BUTTONS.items()
        }
        self.switches = {
            name: _named(name, widgets.ToggleButton, wide, *look) for name, look in SWITCHES.items()
        }
        self.rerun = _rerun_box(rerun)
        self.against = _against_list(against)
        self.progress = widgets.FloatProgress(min=0, max=1, layout={"width": "120px"}).add_class(
            "gradlab-progress"
        )
        self._drawer = widgets.VBox(layout={"display": "none"}).add_class("gradlab-drawer")
        self._batch, self._status_line, self._narration_line, self._listing = (
            widgets.HTML().add_class(f"gradlab-{name}")
            for name in ("batch", "status", "narration", "listing")
        )
        self.one_update = None
        if "toy" not in hide:
            steps = controls.widgets["accumulation_steps"]
            self.one_update = OneUpdate(steps.value)
            widgets.jslink((steps, "value"), (self.one_update, "accumulation_steps"))
        shown = [name for name in VIEWS if name != "toy" and name not in hide]
        first = FIRST_VIEWS - (self.one_update is not None)
        self.charts = Charts(shown, first, chips="pins" not in hide)
        self._page = Page(layout={"display": "none"})
        self._status = Status("", "")
        self._narration = ""
        self.view = self._arranged(controls, hide)
        live_beside_cells(self.view)

    @property
    def status(self) -> Status:
        """The status line."""
        return self._status

    @property
    def narration(self) -> str:
        """The current sentence of slow motion or of a step, or ""."""
        return self._narration

    def show_status(self, status: Status) -> None:
        """Show a status, with its details folded."""
        self._status = status
        folded = ""
        if status.details:
            folded = f"<details><summary>details</summary><pre>{html.escape(status.details)}</pre></details>"
        sentence = html.escape(status.sentence)
        self._status_line.value = (
            f'<div role="status"><b>{status.state}</b>: {sentence}{folded}</div>'
        )
        self._page.state = STATES.get(status.state, status.state)
        if status.state not in ("waiting", "starting"):
            self.charts.preview = {}  # there are updates to show, or there will be none

    def show_more(self, shown: bool) -> None:
        """Show or hide what waits behind the switch "more"."""
        self._drawer.layout.display = "flex" if shown else "none"

    def show_batch(self, e: Experiment) -> None:
        """Show the effective batch of an experiment as a product, how much less noisy a window's loss
        should be, how much of the batch is in memory, and what else is chosen."""
        steps = e.towers * e.accumulation_steps
        if self.one_update is not None:
            self.one_update.towers = e.towers
        factors = [e.towers] * (e.towers > 1) + [e.accumulation_steps, e.microbatch_size]
        product = " × ".join(str(factor) for factor in factors)
        noise = f" · noise of the loss ÷ <b>{steps**0.5:.1f}</b>" if steps > 1 else ""
        self._batch.value = (
            f"{product} = <b>{e.effective_batch}</b> examples an update{noise}"
            f"{memory_bar(e.microbatch_size, e.effective_batch, e.towers)}"
        )
        self.switches["more"].description = f"Settings: {summary(e)}"

    def refuse(self, sentence: str) -> None:
        """Say below k and b why their values cannot be run, until `show_batch` is called again."""
        self._batch.value = (
            f'<span class="gradlab-refusal" role="alert">{html.escape(sentence)}</span>'
        )

    def narrate(self, sentence: str) -> None:
        """Show a sentence of slow motion or of a step; "" clears it."""
        if sentence != self._narration:
            self._narration = sentence
            shown = (
                f'<div role="log" aria-live="polite">{html.escape(sentence)}</div>'
                if sentence
                else ""
            )
            self._narration_line.value = shown

    def list_code(self, code: str) -> None:
        """Show a listing; "" clears it."""
        colored = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
        self._listing.value = f"{_COPY}<pre>{colored}</pre>" if code else ""

    def close(self) -> None:
        """Remove all widgets from the page and from the kernel."""
        close(self.view)

    def _arranged(self, controls: Controls, hide: Collection[str]) -> widgets.Widget:
        def named(*names: str) -> list:
            return [(self.buttons | self.switches)[name] for name in names if name not in hide]

        compare = [] if "against" in hide else [self.against]
        compare += [] if "rerun" in hide else [self.rerun]
        self._drawer.children = [
            _grid(controls.others, "205px"),
            _wrapping_row(compare),
            _wrapping_row(named("step_microbatch", "step_update", "slow", "csv", "png", "code")),
        ]
        cells = [] if self.one_update is None else [self.one_update]
        cells += [self.charts]
        main = named("run", "pause", "stop", "pin", "reset", "more")
        lines = [
            widgets.HTML(_CSS),
            self._page,
            _grid(controls.main, "230px", "auto-fit"),
            self._batch,
            _wrapping_row(main),
            _wrapping_row([self.progress, self._status_line]),
            self._drawer,
            self._narration_line,
            self._listing,
            _grid(cells, "max(260px, 30%)"),
        ]
        return widgets.VBox(lines, layout={"overflow": "hidden"}).add_class("gradlab-lab")


def memory_bar(size: int, batch: int, towers: int = 1) -> str:
    """A bar of the examples in memory at once, inside one of the effective batch, with a mark at the
    room of an imagined card. Each tower has a card of its own."""
    where = " on each device" if towers > 1 else ""
    whole = max(batch, ROOM)
    fits = "fit" if size <= ROOM else "do not fit"
    words = (
        f"{size} of {batch} examples are in memory at once{where}; they {fits} on a card for {ROOM}"
    )
    parts = (("batch-outline", batch), ("held", size), ("room", ROOM))
    drawn = "".join(
        f'<span class="gradlab-{name}" style="width: {100 * part / whole:.1f}%"></span>'
        for name, part in parts
    )
    return (
        f'<span class="gradlab-memory" role="img" data-fits="{fits}" title="{words}" '
        f'aria-label="{words}">{drawn}</span>{size} in memory at once{where}'
    )


def _named(
    name: str, kind: type, layout: widgets.Layout, label: str, icon: str, tooltip: str
) -> widgets.Widget:
    made = kind(description=label, icon=icon, tooltip=tooltip, layout=layout)
    return made.add_class(f"gradlab-{name}")


def _rerun_box(rerun: bool) -> widgets.Widget:
    layout = {"width": "220px", "margin": "2px 2px 2px 12px"}
    box = widgets.Checkbox(
        rerun, description="rerun when a control changes", indent=False, layout=layout
    )
    box.tooltip = "Off: changes take effect when Run is pressed."
    return box.add_class("gradlab-rerun")


def _against_list(against: str) -> widgets.Widget:
    made = widgets.Dropdown(
        options=list(X_AXES),
        value=against,
        description="accuracy against",
        tooltip="The horizontal axis of the accuracy plot, the same for all runs. It does not restart the run.",
        style={"description_width": "initial"},
        layout={"width": "230px"},
    )
    return made.add_class("gradlab-against")


def _grid(children: list, least: str, fill: str = "auto-fill") -> widgets.Widget:
    """Children side by side, in columns of the same width, at least so wide; "auto-fit": they fill
    the row."""
    columns = f"repeat({fill}, minmax({least}, 1fr))"
    return widgets.GridBox(
        children, layout={"grid_template_columns": columns, "grid_gap": "3px 6px"}
    )


def _wrapping_row(children: list) -> widgets.Widget:
    return widgets.Box(children, layout={"flex_flow": "row wrap", "align_items": "center"})

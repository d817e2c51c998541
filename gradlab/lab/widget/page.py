"""What every widget of the course does for the page around it: keys, labels, and closing."""

from collections.abc import Callable

import anywidget
import ipywidgets as widgets
import traitlets
from IPython.core.getipython import get_ipython

from gradlab.lab.widget._ipykernel_internals import answer_beside_cells
from gradlab.lab.widget.js_bundle import FOLDER


class Page(anywidget.AnyWidget):
    """Keeps the keys of a lab from JupyterLab, and names its parts for screen readers and tests
    (page.js).

    Attributes:
        state: "idle", "running", "paused", "finished", "stopped", "diverged" or "failed".
    """

    _esm = FOLDER / "page.js"

    state = traitlets.Unicode("idle").tag(sync=True)


def close(view: widgets.Widget) -> None:
    """Remove a widget and everything inside it from the page and from the kernel."""
    for widget in _all_inside(view):
        widget.close()


def live_beside_cells(view: widgets.Widget) -> None:
    """Let the page reach a widget and everything inside it while cells run."""
    for widget in _all_inside(view):
        answer_beside_cells(widget.comm)


def below_controls(controls: list[widgets.Widget], shown: widgets.Widget) -> widgets.VBox:
    """A box with controls, in as many columns as there is room for, and what they change below."""
    rows = widgets.Layout(display="flex", flex_flow="row wrap")
    box = widgets.Box(controls, layout=rows)
    view = widgets.VBox([Page(layout={"display": "none"}), box, shown]).add_class("gradlab-lab")
    live_beside_cells(view)
    return view


def call_after_cell(function: Callable[[], None]) -> bool:
    """Call a function once, when the cell that is running has ended. Returns False outside of
    IPython, where there is none."""
    shell = get_ipython()
    if shell is None:
        return False

    def end(*_) -> None:
        shell.events.unregister("post_run_cell", end)
        function()

    shell.events.register("post_run_cell", end)
    return True


def _all_inside(view: widgets.Widget) -> list[widgets.Widget]:
    """The widget and everything inside it."""
    found = [view]
    for widget in found:
        found += getattr(widget, "children", ())
    return found

"""What every widget of the course does for the page around it: keys, labels, and closing."""

import anywidget
import ipywidgets as widgets
import traitlets

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
    waiting = [view]
    while waiting:
        widget = waiting.pop()
        waiting += getattr(widget, "children", ())
        widget.close()

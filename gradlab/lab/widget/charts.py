"""The lab's five views of a training, drawn by the browser from numbers that it asks for."""

from collections.abc import Sequence

import anywidget
import traitlets

from gradlab.lab.widget.js_bundle import FOLDER, module


class Charts(anywidget.AnyWidget):
    """The views and, below them, a chip for each run (charts.js, plots.js).

    The page asks for what it does not have yet with a custom message, when it is ready to draw it;
    `PageMessages` answers.

    Args:
        shown: the names of the views.
        first: how many of them are shown before the button "more views" is pressed.
        chips: whether the runs are named below the views.

    Attributes:
        preview: what the page trains by itself until the kernel has a run (`saved_page.trained`), or
            {}.
        news: a number that changes when there is something to ask for.
    """

    _esm = module(
        "canvas", "plots", "offline/digits", "offline/run_rows", "offline/page_run", "charts"
    )
    _css = FOLDER / "charts.css"

    shown = traitlets.List(traitlets.Unicode()).tag(sync=True)
    first = traitlets.Int().tag(sync=True)
    chips = traitlets.Bool(True).tag(sync=True)
    preview = traitlets.Dict().tag(sync=True)
    news = traitlets.Int(0).tag(sync=True)

    def __init__(self, shown: Sequence[str], first: int, chips: bool = True):
        super().__init__(shown=list(shown), first=first, chips=chips)
        self.add_class("gradlab-charts")

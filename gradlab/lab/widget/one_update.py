"""The lab's view of one update: the toy, drawn by the browser, which answers a slider without
asking the kernel."""

import anywidget
import traitlets

from gradlab.lab.figures import toy
from gradlab.lab.widget.js_bundle import FOLDER, module


class OneUpdate(anywidget.AnyWidget):
    """The toy as a widget: one_update.js repeats the arithmetic of `toy`, with the same noise.

    Args:
        accumulation_steps: k, the micro-batches of a window on each tower. With `ipywidgets.jslink`
            it follows a slider without the kernel.
        towers: T.

    Attributes:
        start: the weights at which the descent starts. The page changes them: its ring can be
            dragged.
    """

    _esm = module("canvas", "race", "one_update")
    _css = FOLDER / "one_update.css"

    accumulation_steps = traitlets.Int(1).tag(sync=True)
    towers = traitlets.Int(1).tag(sync=True)
    start = traitlets.List(traitlets.Float()).tag(sync=True)
    noise = traitlets.Bytes(read_only=True).tag(sync=True)
    constants = traitlets.Dict(read_only=True).tag(sync=True)
    looked_at = traitlets.Int(toy.LOOKED_AT, read_only=True).tag(sync=True)

    def __init__(self, accumulation_steps: int = 1, towers: int = 1):
        super().__init__(
            accumulation_steps=accumulation_steps, towers=towers, start=toy.START.tolist()
        )
        self.add_class("gradlab-toy")
        self.on_msg(lambda *_: self._return_to_start())  # says that the page has been reset

    @traitlets.default("noise")
    def _noise(self) -> bytes:
        return toy.draws().astype("<i2").tobytes()

    @traitlets.default("constants")
    def _constants(self) -> dict:
        return {
            "curvature": toy.CURVATURE.tolist(),
            "learningRate": toy.LEARNING_RATE,
            "deviation": toy.NOISE,
            "updates": toy.UPDATES,
            "most": toy.MOST,
            "unit": toy.UNIT,
        }

    def reset(self) -> None:
        """Return to the first starting point and to the first update that is drawn."""
        self._return_to_start()
        # A point that the page has just sent may be handled after this, on another thread. So the
        # page sets its own start, and answers: its messages are handled in their order.
        self.send({"start": self.start})

    def _return_to_start(self) -> None:
        self.start = toy.START.tolist()

"""How figures look, and how they become images. Colours are Okabe and Ito's, which colour-blind readers can tell apart.

No series is told from another by its colour alone: line style and marker differ as well.
"""

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

STYLES = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#E69F00", "linestyle": ":", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (1, 1)), "marker": "P"},
    {"color": "#000000", "linestyle": (0, (8, 2)), "marker": "X"},
)
FAINT = "#56B4E9"
GREY = "#767676"


def line(style: dict) -> dict:
    """A style without its marker, for a line of many points."""
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8}


def against_k(axes, steps) -> None:
    """Makes k a logarithmic axis, with a tick at each k there is."""
    axes.set(xscale="log", xlabel="accumulation_steps k")
    axes.set_xticks(steps, labels=[str(k) for k in steps])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes)


def plain_numbers(axes) -> None:
    """Numbers such as 0.05 at a logarithmic axis, not powers of ten."""
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def to_png(figure: Figure, compression: int = 6) -> bytes:
    """The figure as a PNG image; compression from 1 (quick) to 9 (small)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return pixels_to_png(canvas.buffer_rgba(), compression)


def pixels_to_png(pixels, compression: int = 6) -> bytes:
    """Pixels, shape (height, width, 4), as a PNG image."""
    content = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(content, "PNG", compress_level=compression)
    return content.getvalue()


def to_small_png(figure: Figure) -> bytes:
    """The figure as a PNG image of 128 colours: a third of the bytes, for notebooks that keep it."""
    content = io.BytesIO()
    drawn = Image.open(io.BytesIO(to_png(figure, compression=1))).convert("RGB")
    drawn.quantize(128, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return content.getvalue()

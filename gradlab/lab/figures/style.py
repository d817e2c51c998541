"""The style of all figures, and their conversion to PNG images.

The colors are those of Okabe and Ito (2008), which color-blind readers can distinguish. Series also
differ in line style and marker, never in color alone.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#E69F00", "linestyle": ":", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (1, 1)), "marker": "P"},
    {"color": "#000000", "linestyle": (0, (8, 2)), "marker": "X"},
)
GREY = "#767676"


def line(style: dict[str, Any]) -> dict[str, Any]:
    """One of `STYLES` without its marker, for a line of many points."""
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8}


def against_k(axes: Axes, steps: Sequence[int] | np.ndarray) -> None:
    """Make the horizontal axis a logarithmic axis of k, with a tick at each of the steps."""
    axes.set(xscale="log", xlabel="accumulation_steps k")
    axes.set_xticks(steps, labels=[str(k) for k in steps])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes)


def plain_numbers(axes: Axes) -> None:
    """Label a logarithmic vertical axis with plain numbers such as 0.05 instead of powers of
    ten."""
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def to_png(figure: Figure, compression: int = 6) -> bytes:
    """The figure as a PNG image.

    Args:
        figure: the figure.
        compression: from 1 (fast) to 9 (small).
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    content = io.BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).save(
        content, "PNG", compress_level=compression
    )
    return content.getvalue()


def to_small_png(figure: Figure, colors: int = 128) -> bytes:
    """The figure as a PNG image of few colors. With 128, a notebook that stores it needs a third of
    the bytes."""
    content = io.BytesIO()
    drawn = Image.open(io.BytesIO(to_png(figure, compression=1))).convert("RGB")
    few = drawn.quantize(colors, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    few.save(content, "PNG", optimize=True)
    return content.getvalue()

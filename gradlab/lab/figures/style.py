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
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from matplotlib.quiver import Quiver
from matplotlib.text import Text
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
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def for_any_ground(figure: Figure) -> Figure:
    """Draw a figure on a transparent ground, in colors that are read on white and on black: a page
    that was saved does not know the theme of its reader. Returns the figure."""
    for axes in figure.axes:
        axes.patch.set_visible(False)
        axes.tick_params(grid_color=GREY, grid_alpha=0.4)
    figure.patch.set_visible(False)
    for text in figure.findobj(Text):
        text.set_color(GREY)
    for line in figure.findobj(Line2D):
        line.set_color(_on_any_ground(line.get_color()))
        if line.get_markerfacecolor() == "white":
            line.set_markerfacecolor("none")
    for patch in figure.findobj(Ellipse):
        patch.set_edgecolor(_on_any_ground(patch.get_edgecolor()))
    for arrows in figure.findobj(Quiver):
        arrows.set_facecolor([_on_any_ground(color) for color in arrows.get_facecolor()])
    return figure


def _on_any_ground(color: Any) -> Any:
    """Grey for black and the lighter grey of grids; other colors stay."""
    red, green, blue, alpha = to_rgba(color)
    if not red == green == blue:
        return color
    return to_rgba(GREY, alpha if red < 0.5 else 0.4)


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
    drawn = Image.open(io.BytesIO(to_png(figure, compression=1)))
    if drawn.getchannel("A").getextrema() == (255, 255):
        drawn = drawn.convert("RGB")
    method = Image.Quantize.MAXCOVERAGE if drawn.mode == "RGB" else Image.Quantize.FASTOCTREE
    few = drawn.quantize(colors, method, kmeans=3, dither=Image.Dither.NONE)
    few.save(content, "PNG", optimize=True)
    return content.getvalue()

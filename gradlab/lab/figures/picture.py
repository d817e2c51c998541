"""Figures for notebooks, drawn without pyplot and shown with a text alternative."""

import base64
import html
from typing import Any

from matplotlib.figure import Figure

from gradlab.lab.figures.style import to_small_png


def figure(columns: int = 1, size: tuple[float, float] = (7.0, 3.2)) -> tuple[Figure, Any]:
    """A figure in the style of the course, and its axes.

    Args:
        columns: the number of axes, side by side.
        size: width and height in inches.

    Returns:
        The figure, and its axes: one `Axes`, or an array of them if there are several.
    """
    drawn = Figure(figsize=size, dpi=90, layout="constrained")
    axes = drawn.subplots(1, columns)
    for each in drawn.axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return drawn, axes


class Picture:
    """A figure that a notebook shows as an image with a text alternative.

    Args:
        figure: a matplotlib Figure.
        alt: what the figure shows, in a sentence, for readers who cannot see it.

    Raises:
        ValueError: `alt` is empty.

    Example:
        >>> drawn, axes = figure()
        >>> _ = axes.plot([1, 2], [1, 4])
        >>> Picture(drawn, alt="a line that rises from 1 to 4")
        a line that rises from 1 to 4
    """

    def __init__(self, figure: Figure, alt: str):
        if not alt.strip():
            raise ValueError(f"alt must say what the figure shows. Received: {alt!r}")
        self.figure = figure
        self.alt = alt

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        # JupyterLab shows an image/png without a text alternative, so the image is embedded in
        # HTML. GitHub does not show such HTML and takes the image/png.
        content = base64.b64encode(to_small_png(self.figure)).decode()
        # The figure's text is dark, so it needs a white background in a dark theme.
        tag = f'<img alt="{html.escape(self.alt)}" style="background: white" src="data:image/png;base64,{content}">'
        return {"text/html": tag, "image/png": content, "text/plain": self.alt}

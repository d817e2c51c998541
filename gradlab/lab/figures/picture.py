"""Figures in notebooks: drawn without pyplot, and never without a text alternative."""

import base64
import html

from matplotlib.figure import Figure

from gradlab.lab.figures.style import to_small_png


def figure(columns: int = 1, size: tuple[float, float] = (7.0, 3.2)):
    """A figure and its axes (one, or an array of several side by side), with the course's look; size in inches."""
    drawn = Figure(figsize=size, dpi=90, layout="constrained")
    axes = drawn.subplots(1, columns)
    for each in drawn.axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return drawn, axes


class Picture:
    """A figure as a notebook shows it: an image that a screen reader can read.

    Args:
        figure: a matplotlib Figure.
        alt: what it shows, in a sentence, for those who do not see it.

    Example:
        >>> drawn, axes = figure()
        >>> _ = axes.plot([1, 2], [1, 4])
        >>> Picture(drawn, alt="a line that rises from 1 to 4")
        a line that rises from 1 to 4
    """

    def __init__(self, figure: Figure, alt: str):
        if not alt.strip():
            raise ValueError(f"alt must say what the figure shows. Received: {alt!r}")
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, **kwargs) -> dict:
        # JupyterLab gives an image/png no alternative text, so that it must be HTML; GitHub shows the image alone.
        content = base64.b64encode(to_small_png(self.figure)).decode()
        # white behind it: the dark theme has light text, the figure has not
        tag = f'<img alt="{html.escape(self.alt)}" style="background: white" src="data:image/png;base64,{content}">'
        return {"text/html": tag, "image/png": content, "text/plain": self.alt}

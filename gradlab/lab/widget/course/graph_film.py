"""GraphFilm: runs of a static graph, step by step: what runs when, what the arrows carry, and what
changes."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
import tensorflow as tf

from gradlab.drawing.graph_boxes import Box
from gradlab.drawing.graph_view import drawn_boxes
from gradlab.lab.figures.style import GREY, STYLES
from gradlab.lab.widget.course import graph_layout
from gradlab.lab.widget.course.graph_layout import (
    CHARACTER,
    HEIGHT,
    GraphLayout,
    Place,
    is_variable,
)
from gradlab.lab.widget.course.graph_runs import FilmedSession, FilmStep
from gradlab.lab.widget.page import below_controls
from gradlab.lab.widget.saved_page import image, live, standalone

MILLISECONDS = 1200  # of a step, while it plays
NOW = "#F6C667"  # the fill of what runs, of what has run, and of the others
DONE = "#D6E9F5"
IDLE = "#FFFFFF"
_READ, _WRITE = GREY, STYLES[1]["color"]
_HOST = "#7B3FA0"


class GraphFilm:
    """Makes runs in a session of TensorFlow 1, and shows each of them step by step: the boxes that run
    light up, the arrows carry their values, variables change, and violet values come from Python or go to it.

    Boxes that do not wait for each other run in the same step; TensorFlow may run them in any order.
    Up to three numbers are shown as they are, more by their shape.

    Args:
        session: a `tf.compat.v1.Session` whose variables are initialized. The runs change them.
        runs: (name, fetches, feed) of each run, as for `session.run`.
        depth, expand, hide: as for `gradlab.draw_graph`, but loops and calls of functions cannot be
            expanded, and each variable needs a box of its own.

    Attributes:
        steps: what each step shows.
        view: the widgets, as one ipywidgets box.
        controls: the ipywidgets by the name of what they set: "step".

    Raises:
        ValueError: no session, no run, a name that is not in the graph, a variable that is not
            initialized or has no box of its own, boxes that need parts of each other, or two boxes
            of one run that write the same variable.

    Example:
        >>> v1 = tf.compat.v1
        >>> with tf.Graph().as_default() as graph:
        ...     x = v1.placeholder(tf.float32, [], name="x")
        ...     doubled = tf.multiply(2.0, x, name="doubled")
        >>> session = v1.Session(graph=graph)
        >>> GraphFilm(session, [("a run", doubled, {x: 3.0})])
        a run, step 1 of 2: x. Python feeds x = 3.
        a run, step 2 of 2: doubled. Python gets 6 from doubled.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        runs: Sequence[tuple[str, Any, Mapping]],
        depth: int = 1,
        expand: str | Sequence[str] = (),
        hide: str | Sequence[str] = (),
    ):
        if not isinstance(session, tf.compat.v1.Session):
            raise ValueError(f"session must be a tf.compat.v1.Session. Received: {session!r}")
        if not runs:
            raise ValueError(f"runs must contain a run. Received: {runs!r}")
        self._boxes = drawn_boxes(session.graph, depth, expand, hide)
        graph_layout.levels(self._boxes)  # before anything runs: whether they can be drawn
        filmed = FilmedSession(session, self._boxes)
        self.steps = [step for run in runs for step in filmed.steps(*run)]
        widths = {name: _width(box, self._boxes, self.steps) for name, box in self._boxes.items()}
        self._layout = graph_layout.place(self._boxes, widths)
        self._frames = [_svg(self._boxes, self._layout, step) for step in self.steps]
        self._html = ipywidgets.HTML()
        names = [
            (f"{number} of {len(self.steps)}", number - 1)
            for number in range(1, 1 + len(self.steps))
        ]
        self.controls: dict[str, Any] = {
            "step": ipywidgets.SelectionSlider(
                options=names, value=0, description="step", layout={"width": "420px"}
            )
        }
        play = ipywidgets.Play(
            max=len(self.steps) - 1, interval=MILLISECONDS, show_repeat=False, description="run"
        )
        ipywidgets.link((play, "value"), (self.controls["step"], "index"))
        self.controls["step"].observe(self._draw, "value")
        self.view = below_controls([play, self.controls["step"]], self._html)
        self._draw()

    def _draw(self, change: dict | None = None) -> None:
        number = self.controls["step"].value
        self._html.value = self._page(number, self._frames[number])

    def _page(self, number: int, drawing: str) -> str:
        words = html.escape(self.steps[number].words)
        return f'<div style="max-width: 60em">{drawing}<p aria-live="polite">{words}</p></div>'

    def __repr__(self) -> str:
        return "\n".join(step.words for step in self.steps)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        last = len(self.steps) - 1
        pages = [self._page(number, image(frame)) for number, frame in enumerate(self._frames)]
        facts = {"frames": pages, "milliseconds": MILLISECONDS}
        return dict(self.view._repr_mimebundle_(**kwargs)) | {
            "text/html": live("graph_film", "showGraphFilm", pages[last], facts, self.controls),
            "image/svg+xml": standalone(self._frames[last]),
            "text/plain": repr(self),
        }


# ---- the drawing ----


def _svg(boxes: Mapping[str, Box], layout: GraphLayout, step: FilmStep) -> str:
    """A step as SVG, without ids and on a ground of its own."""
    places = layout.places
    lit = {*step.now, *step.done}
    lines, labels = [], []
    for name, box in boxes.items():
        faint = not is_variable(box) and name not in lit
        before = sorted(graph_layout.needs(box, boxes), key=lambda other: places[other].x)
        variables = [other for other in box.reads if is_variable(boxes[other])]
        ends = _ends(places[name], _arrows(box, boxes))
        for source, x in zip(before, ends):
            dashed = source not in box.reads
            active = (source, name) in step.arrows or (dashed and name in step.now)
            lines.append(_arrow(places[source], x, places[name].top, active, faint, dashed))
            if value := step.passed.get((source, name)):
                labels.append(_label(x, places[name].top - 20, value))
        lines += [
            _from_variable(
                places[source], ends[-1], places[name].top, (source, name) in step.arrows, faint
            )
            for source in variables
        ]
        lines += [
            _to_variable(places[name], places[target], (name, target) in step.arrows, faint)
            for target in box.writes
        ]
    for name, label, above in _host_labels(step):
        y = places[name].top - 12 if above else places[name].bottom + 14
        labels.append(_label(places[name].x, y, label, _HOST))
    drawn = [_box(box, places[name], step) for name, box in boxes.items()]
    width, height = layout.width, layout.height
    words = html.escape(step.words)
    return (
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="width: 100%; max-width: {width:.0f}px; height: auto; display: block; background: #fff" '
        f'font-family="sans-serif" font-size="12">{"".join([*lines, *drawn, *labels])}</svg>'
    )


def _box(box: Box, place: Place, step: FilmStep) -> str:
    """A box with its name, and its kind or the value of its variable."""
    active = box.name in step.now or box.name in step.written
    fill = NOW if active else DONE if box.name in step.done else IDLE
    faint = not (is_variable(box) or active or box.name in step.done)
    corner = 18 if is_variable(box) else 4
    weight = 3 if active else 1.5
    return (
        f'<g opacity="{0.45 if faint else 1}">'
        f'<rect x="{place.left:.1f}" y="{place.top:.1f}" width="{place.width:.1f}" height="{HEIGHT}" '
        f'rx="{corner}" fill="{fill}" stroke="#333" stroke-width="{weight}"/>'
        f"{_text(place.x, place.y - 4, box.name, bold=True)}"
        f"{_text(place.x, place.y + 13, _second_line(box, step))}</g>"
    )


def _width(box: Box, boxes: Mapping[str, Box], steps: Sequence[FilmStep]) -> float:
    """How wide a box must be for its lines of text, and for the values above and below it, in px."""
    longest = max(len(line) for step in steps for line in (box.name, _second_line(box, step)))
    above = [
        _label_width(step.passed.get((other, box.name), ""))
        for step in steps
        for other in graph_layout.needs(box, boxes)
    ]
    outside = [
        _label_width(label)
        for step in steps
        for name, label, _ in _host_labels(step)
        if name == box.name
    ]
    return max(CHARACTER * longest + 20, _arrows(box, boxes) * max(above, default=0), *outside)


def _arrows(box: Box, boxes: Mapping[str, Box]) -> int:
    """How many arrows end on the upper edge of a box: those of all variables are one."""
    reads_variable = any(is_variable(boxes[other]) for other in box.reads)
    return len(graph_layout.needs(box, boxes)) + reads_variable


def _host_labels(step: FilmStep) -> list[tuple[str, str, bool]]:
    """The values that come from Python and go to it: the box, the words, and whether they stand above
    it."""
    fed = [(name, f"Python: {value}", True) for name, value in step.fed.items()]
    return fed + [(name, f"to Python: {value}", False) for name, value in step.fetched.items()]


def _second_line(box: Box, step: FilmStep) -> str:
    """What stands below the name of a box."""
    kind = step.variables[box.name] if is_variable(box) else box.kind
    return " · ".join(filter(None, (kind, box.device)))


def _ends(box: Place, count: int) -> list[float]:
    """Where so many arrows end on the upper edge of a box."""
    return [box.left + box.width * (number + 0.5) / count for number in range(count)]


def _arrow(
    start: Place, x: float, top: float, active: bool, faint: bool, dashed: bool = False
) -> str:
    """From the lower edge of a box to a place on the upper edge of one below it."""
    bend = (top - start.bottom) / 2
    path = (
        f"M {start.x:.1f} {start.bottom:.1f} C {start.x:.1f} {start.bottom + bend:.1f} "
        f"{x:.1f} {top - bend:.1f} {x:.1f} {top - 7:.1f}"
    )
    return _line(path, _READ, active, faint, dashed) + _head(x, top, 0, _READ, faint)


def _from_variable(variable: Place, x: float, top: float, active: bool, faint: bool) -> str:
    """From the left edge of a variable, above the row of a box, to the box's upper edge."""
    lane = top - graph_layout.LANE
    y = variable.y - 8
    path = (
        f"M {variable.left:.1f} {y:.1f} C {variable.left - 40:.1f} {y:.1f} "
        f"{variable.left - 30:.1f} {lane:.1f} {variable.left - 60:.1f} {lane:.1f} "
        f"H {x + 14:.1f} Q {x:.1f} {lane:.1f} {x:.1f} {lane + 14:.1f} V {top - 7:.1f}"
    )
    return _line(path, _READ, active, faint) + _head(x, top, 0, _READ, faint)


def _to_variable(box: Place, variable: Place, active: bool, faint: bool) -> str:
    """From the lower edge of a box, below its row, to the left edge of a variable: a write."""
    x = box.right - 14
    lane = box.bottom + 22
    y = variable.y + 8
    path = (
        f"M {x:.1f} {box.bottom:.1f} Q {x:.1f} {lane:.1f} {x + 14:.1f} {lane:.1f} "
        f"H {variable.left - 60:.1f} C {variable.left - 30:.1f} {lane:.1f} "
        f"{variable.left - 40:.1f} {y:.1f} {variable.left - 8:.1f} {y:.1f}"
    )
    width = 4 if active else 2.5
    return _line(path, _WRITE, active, faint, width=width) + _head(
        variable.left, y, -90, _WRITE, faint
    )


def _line(
    path: str, color: str, active: bool, faint: bool, dashed: bool = False, width: float = 0
) -> str:
    width = width or (2.5 if active else 1.3)
    dash = ' stroke-dasharray="3 4"' if dashed else ""
    opacity = 0.35 if faint else 1
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" opacity="{opacity}"{dash}/>'


def _head(x: float, y: float, turned: int, color: str, faint: bool) -> str:
    """An arrowhead whose tip is at a place; without a turn it points down."""
    opacity = 0.35 if faint else 1
    return (
        f'<path d="M -5 -9 L 5 -9 L 0 0 Z" fill="{color}" opacity="{opacity}" '
        f'transform="translate({x:.1f} {y:.1f}) rotate({turned})"/>'
    )


def _label(x: float, y: float, words: str, color: str = "#000") -> str:
    width = _label_width(words)
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="17" rx="3" '
        f'fill="#fff" stroke="{color}" stroke-width="0.7"/>'
        f"{_text(x, y + 4, words, color=color)}"
    )


def _label_width(words: str) -> float:
    return 6.6 * len(words) + 8


def _text(x: float, y: float, words: str, bold: bool = False, color: str = "#000") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{color}"{weight}>'
        f"{html.escape(words)}</text>"
    )

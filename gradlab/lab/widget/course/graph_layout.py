"""Places for the boxes of a graph: operations on the left, each below what it needs, and variables in a
column on the right."""

import graphlib
from collections.abc import Mapping
from dataclasses import dataclass

from gradlab.drawing.graph_boxes import Box

# in px
CHARACTER = 7.2
HEIGHT = 46  # of a box
BETWEEN_ROWS = 78
BETWEEN_BOXES = 34
BETWEEN_VARIABLES = 18
TO_VARIABLES = 70
MARGIN = 14
ABOVE = 26.0  # the first row, for a value from Python
LANE = 38.0  # of arrows from variables: so far above the row that reads them
BELOW = 38.0  # the last row, for a value to Python and for arrows to variables
LEAST_WIDTH = 76


@dataclass(frozen=True)
class Place:
    """Where a box is drawn: its center and its width, in px."""

    x: float
    y: float
    width: float

    @property
    def left(self) -> float:
        """The left edge."""
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        """The upper edge."""
        return self.y - HEIGHT / 2

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + HEIGHT / 2


@dataclass(frozen=True)
class GraphLayout:
    """A drawing's size in px, and the places of its boxes by their names."""

    width: float
    height: float
    places: Mapping[str, Place]


def is_variable(box: Box) -> bool:
    """Whether a box is a variable."""
    return set(box.types) == {"variable"}


def is_placeholder(box: Box) -> bool:
    """Whether a box takes a value from Python."""
    return set(box.types) == {"Placeholder"}


def needs(box: Box, boxes: Mapping[str, Box]) -> list[str]:
    """The names of the boxes that must run before a box. Variables do not run."""
    before = dict.fromkeys([*box.reads, *box.after])
    return [name for name in before if name in boxes and not is_variable(boxes[name])]


def levels(boxes: Mapping[str, Box]) -> dict[str, int]:
    """For each box that runs, how many boxes run before it, one after the other.

    Raises:
        ValueError: two boxes need each other.
    """
    running = {name: box for name, box in boxes.items() if not is_variable(box)}
    return longest({name: needs(box, running) for name, box in running.items()})


def longest(before: Mapping[str, list[str]]) -> dict[str, int]:
    """For each name, the length of the longest chain of those before it.

    Raises:
        ValueError: two need each other.
    """
    found: dict[str, int] = {}
    try:
        for name in graphlib.TopologicalSorter(before).static_order():
            found[name] = 1 + max((found[other] for other in before[name]), default=-1)
    except graphlib.CycleError as error:
        names = ", ".join(dict.fromkeys(error.args[1]))
        raise ValueError(
            f"boxes must run one after the other. Received: {names}, of which each needs a part of "
            "the other: expand one of them"
        ) from None
    return {name: found[name] for name in before}


def place(boxes: Mapping[str, Box], least: Mapping[str, float]) -> GraphLayout:
    """Places for boxes.

    Args:
        boxes: the boxes by name.
        least: the least width of each box, in px.
    """
    widths = {name: max(LEAST_WIDTH, least[name]) for name in boxes}
    rows = _rows(boxes)
    row_widths = [
        sum(widths[name] for name in row) + BETWEEN_BOXES * (len(row) - 1) for row in rows
    ]
    inside = max(row_widths, default=0.0)
    first = rows[0] if rows else []
    from_variables = any(is_variable(boxes[other]) for name in first for other in boxes[name].reads)
    above = LANE + MARGIN if from_variables else ABOVE
    places = {}
    for number, (row, width) in enumerate(zip(rows, row_widths)):
        left = MARGIN + (inside - width) / 2
        y = above + HEIGHT / 2 + number * (HEIGHT + BETWEEN_ROWS)
        for name in row:
            places[name] = Place(left + widths[name] / 2, y, widths[name])
            left += widths[name] + BETWEEN_BOXES
    height = above + len(rows) * (HEIGHT + BETWEEN_ROWS) - BETWEEN_ROWS + BELOW
    variables = [name for name, box in boxes.items() if is_variable(box)]
    if not variables:
        return GraphLayout(inside + 2 * MARGIN, height, places)
    column = max(widths[name] for name in variables)
    x = MARGIN + inside + TO_VARIABLES + column / 2
    wanted = {name: _mean_y(name, boxes, places) for name in variables}
    lowest = float(MARGIN + HEIGHT / 2)
    for name in sorted(variables, key=wanted.__getitem__):
        places[name] = Place(x, max(wanted[name], lowest), column)
        lowest = places[name].y + HEIGHT + BETWEEN_VARIABLES
    height = max(height, lowest - HEIGHT / 2 + MARGIN)
    return GraphLayout(MARGIN + x + column / 2, height, places)


def _rows(boxes: Mapping[str, Box]) -> list[list[str]]:
    """The boxes that run, in rows from top to bottom: a placeholder is just above what first uses it,
    and in each row the boxes stand in the order of what they need."""
    found = _reading_order(boxes)
    for name in found:
        users = [level for other, level in found.items() if name in needs(boxes[other], boxes)]
        if is_placeholder(boxes[name]) and users:
            found[name] = min(users) - 1
    rows: list[list[str]] = [[] for _ in range(max(found.values(), default=-1) + 1)]
    for name, level in found.items():
        rows[level].append(name)
    at: dict[str, float] = {}
    for row in rows:
        centers = {
            name: [at[other] for other in needs(boxes[name], boxes) if other in at] for name in row
        }
        first = {name: number / len(row) for number, name in enumerate(row)}
        row.sort(key=lambda name: _mean(centers[name]) if centers[name] else first[name])
        at |= {name: (number + 0.5) / len(row) for number, name in enumerate(row)}
    return [row for row in rows if row]


def _reading_order(boxes: Mapping[str, Box]) -> dict[str, int]:
    """The levels of the boxes, with what uses a variable below what was built before it and writes
    that variable, if this is possible."""
    running = {name: box for name, box in boxes.items() if not is_variable(box)}
    below = {name: needs(box, running) for name, box in running.items()}
    built: list[str] = []
    for name, box in running.items():
        used = {*box.reads, *box.writes}
        below[name] = [*below[name], *(other for other in built if used & {*boxes[other].writes})]
        built.append(name)
    try:
        return longest(below)
    except ValueError:
        return levels(boxes)


def _mean_y(variable: str, boxes: Mapping[str, Box], places: Mapping[str, Place]) -> float:
    """The mean height of what reads or writes a variable."""
    users = [
        places[name].y
        for name, box in boxes.items()
        if name in places and variable in [*box.reads, *box.writes]
    ]
    return _mean(users) if users else 0.0


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)

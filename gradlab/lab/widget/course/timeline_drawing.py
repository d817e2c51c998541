"""Draws schedules as SVG: a row for each device, a box for each forward and backward pass and for
each all-reduce.

Text and borders have the color of the page's text, so the drawing follows light and dark themes.
Forward passes are dark with light numbers, backward passes light with dark numbers, all-reduces
hatched: no difference is only one of hue.
"""

import html
import math
from collections.abc import Mapping
from typing import Any

from gradlab.lab.figures.style import STYLES
from gradlab.lab.widget.course.schedules import Schedule
from gradlab.lab.widget.saved_page import image, standalone

# of the drawing and its margins, in px
WIDTH = 760
LEFT = 70
RIGHT = 16
# the height of a row, and of the boxes in it
ROW = 26
BOX = 22
FILLS = {"forward": STYLES[0]["color"], "backward": STYLES[3]["color"], "all-reduce": "#ffffff"}
_INKS = {"forward": "#ffffff", "backward": "#000000"}
_HATCH = STYLES[1]["color"]


class Drawing:
    """A drawing for a notebook: an image, and words for pages and readers without it.

    Args:
        svg: the drawing.
        words: what it shows.
    """

    def __init__(self, svg: str, words: str):
        self.svg = svg
        self.words = words

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return {
            "text/html": image(self.svg),
            "image/svg+xml": standalone(self.svg),
            "text/plain": self.words,
        }


def draw(schedules: Mapping[str, Schedule], label: str) -> str:
    """Draw schedules below each other, on one scale of time.

    Args:
        schedules: the schedules, with the line of text above each. "": no line.
        label: the text alternative.

    Returns:
        The SVG, which loads nothing and has no ids, so that several can stand on a page.
    """
    longest = float(max(each.seconds for each in schedules.values()))
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [_legend(schedules)]
    top = 34.0
    for title, each in schedules.items():
        if title:
            parts.append(_text(0, top + 10, html.escape(title), weight="bold"))
            top += 20
        parts += _rows(each, top, scale)
        top += ROW * each.devices + 8
    parts += _axis(longest, top, scale)
    return (
        f'<svg role="img" aria-label="{html.escape(label)}" viewBox="0 0 {WIDTH} {top + 40:.0f}" '
        f'style="width: 100%; max-width: {WIDTH}px; height: auto; display: block" '
        'font-family="sans-serif" font-size="12" fill="currentColor" '
        f'stroke-width="1">{"".join(parts)}</svg>'
    )


def facts() -> dict[str, Any]:
    """Colors and sizes, for timeline.js."""
    sizes = {"width": WIDTH, "left": LEFT, "right": RIGHT, "row": ROW, "box": BOX}
    return {"fills": FILLS, "inks": _INKS, "hatch": _HATCH, "sizes": sizes}


def _rows(schedule: Schedule, top: float, scale: float) -> list[str]:
    parts = []
    # px for a number
    end = float(schedule.seconds) * scale
    room = 7 * len(str(schedule.microbatches)) + 2
    for device in range(schedule.devices):
        y = top + ROW * device
        parts.append(_text(LEFT - 8, y + 15, f"device {device + 1}", anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y:g}" width="{end:.1f}" height="{BOX}" fill-opacity="0.12"/>'
        )
        for task in schedule.of(device):
            x = LEFT + float(task.start) * scale
            width = float(task.end - task.start) * scale
            parts.append(_box(task.step.kind, x, y, width))
            if task.step.kind in _INKS and width > room:
                number = str(task.step.microbatch)
                ink = _INKS[task.step.kind]
                parts.append(_text(x + width / 2, y + 15, number, anchor="middle", fill=ink))
    return parts


def _box(kind: str, x: float, y: float, width: float) -> str:
    place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{BOX}"'
    if kind != "all-reduce":
        return f'<rect class="{kind}" {place} fill="{FILLS[kind]}" stroke="currentColor"/>'
    ground = f'<rect {place} fill="{FILLS[kind]}"/>'
    border = f'{place} fill="none" stroke="currentColor"'
    return f'{ground}{_hatching(x, y, width)}<rect class="{kind}" {border}/>'


def _hatching(x: float, y: float, width: float, every: float = 6) -> str:
    """Diagonal lines that fill a box. A pattern would need an id, and fails where its first copy is
    hidden."""
    lines = []
    for number in range(1, math.ceil((width + BOX) / every)):
        # The line runs from (along, 0) to (along - BOX, BOX), cut off at the box's sides
        along = number * every
        right = min(along, width)
        left = max(along - BOX, 0)
        lines.append(
            f"M{x + right:.1f} {y + along - right:.1f}L{x + left:.1f} {y + along - left:.1f}"
        )
    return f'<path d="{"".join(lines)}" stroke="{_HATCH}" stroke-width="2.5" fill="none"/>'


def _legend(schedules: Mapping[str, Schedule]) -> str:
    kinds = {task.step.kind for each in schedules.values() for task in each.tasks}
    parts = []
    x = float(LEFT)
    for kind in ("forward", "backward", "all-reduce"):
        if kind in kinds:
            parts += [_box(kind, x, 0, 28), _text(x + 35, 15, kind)]
            x += 115
    parts.append(f'<rect x="{x:g}" y="0" width="28" height="{BOX}" fill-opacity="0.12"/>')
    return "".join([*parts, _text(x + 35, 15, "idle")])


def _axis(longest: float, top: float, scale: float) -> list[str]:
    """The axis of time, with a tick at multiples of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(longest / 8))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if longest / (factor * power) <= 10)
    line = f'<path d="M{LEFT} {top:g}H{LEFT + longest * scale:.1f}" stroke="currentColor"/>'
    parts = [line]
    for number in range(int(longest / step * (1 + 1e-9)) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<path d="M{x:.1f} {top:g}v4" stroke="currentColor"/>')
        parts.append(_text(x, top + 17, f"{round(number * step, 9):g}", anchor="middle"))
    return [*parts, _text(LEFT + longest * scale / 2, top + 34, "time in seconds", anchor="middle")]


def _text(
    x: float, y: float, words: str, anchor: str = "start", fill: str = "", weight: str = ""
) -> str:
    extra = (f' fill="{fill}"' if fill else "") + (f' font-weight="{weight}"' if weight else "")
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"{extra}>{words}</text>'

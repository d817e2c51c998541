"""MemoryFilm: what one window holds in memory, operation by operation, beside the limit of a card."""

import html
import itertools
from collections.abc import Mapping
from typing import Any

import ipywidgets
import numpy as np

from gradlab import _checks
from gradlab.fit.sizes.memory_plan import MemoryPlan
from gradlab.lab.widget.course.memory_bars import COLORS
from gradlab.lab.widget.course.memory_count import MIB, PARTS, mib
from gradlab.lab.widget.page import below_controls
from gradlab.lab.widget.saved_page import image, standalone

WIDTH, HEIGHT, LEFT, TOP = 560, 200, 84, 18  # of the drawing's axes, in its units
COLUMNS = 280  # in which the operations are drawn
ORDER = ("weights", "optimizer state", "accumulator", "gradients", "activations")  # from below
BATCHES = [2**power for power in range(15)]
LIMITS = [2**power for power in range(6, 17)]  # MiB
_COLOR = dict(zip(PARTS, COLORS, strict=True))
_STYLE = {"description_width": "90px"}
_LAYOUT = {"width": "320px"}


def curves(plan: MemoryPlan, batch: int, b: int) -> dict[str, np.ndarray]:
    """The bytes of each part while the operations of a window run.

    Counted are the numbers of the traced graph, in the order of its operations. What a framework
    and its kernels take besides is not.

    Args:
        plan: what `gradlab.measure.memory.plan` returned.
        batch: the examples of the window, a multiple of b.
        b: the examples of a micro-batch.

    Returns:
        For each of `PARTS` the bytes, shape (batch / b * operations,).
    """
    k = batch // b
    gradients = plan.liveness.gradients
    alive = plan.liveness.fixed + b * plan.liveness.per_example
    ones = np.ones(k * len(alive))
    return {
        "weights": plan.weights * ones,
        "optimizer state": plan.optimizer * ones,
        "accumulator": (plan.accumulators if k > 1 else 0) * ones,
        "gradients": np.tile(gradients, k),
        "activations": np.tile(alive - gradients, k),
    }


def _total(parts: dict[str, np.ndarray]) -> np.ndarray:
    return np.sum(list(parts.values()), axis=0)


def sentence(plan: MemoryPlan, batch: int, b: int, limit: float) -> str:
    """What the drawing shows, in words.

    Args:
        plan, batch, b: as for `curves`.
        limit: the bytes of the card.
    """
    cut, whole = _total(curves(plan, batch, b)), _total(curves(plan, batch, batch))

    def outcome(total: np.ndarray) -> str:
        end = _end(total, limit)
        if end == len(total):
            return "fits"
        return f"does not fit: memory runs out after {end / len(total):.0%} of the operations"

    said = f"One large batch of {batch} needs {mib(whole.max())} MiB and {outcome(whole)}."
    if b < batch:
        k = batch // b
        said += f" {k} micro-batches of {b} need {mib(cut.max())} MiB, which {outcome(cut)}."
    return f"{said} The card has {mib(limit)} MiB."


def _end(total: np.ndarray, limit: float) -> int:
    """The first operation that finds too little memory; the number of operations if none does."""
    over = np.flatnonzero(total > limit)
    return int(over[0]) if len(over) else len(total)


def svg(plan: MemoryPlan, batch: int, b: int, limit: float) -> str:
    """Memory against time in one window, as SVG in the colors of the page around it.

    Args:
        plan, batch, b, limit: as for `sentence`.
    """
    parts = curves(plan, batch, b)
    total = _total(parts)
    whole = _total(curves(plan, batch, batch))
    scale = HEIGHT / (1.08 * max(limit, total.max(), whole.max()))
    shown, peaks = _peaks(total), _peaks(whole)
    x = _places(len(shown))
    end = _end(total[shown], limit)
    below = np.zeros(len(shown))
    shapes = []
    for name in ORDER:
        above = below + parts[name][shown]
        title = f"<title>{name}: at most {mib(parts[name].max())} MiB</title>"
        for at, opacity in ((slice(0, end + 1), 1), (slice(end, None), 0.3)):
            around = [*zip(x[at], above[at]), *zip(x[at][::-1], below[at][::-1])]
            if len(around) > 2:
                shapes.append(
                    f'<path d="M{_joined(around, scale)}z" fill="{_COLOR[name]}" '
                    f'fill-opacity="{opacity}">{title}</path>'
                )
        below = above
    line = list(zip(_places(len(peaks)), whole[peaks]))
    broken = _end(whole[peaks], limit)
    for piece, dashes in ((line[: broken + 1], "none"), (line[broken:], "2 4")):
        if len(piece) > 1:
            shapes.append(
                f'<path d="M{_joined(piece, scale)}" fill="none" stroke="currentColor" '
                f'stroke-width="1.5" stroke-dasharray="{dashes}"><title>one large batch of {batch}: '
                f"at most {mib(whole.max())} MiB</title></path>"
            )
    shapes += [
        f'<path d="M{x0 - 5:.1f} {TOP + HEIGHT - limit * scale - 5:.1f}l10 10m0 -10l-10 10" '
        'stroke="#D00000" stroke-width="3"><title>memory runs out here</title></path>'
        for x0 in {
            *([x[end]] if end < len(x) else []),
            *([line[broken][0]] if broken < len(line) else []),
        }
    ]
    shapes += _axes(limit, scale, batch // b)
    words = html.escape(sentence(plan, batch, b, limit), quote=True)
    return (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 44} {TOP + HEIGHT + 34}" role="img" aria-label="{words}" '
        'fill="currentColor" style="max-width: 52em; width: 100%; font: 13px sans-serif">'
        f"{''.join(shapes)}</svg>"
    )


def _peaks(total: np.ndarray) -> np.ndarray:
    """For each column of the drawing, the operation at which most is in memory."""
    edges = np.linspace(0, len(total), min(COLUMNS, len(total)) + 1).astype(int)
    return np.array([a + int(np.argmax(total[a:e])) for a, e in itertools.pairwise(edges)])


def _places(count: int) -> np.ndarray:
    return LEFT + WIDTH * (np.arange(count) + 0.5) / count


def _joined(points: list[tuple[float, float]], scale: float) -> str:
    return "L".join(f"{x:.1f} {TOP + HEIGHT - y * scale:.1f}" for x, y in points)


def _axes(limit: float, scale: float, k: int) -> list[str]:
    """The axes, the limit, and where each of a few micro-batches ends."""
    floor, right = TOP + HEIGHT, LEFT + WIDTH
    line = floor - limit * scale
    steps = [MIB * 2**power for power in range(4, 24) if MIB * 2**power * scale < HEIGHT][-3:]
    ticks = "".join(
        f'<text x="{LEFT - 8}" y="{floor - step * scale + 4:.1f}" text-anchor="end">'
        f"{mib(step)} MiB</text>"
        for step in steps
    )
    ends = (
        "".join(f"M{LEFT + WIDTH * i / k:.1f} {floor}v6" for i in range(k + 1)) if k <= 64 else ""
    )
    return [
        f'<path d="M{LEFT} {TOP}V{floor}H{right}{ends}" fill="none" stroke="currentColor"/>',
        ticks,
        f'<path d="M{LEFT} {line:.1f}H{right}" stroke="currentColor" stroke-width="2" '
        'stroke-dasharray="5 4"/>',
        f'<text x="{right + 6}" y="{line + 4:.1f}">card</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{floor + 26}" text-anchor="middle">time: the operations of '
        f"one window, {k} micro-batch{'es' * (k > 1)}</text>",
    ]


class MemoryFilm:
    """Controls for the micro-batches of a window, and its memory against time.

    Areas are the parts of the window in micro-batches, the line is one large batch, the dashed line
    is the card. A red cross is where memory runs out; what would come after it is pale or dotted.

    Args:
        plans: what `gradlab.measure.memory.plan` returned, by a name for each.
        batch: the examples of a window: a power of two.
        b: the micro-batch size at first: a power of two, at most the batch.
        limit_mib: the card's memory at first, in MiB: a power of two from 64 to 65,536.

    Attributes:
        view: the widgets, as one ipywidgets box.
        controls: the ipywidgets by the name of what they set: "plan", "b", "limit_mib".

    Raises:
        ValueError: no plan, or a number that is not one of those above.

    Example:
        >>> import keras, numpy as np
        >>> from gradlab.measure import memory
        >>> model = keras.Sequential([keras.Input([2000]), keras.layers.Dense(2000), keras.layers.Dense(1)])
        >>> plan = memory.plan(model, "mse", "sgd", (np.zeros([1, 2000]), np.zeros([1, 1])))
        >>> MemoryFilm({"dense": plan}, batch=4096, b=16, limit_mib=64)    # doctest: +ELLIPSIS
        One large batch of 4096 needs ... MiB and does not fit: memory runs out after 0% of the operations. 256 ...
    """

    def __init__(
        self,
        plans: Mapping[str, MemoryPlan],
        batch: int = 128,
        b: int = 4,
        limit_mib: int = 512,
    ):
        if not plans:
            raise ValueError(f"plans must contain a plan. Received: {plans!r}")
        _checks.one_of("batch", batch, BATCHES)
        sizes = [size for size in BATCHES if size <= batch]
        _checks.one_of("b", b, sizes)
        _checks.one_of("limit_mib", limit_mib, LIMITS)
        self._plans = dict(plans)
        self._batch = batch
        self._html = ipywidgets.HTML()
        slider = ipywidgets.SelectionSlider
        self.controls: dict[str, Any] = {
            "plan": ipywidgets.Dropdown(
                options=list(plans), description="network", style=_STYLE, layout=_LAYOUT
            ),
            "b": slider(options=sizes, value=b, description="b", style=_STYLE, layout=_LAYOUT),
            "limit_mib": slider(
                options=LIMITS,
                value=limit_mib,
                description="card, MiB",
                style=_STYLE,
                layout=_LAYOUT,
            ),
        }
        for control in self.controls.values():
            control.observe(self._draw, "value")
        self.view = below_controls(list(self.controls.values()), self._html)
        self._draw()

    def _settings(self) -> tuple[MemoryPlan, int, int, float]:
        chosen = {name: control.value for name, control in self.controls.items()}
        return self._plans[chosen["plan"]], self._batch, chosen["b"], MIB * chosen["limit_mib"]

    def _draw(self, change: dict | None = None) -> None:
        self._html.value = self._page(svg(*self._settings()))

    def _page(self, drawing: str) -> str:
        """A drawing above its legend and the sentence, as HTML without scripts."""
        swatches = " ".join(
            f'<span style="white-space: nowrap"><span aria-hidden="true" style="color: {_COLOR[name]}">'
            f"&#9632;</span> {name}</span>"
            for name in reversed(ORDER)
        )
        line = '<span style="white-space: nowrap"><b aria-hidden="true">&#9472;</b> one large batch</span>'
        words = html.escape(repr(self))
        return (
            f'<div style="max-width: 52em">{drawing}<p style="margin: 0 0 0 {LEFT}px">{swatches} '
            f'{line}</p><p aria-live="polite">{words}</p></div>'
        )

    def __repr__(self) -> str:
        return sentence(*self._settings())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A page without a kernel shows the HTML; others the SVG or the sentence.
        drawing = svg(*self._settings())
        return dict(self.view._repr_mimebundle_(**kwargs)) | {
            "text/html": self._page(image(drawing)),
            "image/svg+xml": standalone(drawing),
            "text/plain": repr(self),
        }

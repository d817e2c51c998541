"""MemoryBars: what a training holds in memory, as bars beside the limit of a card."""

import html
import re
from dataclasses import asdict, fields, replace
from typing import Any

import ipywidgets

from gradlab import _checks
from gradlab.lab.widget.course.memory_count import (
    MEASURED,
    MIB,
    OPTIMIZERS,
    PARTS,
    PRECISIONS,
    PRESETS,
    Training,
    memory,
    mib,
    sentence,
)
from gradlab.lab.widget.page import below_controls
from gradlab.lab.widget.saved_page import image, live, standalone

COLORS = ("#0072B2", "#D55E00", "#CC79A7", "#009E73", "#E69F00")
LIMITS = (0.25, 0.5, 1.0, 4.0, 8.0, 12.0, 16.0, 24.0, 40.0, 80.0)  # GiB
# Among them VGG-16 without and with its top, and GPT-2 small.
PARAMETERS = (
    10**6,
    5 * 10**6,
    14_714_688,
    60 * 10**6,
    124_439_808,
    138_357_544,
    10**9,
    7 * 10**9,
    70 * 10**9,
)
POWERS = tuple(2**power for power in range(11))
CHOICES: dict[str, tuple] = {
    "microbatch_size": POWERS,
    "accumulation_steps": POWERS,
    "size": (32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 2048, 4096, 8192),
    "optimizer": tuple(OPTIMIZERS),
    "precision": tuple(PRECISIONS),
    "zero_stage": (0, 1, 2, 3),
    "devices": (1, 2, 4, 8, 16, 32, 64),
}
LABELS = {
    "microbatch_size": "b",
    "accumulation_steps": "k",
    "size": "side or length",
    "optimizer": "optimizer",
    "precision": "precision",
    "zero_stage": "ZeRO stage",
    "devices": "devices",
}
_STYLE = {"description_width": "90px"}
_LAYOUT = {"width": "320px"}


def table(training: Training, limit: float) -> str:
    """The bars as lines of text.

    Args:
        training: the settings of accumulation.
        limit: the bytes of the card.
    """
    columns = [memory(training.whole), memory(training)]
    rows: list[tuple[str, ...]] = [("MiB on each device", "one large batch", "accumulation")]
    rows += [(part, *(mib(column[part]) for column in columns)) for part in PARTS]
    rows.append(("total", *(mib(sum(column.values())) for column in columns)))
    marks = [MEASURED.get(each) for each in (training.whole, training)]
    if any(marks):
        rows.append(("measured", *("" if mark is None else f"{mark:,.0f}" for mark in marks)))
    lines = [f"{name:20} {whole:>16} {cut:>14}".rstrip() for name, whole, cut in rows]
    return "\n".join([*lines, sentence(training, limit)])


def svg(training: Training, limit: float) -> str:
    """The bars as SVG, in the colors of the page around it.

    Args:
        training: the settings of accumulation.
        limit: the bytes of the card.
    """
    bars = [("one large batch", training.whole), ("accumulation", training)]
    most = 1.02 * max(
        limit,
        *(sum(memory(each).values()) for _, each in bars),
        *(MIB * m for m in MEASURED.values()),
    )
    scale = 500 / most
    shapes = []
    for row, (name, each) in enumerate(bars):
        top = 24 + 44 * row
        left = 130.0
        shapes.append(f'<text x="122" y="{top + 19}" text-anchor="end">{name}</text>')
        for color, (part, number) in zip(COLORS, memory(each).items()):
            width = number * scale
            title = f"<title>{part}: {mib(number)} MiB</title>"
            shapes.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="28" '
                f'fill="{color}">{title}</rect>'
            )
            left += width
        if each in MEASURED:
            x = 130 + MEASURED[each] * MIB * scale
            mark = f"M{x:.1f} {top - 4}v36m-4 -36h8m-8 36h8"
            title = f"<title>measured: {MEASURED[each]:,.0f} MiB</title>"
            shapes.append(
                f'<path d="{mark}" fill="none" stroke="currentColor" '
                f'stroke-width="2">{title}</path>'
            )
    x = 130 + limit * scale
    shapes.append(
        f'<path d="M{x:.1f} 16V106" stroke="currentColor" stroke-width="2" stroke-dasharray="5 4"/>'
        f'<text x="{x:.1f}" y="12" text-anchor="{"end" if x > 400 else "middle"}">limit '
        f"{mib(limit)} MiB</text>"
    )
    words = html.escape(sentence(training, limit), quote=True)
    return (
        f'<svg viewBox="0 0 660 112" role="img" aria-label="{words}" fill="currentColor" '
        f'style="max-width: 52em; width: 100%; font: 13px sans-serif">{"".join(shapes)}</svg>'
    )


def page(training: Training, limit: float) -> str:
    """The bars, the table that is their legend, and the sentence, as HTML without scripts, in the
    page's colors."""
    return _with_table(svg(training, limit), training, limit)


def saved(training: Training, limit: float) -> str:
    """The same with the bars as an image, which a notebook that is not trusted shows, too."""
    return _with_table(image(svg(training, limit)), training, limit)


def _with_table(bars: str, training: Training, limit: float) -> str:
    first, *rows, words = table(training, limit).splitlines()
    cells = [re.split(r" {2,}", html.escape(row)) for row in rows]
    swatches = [
        f'<span aria-hidden="true" style="color: {color}">&#9632;</span> ' for color in COLORS
    ] + ["", ""]
    body = "".join(
        f'<tr><th scope="row" style="text-align: left">{swatch}{name}</th>'
        + "".join(f'<td style="text-align: right">{number}</td>' for number in numbers)
        + "</tr>"
        for swatch, (name, *numbers) in zip(swatches, cells)
    )
    heads = "".join(
        f'<th scope="col" style="text-align: right">{name}</th>'
        for name in re.split(r" {2,}", first)
    )
    return (
        f'<div style="max-width: 52em">{bars}'
        f'<table style="color: inherit; border-spacing: 14px 2px"><thead><tr>{heads}</tr></thead>'
        f'<tbody>{body}</tbody></table><p aria-live="polite">{html.escape(words)}</p></div>'
    )


class MemoryBars:
    """Sliders for what a training holds in memory, and bars for one large batch beside
    accumulation.

    Everything is arithmetic, as in `memory`; a mark on a bar shows a measurement where there is
    one.

    Args:
        preset: one of `PRESETS`.
        limit_gib: the memory of the card, in GiB: one of `LIMITS`.
        **settings: fields of `Training` that differ from the preset.

    Attributes:
        training: the settings that are shown.
        view: the widgets, as one ipywidgets box.

    Raises:
        ValueError: an unknown preset or limit, or a setting out of its range or not among its
            control's choices.

    Example:
        >>> bars = MemoryBars(limit_gib=12.0, optimizer="adam")
        >>> bars.training.optimizer
        'adam'
    """

    def __init__(
        self, preset: str = "VGG-16 without top, 96x96", limit_gib: float = 0.5, **settings: Any
    ):
        _checks.one_of("preset", preset, PRESETS)
        _checks.one_of("limit_gib", limit_gib, LIMITS)
        known = [field.name for field in fields(Training)]
        for name in settings:
            _checks.one_of("a setting", name, known)
        self.training = replace(PRESETS[preset], **settings)
        for name, choices in CHOICES.items():
            _checks.one_of(name, getattr(self.training, name), choices)
        self._html = ipywidgets.HTML()
        self._controls = _controls(self.training)
        self._preset = _dropdown("model", list(PRESETS), preset)
        self._limit = _dropdown("card, GiB", LIMITS, limit_gib)
        self._moving = False
        self._preset.observe(self._load, "value")
        for control in (*self._controls.values(), self._limit):
            control.observe(self._read, "value")
        controls = [self._preset, self._limit, *self._controls.values()]
        self.view = below_controls(controls, self._html)
        self._draw()

    @property
    def limit(self) -> float:
        """The bytes of the card."""
        return self._limit.value * 2**30

    @property
    def controls(self) -> dict[str, Any]:
        """The ipywidgets by the name of what they set: a field of `Training`, "preset" or
        "limit_gib"."""
        return {"preset": self._preset, "limit_gib": self._limit, **self._controls}

    def _load(self, change: dict) -> None:
        """Take over a preset."""
        self.training = PRESETS[change["new"]]
        self._moving = True
        try:
            for name, control in self._controls.items():
                control.value = getattr(self.training, name)
        finally:
            self._moving = False
        self._draw()

    def _read(self, change: dict) -> None:
        if self._moving:
            return
        values = {name: control.value for name, control in self._controls.items()}
        self.training = replace(self.training, **values)
        self._draw()

    def _draw(self) -> None:
        self._html.value = page(self.training, self.limit)

    def __repr__(self) -> str:
        return table(self.training, self.limit)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A page without a kernel shows the HTML; others the SVG or the table.
        return dict(self.view._repr_mimebundle_(**kwargs)) | {
            "text/html": live(
                "memory_bars",
                "showMemoryBars",
                saved(self.training, self.limit),
                facts() | {"training": asdict(self.training)},
                self.controls,
            ),
            "image/svg+xml": standalone(svg(self.training, self.limit)),
            "text/plain": repr(self),
        }


def facts() -> dict[str, Any]:
    """What memory_bars.js needs to count and to draw as this module does."""
    return {
        "optimizers": OPTIMIZERS,
        "precisions": PRECISIONS,
        "presets": {name: asdict(training) for name, training in PRESETS.items()},
        "measured": [(asdict(training), mebibytes) for training, mebibytes in MEASURED.items()],
        "colors": COLORS,
    }


def _dropdown(label: str, choices: Any, value: Any) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(
        options=choices, value=value, description=label, style=_STYLE, layout=_LAYOUT
    )


def _controls(training: Training) -> dict[str, Any]:
    """A control for each setting that can be changed, with its value."""
    # A selection, because a slider over floats rounds its value as soon as a page shows it.
    counts = sorted({*PARAMETERS, training.parameters})
    options = [(f"{count / 1e6:,.1f} M", count) for count in counts]
    made: dict[str, Any] = {
        "parameters": ipywidgets.SelectionSlider(
            options=options,
            value=training.parameters,
            description="parameters",
            style=_STYLE,
            layout=_LAYOUT,
        )
    }
    for name, choices in CHOICES.items():
        kind = ipywidgets.SelectionSlider if len(choices) > 5 else ipywidgets.Dropdown
        value = getattr(training, name)
        made[name] = kind(
            options=choices, value=value, description=LABELS[name], style=_STYLE, layout=_LAYOUT
        )
    made["checkpointing"] = ipywidgets.Checkbox(
        value=training.checkpointing,
        description="activation checkpointing",
        indent=False,
        layout=_LAYOUT,
    )
    return made

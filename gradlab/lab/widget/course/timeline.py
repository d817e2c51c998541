"""Timeline: who computes what, and when, in one update of data parallelism or of a pipeline.

What is left out, so that the formulas hold exactly: differences between devices, the optimizer's
own time, the time to send activations between stages, the latency of an all-reduce, and its overlap
with the backward pass.
"""

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from gradlab import _checks
from gradlab.lab.widget.course import schedules, timeline_drawing
from gradlab.lab.widget.course.schedules import NAMES, PIPELINES, Schedule
from gradlab.lab.widget.course.timeline_drawing import Drawing
from gradlab.lab.widget.page import Page, close, live_beside_cells
from gradlab.lab.widget.saved_page import image, live, standalone

FORWARD = 0.1  # seconds of a micro-batch's forward pass through the whole network
MOST = {"devices": 16, "microbatches": 64, "megabytes": 10_000, "gigabits": 1000}

_LABELS = {
    "schedule": ("schedule", "How the devices share the work of one update."),
    "devices": ("devices p", "Number of replicas of the model, or of stages of the pipeline."),
    "microbatches": (
        "micro-batches m",
        "Micro-batches per update: of each replica (k), or of the pipeline.",
    ),
    "backward": ("backward / forward", "Time of a backward pass, relative to the forward pass."),
    "megabytes": ("gradient (MB)", "Size of the whole gradient. Only data parallelism sends it."),
    "gigabits": (
        "bandwidth (Gbit/s)",
        "Bandwidth of each device. Only data parallelism uses it here.",
    ),
}
_CSS = """<style>
.gradlab-timeline :focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.gradlab-timeline .widget-html-content { line-height: 1.5; }
</style>"""


class Timeline:
    """An interactive timeline of one update: sliders for the devices, micro-batches, times,
    gradient and bandwidth.

    A micro-batch's forward pass through the whole network takes 0.1 s on one device. A stage of a
    pipeline has 1/p of the layers, and takes 1/p of the time. An all-reduce is a ring.

    Args:
        schedule: "each" (data parallel, an all-reduce for each micro-batch), "window" (data
            parallel, one all-reduce for each window), "gpipe" or "1f1b".
        devices: p, at most 16.
        microbatches: m, at most 64: of each replica (k), or of the pipeline.
        backward: the time of a backward pass, relative to the forward pass, from 0.5 to 4.
        megabytes: the size of the gradient in MB, at most 10,000.
        gigabits: the bandwidth of each device in Gbit/s, at most 1,000.

    Attributes:
        controls: the widgets by the names of the arguments.
        view: all widgets, in one box.

    Raises:
        ValueError: an argument is not allowed.

    Example:
        >>> print(Timeline("1f1b", devices=4, microbatches=8).words)
        Pipeline, 1F1B: p = 4, m = 8.
        Time of an update: 0.825 s for 8 micro-batches (9.7 a second).
        Time in which devices compute nothing: 27.3%. Formula: (p - 1) / (m + p - 1): 27.3%.
        Activations held at most: 4 micro-batches, of 1/4 of the layers (device 1).
    """

    def __init__(
        self,
        schedule: str = "window",
        devices: int = 4,
        microbatches: int = 4,
        backward: float = 2.0,
        megabytes: int = 400,
        gigabits: int = 10,
    ):
        values = {
            "schedule": schedule,
            "devices": devices,
            "microbatches": microbatches,
            "backward": backward,
            "megabytes": megabytes,
            "gigabits": gigabits,
        }
        _check(values)
        self.controls = _controls(values)
        self._drawing = widgets.HTML(layout={"max_width": "100%"})
        self._words = widgets.HTML()
        for control in self.controls.values():
            control.observe(self._show, names="value")
        self._show()
        sliders = widgets.GridBox(
            list(self.controls.values()),
            layout={
                "grid_template_columns": "repeat(auto-fit, minmax(310px, 1fr))",
                "grid_gap": "2px 12px",
            },
        )
        parts = [
            widgets.HTML(_CSS),
            Page(layout={"display": "none"}),
            sliders,
            self._drawing,
            self._words,
        ]
        self.view = widgets.VBox(parts, layout={"max_width": "800px", "overflow": "hidden"})
        live_beside_cells(self.view)
        self.view.add_class("gradlab-lab").add_class("gradlab-timeline")

    @property
    def schedule(self) -> Schedule:
        """The schedule that the controls describe."""
        return schedules.schedule(**self._times())

    @property
    def words(self) -> str:
        """What the timeline says below the drawing, as text."""
        return describe(self.schedule, *schedules.expected_idle_share(**self._times()))

    def close(self) -> None:
        """Remove all widgets from the page and from the kernel."""
        close(self.view)

    def _times(self) -> dict[str, Any]:
        """The arguments of `schedules.schedule`."""
        values = {name: control.value for name, control in self.controls.items()}
        name = values["schedule"]
        devices = values["devices"]
        forward = FORWARD / devices if name in PIPELINES else FORWARD
        sent = 0.0
        if name not in PIPELINES:
            sent = schedules.ring_seconds(
                devices, 1e6 * values["megabytes"], 1e9 / 8 * values["gigabits"]
            )
        times = {"forward": forward, "backward": values["backward"] * forward, "all_reduce": sent}
        return {"name": name, "devices": devices, "microbatches": values["microbatches"]} | times

    def _show(self, change: Any = None) -> None:
        """Draw the schedule of the controls, and enable the controls that it uses."""
        for name in ("megabytes", "gigabits"):
            self.controls[name].disabled = self.controls["schedule"].value in PIPELINES
        self._drawing.value = _draw({"": self.schedule})
        self._words.value = f'<div role="status">{_lines(self.words)}</div>'

    def __repr__(self) -> str:
        return f"Timeline: {self.words}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widgets, and for pages without a kernel the drawing and the words."""
        drawing = _draw({"": self.schedule})
        picture = f"<div>{image(drawing)}<p>{_lines(self.words)}</p></div>"
        still = {
            "text/html": live("timeline", "showTimeline", picture, facts(), self.controls),
            "image/svg+xml": standalone(drawing),
            "text/plain": f"{self!r}\n{orders(self.schedule)}",
        }
        return dict(self.view._repr_mimebundle_(**kwargs)) | still


def compare(timelines: Mapping[str, Timeline]) -> Drawing:
    """Draw timelines below each other, on one scale of time, as a figure without controls.

    Args:
        timelines: the timelines, by the line of text above each.
    """
    made = {title: timeline.schedule for title, timeline in timelines.items()}
    words = "\n".join(
        f"{title}: {each.seconds:.3g} s. Devices compute nothing for {100 * each.idle_share:.1f}% "
        "of the time.\n"
        f"{orders(each)}"
        for title, each in made.items()
    )
    return Drawing(_draw(made), words)


def facts() -> dict[str, Any]:
    """What timeline.js needs to compute and to draw as this module does."""
    return {
        "names": NAMES,
        "pipelines": PIPELINES,
        "forward": FORWARD,
        **timeline_drawing.facts(),
    }


def describe(update: Schedule, formula: str, value: float) -> str:
    """The numbers of a schedule in sentences: its time, its idle share beside the formula's, and
    its activations.

    Args:
        update: the schedule.
        formula: the formula of the idle share.
        value: the formula's value.
    """
    p = update.devices
    m = update.microbatches
    pipeline = update.name in PIPELINES
    total = m if pipeline else p * m
    held = max(range(p), key=update.held)  # the first device that holds the most
    layers = "all layers" if not pipeline or p == 1 else f"1/{p} of the layers"
    where = f"device {held + 1}" if pipeline else "each device"
    return (
        f"{NAMES[update.name][0].upper()}{NAMES[update.name][1:]}: p = {p}, m = {m}.\n"
        f"Time of an update: {update.seconds:.3g} s for {_count(total)} "
        f"({total / update.seconds:.1f} a second).\n"
        f"Time in which devices compute nothing: {100 * update.idle_share:.1f}%. Formula: "
        f"{formula}: {100 * value:.1f}%.\n"
        f"Activations held at most: {_count(update.held(held))}, of {layers} ({where})."
    )


def orders(update: Schedule) -> str:
    """What each device does, in order: F3 and B3 are the passes of micro-batch 3, and A is an
    all-reduce."""
    letters = {"forward": "F{}", "backward": "B{}", "all-reduce": "A"}
    return "\n".join(
        f"device {device + 1}: "
        + " ".join(
            letters[task.step.kind].format(task.step.microbatch) for task in update.of(device)
        )
        for device in range(update.devices)
    )


def _draw(made: Mapping[str, Schedule]) -> str:
    labels = [
        f"{title or NAMES[each.name]}, {each.devices} devices" for title, each in made.items()
    ]
    return timeline_drawing.draw(made, f"Timeline of one update: {'; '.join(labels)}.")


def _controls(values: dict[str, Any]) -> dict[str, widgets.ValueWidget]:
    made = {
        "schedule": widgets.Dropdown(options=[(words, name) for name, words in NAMES.items()]),
        "devices": widgets.IntSlider(min=1, max=max(8, values["devices"])),
        "microbatches": widgets.IntSlider(min=1, max=max(32, values["microbatches"])),
        "backward": widgets.FloatSlider(min=0.5, max=4, step=0.5, readout_format=".1f"),
        "megabytes": widgets.IntSlider(
            min=min(10, values["megabytes"]), max=max(2000, values["megabytes"]), step=10
        ),
        "gigabits": widgets.IntSlider(min=1, max=max(100, values["gigabits"])),
    }
    for name, widget in made.items():
        widget.value = values[name]
        widget.description, widget.tooltip = _LABELS[name]
        widget.style = {"description_width": "130px"}
        widget.layout = {"width": "auto"}
        widget.add_class(f"gradlab-{name}")
    # A row of its own
    made["schedule"].layout = {"width": "auto", "max_width": "480px", "grid_column": "1 / -1"}
    return made


def _check(values: dict[str, Any]) -> None:
    _checks.one_of("schedule", values["schedule"], NAMES)
    for name, most in MOST.items():
        _checks.positive_integer(name, values[name])
        if values[name] > most:
            raise ValueError(
                f"{name} must be at most {most} in a timeline. Received: {values[name]}"
            )
    _checks.positive_number("backward", values["backward"])
    if not 0.5 <= values["backward"] <= 4:
        raise ValueError(f"backward must be from 0.5 to 4. Received: {values['backward']!r}")


def _count(number: int) -> str:
    return f"{number} micro-batch{'es' * (number > 1)}"


def _lines(words: str) -> str:
    return html.escape(words).replace("\n", "<br>")

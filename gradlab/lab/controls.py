"""The lab's controls: one widget a field of the experiment."""

import math
from dataclasses import replace

import ipywidgets as widgets

from gradlab import runtime
from gradlab.lab import methods
from gradlab.lab.experiment import Experiment


def build(e: Experiment) -> dict[str, widgets.ValueWidget]:
    """A control for each field that can be changed, by the field's name, set to the experiment's values.

    Each carries the CSS class "gradlab-" and its name.
    """
    controls = {
        "accumulation_steps": _control(
            widgets.IntSlider,
            "accumulation_steps k",
            "Micro-batches whose gradients are averaged for one update.",
            value=e.accumulation_steps,
            min=1,
            max=max(50, e.accumulation_steps),
        ),
        "microbatch_size": _control(
            widgets.IntSlider,
            "microbatch_size b",
            "Examples of one forward and backward pass: what must fit in memory.",
            value=e.microbatch_size,
            min=1,
            max=max(100, e.microbatch_size),
        ),
        "learning_rate": _control(
            widgets.FloatLogSlider,
            "learning rate",
            "How far an update goes.",
            value=e.learning_rate,
            min=min(-5, math.log10(e.learning_rate)),
            max=max(0, math.log10(e.learning_rate)),
            step=0.1,
            readout_format=".1e",
        ),
        "method": _control(
            widgets.Dropdown, "method", "How the update is made.", options=list(methods.METHODS), value=e.method
        ),
        "towers": _control(
            widgets.IntSlider,
            "towers T",
            "Copies of the model, each on its device; gradlab.setup(towers=...) makes more devices.",
            value=e.towers,
            min=1,
            max=max(2, _devices()),
        ),
    }
    for name, control in controls.items():
        control.add_class(f"gradlab-{name}")

    def allow_towers(change=None):
        controls["towers"].disabled = _devices() == 1 or not methods.takes_towers(controls["method"].value)

    controls["method"].observe(allow_towers, names="value")
    allow_towers()
    return controls


def read(controls: dict[str, widgets.ValueWidget], experiment: Experiment) -> Experiment:
    """The experiment with the controls' values; towers count only where the method can use them.

    Raises:
        ValueError: the values do not go together.
    """
    values = {name: control.value for name, control in controls.items()}
    if not methods.takes_towers(values["method"]):
        values["towers"] = 1
    return replace(experiment, **values)


def _devices() -> int:
    chosen = runtime.current()
    return 1 if chosen is None else len(chosen.devices)


def _control(kind, description: str, tooltip: str, **arguments):
    return kind(
        description=description,
        tooltip=tooltip,
        style={"description_width": "150px"},
        layout={"width": "410px"},
        **arguments,
    )

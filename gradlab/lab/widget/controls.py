"""The lab's controls: one widget a field of the experiment, and what a change of it does written beside it."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import ipywidgets as widgets

from gradlab import runtime
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment

BUDGETS = {"updates": 300, "examples": 30_000, "seconds": 1.0}  # and what a change of kind proposes

# name: what it is for, in a sentence
TOOLTIPS = {
    "accumulation_steps": "Micro-batches whose gradients are averaged for one update.",
    "microbatch_size": "Examples of one forward and backward pass: what must fit in memory.",
    "learning_rate": "How far an update goes.",
    "optimizer": "What is done with the averaged gradient.",
    "method": "How the update is made; every method makes the same one.",
    "towers": "Copies of the model, each on its device; gradlab.setup(towers=...) makes more devices.",
    "model": "The network: dense is quick, lenet is the published one.",
    "dataset": "The images; mnist is here, the others are downloaded the first time.",
    "seeds": "How many trainings, which differ in first weights, order and masks: the bands are over them.",
    "budget_kind": "What the length of a run is counted in.",
    "budget": "How long a run is, in what is chosen above.",
}


@dataclass(frozen=True)
class Controls:
    """The widgets by their names, and all of them with their words, as one box."""

    widgets: dict[str, widgets.ValueWidget]
    view: widgets.Widget

    def read(self, experiment: Experiment, first_seed: int) -> Experiment:
        """The experiment with the controls' values; towers count only where the method can use them.

        Raises:
            ValueError: the values do not go together.
        """
        values = {name: widget.value for name, widget in self.widgets.items()}
        if not methods.takes_towers(values["method"]):
            values["towers"] = 1
        kind, budget = values.pop("budget_kind"), values.pop("budget")
        values |= dict.fromkeys(BUDGETS) | {kind: budget if kind == "seconds" else round(budget)}
        values["seeds"] = tuple(range(first_seed, first_seed + values["seeds"]))
        return replace(experiment, **values)

    def write(self, experiment: Experiment) -> None:
        """Sets the controls to an experiment."""
        for name, value in _values(experiment).items():
            widget = self.widgets[name]
            if isinstance(widget, widgets.IntSlider) and value > widget.max:
                widget.max = value  # it would cut the value off, and say nothing
            widget.value = value


def build(experiment: Experiment, moved: Callable[[], None], hide: Collection, lock: Collection) -> Controls:
    """A control for each field that can be changed, set to the experiment's values.

    Args:
        experiment: where the controls start.
        moved: called after a change.
        hide: the names of those not to show.
        lock: the names of those that cannot be changed.

    Each carries the CSS class "gradlab-" and its name.
    """
    e, at = experiment, _values(experiment)
    made: dict[str, widgets.ValueWidget] = {
        "accumulation_steps": widgets.IntSlider(min=1, max=max(50, e.accumulation_steps)),
        "microbatch_size": widgets.IntSlider(min=1, max=max(100, e.microbatch_size)),
        "learning_rate": widgets.FloatLogSlider(
            min=min(-5, math.log10(e.learning_rate)),
            max=max(0, math.log10(e.learning_rate)),
            step=0.1,
            readout_format=".1e",
        ),
        "seeds": widgets.IntSlider(min=1, max=max(20, at["seeds"])),
        "budget_kind": widgets.Dropdown(options=list(BUDGETS)),
        "budget": widgets.BoundedFloatText(min=0.1, max=1e9, step=50, continuous_update=False),
        "optimizer": widgets.Dropdown(options=list(optimizers.OPTIMIZERS)),
        "method": widgets.Dropdown(options=list(methods.METHODS)),
        "towers": widgets.IntSlider(min=1, max=max(2, _devices())),
        "model": widgets.Dropdown(options=list(models.MODELS)),
        "dataset": widgets.Dropdown(options=list(datasets.TRAINING_EXAMPLES)),
    }
    letters = {"accumulation_steps": " k", "microbatch_size": " b", "towers": " T", "budget_kind": ""}
    rows = []
    for name, widget in made.items():
        widget.value = at[name]
        widget.description = {"budget_kind": "budget in"}.get(
            name, name.replace("learning_", "learning ")
        ) + letters.get(name, "")
        widget.tooltip = TOOLTIPS[name]
        widget.style = {"description_width": "160px"}
        widget.layout = {"width": "370px"}
        widget.disabled = name in lock
        widget.add_class(f"gradlab-{name}")
        if name not in hide:
            rows.append(widgets.HBox([widget, widgets.HTML(_STARTS_ANEW)], layout={"align_items": "center"}))

    def follow(change=None):
        """Towers are for the methods and devices that have them; a kind of budget brings its number."""
        takes = methods.takes_towers(made["method"].value) and _devices() > 1
        made["towers"].disabled = "towers" in lock or not takes

    def propose(change):
        made["budget"].value = BUDGETS[change["new"]]

    made["method"].observe(follow, names="value")
    made["budget_kind"].observe(propose, names="value")
    follow()
    for widget in made.values():
        widget.observe(lambda change: moved(), names="value")
    return Controls(made, widgets.Box(rows, layout={"flex_flow": "row wrap"}))


_STARTS_ANEW = '<span style="opacity: 0.65; font-size: 11px">starts anew</span>'
GOES_ON = '<span style="opacity: 0.65; font-size: 11px">the run goes on</span>'


def _values(e: Experiment) -> dict:
    kind = next(kind for kind in BUDGETS if getattr(e, kind) is not None)
    fields = (
        "accumulation_steps",
        "microbatch_size",
        "learning_rate",
        "optimizer",
        "method",
        "towers",
        "model",
        "dataset",
    )
    rest = {"budget_kind": kind, "budget": float(getattr(e, kind)), "seeds": len(e.seed_numbers)}
    return {name: getattr(e, name) for name in fields} | rest


def _devices() -> int:
    chosen = runtime.current()
    return 1 if chosen is None else len(chosen.devices)

"""The lab's controls: one widget for each field of the experiment, with the effect of a change
written beside it."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ipywidgets

from gradlab import runtime
from gradlab.lab.experiments import choices, datasets
from gradlab.lab.experiments.experiment import Experiment

# Each unit with the length that choosing it proposes
BUDGETS = {"updates": 300, "examples": 30_000, "seconds": 1.0}

# A page can send any number. Each seed takes memory before anything is trained, and each update
# keeps some.
MOST_SEEDS = 1000
LIMITS = {"updates": (1, 1_000_000), "examples": (1, 1_000_000_000), "seconds": (0.1, 86_400)}

TOOLTIPS = {
    "accumulation_steps": "Number of micro-batches whose gradients are averaged for one update.",
    "microbatch_size": "Number of examples in one forward and backward pass; this is what must "
    "fit in memory.",
    "learning_rate": "Step size of the optimizer.",
    "optimizer": "Rule by which the averaged gradient changes the weights.",
    "method": "How gradients are accumulated; every method computes the same update.",
    "towers": "Number of copies of the model, one per device; gradlab.setup(towers=...) creates "
    "more devices.",
    "model": "The network: dense is fast, lenet is the network of the published experiment.",
    "dataset": "The images: mnist is included, the others are downloaded when first used.",
    "seeds": "Number of training runs with different weights, data order and dropout masks; bands "
    "show their spread.",
    "budget_kind": "Unit in which the length of a run is given.",
    "budget": "Length of a run, in the unit of the control before this one.",
}

# Those on top; the others wait behind a button
MAIN = ("accumulation_steps", "microbatch_size", "learning_rate")
_LABELS = {
    "accumulation_steps": "k micro-batches",
    "microbatch_size": "b examples",
    "learning_rate": "learning rate",
    "towers": "towers T",
    "budget_kind": "budget in",
}


@dataclass(frozen=True)
class Controls:
    """The lab's controls.

    Attributes:
        widgets: the widgets by name, each with the CSS class "gradlab-" followed by its name.
        main: those that are always shown, without hidden ones.
        others: all others, without hidden ones.
    """

    widgets: dict[str, ipywidgets.ValueWidget]
    main: list[ipywidgets.Widget]
    others: list[ipywidgets.Widget]

    def read(self, experiment: Experiment, first_seed: int) -> Experiment:
        """The experiment that the controls describe. Towers count only for methods that use them.

        Args:
            experiment: provides the fields that have no control.
            first_seed: the first of the seeds.

        Raises:
            ValueError: the values cannot be combined.
        """
        values = {name: widget.value for name, widget in self.widgets.items()}
        if not choices.takes_towers(values["method"]):
            values["towers"] = 1
        if not 1 <= values["seeds"] <= MOST_SEEDS:
            raise ValueError(
                f"seeds must be from 1 to {MOST_SEEDS} in a lab. Received: {values['seeds']}"
            )
        kind = values.pop("budget_kind")
        budget = values.pop("budget")
        least, most = LIMITS[kind]
        if not least <= budget <= most:
            raise ValueError(
                f"the budget must be from {least:,} to {most:,} {kind} in a lab. Received: "
                f"{budget:,.10g}"
            )
        values |= dict.fromkeys(BUDGETS) | {kind: budget if kind == "seconds" else round(budget)}
        values["seeds"] = tuple(range(first_seed, first_seed + values["seeds"]))
        return replace(experiment, **values)

    def write(self, experiment: Experiment) -> None:
        """Set the controls to the values of an experiment."""
        for name, value in _values(experiment).items():
            widget = self.widgets[name]
            if isinstance(widget, ipywidgets.IntSlider) and value > widget.max:
                widget.max = value  # the slider would silently cut the value off
            widget.value = value


def build(
    experiment: Experiment,
    changed: Callable[[], None],
    hide: Collection[str],
    lock: Collection[str],
) -> Controls:
    """A control for each field that can be changed, set to the experiment's values.

    Args:
        experiment: the initial values.
        changed: called after each change.
        hide: the names of the controls to hide.
        lock: the names of the controls that cannot be changed.
    """
    values = _values(experiment)
    # The page shows the lab once it has every model, and a layout is one: all controls share it
    layout = ipywidgets.Layout(width="auto")
    made = {}
    for name, control in _controls(experiment).items():
        made[name] = control(
            value=values[name],
            description=_LABELS.get(name, name),
            tooltip=f"{TOOLTIPS[name]} A change restarts the run.",
            style={"description_width": "initial" if name in MAIN else "70px"},
            layout=layout,
            disabled=name in lock,
        ).add_class(f"gradlab-{name}")

    def enable_towers(change=None):
        """Enable the towers only for methods that use them, and only if there are several
        devices."""
        useful = choices.takes_towers(made["method"].value) and _devices() > 1
        made["towers"].disabled = "towers" in lock or not useful

    def propose_budget(change):
        """Set the length that goes with the chosen unit."""
        made["budget"].value = BUDGETS[change["new"]]

    made["method"].observe(enable_towers, names="value")
    made["budget_kind"].observe(propose_budget, names="value")
    enable_towers()
    for widget in made.values():
        widget.observe(lambda change: changed(), names="value")
    shown = {name: widget for name, widget in made.items() if name not in hide}
    main = [widget for name, widget in shown.items() if name in MAIN]
    return Controls(made, main, [widget for name, widget in shown.items() if name not in MAIN])


def summary(e: Experiment) -> str:
    """What the controls behind the button say, in a few words: "dense · mnist · adam · 5 seeds ·
    300 updates"."""
    kind = next(kind for kind in BUDGETS if getattr(e, kind) is not None)
    seeds = len(e.seed_numbers)
    return f"{e.model} · {e.dataset} · {e.optimizer} · {seeds} seed{'s' * (seeds > 1)} · {getattr(e, kind):g} {kind}"


def _controls(e: Experiment) -> dict[str, Callable[..., ipywidgets.ValueWidget]]:
    """Makes each control, in the order of the page, from what all have. Ranges are widened to
    include the experiment's values."""
    exponent = math.log10(e.learning_rate)

    def slider(*largest: int) -> Callable:
        return partial(ipywidgets.IntSlider, min=1, max=max(largest))

    def choice(options: Collection[str]) -> Callable:
        return partial(ipywidgets.Dropdown, options=list(options))

    return {
        "accumulation_steps": slider(50, e.accumulation_steps),
        "microbatch_size": slider(100, e.microbatch_size),
        "learning_rate": partial(
            ipywidgets.FloatLogSlider,
            min=min(-5, exponent),
            max=max(0, exponent),
            step=0.1,
            readout_format=".2g",
        ),
        "seeds": slider(20, len(e.seed_numbers)),
        "budget_kind": choice(BUDGETS),
        "budget": partial(ipywidgets.FloatText, step=50, continuous_update=False),
        "optimizer": choice(choices.OPTIMIZERS),
        "method": choice(choices.METHODS),
        "towers": slider(2, _devices(), e.towers),  # a cluster may have more devices
        "model": choice(choices.MODELS),
        "dataset": choice(datasets.TRAINING_EXAMPLES),
    }


def _values(e: Experiment) -> dict[str, Any]:
    """The values of the controls for an experiment."""
    kind = next(kind for kind in BUDGETS if getattr(e, kind) is not None)
    names = (
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
    return {name: getattr(e, name) for name in names} | rest


def _devices() -> int:
    chosen = runtime.current()
    return 1 if chosen is None else len(chosen.devices)

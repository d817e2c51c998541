"""The arguments of a lab: its default experiment, checks, and the names of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gradlab import _checks
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures.shown import labels
from gradlab.lab.widget import controls, layout

# A short run of a small network, so that the plots follow a slider while it is dragged.
DEFAULTS = {
    "model": "dense",
    "method": "microbatched",
    "seeds": 5,
    "updates": 300,
    "eval_every": 50,
}
OWN = ("seed", "hide", "lock", "rerun", "against", "executor")


def experiment(seed: int, preset: Mapping) -> Experiment:
    """The initial experiment of a lab.

    Args:
        seed: the first of the seeds.
        preset: fields of `Experiment`, where "seeds" is the number of seeds.

    Raises:
        ValueError: a name is not a field, or a value is not allowed.
    """
    known = [field.name for field in fields(Experiment)]
    for name in preset:
        if name not in known:
            raise ValueError(f"AccumulationLab takes {', '.join((*OWN, *known))}. Received: {name}")
    _checks.natural_number("seed", seed)
    _checks.positive_integer("seeds", preset.get("seeds", 1))
    chosen: dict[str, Any] = DEFAULTS | dict(preset)
    if preset.get("examples") is not None or preset.get("seconds") is not None:
        chosen["updates"] = preset.get("updates")
    chosen["seeds"] = tuple(range(seed, seed + chosen["seeds"]))
    return Experiment(**chosen)


def names(hide: Sequence[str], lock: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names to hide and the names to lock, as tuples; a single name may be given as a string.

    Raises:
        ValueError: a name does not exist, or names something that cannot be locked.
    """
    hide, lock = ((one,) if isinstance(one, str) else tuple(one) for one in (hide, lock))
    for each in hide:
        _checks.one_of("a name in hide", each, (*controls.TOOLTIPS, *layout.NAMES))
    for each in lock:
        _checks.one_of("a name in lock", each, controls.TOOLTIPS)
    return hide, lock


def name(run: Experiment, preset: Experiment) -> str:
    """The name of a run: k, b, and the fields that differ from the preset."""
    [label, _] = labels([run, preset])
    shape = f"k = {run.accumulation_steps}, b = {run.microbatch_size}"
    rest = [
        field
        for field in label.split(", ")
        if field[:4] not in ("k = ", "b = ") and field != preset.method
    ]
    return ", ".join([shape, *rest])

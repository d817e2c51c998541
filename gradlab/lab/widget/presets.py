"""What a lab begins with: the checks of its arguments, its default experiment, and the names of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from gradlab import _checks
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.figures import plots
from gradlab.lab.widget import controls, panel

# A short run of a small network: it answers while the hand is still on the slider.
DEFAULTS = {"model": "dense", "method": "microbatched", "seeds": 5, "updates": 300, "eval_every": 50}
OWN = ("seed", "hide", "lock", "rerun", "against")  # a lab's arguments beside the fields of its experiment


def experiment(seed: int, preset: Mapping) -> Experiment:
    """The experiment that a lab begins with.

    Args:
        seed: the first of its seeds.
        preset: fields of `Experiment`; seeds is how many.

    Raises:
        ValueError: a name that is no field, or a value that is not allowed.
    """
    known = [field.name for field in fields(Experiment)]
    for name in preset:
        if name not in known:
            raise ValueError(f"AccumulationLab takes {', '.join((*OWN, *known))}. Received: {name}")
    _checks.natural_number("seed", seed)
    _checks.positive_integer("seeds", preset.get("seeds", 1))
    chosen = DEFAULTS | dict(preset)
    if preset.get("examples") is not None or preset.get("seconds") is not None:
        chosen["updates"] = preset.get("updates")
    chosen["seeds"] = tuple(range(seed, seed + chosen["seeds"]))
    return Experiment(**chosen)


def names(hide: Sequence[str], lock: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to hide and what to lock, after a check that there are such things."""
    hide, lock = ((one,) if isinstance(one, str) else tuple(one) for one in (hide, lock))
    for each in hide:
        _checks.one_of("a name in hide", each, (*controls.TOOLTIPS, *panel.NAMES))
    for each in lock:
        _checks.one_of("a name in lock", each, controls.TOOLTIPS)
    return hide, lock


def name(run: Experiment, preset: Experiment) -> str:
    """A run's name: k and b, and what else differs from the preset."""
    [label, _] = plots.labels([run, preset])
    shape = f"k = {run.accumulation_steps}, b = {run.microbatch_size}"
    rest = [part for part in label.split(", ") if part[:4] not in ("k = ", "b = ") and part != preset.method]
    return ", ".join([shape, *rest])

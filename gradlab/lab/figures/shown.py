"""What the page of a lab and its figures both need, without Matplotlib: importing that takes longer
than the page takes to appear."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import toy
from gradlab.lab.figures.curves import Point

# in the order in which the lab shows them
VIEWS = ("toy", "losses", "noise", "accuracy", "scale", "cost")
X_AXES = {
    "updates": "updates",
    "examples": "training examples seen",
    "seconds": "training time (s)",
}


@dataclass(frozen=True)
class Shown:
    """What the lab shows.

    Attributes:
        experiment: the experiment of the current run or, without one, of the controls.
        name: the name of the current run.
        result: the result of the current run so far, or None.
        window: the losses of the micro-batches shown so far, if a window is shown micro-batch by
            micro-batch.
        window_at: the number of updates before that window.
        pinned: (name, result) of the pinned runs.
        points: the points of earlier runs.
        against: the horizontal axis of the accuracy: "updates", "examples" or "seconds".
        start: the weights at which the toy starts.
    """

    experiment: Experiment
    name: str
    result: Result | None = None
    window: np.ndarray = field(default_factory=lambda: np.zeros(0))
    window_at: int = 0
    pinned: Sequence[tuple[str, Result]] = ()
    points: Sequence[Point] = ()
    against: str = "updates"
    start: Sequence[float] = tuple(toy.START)

    @property
    def steps(self) -> int:
        """The micro-batches of a window, on all towers."""
        return self.experiment.towers * self.experiment.accumulation_steps

    @property
    def now(self) -> list[Point]:
        """The point of the current run, if there is one."""
        return [] if self.result is None else [Point.of(self.result)]


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """A label for each experiment, made of the fields in which the experiments differ.

    >>> labels([Experiment(accumulation_steps=5), Experiment(accumulation_steps=1, microbatch_size=100)])
    ['k = 5, b = 20', 'k = 1, b = 100']
    """
    short = {"accumulation_steps": "k", "microbatch_size": "b", "towers": "T"}
    values = {f.name: [getattr(e, f.name) for e in experiments] for f in fields(Experiment)}
    order = ["method", "accumulation_steps", "microbatch_size"]
    names = [*order, *(name for name in values if name not in (*order, "eval_every", "seeds"))]
    differing = [name for name in names if len(set(values[name])) > 1] or ["method"]

    def spell(name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        number = f"{value:.3g}" if isinstance(value, float) else value
        return f"{short.get(name, name.replace('_', ' '))} = {number}"

    return [
        # Of the budgets, all but one are None
        ", ".join(spell(name, values[name][i]) for name in differing if values[name][i] is not None)
        for i in range(len(experiments))
    ]

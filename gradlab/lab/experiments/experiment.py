"""The description of an experiment: what to train and how. Checked when it is made; converts to and
from JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gradlab import _checks
from gradlab.lab.experiments import choices, datasets

UPDATES = 1000  # the default budget


@dataclass(frozen=True)
class Experiment:
    """What to train and how. All fields are checked when the experiment is made.

    Attributes:
        dataset: "mnist", "fashion_mnist" or "cifar10".
        model: "lenet", "dense" or "vgg".
        method: how an update is computed: "large_batch", "towers", "placeholders", "variables" or
            "microbatched".
        microbatch_size: b, the examples of one forward and backward pass.
        accumulation_steps: k, the micro-batches of one update (on each tower).
        towers: T, the copies of the computation; more than 1 only for "towers", "placeholders" and
            "variables".
        updates: the budget as a number of optimizer steps. An experiment has one budget; the
            default is 1000 updates.
        examples: the budget as a number of training examples. An example counts each time it is
            used. The last window is cut so that the budget is met exactly.
        seconds: the budget as a training time. Measuring the test accuracy does not count.
        seeds: the number of trainings, with the seeds 0, 1, 2 and so on; or the seeds themselves,
            such as (3, 5).
        optimizer: "sgd", "momentum", "adam" or "adamw".
        learning_rate: the learning rate of every update.
        eval_every: the test accuracy is measured each time this number of updates has been made,
            and after the last update. None: ten times, evenly distributed over the budget, and
            after the last update.

    Example:
        >>> Experiment(microbatch_size=20, accumulation_steps=5).effective_batch
        100
        >>> Experiment.from_json(Experiment(seeds=3).to_json()) == Experiment(seeds=(0, 1, 2))
        True
        >>> Experiment(microbatch_size=0)
        Traceback (most recent call last):
        ValueError: microbatch_size must be a positive integer. Received: 0
    """

    dataset: str = "mnist"
    model: str = "lenet"
    method: str = "variables"
    microbatch_size: int = 20
    accumulation_steps: int = 5
    towers: int = 1
    updates: int | None = None
    examples: int | None = None
    seconds: float | None = None
    seeds: int | tuple[int, ...] = 10
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    eval_every: int | None = None

    def __post_init__(self) -> None:
        _checks.one_of("dataset", self.dataset, datasets.TRAINING_EXAMPLES)
        _checks.one_of("model", self.model, choices.MODELS)
        _checks.one_of("method", self.method, choices.METHODS)
        _checks.one_of("optimizer", self.optimizer, choices.OPTIMIZERS)
        for name in ("microbatch_size", "accumulation_steps", "towers"):
            _checks.positive_integer(name, getattr(self, name))
        if self.eval_every is not None:
            _checks.positive_integer("eval_every", self.eval_every, otherwise="None or ")
        _checks.positive_number("learning_rate", self.learning_rate)
        object.__setattr__(self, "learning_rate", float(self.learning_rate))
        choices.check_towers(self.method, self.towers)
        self._check_budget()
        object.__setattr__(self, "seeds", _normal_seeds(self.seeds))
        examples = datasets.TRAINING_EXAMPLES[self.dataset]
        if self.effective_batch > examples:
            raise ValueError(
                f"towers * accumulation_steps * microbatch_size must be at most the {examples} "
                f"training examples of {self.dataset}. Received: {self.towers} * "
                f"{self.accumulation_steps} * {self.microbatch_size} = {self.effective_batch}"
            )

    def _check_budget(self) -> None:
        budgets = {name: getattr(self, name) for name in ("updates", "examples", "seconds")}
        given = {name: value for name, value in budgets.items() if value is not None}
        if len(given) > 1:
            received = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(
                "an experiment must have one budget: updates, examples or seconds. Received: "
                f"{received}"
            )
        if not given:
            object.__setattr__(self, "updates", UPDATES)
        for name, value in given.items():
            (_checks.positive_number if name == "seconds" else _checks.positive_integer)(
                name, value
            )

    @property
    def effective_batch(self) -> int:
        """The effective batch B = T * k * b: the number of examples in one update."""
        return self.towers * self.accumulation_steps * self.microbatch_size

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds as a tuple, also when `seeds` is a number."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def of_seeds(self, *seeds: int) -> "Experiment":
        """Return the same experiment with these seeds."""
        return replace(self, seeds=seeds)

    def to_json(self) -> str:
        """Return the fields as a JSON object, in the order of their definition."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """Make the experiment that a JSON object describes. Missing fields have their default
        values.

        Raises:
            ValueError: the text is not a JSON object, a field is unknown, or a value is invalid.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"an experiment must be a JSON object ({error}). Received: {_short(text)}"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"an experiment must be a JSON object. Received: {_short(text)}")
        return cls.from_fields(values)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "Experiment":
        """Make the experiment with these fields.

        Raises:
            ValueError: a field is unknown, or a value is invalid.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            _checks.one_of("an experiment's field", name, known)
        return cls(**values)


def _normal_seeds(seeds: Any) -> int | tuple[int, ...]:
    """Replace (0, 1, 2) by 3, so that experiments with the same seeds compare equal."""
    if isinstance(seeds, (list, tuple)):
        for seed in seeds:
            _checks.natural_number("a seed", seed)
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(
                "seeds must be the number of seeds, or at least one seed, all different. "
                f"Received: {seeds!r}"
            )
        seeds = tuple(int(seed) for seed in seeds)
        return len(seeds) if seeds == tuple(range(len(seeds))) else seeds
    _checks.positive_integer("seeds", seeds, otherwise="different integers of 0 or more, or ")
    return int(seeds)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

"""An experiment: what to train and how, checked as a whole, and the same in JSON."""

import json
from dataclasses import asdict, dataclass, fields, replace

from gradlab import _checks
from gradlab.lab.experiments import datasets, methods, models, optimizers

UPDATES = 1000  # the budget of an experiment that is given none


@dataclass(frozen=True)
class Experiment:
    """What to train and how. Checked as a whole when it is made.

    Attributes:
        dataset: "mnist", "fashion_mnist" or "cifar10".
        model: "lenet", "dense" or "vgg".
        method: how an update is made: "large_batch", "towers", "placeholders", "variables" or "microbatched".
        microbatch_size: b, the examples of one forward and backward pass.
        accumulation_steps: k, the micro-batches of one update (on each tower).
        towers: T, copies of the computation; more than 1 only for "towers", "placeholders" and "variables".
        updates: a budget: how many optimizer steps. 1000 when no budget is given.
        examples: a budget instead: how many training examples, counted each time they are seen. The last window is
            cut to it.
        seconds: a budget instead: how long to train. The time of measuring the accuracy does not count.
        seeds: how many trainings, of the seeds 0, 1, 2...; or these seeds themselves, as in (3, 5).
        optimizer: "sgd", "momentum", "adam" or "adamw".
        learning_rate: of every update.
        eval_every: the test accuracy is measured after every so many updates, and after the last.

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
    eval_every: int = 100

    def __post_init__(self):
        _checks.one_of("dataset", self.dataset, datasets.TRAINING_EXAMPLES)
        _checks.one_of("model", self.model, models.MODELS)
        _checks.one_of("method", self.method, methods.METHODS)
        _checks.one_of("optimizer", self.optimizer, optimizers.OPTIMIZERS)
        for name in ("microbatch_size", "accumulation_steps", "towers", "eval_every"):
            _checks.positive_integer(name, getattr(self, name))
        _checks.positive_number("learning_rate", self.learning_rate)
        object.__setattr__(self, "learning_rate", float(self.learning_rate))
        methods.check_towers(self.method, self.towers)
        self._check_budget()
        object.__setattr__(self, "seeds", _normal_seeds(self.seeds))
        there = datasets.TRAINING_EXAMPLES[self.dataset]
        if self.effective_batch > there:
            raise ValueError(
                f"towers * accumulation_steps * microbatch_size must be at most the {there} training examples of "
                f"{self.dataset}. Received: {self.towers} * {self.accumulation_steps} * {self.microbatch_size} = "
                f"{self.effective_batch}"
            )

    def _check_budget(self) -> None:
        budgets = {name: getattr(self, name) for name in ("updates", "examples", "seconds")}
        given = {name: value for name, value in budgets.items() if value is not None}
        if len(given) > 1:
            received = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"an experiment has one budget: updates, examples or seconds. Received: {received}")
        if not given:
            object.__setattr__(self, "updates", UPDATES)
        for name, value in given.items():
            (_checks.positive_number if name == "seconds" else _checks.positive_integer)(name, value)

    @property
    def effective_batch(self) -> int:
        """B = T * k * b, the examples behind one update."""
        return self.towers * self.accumulation_steps * self.microbatch_size

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds themselves."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def of_seeds(self, *seeds: int) -> "Experiment":
        """The same experiment with these seeds."""
        return replace(self, seeds=seeds)

    def to_json(self) -> str:
        """The experiment as a JSON object: its fields, in order."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The experiment that a JSON object describes; what it leaves out has its default.

        Raises:
            ValueError: it is no JSON object, names a field that there is not, or a value is not allowed.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"an experiment must be a JSON object ({error}). Received: {_short(text)}") from None
        if not isinstance(values, dict):
            raise ValueError(f"an experiment must be a JSON object. Received: {_short(text)}")
        return cls.from_fields(values)

    @classmethod
    def from_fields(cls, values: dict) -> "Experiment":
        """The experiment with these fields, after a check that all of them are known."""
        known = [field.name for field in fields(cls)]
        for name in values:
            _checks.one_of("an experiment's field", name, known)
        return cls(**values)


def _normal_seeds(seeds) -> int | tuple[int, ...]:
    """Seeds in their one form: (0, 1, 2) is 3, so that equal experiments compare equal."""
    if isinstance(seeds, (list, tuple)):
        for seed in seeds:
            _checks.natural_number("a seed", seed)
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds must be a number of seeds, or different ones, at least one. Received: {seeds!r}")
        seeds = tuple(int(seed) for seed in seeds)
        return len(seeds) if seeds == tuple(range(len(seeds))) else seeds
    _checks.positive_integer("seeds", seeds, otherwise="different integers of 0 or more, or ")
    return int(seeds)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

"""The eight bugs of `BugLab`, and what its experiments can switch on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from gradlab import _checks
from gradlab.auditing.bugs import BUGS as KNOWN

OPTIMIZERS = ("SGD", "Adam")
STEPS = (1, 2, 4, 16)  # the values of k
MEASURES = ("weight", "memory")
SWITCHES = {
    "ragged": "ragged tail",
    "unequal": "unequal lengths",
    "clipping": "clipping at 3",
    "schedule": "falling rate",
    "normalization": "normalization",
}


@dataclass(frozen=True)
class Settings:
    """What an experiment switches on.

    Attributes:
        optimizer: "SGD" or "Adam".
        k: micro-batches of a full window: 1, 2, 4 or 16.
        ragged: whether the last window of each epoch is short, and its last micro-batch has one
            text.
        unequal: whether texts have different numbers of tokens.
        clipping: whether gradients above 3 are clipped.
        schedule: whether the learning rate falls to 0 during the training.
        normalization: whether inputs are normalized by the statistics of the batch.

    Raises:
        ValueError: a value is not allowed.
    """

    optimizer: str = "SGD"
    k: int = 4
    ragged: bool = False
    unequal: bool = False
    clipping: bool = False
    schedule: bool = False
    normalization: bool = False

    def __post_init__(self) -> None:
        _checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        if isinstance(self.k, bool) or self.k not in STEPS:
            raise ValueError(f"k must be one of {', '.join(map(str, STEPS))}. Received: {self.k!r}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False. Received: {getattr(self, name)!r}")

    def __str__(self) -> str:
        return ", ".join(
            [
                self.optimizer,
                f"k = {self.k}",
                *(SWITCHES[name] for name in SWITCHES if getattr(self, name)),
            ]
        )


class Bug(NamedTuple):
    """A bug.

    Attributes:
        name: what a player chooses.
        does: what the loop does, as a sentence.
        found: which experiment shows it, as a sentence.
        shown_by: the settings of such an experiment.
        rules: the fields of `gradlab.auditing.rules.LoopRules` that differ from those of a right
            loop, where the audit knows the bug.
    """

    name: str
    does: str
    found: str
    shown_by: Settings
    rules: dict[str, Any]


BUGS = {
    "sum": Bug(
        "1. sum instead of mean",
        "The loop adds the gradients of the micro-batches and does not divide by their number.",
        "SGD with k above 1 shows it from the first window on. With an even tail, Adam hides it.",
        Settings(),
        KNOWN["sum_for_mean"].variants[1],
    ),
    "tail_by_k": Bug(
        "2. tail divided by k",
        "The loop divides by k even if a window has fewer micro-batches.",
        "A ragged tail shows it: the step of the tail's window is too small.",
        Settings(ragged=True),
        KNOWN["divided_by_k"].variants[1],
    ),
    "tail_dropped": Bug(
        "3. tail dropped",
        "The loop forgets the micro-batches that do not fill a window at the end of an epoch.",
        "A ragged tail shows it: the weight does not change in the tail's window.",
        Settings(ragged=True),
        KNOWN["tail_dropped"].variants[0],
    ),
    "mean_of_means": Bug(
        "4. mean of means",
        "The loop weights each micro-batch by its texts and not by its tokens.",
        "Texts of unequal lengths show it, and nothing else does.",
        Settings(unequal=True),
        {},
    ),
    "clip_each": Bug(
        "5. clip per micro-batch",
        "The loop clips the gradient of each micro-batch and not their mean.",
        "Clipping shows it.",
        Settings(clipping=True),
        KNOWN["clipped_per_microbatch"].variants[0],
    ),
    "clocks": Bug(
        "6. clocks per micro-batch",
        "The learning-rate schedule and Adam count micro-batches and not updates.",
        "A falling learning rate shows it, and so does Adam, with k above 1.",
        Settings(schedule=True),
        KNOWN["schedule_per_microbatch"].variants[0]
        | KNOWN["bias_correction_per_microbatch"].variants[0],
    ),
    "batch_norm": Bug(
        "7. batch normalization",
        "The loop normalizes each micro-batch by its own mean and variance.",
        "Normalization shows it, with k above 1.",
        Settings(normalization=True),
        {},
    ),
    "in_flight": Bug(
        "8. several in flight",
        "The loop begins ten micro-batches before it finishes the first. Its gradients are right.",
        "Only the memory shows it, with k above 1.",
        Settings(),
        {},
    ),
}

EVERYTHING = Settings(ragged=True, unequal=True, clipping=True, schedule=True, normalization=True)

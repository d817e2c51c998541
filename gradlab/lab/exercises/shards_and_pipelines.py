"""Checkers for the exercises of notebook 15."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_unlike
from gradlab.lab.widget.course.schedules import PIPELINES, schedule
from gradlab.lab.widget.course.timeline import Timeline, compare
from gradlab.lab.widget.course.timeline_drawing import Drawing

# Of the timelines without names: schedule, devices and micro-batches.
_UNNAMED = {"A": ("1f1b", 3, 6), "B": ("gpipe", 4, 5), "C": ("1f1b", 4, 3)}


@exercise
def first_stage(answer: Any) -> None:
    """A function: (parameters, devices, memory) -> the first stage of ZeRO that fits, or None."""
    filled(answer(1000, 1, 10**9))
    for case, wanted in {
        (100_000_000, 8, 1_000_000_000): 1,
        (100_000_000, 8, 1_600_000_000): 0,
        (100_000_000, 8, 899_999_999): 2,
        (100_000_000, 8, 200_000_000): 3,
        (1000, 1, 16_000): 0,
        (1000, 4, 10_000): 1,
    }.items():
        _check_stage(answer, case, wanted)
    too_small = answer(100_000_000, 8, 199_999_999)
    require(
        too_small is None,
        f"200 MB a device are needed even in stage 3. With a byte less, {too_small!r} should be "
        "None",
    )


@exercise
def enough_microbatches(answer: Any) -> None:
    """A function: (stages, share) -> the fewest micro-batches whose bubble is at most this share."""
    for stages, share, right in (
        (4, 0.2, 12),
        (8, 0.1, 63),
        (4, 0.25, 9),
        (8, 0.15, 40),  # 39.67 would be enough
        (4, 0.9, 1),
        (1, 0.5, 1),
        (8, 0.3, 17),  # 16.33 would be enough, and rounds down
    ):
        _check_microbatches(answer, stages, share, right)


@exercise
def which_schedule(answer: Any) -> None:
    """A dictionary: for each of the unnamed timelines, its schedule and the most activations on
    device 1."""
    require(isinstance(answer, dict) and set(answer) == set(_UNNAMED), "answer for A, B and C")
    for letter, (name, devices, microbatches) in _UNNAMED.items():
        got = answer[letter]
        require(got is not ..., f"{letter} is still missing: put your answer in place of the dots")
        require(
            isinstance(got, tuple) and len(got) == 2,
            f'{letter}: answer a pair such as ("gpipe", 2)',
        )
        name_given = got[0].lower() if isinstance(got[0], str) else got[0]
        require(got[1] is not ..., f"{letter}: for how many micro-batches are activations held?")
        require(
            name_given in PIPELINES,
            f"{letter}: the schedule is one of {', '.join(map(repr, PIPELINES))}",
        )
        held = schedule(name, devices, microbatches).held(0)
        require(
            got[1] == held,
            f"{letter}: device 1 does not hold {got[1]}. Count its forward passes, less its "
            "backward passes that have ended, from left to right",
        )
        require(
            name_given == name,
            f"{letter}: the number is right, and the schedule is not. Device 1 can do the same in "
            "both: look at the devices below it. Do they wait with their first backward pass "
            "until they have done all forward passes?",
        )


def unnamed_timelines() -> Drawing:
    """The timelines of the exercise `which_schedule`, without their names."""
    return compare(
        {f"Timeline {letter}": Timeline(*arguments) for letter, arguments in _UNNAMED.items()}
    )


def _check_stage(answer: Callable, case: tuple[int, int, int], wanted: int) -> None:
    parameters, devices, memory = case
    got = answer(*case)
    copies = {"weights": 1, "gradients": 1, "Adam's averages": 2}
    sharded = ["Adam's averages", "gradients", "weights"]

    def needed(stage: int) -> float:
        return sum(
            4 * parameters * copies[name] / (devices if name in sharded[:stage] else 1)
            for name in copies
        )

    said = f"for {parameters:,} parameters, {devices} devices and {memory:,} bytes"
    require(got is not None, f"{said}: it fits. Stage {wanted} needs {needed(wanted):,.0f} bytes")
    filled(got)
    require(
        isinstance(got, int | np.integer) and 0 <= got <= 3,
        f"{said}: {got!r} is not a stage from 0 to 3",
    )
    require(
        got >= wanted,
        f"{said}: stage {got} needs {needed(int(got)):,.0f} bytes on each device. Every parameter "
        "has a weight, a gradient and two averages, of 4 bytes each",
    )
    require(
        got <= wanted,
        f"{said}: stage {got} fits, and stage {wanted} does, too: it needs {needed(wanted):,.0f} "
        "bytes. Stage 1 shards the averages only, stage 2 the gradients as well",
    )


def _check_microbatches(answer: Callable, p: int, share: float, right: int) -> None:
    case = f"with {p} stage{'s' * (p > 1)} and a share of {share:g}"
    got = filled(answer(p, share))
    is_number = isinstance(got, int | float | np.integer | np.floating)
    require(is_number, f"{case}: return one number. Received: {got!r:.80}")
    exact = (p - 1) * (1 - share) / share
    require(got > 0, f"{case}: without a micro-batch there is no update")
    if right > 1:
        relative = int(np.ceil((p - 1) / share - 1e-9))
        mistakes = {
            p * (1 - share) / share: "the last stage begins p - 1 forward passes late, not p",
            relative: "divide the waiting by the whole time of the update: (m + p - 1), not m",
        }
        require_unlike(got, {wrong: f"{case}: {hint}" for wrong, hint in mistakes.items()})
    require(
        got == int(got),
        f"{case}: {got} micro-batches cannot be computed: round up",
    )
    idle = (p - 1) / (got + p - 1)
    require(got >= right, f"{case}: {got:g} micro-batches leave {idle:.4g} of the time idle")
    hint = f"{case}: {got:g} are enough, and so are fewer"
    if np.isclose(exact, right, rtol=1e-9) and got == right + 1:
        hint += ": a rounding error lifts your number above a whole one before you round up"
    require(got == right, hint)

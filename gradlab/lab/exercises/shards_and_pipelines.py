"""Checkers for the exercises of notebook 15."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close
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
def bubble(answer: Any) -> None:
    """A function: (stages, micro-batches, forward, backward) -> the seconds of an update, and the
    idle share."""
    _check_bubble(answer, 4, 8, 0.01, 0.02)
    _check_bubble(answer, 4, 1, 0.1, 0.3)
    _check_bubble(answer, 8, 56, 1.0, 1.0)
    _check_bubble(answer, 1, 5, 1.0, 2.0)


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


def _check_bubble(answer: Callable, p: int, m: int, forward: float, backward: float) -> None:
    got = filled(answer(p, m, forward, backward))
    require(
        isinstance(got, tuple | list) and len(got) == 2,
        "return two numbers: the seconds, and the idle share",
    )
    case = f"with {p} stages, {m} micro-batches and {forward:g} s and {backward:g} s"
    seconds, share = (float(number) for number in got)
    both = forward + backward
    right = (p - 1) / (m + p - 1)
    hints = {
        m * both: "that is the time without any waiting: when does the last stage begin?",
        p * m * both: "the stages do not work one after the other: they overlap",
        (m + p - 1) * forward: "the backward passes take time, too",
        m * both + (p - 1) * forward: "the first stage waits for backward passes, too",
        (m + p) * both: "the last stage begins p - 1 forward passes late, not p",
        (m + 2 * (p - 1)) * both: "each stage waits for p - 1 forward and p - 1 backward passes in "
        "all: those before it and those after it",
        (m + p - 1) * both / p: "the seconds are already those of one stage: do not divide by the "
        "stages",
    }
    for wrong, hint in hints.items():
        require(
            not np.isclose(seconds, wrong) or np.isclose(wrong, (m + p - 1) * both),
            f"{case}: {hint}",
        )
    require_close(seconds, (m + p - 1) * both, f"{case}: the time of an update")
    require(
        not right or not np.isclose(share, 100 * right),
        "the share is a number from 0 to 1, not a percentage",
    )
    require(
        not right or not np.isclose(share, (p - 1) / m),
        f"{case}: {share:g} is the waiting relative to the computing. Divide by the whole time of "
        "the update",
    )
    require(
        not right or not np.isclose(share, 1 - right),
        f"{case}: {share:g} is the share that is used",
    )
    require_close(share, right, f"{case}: the idle share")

"""Schedules of data parallelism and of pipelines: which device computes which micro-batch, and
when.

A small event simulation: every device works through its own list of steps in order, and a step
starts as soon as its device is free and the steps that it needs have ended. With integers or
fractions as times, the results are exact.

Sources: Huang et al. 2019, GPipe, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473 (1F1B
with a flush after each update).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from gradlab import _checks

NAMES = {
    "each": "data parallel, an all-reduce for each micro-batch",
    "window": "data parallel, one all-reduce for each window",
    "gpipe": "pipeline, GPipe",
    "1f1b": "pipeline, 1F1B",
}
PIPELINES = ("gpipe", "1f1b")


class PipelineStep(NamedTuple):
    """What a device does: `kind` is "forward", "backward" or "all-reduce"; micro-batches count from
    1."""

    kind: str
    microbatch: int


class Task(NamedTuple):
    """A step of a device (devices count from 0) with its start and its end, in the unit of the
    times given."""

    device: int
    step: PipelineStep
    start: Any
    end: Any


@dataclass(frozen=True)
class Schedule:
    """One update on all devices.

    Attributes:
        name: a key of `NAMES`.
        devices: p.
        microbatches: m, the micro-batches that each device computes.
        tasks: what the devices do, each with its times.

    Example:
        >>> update = schedule("gpipe", devices=4, microbatches=4, forward=1, backward=2)
        >>> update.seconds, str(update.idle_share), update.held(0)
        (21, '3/7', 4)
    """

    name: str
    devices: int
    microbatches: int
    tasks: tuple[Task, ...]

    @property
    def seconds(self) -> Any:
        """The time of the update: the end of its last task."""
        return max(task.end for task in self.tasks)

    @property
    def idle_share(self) -> Any:
        """The share of the devices' time in which they compute nothing, all-reduces included, from
        0 to 1.

        It is a fraction if all times are integers or fractions.
        """
        computed = sum(
            task.end - task.start for task in self.tasks if task.step.kind != "all-reduce"
        )
        available = self.devices * self.seconds
        return 1 - (
            computed / available if isinstance(computed, float) else Fraction(computed) / available
        )

    def of(self, device: int) -> list[Task]:
        """The tasks of a device, in order."""
        return [task for task in self.tasks if task.device == device]

    def held(self, device: int) -> int:
        """The most micro-batches whose activations a device holds at a time: from their forward to
        their backward."""
        held = most = 0
        for task in self.of(device):
            held += task.step.kind == "forward"
            most = max(most, held)
            held -= task.step.kind == "backward"
        return most


def schedule(
    name: str,
    devices: int,
    microbatches: int,
    forward: Any = 1,
    backward: Any = 2,
    all_reduce: Any = 0,
) -> Schedule:
    """One update with equal devices.

    Args:
        name: a key of `NAMES`.
        devices: p: replicas of the whole model, or stages of the pipeline.
        microbatches: m: the micro-batches of each replica, or of the pipeline.
        forward: the time of a micro-batch's forward pass on one device.
        backward: the time of its backward pass.
        all_reduce: the time of an all-reduce; only used for data parallelism. 0: there is none.

    Raises:
        ValueError: an argument is not allowed.
    """
    _checks.one_of("name", name, NAMES)
    _checks.positive_integer("devices", devices)
    _checks.positive_integer("microbatches", microbatches)
    _checks.positive_number("forward", forward)
    _checks.positive_number("backward", backward)
    if all_reduce != 0:
        _checks.positive_number("all_reduce", all_reduce)
    times = {"forward": forward, "backward": backward, "all-reduce": all_reduce}
    orders = [
        _order(name, stage, devices, microbatches, bool(all_reduce)) for stage in range(devices)
    ]
    needs = _needs_in_pipeline if name in PIPELINES else _needs_of_replicas
    tasks = simulate(
        orders,
        lambda device, step: times[step.kind],
        lambda device, step: needs(device, step, devices),
    )
    return Schedule(name, devices, microbatches, tuple(tasks))


def simulate(
    orders: Sequence[Sequence[PipelineStep]],
    time: Callable[[int, PipelineStep], Any],
    needs: Callable[[int, PipelineStep], Sequence[tuple[int, PipelineStep]]],
) -> list[Task]:
    """Run every device's steps in its order, each as early as possible.

    Args:
        orders: the steps of each device.
        time: a function from a device and a step to the time that the step takes.
        needs: a function from a device and a step to the (device, step) pairs that must have ended
            before.

    Returns:
        All tasks, each device's own in its order.

    Raises:
        ValueError: some steps wait for each other, so that none of them can start.
    """
    ends: dict[tuple[int, PipelineStep], Any] = {}
    tasks: list[Task] = []
    done = [0] * len(orders)
    free = [0] * len(orders)
    while len(tasks) < sum(map(len, orders)):
        before = len(tasks)
        for device, order in enumerate(orders):
            for step in order[done[device] :]:
                needed = needs(device, step)
                if any(each not in ends for each in needed):
                    break
                start = max([free[device], *(ends[each] for each in needed)])
                free[device] = ends[device, step] = start + time(device, step)
                tasks.append(Task(device, step, start, free[device]))
                done[device] += 1
        if len(tasks) == before:
            waiting = [tuple(order[at]) for order, at in zip(orders, done) if at < len(order)]
            raise ValueError(
                "orders must have no steps that wait for each other. Received: waiting are "
                f"{waiting}"
            )
    return tasks


def ring_seconds(devices: int, gradient_bytes: float, bytes_per_second: float) -> float:
    """The time of an all-reduce in a ring: every device sends 2 (p - 1) / p times the gradient.
    Latency is left out.

    Source: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.

    Args:
        devices: p.
        gradient_bytes: the size of the gradient.
        bytes_per_second: what each device sends in a second.

    Example:
        >>> ring_seconds(8, 400e6, 1250e6)
        0.56
    """
    _checks.positive_integer("devices", devices)
    _checks.positive_number("gradient_bytes", gradient_bytes)
    _checks.positive_number("bytes_per_second", bytes_per_second)
    return 2 * (devices - 1) / devices * gradient_bytes / bytes_per_second


def expected_idle_share(
    name: str,
    devices: int,
    microbatches: int,
    forward: Any = 1,
    backward: Any = 2,
    all_reduce: Any = 0,
) -> tuple[str, float]:
    """The formula for the share of the time without computation, as text, and its value. Arguments:
    see `schedule`."""
    p = devices
    m = microbatches
    computed = forward + backward
    if name in PIPELINES:
        return "(p - 1) / (m + p - 1)", (p - 1) / (m + p - 1)
    meaning = f"with an all-reduce of a = {float(all_reduce):.3g} s"
    if name == "window":
        return f"a / (m (f + b) + a) {meaning}", all_reduce / (m * computed + all_reduce)
    return f"a / (f + b + a) {meaning}", all_reduce / (computed + all_reduce)


def _order(
    name: str, stage: int, devices: int, microbatches: int, reduces: bool
) -> list[PipelineStep]:
    """The steps of one device."""
    numbers = range(1, microbatches + 1)
    forward, backward, reduce = (
        {number: PipelineStep(kind, number) for number in numbers}
        for kind in ("forward", "backward", "all-reduce")
    )
    if name in PIPELINES:
        # The forward passes before the first backward pass: all in GPipe; in 1F1B as many as there
        # are stages from this one to the last. Each backward pass is then followed by one more
        # forward pass, as long as there are any.
        ahead = microbatches if name == "gpipe" else min(devices - stage, microbatches)
        order = [forward[number] for number in range(1, ahead + 1)]
        for number in numbers:
            order += [
                backward[number],
                *([forward[number + ahead]] if number + ahead <= microbatches else []),
            ]
        return order
    order = []
    for number in numbers:
        order += [forward[number], backward[number]]
        if reduces and (name == "each" or number == microbatches):
            order.append(reduce[number])
    return order


def _needs_in_pipeline(
    device: int, step: PipelineStep, devices: int
) -> list[tuple[int, PipelineStep]]:
    """A forward pass needs the stage before, a backward pass the stage after and the stage's own
    forward pass."""
    if step.kind == "forward":
        return [(device - 1, step)] if device else []
    own = (device, PipelineStep("forward", step.microbatch))
    return [own, *([(device + 1, step)] if device + 1 < devices else [])]


def _needs_of_replicas(
    device: int, step: PipelineStep, devices: int
) -> list[tuple[int, PipelineStep]]:
    """An all-reduce needs all replicas' backward passes."""
    if step.kind != "all-reduce":
        return []
    return [(each, PipelineStep("backward", step.microbatch)) for each in range(devices)]

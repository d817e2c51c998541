"""The memory that a training may take, and the micro-batch sizes that fit in it."""

import dataclasses
import math
from typing import NoReturn

import tensorflow as tf

from gradlab import runtime
from gradlab._batches import tensors_of
from gradlab.fit import keras_private as internals
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.replicas import replicas_here
from gradlab.fit.sizes.memory_plan import HELP, MEBIBYTE, MemoryPlan, plan_of, too_little

# What the least is, what helps, and what a training gets that takes more; for a loss over the whole
# batch and others.
OF_ONE = "a micro-batch of one example", HELP, "one example, with which memory runs out"
OF_WHOLE = (
    "a micro-batch of one example, and the loss over the whole batch with its gradient",
    f"a smaller batch takes less, and {HELP}",
    "a batch with which memory runs out in micro-batches of one",
)
NOT_PLANNED = (
    "microbatch_size must be a number for a model that hides its memory, as loops and sparse "
    'examples do. Received: "auto"'
)
NOT_KNOWN = (
    'memory must be given for microbatch_size="auto" with several replicas, where it is not known. '
    "Received: None"
)


def ran_out(is_whole: bool) -> MemoryError:
    """The error for a real memory that ends with micro-batches of one example."""
    least, help, received = OF_WHOLE if is_whole else OF_ONE
    return MemoryError(f"memory must hold {least}; {help}. Received: {received}")


def times_planned() -> float:
    """How many times its plan a training may take on this processor, at worst
    (benchmarks/NOTES.md). On a GPU, the plan leaves out the workspaces of convolutions."""
    if tf.config.list_logical_devices("GPU"):
        return 4.2
    return 1.25 if internals.uses_onednn() else 1.6


class Room:
    """The memory that a training may take, and what it is planned to take.

    On a GPU whose memory was not given, everything is taken to fit: its allocator reports when it
    does not, and an update that failed has assigned nothing.

    Args:
        update: the update.
        batch: (x, y, sample_weight).
        memory: the bytes, or None.
        strategy: that of the model.

    Raises:
        ValueError: it is not known how much memory there is, with several replicas, which do not
            survive when it ends; or how much a training takes.
    """

    def __init__(
        self,
        update: WindowUpdate,
        batch: tuple,
        memory: float | None,
        strategy: tf.distribute.Strategy,
    ):
        self._given = memory
        self._replicas = replicas_here(strategy)
        self._memory = math.inf
        if memory is not None:
            self._memory = memory
        elif not tf.config.list_logical_devices("GPU"):
            variables = self._replicas * update.bytes_of_variables()
            available = runtime.available_memory() / (2 * runtime.workers_here())
            self._memory = available + variables
        self._plan: MemoryPlan | None = None
        if not math.isinf(self._memory):
            self._plan = _plan(update, batch)
        elif strategy.num_replicas_in_sync > 1:
            raise ValueError(NOT_KNOWN)

    def fitting(self, sizes: list[int], examples: int, in_flight: int) -> list[int]:
        """Those of the sizes that are planned to fit, with so many micro-batches at once, in a
        window of so many examples."""

        def fits(size):
            steps = -(-examples // size)
            return self._total(size, min(in_flight, steps)) <= self._memory

        return [size for size in sizes if fits(size)]

    def refuse(self, in_flight: int) -> NoReturn:
        """Raises ValueError, because not even micro-batches of one example, so many at once, are
        planned to fit."""
        raise ValueError(too_little(self._total(1, in_flight), self._memory))

    def _total(self, size: int, in_flight: int) -> float:
        """The most that a training is planned to take."""
        if self._plan is None:
            return 0.0
        total = dataclasses.replace(self._plan, in_flight=in_flight).total(size)
        return times_planned() * self._replicas * total

    def __str__(self) -> str:
        if math.isinf(self._memory):
            return "memory, unless it runs out"
        workers = runtime.workers_here()
        share = "" if workers == 1 else f" for {workers} workers on this machine"
        of_what = "" if self._given is not None else f", half of what is available{share}"
        return f"{self._memory / MEBIBYTE:,.0f} MiB{of_what}"


def _plan(update: WindowUpdate, batch: tuple) -> MemoryPlan:
    """The plan of the memory."""
    # Ragged and sparse examples have no size of their own
    is_dense = all(isinstance(tensor, tf.Tensor) for tensor in tensors_of(batch))
    found = None
    if is_dense:
        dtype = update.accumulator_dtype
        found = plan_of(
            update.model, update.objective, update.optimizer, batch, accumulator_dtype=dtype
        )
    if found is None:
        raise ValueError(NOT_PLANNED)
    return found

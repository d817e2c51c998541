"""The memory that a training may take, and the micro-batch sizes that fit in it."""

import dataclasses
import math
from typing import NoReturn

import tensorflow as tf

from gradlab import runtime
from gradlab._batches import examples_of, map_tensors, rows_of, spec_of, tensors_of
from gradlab._peak_memory import PeakMemory, return_freed_memory
from gradlab.fit import keras_private as internals
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.sizes.memory_plan import HELP, MEBIBYTE, MemoryPlan, plan_of, too_little

# What the least is, what helps, and what a training gets that takes more; for a loss over the whole
# batch and others.
OF_ONE = "a micro-batch of one example", HELP, "one example, with which memory runs out"
OF_WHOLE = (
    "a micro-batch of one example, and the loss over the whole batch with its gradient",
    f"a smaller batch takes less, and {HELP}",
    "a batch with which memory runs out in micro-batches of one",
)


def ran_out(is_whole: bool) -> MemoryError:
    """The error for a real memory that ends with micro-batches of one example."""
    least, help, received = OF_WHOLE if is_whole else OF_ONE
    return MemoryError(f"memory must hold {least}; {help}. Received: {received}")


def times_planned() -> tuple[float, float]:
    """How many times its plan a training may take on this processor, at worst and at best
    (benchmarks/NOTES.md)."""
    return (1.25, 1.0) if internals.uses_onednn() else (1.6, 0.7)


class Room:
    """The memory that a training may take, and what it is planned to take.

    Args:
        update: the update.
        batch: (x, y, sample_weight).
        memory: the bytes, or None.
        replicas: the number of replicas in this process.

    Attributes:
        on_gpu: whether the memory is that of a GPU.
        is_known: whether it is known how much memory there is.
        is_planned: whether the memory is known as a function of the size.
    """

    def __init__(self, update: WindowUpdate, batch: tuple, memory: float | None, replicas: int):
        self.on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._replicas = replicas
        self._given = memory
        self._plan = _plan(update, batch)
        self._update = update
        self._memory = math.inf
        self.is_planned = self._plan is not None
        if memory is not None:
            self._memory = memory
        elif not self.on_gpu:
            self._memory = (
                runtime.available_memory() / (2 * runtime.workers_here()) + self._variables
            )
        self.is_known = not math.isinf(self._memory)

    @property
    def _variables(self) -> int:
        return self._replicas * self._update.bytes_of_variables()

    @property
    def left(self) -> float:
        """The bytes beyond the variables of the model, its optimizer and accumulators; infinite if
        not known."""
        return self._memory - self._variables

    def fitting(self, sizes: list[int], in_flight: int, at_best: bool = False) -> list[int]:
        """Those of the sizes that are planned to fit, with so many micro-batches at once; all if
        there is no plan."""
        worst, best = times_planned()
        times = best if at_best else worst
        steps = [-(-sizes[0] // size) for size in sizes]
        totals = [self._total(size, min(in_flight, each)) for size, each in zip(sizes, steps)]
        return [size for size, total in zip(sizes, totals) if times * total <= self._memory]

    def refuse(self, in_flight: int) -> NoReturn:
        """Raises ValueError, because not even micro-batches of one example, so many at once, are
        planned to fit."""
        raise ValueError(too_little(times_planned()[1] * self._total(1, in_flight), self._memory))

    def refuse_tried(self, size: int, taken: float) -> NoReturn:
        """Raises ValueError, because the smallest size took so many bytes; MemoryError if it was
        all that there is."""
        is_whole = self._update.objective.sees_whole
        if math.isinf(taken):
            raise ran_out(is_whole)
        least, help, _ = OF_WHOLE if is_whole else OF_ONE
        least = least if size == 1 else least.replace("one example", f"{size} examples")
        raise ValueError(too_little(self._variables + taken, self._memory, least, help))

    def _total(self, size: int, in_flight: int) -> float:
        if self._plan is None:
            return 0.0
        return self._replicas * dataclasses.replace(self._plan, in_flight=in_flight).total(size)

    def __str__(self) -> str:
        if not self.is_known:
            return "the GPU's memory" if self.on_gpu else "memory"
        workers = runtime.workers_here()
        share = "" if workers == 1 else f" for {workers} workers on this machine"
        of_what = "" if self._given is not None else f", half of what is available{share}"
        return f"{self._memory / MEBIBYTE:,.0f} MiB{of_what}"


def _plan(update: WindowUpdate, batch: tuple) -> MemoryPlan | None:
    """The plan of the memory, or None if the graph does not show it."""
    if not all(isinstance(tensor, tf.Tensor) for tensor in tensors_of(batch)):
        return None  # ragged and sparse examples have no size of their own
    return plan_of(update.model, update.objective, update.optimizer, batch)


class Trial:
    """Computes micro-batches without applying anything, to see what fits.

    Args:
        update: the update.
        batch: (x, y, sample_weight).
        variable: the size, which the update reads.
        in_flight: the number of micro-batches that are computed at once.
        strategy: that of the model, with one replica.

    Attributes:
        taken: for each size that was tried, the bytes that its micro-batches in flight added to the
            process.
    """

    def __init__(
        self,
        update: WindowUpdate,
        batch: tuple,
        variable: tf.Variable,
        in_flight: int,
        strategy: tf.distribute.Strategy,
    ):
        self.taken: dict[int, float] = {}
        return_freed_memory()  # of what ran before
        # Tracing takes memory too, and training will trace as much
        self._before = PeakMemory().bytes()
        specs = map_tensors(spec_of, batch)
        compiled = tf.function(
            lambda *batch: strategy.run(update.gradients_only, args=batch), autograph=False
        )
        self._run = compiled.get_concrete_function(*specs)
        self._batch = batch
        self._variable = variable
        self._in_flight = in_flight
        self._examples = int(examples_of(batch))
        self._parameters = sum(
            tf.TensorShape(v.shape).num_elements() for v in update.model.trainable_weights
        )
        self._is_whole = update.objective.sees_whole

    def _compute(self, size: int) -> None:
        """Computes as many micro-batches of a size as are in flight.

        A loss over the whole batch may need all examples, so then they are all computed.
        """
        self._variable.assign(size)
        examples = self._examples if self._is_whole else min(self._examples, size * self._in_flight)
        rows = slice(0, tf.constant(examples))
        self._run(*map_tensors(lambda tensor: rows_of(tensor, rows), self._batch))

    def largest(self, sizes: list[int]) -> int:
        """The first of the sizes with which a GPU's memory does not run out, less a margin.

        The margin is as large as all gradients: at its end, an update may hold their mean besides
        their sum.
        """
        for size in sizes:
            try:
                margin = tf.zeros([self._parameters])
                self._compute(size)
                del margin
            except tf.errors.ResourceExhaustedError:
                continue
            return size
        raise ran_out(self._is_whole)

    def fitting(self, sizes: list[int], room: Room) -> list[int]:
        """Those of the sizes, from the largest one, with which a process has memory for the
        micro-batches in flight.

        If the memory is planned, it begins with the largest one. Otherwise it begins with the
        smallest one, and goes on as long as the next one can be expected to fit.
        """
        taken = self.taken
        for size in sizes if room.is_planned else sizes[::-1]:
            taken[size] = self._taken(size)
            if (taken[size] <= room.left) if room.is_planned else (2 * taken[size] > room.left):
                break
        return [size for size in sizes if taken.get(size, 0.0) <= room.left and size <= max(taken)]

    def _taken(self, size: int) -> float:
        """The bytes that the micro-batches in flight add to the process; 0 if that cannot be
        read."""
        return_freed_memory()  # of the sizes before
        peak = PeakMemory()
        try:
            self._compute(size)
        except tf.errors.ResourceExhaustedError:
            return math.inf
        taken = peak.bytes() - self._before
        return 0.0 if math.isnan(taken) else max(0.0, taken)  # the system may have taken some back

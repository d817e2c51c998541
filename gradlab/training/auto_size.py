"""microbatch_size="auto": chosen before the first update, and halved if memory runs out all the same."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from gradlab import _checks, runtime
from gradlab._batches import examples_of, map_tensors, rows_of, spec_of, tensors_of
from gradlab._peak_memory import PeakMemory
from gradlab.training.memory_plan import MEBIBYTE, MemoryPlan, plan_of
from gradlab.training.update import WindowUpdate

Result = TypeVar("Result")

BEFORE = 32  # the size until one is chosen, for `evaluate` and `predict`: the batch size that is Keras' default
# A size is compared with the best one so far over this many seconds. One that takes more than WORSE of its time ends
# the search among the smaller ones, and one that takes more than NEAR of the best time is not chosen.
SECONDS, WORSE, NEAR = 0.2, 1.1, 1.03

TOO_LITTLE = (
    "memory must hold a micro-batch of one example; mixed precision, smaller inputs, an optimizer with fewer averages "
    "and keras.remat take less. Received: one example, with which memory runs out"
)


def check_size(microbatch_size: Any, memory: Any) -> None:
    """Raises ValueError unless they are a number, or "auto" and perhaps a number of bytes."""
    if microbatch_size != "auto":
        _checks.positive_integer("microbatch_size", microbatch_size, otherwise='"auto" or ')
    if memory is not None:
        _checks.positive_number("memory", memory)
        if microbatch_size != "auto":
            raise ValueError(f'memory is for microbatch_size="auto". Received: microbatch_size={microbatch_size!r}')


def check_auto(strategy: tf.distribute.Strategy, accumulation: Any) -> None:
    """Raises ValueError for what a `Trainer` cannot do with "auto"."""
    if accumulation is not None:
        raise ValueError(
            'accumulation must be None with microbatch_size="auto": windows of a number of micro-batches would change '
            f"with the size. Received: {accumulation!r}"
        )
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "microbatch_size must be a number with several workers, of which one alone could run out of memory while "
            'the others wait for it. Received: "auto"'
        )


class AutoSize:
    """A micro-batch size that is chosen once, with the first window.

    Args:
        memory: the bytes that the training may take, or None for half of what is available, or all of a GPU.
        on_change: a function that is called with each new size.

    Attributes:
        variable: the size, an integer scalar, which compiled functions read.
        begun: changes when the results of a window begin to be applied. A window that fails earlier can be repeated.
        chosen: the size, or None before it is chosen.
    """

    def __init__(self, memory: float | None, on_change: Callable[[int], None] = lambda size: None):
        self._memory, self._on_change = memory, on_change
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.device("CPU:0"):
            self.variable = tf.Variable(BEFORE, trainable=False, aggregation=first, name="microbatch_size")
            self.begun = tf.Variable(0, trainable=False, aggregation=first, name="windows_begun")
        self.chosen: int | None = None
        self._has_replicas = False

    def choose(self, update: WindowUpdate, batch: tuple, strategy: tf.distribute.Strategy) -> str:
        """Chooses the size, and says in a sentence which one and why.

        On one replica, a micro-batch is computed before the first update, to see that it fits. On a CPU, smaller ones
        that are no slower are not looked for further than the first that is. Nothing is applied or assigned.

        Args:
            update: the update.
            batch: (x, y, sample_weight), one replica's part of the first window.
            strategy: that of the model.

        Raises:
            ValueError: not even one example is planned to fit.
            MemoryError: not even one example fits.
        """
        replicas = strategy.num_replicas_in_sync
        self._has_replicas = replicas > 1
        with strategy.scope():
            in_flight = update.prepare(batch if replicas == 1 else ()).count
        sizes = _sizes(int(examples_of(batch)))
        room = _Room(update, batch, self._memory, in_flight, replicas)
        fitting = [size for size in sizes if room.holds(size, math.ceil(sizes[0] / size))]
        if not fitting:
            room.refuse()
        trial = _Trial(update, batch, self.variable, in_flight, strategy)
        reason = f"the largest that fits in {room}"
        if replicas > 1:
            size = fitting[0]
        elif room.on_gpu:
            size = trial.largest(fitting)
        else:
            tried = trial.fitting(fitting, room)
            size = trial.fastest(tried)
            if size != tried[0]:
                reason = f"faster than {tried[0]}, which would fit in {room}, too"
        self._set(size)
        if size == sizes[0]:
            reason = f"the whole batch, which fits in {room}"
        return f"gradlab: micro-batches of {size}, {in_flight} in flight: {reason}"

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Computes a window: if memory runs out before results are applied, again with half the size, and a warning.

        Not with several replicas: an error on one of them ends TensorFlow's communication between all of them.

        Args:
            attempt: a function () -> results.

        Raises:
            MemoryError: not even one example fits.
        """
        while True:
            begun = int(self.begun.numpy())
            try:
                return attempt()
            except tf.errors.ResourceExhaustedError as error:
                if self._has_replicas or int(self.begun.numpy()) != begun:
                    raise
                size = int(self.variable.numpy())
                if size == 1:
                    raise MemoryError(TOO_LITTLE) from error
                self._set(-(-size // 2))
                warnings.warn(
                    f"Memory ran out with micro-batches of {size} examples. From now on they have {self.chosen}.",
                    stacklevel=2,
                )

    def _set(self, size: int) -> None:
        self.chosen = size
        self.variable.assign(size)
        self._on_change(size)


def _sizes(examples: int) -> list[int]:
    """The sizes that cut a window into 1, 2, 4, ... micro-batches of about the same size, the largest first.

    >>> _sizes(100)
    [100, 50, 25, 13, 7, 4, 2, 1]
    """
    cuts = [-(-examples // 2**power) for power in range(examples.bit_length() + 1)]
    return list(dict.fromkeys(cuts))


class _Room:
    """The memory that a training may take, and what it is planned to take.

    Args:
        update: the update.
        batch: (x, y, sample_weight).
        memory: the bytes, or None.
        in_flight: the number of micro-batches that are computed at once.
        replicas: the number of replicas in this process.

    Attributes:
        on_gpu: whether the memory is that of a GPU.
        left: the bytes beyond the variables of the model and its optimizer; infinite if they are not known.
    """

    def __init__(self, update: WindowUpdate, batch: tuple, memory: float | None, in_flight: int, replicas: int):
        self.on_gpu, self._replicas, self._in_flight = bool(tf.config.list_logical_devices("GPU")), replicas, in_flight
        self._given = memory
        self._plan = _plan(update, batch)
        self._memory = math.inf
        fixed = replicas * update.bytes_of_variables()
        if memory is not None:
            self._memory = memory
        elif not self.on_gpu:
            self._memory = runtime.available_memory() / 2 + fixed
        self.left = self._memory - fixed

    def holds(self, size: int, steps: int) -> bool:
        """Whether a training with micro-batches of a size is planned to fit; True if there is no plan."""
        return self._plan is None or self._total(size, steps) <= self._memory

    def refuse(self) -> None:
        """Raises ValueError, because not even one example fits."""
        if self._plan is not None:
            dataclasses.replace(self._plan, in_flight=1).largest(self._memory / self._replicas)

    def _total(self, size: int, steps: int) -> float:
        plan: Any = self._plan
        return self._replicas * dataclasses.replace(plan, in_flight=min(self._in_flight, steps)).total(size)

    def __str__(self) -> str:
        if math.isinf(self._memory):
            return "the GPU's memory" if self.on_gpu else "memory"
        of_what = "" if self._given is not None else ", half of what is available"
        return f"{self._memory / MEBIBYTE:,.0f} MiB{of_what}"


def _plan(update: WindowUpdate, batch: tuple) -> MemoryPlan | None:
    """The plan of the memory, or None if the graph does not show it."""
    if not all(isinstance(tensor, tf.Tensor) for tensor in tensors_of(batch)):
        return None  # ragged and sparse examples have no size of their own
    return plan_of(update.model, update.objective, update.optimizer, batch)


class _Trial:
    """Computes micro-batches without applying anything, to see what fits and what is fast.

    Args:
        update: the update.
        batch: (x, y, sample_weight).
        variable: the size, which the update reads.
        in_flight: the number of micro-batches that are computed at once.
        strategy: that of the model, with one replica.
    """

    def __init__(
        self,
        update: WindowUpdate,
        batch: tuple,
        variable: tf.Variable,
        in_flight: int,
        strategy: tf.distribute.Strategy,
    ):
        specs = map_tensors(spec_of, batch)
        compiled = tf.function(lambda *batch: strategy.run(update.gradients_only, args=batch), autograph=False)
        self._run = compiled.get_concrete_function(*specs)
        self._batch, self._variable, self._in_flight = batch, variable, in_flight
        self._examples = int(examples_of(batch))

    def _seconds(self, size: int, examples: int) -> float:
        """The seconds that the first examples take in micro-batches of a size."""
        self._variable.assign(size)
        part = map_tensors(lambda tensor: rows_of(tensor, slice(0, tf.constant(examples))), self._batch)
        began = time.perf_counter()
        self._run(*part)
        return time.perf_counter() - began

    def largest(self, sizes: list[int]) -> int:
        """The first of the sizes with which memory does not run out."""
        for size in sizes:
            try:
                self._seconds(size, min(self._examples, size * self._in_flight))
            except tf.errors.ResourceExhaustedError:
                continue
            return size
        raise MemoryError(TOO_LITTLE)

    def fitting(self, sizes: list[int], room: _Room) -> list[int]:
        """Those of the sizes, from the largest one, with which a process has memory for the micro-batches in flight.

        It begins with the smallest one and doubles it as long as the next one can be expected to fit.
        """
        fits: list[int] = []
        for size in reversed(sizes):
            peak = PeakMemory()
            before = peak.bytes()
            try:
                self._seconds(size, min(self._examples, size * self._in_flight))
            except tf.errors.ResourceExhaustedError:
                break
            taken = peak.bytes() - before
            if taken > room.left and fits:
                break
            fits.append(size)
            if 2 * taken > room.left:
                break
        if not fits:
            raise MemoryError(TOO_LITTLE)
        return fits[::-1]

    def fastest(self, sizes: list[int]) -> int:
        """The largest of the sizes that is about as fast as the fastest. It does not try those far below it."""
        examples = min(self._examples, sizes[0] * self._in_flight)
        times: dict[int, float] = {}
        for size in sizes:
            times[size] = self._best(size, examples)
            if times[size] > WORSE * min(times.values()):
                break
        limit = NEAR * min(times.values())
        return next(size for size, seconds in times.items() if seconds <= limit)

    def _best(self, size: int, examples: int) -> float:
        self._seconds(size, examples)  # the first time, kernels prepare themselves
        found: list[float] = []
        began = time.perf_counter()
        while not found or time.perf_counter() - began < SECONDS:
            found.append(self._seconds(size, examples))
        return min(found)

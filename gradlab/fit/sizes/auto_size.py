"""microbatch_size="auto": chosen before the first update, and halved if memory runs out all the
same."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from gradlab import _checks
from gradlab._batches import examples_of
from gradlab.fit.program.precut import GIVEN
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.replicas import over_workers
from gradlab.fit.sizes.memory_room import Room, ran_out

Result = TypeVar("Result")

# The size until one is chosen, for `evaluate` and `predict`: the batch size that is Keras' default
BEFORE = 32


def checked_size(microbatch_size: Any, memory: Any) -> int | str:
    """The size: a number, "auto" or "given".

    Raises:
        ValueError: it is none of them, or memory is not a number of bytes, or not for "auto".
    """
    if not (isinstance(microbatch_size, str) and microbatch_size in ("auto", GIVEN)):
        _checks.positive_integer(
            "microbatch_size", microbatch_size, otherwise='"auto", "given" or '
        )
    if memory is not None:
        _checks.positive_number("memory", memory)
        if microbatch_size != "auto":
            raise ValueError(
                'memory is for microbatch_size="auto". Received: '
                f"microbatch_size={microbatch_size!r}"
            )
    return microbatch_size if isinstance(microbatch_size, str) else int(microbatch_size)


class _Choice(NamedTuple):
    """A size, whether it is the whole first window, the number of micro-batches in flight, and the
    reason."""

    size: int
    is_whole: bool
    in_flight: int
    reason: str


class AutoSize:
    """A micro-batch size that is chosen with the first window, and again for a larger window if
    that one fitted whole.

    Args:
        memory: the bytes that the training may take, or None for half of what is available, or for
            as much of a GPU as there is.
        on_change: a function that is called with each new size, or None before one is chosen, and
            its `choice`.

    Attributes:
        variable: the size, an integer scalar, which compiled functions read.
        updates_started: grows by 1 when the results of a window begin to be applied. A window that fails
            earlier can be repeated.
        chosen: the size, or None before it is chosen.
        choice: the sentence that says which size, and why; empty before it is chosen.
    """

    def __init__(
        self,
        memory: float | None,
        on_change: Callable[[int | None, str], None] = lambda size, choice: None,
    ):
        self._memory = memory
        self._on_change = on_change
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.device("CPU:0"):
            self.variable = tf.Variable(
                BEFORE, trainable=False, aggregation=first, name="microbatch_size"
            )
            self.updates_started = tf.Variable(
                0, trainable=False, aggregation=first, name="updates_started"
            )
        self.chosen: int | None = None
        self.choice = ""
        self._limit = 0
        self._seen_started = 0  # the same as `updates_started`, without asking TensorFlow
        self._has_replicas = False
        self._objective: Any = None  # which knows after tracing whether a loss sees the whole batch

    def forget(self) -> None:
        """Lets the size be chosen anew: for another loss or optimizer."""
        self._set(None, "")

    @property
    def may_change(self) -> bool:
        """Whether `wants` may be true for some window."""
        return self.chosen is None or self._limit > 0

    def wants(self, window: tuple, strategy: tf.distribute.Strategy, replicas: int = 1) -> bool:
        """Whether to choose with a window: it is the first one, or larger than one that fitted
        whole.

        Several workers choose once: whether a window is larger may differ between them.

        Args:
            window: (x, y, sample_weight).
            strategy: that of the model.
            replicas: the number of replicas that share the window.
        """
        if self.chosen is None:
            return True
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        return 0 < self._limit < -(-int(examples_of(window)) // replicas) and not several

    def choose(self, update: WindowUpdate, batch: tuple, strategy: tf.distribute.Strategy) -> str:
        """Chooses the size, and says in a sentence which one and why.

        Several workers agree on the smallest size that memory demands on one of them. If one was
        chosen before, it stays where the errors below would be raised.

        Args:
            update: the update.
            batch: (x, y, sample_weight), one replica's part of the first window.
            strategy: that of the model.

        Raises:
            ValueError: not even one example fits, or it is not known what fits.
        """
        try:
            choice = self._choice(update, batch, strategy)
        except ValueError:
            over_workers(strategy, [0, 0])  # the other workers wait for an answer
            if self.chosen is None:
                raise
            self._limit = 0  # the size that served smaller windows stays
            return self.choice
        all_of_it, sizes = over_workers(strategy, [choice.is_whole, choice.size]).T
        size = int(max(sizes) if min(all_of_it) else min(sizes[all_of_it == 0]))
        if size == 0:
            raise ValueError(
                "memory must hold a micro-batch of one example on each worker. Received: a worker "
                "on which it does not"
            )
        self._limit = int(examples_of(batch)) if min(all_of_it) else 0
        is_less = size != choice.size and not self._limit
        others = f", on the worker that allows least; here {choice.size}" if is_less else ""
        self._set(
            size,
            f"gradlab: micro-batches of {size}, {choice.in_flight} in flight: "
            f"{choice.reason}{others}",
        )
        return self.choice

    def _choice(
        self, update: WindowUpdate, batch: tuple, strategy: tf.distribute.Strategy
    ) -> _Choice:
        """What this worker would choose."""
        self._has_replicas = strategy.num_replicas_in_sync > 1
        self._objective = update.objective
        with strategy.scope():
            in_flight = update.prepare(() if self._has_replicas else batch).count
        examples = int(examples_of(batch))
        sizes = _sizes(examples)
        room = Room(update, batch, self._memory, strategy)
        fitting = room.fitting(sizes, examples, in_flight)
        is_first = self.chosen is None  # later, functions are compiled for the number in flight
        if not fitting and is_first and update.lower_in_flight():
            in_flight = 1
            fitting = room.fitting(sizes, examples, 1)
        if not fitting:
            room.refuse(min(in_flight, examples))
        is_whole = fitting[0] == examples
        what = "the whole batch, which fits in" if is_whole else "the largest that fits in"
        return _Choice(fitting[0], is_whole, in_flight, f"{what} {room}")

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Computes a window: if memory runs out before results are applied, again with half the
        size, and a warning.

        Not with several replicas: an error on one of them ends TensorFlow's communication between
        all of them.

        Args:
            attempt: a function () -> results.

        Raises:
            MemoryError: not even one example fits.
        """
        while True:
            try:
                found = attempt()
            # One that comes from the keyboard too: results may have been applied
            except BaseException as error:
                started = self._seen_started
                self._seen_started = int(self.updates_started.numpy())
                can_repeat = (
                    isinstance(error, tf.errors.ResourceExhaustedError) and not self._has_replicas
                )
                if not can_repeat or self._seen_started != started:
                    raise
                size = int(self.variable.numpy())
                if size == 1:
                    raise ran_out(
                        self._objective is not None and self._objective.sees_whole
                    ) from error
                self._halve(size)
            else:
                self._seen_started += 1
                return found

    def _halve(self, size: int) -> None:
        half = -(-size // 2)
        self._limit = 0
        self._set(half, f"gradlab: micro-batches of {half}: memory ran out with {size}")
        warnings.warn(
            f"Memory ran out with micro-batches of {size} examples. From now on they have {half}.",
            stacklevel=3,
        )

    def _set(self, size: int | None, choice: str) -> None:
        self.chosen = size
        self.choice = choice
        if size is not None:  # otherwise `evaluate` keeps the one that it had
            self.variable.assign(size)
        self._on_change(size, choice)


def _sizes(examples: int) -> list[int]:
    """The sizes that cut a window into 1, 2, 4, ... micro-batches of about the same size, the
    largest first.

    >>> _sizes(100)
    [100, 50, 25, 13, 7, 4, 2, 1]
    """
    cuts = [-(-examples // 2**power) for power in range(examples.bit_length() + 1)]
    return list(dict.fromkeys(cuts))

"""The steps of `fit` with microbatch_size="auto": the batch is at hand, so that it can be computed
again."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import as_tensor, map_tensors
from gradlab.fit.program.compiled_step import CompiledStep, without_optional
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.sizes.auto_size import AutoSize


class AutoSteps:
    """Makes the steps that `fit` asks for.

    Args:
        model: the model.
        made: the function (iterator) -> results that Keras made for its steps.
        update: the update that the steps make.
        size: the size of micro-batches.
        say: a function that shows a sentence.
    """

    def __init__(
        self,
        model: keras.Model,
        made: Callable[[Iterator], Any],
        update: WindowUpdate,
        size: AutoSize,
        say: Callable[[str], None],
    ):
        self._model = model
        self._made = made
        self._update = update
        self._size = size
        self._say = say
        self._repeatable: RepeatableStep | None = None
        self._iterator: Callable[[], Any] = lambda: None

    def __call__(self, data: Iterator) -> Any:
        """The results of one step, or of the last of as many as `steps_per_execution` asks for.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: there is no more batch.
        """
        found = None
        for _ in range(int(self._model.steps_per_execution)):
            try:
                found = self._step(data)
            except (StopIteration, tf.errors.OutOfRangeError):
                if found is None:
                    raise
                break
        return found

    def _step(self, data: Iterator) -> Any:
        strategy = self._model.distribute_strategy
        is_dataset = isinstance(data, tf.data.Iterator)
        if not is_dataset or strategy.num_replicas_in_sync > 1 or self._model.run_eagerly:
            batch = self._chosen(next(data))
            return self._size.run(lambda: self._made(iter([batch])))
        batch = None
        is_new = self._iterator() is not data
        if self._size.chosen is None or (is_new and self._size.may_change):
            batch = next(data)
            self._chosen(batch)
        repeatable = self._repeatable_for(data)
        attempts = repeatable.attempts(data if batch is None else repeatable.iterator_over(batch))
        return self._size.run(lambda: next(attempts)())

    def _chosen(self, batch: Any) -> Any:
        """A batch that came from an iterator, with a size that was chosen with it if need be."""
        strategy = self._model.distribute_strategy
        batch = keras.tree.map_structure(without_optional, batch)
        if self._size.may_change:
            local = keras.tree.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], batch
            )
            first = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(local))
            if self._size.wants(first, strategy):
                self._say(self._size.choose(self._update, first, strategy))
        return batch

    def _repeatable_for(self, data: tf.data.Iterator) -> "RepeatableStep":
        """The step for the iterator's batches; iterators of the same types share it."""
        if self._repeatable is None or self._iterator() is not data:
            self._iterator = weakref.ref(data)
            if self._repeatable is None or data.element_spec != self._repeatable.element_spec:
                strategy = self._model.distribute_strategy
                self._repeatable = RepeatableStep(
                    self._step_of_size, self._size, strategy, data.element_spec
                )
        return self._repeatable

    def _step_of_size(self, batch: Any, size: int) -> Any:
        """A step in graph mode, for a size that TensorFlow knows: it computes a single micro-batch
        without a loop."""
        with self._update.of_size(size):
            return self._model.train_step(batch)


class RepeatableStep:
    """A step that fetches its batch in the same call from Python to TensorFlow, and keeps it, to be
    repeated with it.

    Variables hold the batch until the next step. They share its memory, so nothing is copied.

    Args:
        step: a function (batch, size of micro-batches) -> results, in graph mode.
        size: the size.
        strategy: the strategy in whose scope the model was made; it must have one replica.
        element_spec: the types of a batch.
    """

    def __init__(
        self,
        step: Callable[[Any, int], Any],
        size: AutoSize,
        strategy: tf.distribute.Strategy,
        element_spec: Any,
    ):
        self.element_spec = element_spec
        self._step = step
        self._size = size
        self._strategy = strategy
        self._specs = keras.tree.map_structure(
            lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, element_spec
        )
        self._leaves = tf.nest.flatten(self._specs, expand_composites=True)
        with tf.device("CPU:0"):
            self._kept = [
                tf.Variable(tf.zeros([0], leaf.dtype), trainable=False, shape=tf.TensorShape(None))
                for leaf in self._leaves
                if leaf is not None
            ]
            self._fetched = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._seen = 0  # the same number, without asking TensorFlow
        # True: for the next batch; False: for the one that is kept
        self._compiled: dict[bool, CompiledStep] = {}
        self._compiled_size: int | None = None

    def iterator_over(self, batch: Any) -> tf.data.Iterator:
        """An iterator over one batch, for which the step need not be traced again."""
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        return iter(tf.data.experimental.from_variant(variant, self.element_spec))

    def attempts(self, iterator: tf.data.Iterator) -> Iterator[Callable[[], Any]]:
        """Functions () -> results: the first for the next batch, all others to repeat it.

        The first one raises tf.errors.OutOfRangeError if there is no more batch, and MemoryError if
        memory ran out while it was fetched.
        """
        yield lambda: self._first(iterator)
        while True:
            yield lambda: self._now(is_new=False)(iterator)

    def _now(self, is_new: bool) -> CompiledStep:
        """The step for the present size, which seldom changes."""
        size: Any = self._size.chosen

        def run(batch):
            # What does not need the batch waits for it too: if it fails, the batch is there to
            # repeat the step.
            with tf.control_dependencies(_parts(batch)):
                return self._step(batch, size)

        if self._compiled_size != size:
            self._compiled = {}
            self._compiled_size = size
        if is_new not in self._compiled:
            self._compiled[is_new] = CompiledStep(
                run, self._strategy, self._next if is_new else self._again
            )
        return self._compiled[is_new]

    def _first(self, iterator: tf.data.Iterator) -> Any:
        try:
            found = self._now(is_new=True)(iterator)
        # One that comes from the keyboard too: the batch may have been fetched
        except BaseException as error:
            before = self._seen
            self._seen = int(self._fetched.numpy())
            if isinstance(error, tf.errors.OutOfRangeError):
                for variable in self._kept:
                    # An epoch's last batch need not stay in memory
                    variable.assign(tf.zeros([0], variable.dtype))
            if isinstance(error, tf.errors.ResourceExhaustedError) and self._seen == before:
                rule = "memory must hold a batch of the dataset"
                raise MemoryError(f"{rule}. Received: one with which it ran out") from error
            raise
        self._seen += 1
        return found

    def _next(self, iterator: tf.data.Iterator) -> Any:
        """The next batch, which is kept."""
        batch = keras.tree.map_structure(without_optional, iterator.get_next())
        with tf.control_dependencies(self._keep(batch)):
            counted = self._fetched.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]):
            return tf.nest.map_structure(
                lambda part: None if part is None else tf.identity(part), batch
            )

    def _again(self, iterator: tf.data.Iterator) -> Any:
        """The batch that is kept."""
        parts = (variable.read_value() for variable in self._kept)
        leaves = [
            leaf if leaf is None else tf.ensure_shape(next(parts), leaf.shape)
            for leaf in self._leaves
        ]
        return tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)

    def _keep(self, batch: Any) -> list:
        return [
            variable.assign(part, read_value=False)
            for variable, part in zip(self._kept, _parts(batch))
        ]


def _parts(batch: Any) -> list[tf.Tensor]:
    return [part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None]

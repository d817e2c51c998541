"""The steps of `fit` with microbatch_size="auto": the batch is at hand, so that it can be computed
again."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import as_tensor, map_tensors, spec_of
from gradlab.fit.program.compiled_step import without_optional
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
        self._compiled: dict[tuple, Callable] = {}  # by the size and the types of the batch
        # The iterator of the last step, its size and what was compiled for both.
        self._latest: Callable[[], Any] = lambda: None
        self._latest_size: int | None = None
        self._latest_step: Any = None

    def __call__(self, data: Iterator) -> Any:
        """The results of one step, or of the last of as many as `steps_per_execution` asks for.

        Raises:
            StopIteration: there is no more batch.
            MemoryError: memory ran out while a batch was fetched.
        """
        found = None
        for _ in range(int(self._model.steps_per_execution)):
            try:
                batch = _next(data)
            except StopIteration:
                if found is None:
                    raise
                break
            found = self._step(batch, data)
        return found

    def _step(self, batch: Any, data: Iterator) -> Any:
        model = self._model
        is_new = self._latest() is not data
        if self._size.chosen is None or (is_new and self._size.may_change):
            self._choose(batch)
        if model.distribute_strategy.num_replicas_in_sync > 1 or model.run_eagerly:
            return self._size.run(lambda: self._made(iter([batch])))
        return self._size.run(lambda: self._step_for(data, batch)(batch))

    def _choose(self, batch: Any) -> None:
        """Lets the size be chosen with a batch if need be."""
        strategy = self._model.distribute_strategy
        first = keras.tree.map_structure(
            lambda part: strategy.experimental_local_results(part)[0], batch
        )
        window = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(first))
        if self._size.wants(window, strategy):
            self._say(self._size.choose(self._update, window, strategy))

    def _step_for(self, data: Any, batch: Any) -> Callable:
        """The compiled step for the batches of an iterator, of any number of examples.

        TensorFlow knows the size, so it computes a single micro-batch without a loop.
        """
        size: Any = self._size.chosen
        if self._latest() is data and self._latest_size == size:
            return self._latest_step
        is_dataset = isinstance(data, tf.data.Iterator)
        types = data.element_spec if is_dataset else map_tensors(_type, batch)
        specs = keras.tree.map_structure(_without_optional_spec, types)
        key = size, str(specs)
        if key not in self._compiled:

            def step(batch):
                with self._update.of_size(size):
                    return self._model.distribute_strategy.run(
                        self._model.train_step, args=(batch,)
                    )

            compiled = tf.function(step, autograph=False)
            self._compiled[key] = compiled.get_concrete_function(specs)
        if is_dataset:  # others may yield batches of several types
            self._latest = weakref.ref(data)
            self._latest_size = size
            self._latest_step = self._compiled[key]
        return self._compiled[key]


def _type(part: Any) -> tf.TypeSpec:
    return spec_of(as_tensor(part))


def _without_optional_spec(spec: Any) -> Any:
    """None for the type of a part that is missing."""
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _next(data: Iterator) -> Any:
    """The next batch, with None for a part that is missing."""
    try:
        batch = next(data)
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        raise MemoryError(
            "memory must hold a batch of the dataset. Received: one with which it ran out"
        ) from error
    return keras.tree.map_structure(without_optional, batch)

"""The steps of `fit` with microbatch_size="auto": the batch is at hand, so that it can be computed again."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import as_tensor, map_tensors
from gradlab.training.auto_size import AutoSize
from gradlab.training.compiled_step import without_optional
from gradlab.training.update import WindowUpdate


class AutoSteps:
    """Makes the steps that `fit` asks for, each from a batch that is fetched before.

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
        self._model, self._made, self._update, self._size, self._say = model, made, update, size, say
        self._specs: Any = None
        self._compiled: Callable | None = None

    def __call__(self, data: Iterator) -> Any:
        """The results of one step, or of the last of as many as `steps_per_execution` asks for.

        Raises:
            StopIteration: there is no more batch.
        """
        found = None
        for batch in itertools.islice(data, int(self._model.steps_per_execution)):
            found = self._step(data, keras.tree.map_structure(without_optional, batch))
        if found is None:
            raise StopIteration
        return found

    def _step(self, data: Iterator, batch: Any) -> Any:
        strategy = self._model.distribute_strategy
        if self._size.chosen is None:
            local = keras.tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], batch)
            first = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(local))
            self._say(self._size.choose(self._update, first, strategy))
        return self._size.run(lambda: self._computed(data, batch))

    def _computed(self, data: Iterator, batch: Any) -> Any:
        """The results of a step with a batch, which is compiled once for all sizes of batches that a dataset has."""
        strategy = self._model.distribute_strategy
        if self._model.run_eagerly or strategy.num_replicas_in_sync > 1 or not isinstance(data, tf.data.Iterator):
            return self._made(iter([batch]))
        if self._compiled is None or data.element_spec != self._specs:
            self._specs = data.element_spec
            signature = keras.tree.map_structure(
                lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, self._specs
            )
            self._compiled = tf.function(
                lambda batch: strategy.run(self._model.train_step, args=(batch,)), autograph=False
            ).get_concrete_function(signature)
        return self._compiled(batch)

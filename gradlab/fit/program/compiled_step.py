"""A step of `fit` with one call from Python to TensorFlow instead of Keras' three."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import as_tensor, tensors_of
from gradlab.fit.program.precut import specs_of_microbatch


class CompiledStep:
    """Makes a step with the next element of an iterator.

    Keras matches the iterator with the function's signature in every step, wraps the results into
    an optional and opens it with two more calls. Here an iterator is matched once, when it is seen
    for the first time. On a CPU this saves a fifth of a millisecond per step (benchmarks/NOTES.md).

    Args:
        step: a function (element) -> results, in graph mode.
        strategy: the strategy in whose scope the model was made; it must have one replica.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        strategy: tf.distribute.Strategy,
    ):
        def run(iterator):
            data = keras.tree.map_structure(without_optional, iterator.get_next())
            return strategy.run(step, args=(data,))

        self._compiled = tf.function(run, autograph=False, reduce_retracing=True)
        self._concrete: Any = None
        self._specs: Any = None
        self._iterator: Callable[[], Any] = lambda: None

    def __call__(self, iterator: tf.data.Iterator) -> Any:
        """The step's results.

        Args:
            iterator: an iterator of a dataset.

        Raises:
            tf.errors.OutOfRangeError: the iterator has no more elements.
        """
        if self._iterator() is not iterator:
            if self._concrete is None or iterator.element_spec != self._specs:
                self._concrete = self._compiled.get_concrete_function(iterator)
            self._iterator = weakref.ref(iterator)
            self._specs = iterator.element_spec
        return self._concrete(iterator)


def in_one_call(model: keras.Model, kind: str, made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that Keras made for a model's steps, with a `CompiledStep` in its place where
    that is the same.

    Args:
        model: the model.
        kind: "train", "test" or "predict".
        made: the function (data) -> results.
    """
    several = model.steps_per_execution != 1 or model.distribute_strategy.num_replicas_in_sync > 1
    if several or model.run_eagerly or kind == "predict":
        return made
    step = CompiledStep(getattr(model, f"{kind}_step"), model.distribute_strategy)
    return lambda data: (step if isinstance(data, tf.data.Iterator) else made)(data)


def types_of(data: Any, microbatch_size: Any) -> tuple:
    """The types of (x, y, sample_weight) in the data that Keras gives to a step, and the data.

    Args:
        data: an iterator of tf.data, or another iterator over batches, of which the first is looked
            at.
        microbatch_size: a number, a variable, or "given".

    Returns:
        The types, or None if one of them does not tell its number of dimensions; and the data with
        its first batch.
    """
    if isinstance(data, tf.data.Iterator):
        element = data.element_spec
    else:
        first = next(data)
        element = keras.tree.map_structure(_type, first)
        data = itertools.chain([first], data)
    specs = keras.utils.unpack_x_y_sample_weight(element)
    known = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)
    is_known = all(isinstance(spec, known) and spec.shape.rank for spec in tensors_of(specs))
    return (specs_of_microbatch(specs, microbatch_size) if is_known else None), data


def _type(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(as_tensor(value))


def without_optional(value: Any) -> Any:
    """None for the optional that stands for a part of the data that is missing."""
    return None if isinstance(value, tf.experimental.Optional) else value

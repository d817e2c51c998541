"""The batches of a dataset cut into windows, from any position in it."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradlab._batches import map_tensors, rows_of, tensors_of


class DatasetWindows(Iterator):
    """Cuts the batches of a dataset into windows, epoch after epoch, and keeps track of its
    position.

    The last window of an epoch holds the examples that are left; no window holds examples of two
    epochs.

    Args:
        dataset: as for `Trainer.fit`.
        size: a function () -> the number of examples of the next window, or None to take the
            dataset's next batch as it is.
        epoch, examples: the position to begin at: the epoch, and the number of its examples to
            skip.
    """

    def __init__(
        self, dataset: Any, size: Callable[[], int | None], epoch: int = 0, examples: int = 0
    ):
        self.epoch = epoch
        self.examples = examples
        self._dataset = dataset
        self._size = size
        if not callable(dataset):
            # A dataset that shuffles draws a new order each time it is iterated
            for _ in range(epoch):
                next(iter(dataset), None)
        self._batches = _epoch(dataset, epoch, examples)
        self._kept = None

    def __next__(self) -> tuple:
        """The next window: a nest (x, y, sample_weight) of NumPy arrays, ragged and sparse
        tensors."""
        size = self._size()
        window = self._take(size)
        if window is None and self.examples:
            self.epoch = self.epoch + 1
            self.examples = 0
            self._batches = _epoch(self._dataset, self.epoch, 0)
            window = self._take(size)
        if window is None:
            raise ValueError(
                f"dataset must hold at least one example. Received: none in epoch {self.epoch}"
            )
        self.examples += _length(window)
        return window

    def _take(self, size: int | None) -> Any:
        """A window of that many examples, fewer at the end of the epoch, None after it."""
        window = self._kept
        self._kept = None
        while window is None or (size is not None and _length(window) < size):
            batch = next(self._batches, None)
            if batch is None:
                break
            window = batch if window is None else map_tensors(_joined, window, batch)
        if window is not None and size is not None and _length(window) > size:
            self._kept = _rows(window, size, _length(window))
            window = _rows(window, 0, size)
        return window


# A method would refer to the windows, and they to it: the dataset's iterator would be left to the
# garbage collector, which can wait for its threads for half a minute.
def _epoch(dataset: Any, epoch: int, skip: int) -> Iterator:
    """The batches of an epoch, without its first examples."""
    for batch in dataset(epoch) if callable(dataset) else dataset:
        batch = map_tensors(_as_array, keras.utils.unpack_x_y_sample_weight(batch))
        length = _length(batch)
        if length > skip:
            yield _rows(batch, skip, length) if skip else batch
        skip = max(0, skip - length)


def _as_array(part: Any) -> Any:
    return part if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)) else np.asarray(part)


def _rows(batch: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda array: rows_of(array, slice(start, stop)), batch)


def _joined(one: Any, other: Any) -> Any:
    """The examples of both, one after the other."""
    if isinstance(one, tf.SparseTensor):
        return tf.sparse.concat(0, [one, other])
    if isinstance(one, tf.RaggedTensor):
        return tf.concat([one, other], 0)
    return np.concatenate([one, other])


def _length(batch: Any) -> int:
    first = tensors_of(batch)[0]
    if len(first.shape) == 0:
        raise ValueError(
            f"dataset must yield (x, y) with a row for each example. Received: {first!r} for x"
        )
    return int(first.shape[0])

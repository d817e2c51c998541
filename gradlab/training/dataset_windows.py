"""The batches of a dataset cut into windows, from any place in it."""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf


class Windows(Iterator):
    """Cuts the batches of a dataset into windows, epoch after epoch, and knows where it is.

    Args:
        dataset: as for `Trainer.fit`.
        size: a function () -> examples of the next window, or None to take the dataset's next batch as it is.
        epoch, examples: where to begin: the epoch, and how many of its examples are behind us.

    An epoch's last window holds what is left: no window holds examples of two epochs.
    """

    def __init__(self, dataset, size: Callable[[], int | None], epoch: int = 0, examples: int = 0):
        self.epoch, self.examples = epoch, examples
        self._dataset, self._size = dataset, size
        if not callable(dataset):
            for _ in range(epoch):  # a dataset that shuffles draws a new order each time it is begun
                next(iter(dataset), None)
        self._batches, self._kept = self._begin(skip=examples), None

    def __next__(self):
        """The next window: a nest (x, y, sample_weight) of NumPy arrays."""
        size = self._size()
        window = self._take(size)
        if window is None and self.examples:
            self.epoch, self.examples = self.epoch + 1, 0
            self._batches = self._begin(skip=0)
            window = self._take(size)
        if window is None:
            raise ValueError(f"dataset must hold at least one example. Received: none in epoch {self.epoch}")
        self.examples += examples_in(window)
        return window

    def _take(self, size):
        """A window of so many examples, fewer at the epoch's end, None after it."""
        window, self._kept = self._kept, None
        while window is None or (size is not None and examples_in(window) < size):
            batch = next(self._batches, None)
            if batch is None:
                break
            window = batch if window is None else map_parts(lambda *parts: np.concatenate(parts), window, batch)
        if window is not None and size is not None and examples_in(window) > size:
            self._kept = map_parts(lambda part: part[size:], window)
            window = map_parts(lambda part: part[:size], window)
        return window

    def _begin(self, skip: int):
        """An epoch's batches, without its first examples."""
        for batch in self._dataset(self.epoch) if callable(self._dataset) else self._dataset:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            batch = map_parts(np.asarray, (x, y, sample_weight))
            left, skip = examples_in(batch) - skip, max(0, skip - examples_in(batch))
            if left > 0:
                yield map_parts(lambda part, left=left: part[-left:], batch)


def map_parts(function, *nests):
    return tf.nest.map_structure(lambda *parts: None if parts[0] is None else function(*parts), *nests)


def parts_of(nest) -> list:
    return [part for part in tf.nest.flatten(nest) if part is not None]


def examples_in(nest) -> int:
    return len(parts_of(nest)[0])


def check_lengths(window) -> None:
    """Raises ValueError when a window has no examples, or its parts have different numbers of them, as far as known."""
    lengths = [part.shape[0] if part.shape.rank else 0 for part in parts_of(window)]
    known = [length for length in lengths if length is not None]
    if known and not any(known):
        raise ValueError("A window must hold at least one example. Received: 0")
    if len(set(known)) > 1:
        raise ValueError(
            f"x, y and sample_weight must have the same number of examples. Received: {' '.join(map(str, known))}"
        )

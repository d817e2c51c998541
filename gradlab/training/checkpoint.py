"""Checkpoints of a training loop: everything that the next update depends on, written whole or not at all."""

from pathlib import Path

import numpy as np
import tensorflow as tf


class Checkpoints:
    """The latest states of a training, in a directory.

    TensorFlow writes each under its own name and only then, by renaming a file, says that it is the latest: a process
    that is killed while it writes leaves the one before.

    Args:
        directory: where; it is made when it is missing. Several workers must see the same one.
        variables: the Keras variables to save: the model's and the optimizer's.
        writes: whether this process writes; of several workers one does, and all read.
    """

    def __init__(self, directory, variables: list, writes: bool):
        self._position = tf.Variable(np.zeros(3, np.int64), trainable=False)
        named = {f"variable_{i:04d}": variable.value for i, variable in enumerate(variables)}
        self._checkpoint = tf.train.Checkpoint(position=self._position, **named)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(Path(directory).absolute()), max_to_keep=2)
        self._writes = writes

    def restore(self) -> tuple[int, int, int]:
        """Sets the variables as they were saved last, if ever.

        Returns:
            (windows trained on, epoch, examples of that epoch used).

        Raises:
            ValueError: what was saved is of another model or optimizer.
        """
        if self._manager.latest_checkpoint is None:
            return 0, 0, 0
        try:
            self._checkpoint.restore(self._manager.latest_checkpoint).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError):
            raise ValueError(
                "checkpoint_dir must hold checkpoints of this model and optimizer, or none. "
                f"Received: {self._manager.directory}, whose variables differ in number or shape"
            ) from None
        return tuple(int(number) for number in self._position.numpy())

    def save(self, windows: int, epoch: int, examples: int) -> None:
        """Saves the variables and this position."""
        if self._writes:
            self._position.assign([windows, epoch, examples])
            self._manager.save(checkpoint_number=windows)

"""Checkpoints of a training loop: everything that the next update depends on, written completely or not at all."""

import os
from pathlib import Path
from typing import cast

import numpy as np
import tensorflow as tf


class Checkpoints:
    """The latest states of a training run, in a directory.

    TensorFlow writes each state under a name of its own. Only then does it mark that state as the latest, by renaming a
    file. So a process that is killed while it writes leaves the previous checkpoint intact.

    Args:
        directory: the directory, created if it is missing. All workers must see the same one.
        variables: the Keras variables to save: those of the model and of the optimizer.
        writes: whether this process writes. One of several workers writes, and all of them read.
    """

    def __init__(self, directory: str | os.PathLike, variables: list, writes: bool):
        self._position = tf.Variable(np.zeros(3, np.int64), trainable=False)
        named = {f"variable_{i:04d}": variable.value for i, variable in enumerate(variables)}
        self._checkpoint = tf.train.Checkpoint(position=self._position, **named)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(Path(directory).absolute()), max_to_keep=2)
        self._writes = writes

    def restore(self) -> tuple[int, int, int]:
        """Restores the latest state, if there is one.

        Returns:
            (windows trained on, epoch, examples of that epoch used): zeros if there is no checkpoint.

        Raises:
            ValueError: the checkpoint belongs to a different model or optimizer.
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
        return cast(tuple[int, int, int], tuple(int(number) for number in self._position.numpy()))

    def save(self, windows: int, epoch: int, examples: int) -> None:
        """Saves the variables and this position."""
        if self._writes:
            self._position.assign([windows, epoch, examples])
            self._manager.save(checkpoint_number=windows)

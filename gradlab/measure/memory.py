"""The peak memory of this process or its GPU, and a plan of it before a training runs."""

import contextlib
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from gradlab.fit.sizes.memory_plan import MemoryPlan

__all__ = ["MEBIBYTE", "PeakMemory", "plan"]

MEBIBYTE = 2**20


class PeakMemory:
    """Measures the most memory in use since the object was created.

    On a GPU, this is the peak of TensorFlow's allocator on the first GPU. On Linux without a GPU,
    it is the peak of the process's resident set size. Elsewhere the peak cannot be read.

    The resident set includes memory that an earlier training freed but the process did not return
    to the system, so run trainings that are to be compared in separate processes.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        self._gpu = "GPU:0" if tf.config.list_logical_devices("GPU") else None
        self._readable = True
        if self._gpu:
            tf.config.experimental.reset_memory_stats(self._gpu)
        else:
            try:
                # On Linux, resets the peak to the current size
                pathlib.Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._readable = False

    def bytes(self) -> float:
        """The peak so far, in bytes; NaN if it cannot be read."""
        import tensorflow as tf

        if self._gpu:
            return float(tf.config.experimental.get_memory_info(self._gpu)["peak"])
        if self._readable:
            with contextlib.suppress(OSError):
                for line in pathlib.Path("/proc/self/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        return 1024.0 * int(line.split()[1])
        return float("nan")


def plan(
    model: "keras.Model", loss: Any, optimizer: Any, example: tuple, *, in_flight: int = 1
) -> "MemoryPlan":
    """Plans the memory of a training with micro-batches, as a function of their size, without
    running it.

    Args:
        model: the Keras model; its variables and those of the optimizer are created.
        loss: as for `keras.Model.compile`.
        optimizer: a Keras optimizer, or its name.
        example: (x, y) or (x, y, sample_weight): nests of arrays with at least one example.
        in_flight: the number of micro-batches that are computed at once.

    Returns:
        The `MemoryPlan`: `largest(memory)` is the largest micro-batch size that fits, `table()`
        shows the parts.

    Raises:
        ValueError: an argument out of range, or a model with loops, which hide their memory.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input([64, 64, 3]), keras.layers.Conv2D(32, 3), keras.layers.Flatten()])
        >>> planned = plan(model, "mse", "adam", (np.zeros([1, 64, 64, 3]), np.zeros([1, 62 * 62 * 32])))
        >>> planned.largest(1024 * MEBIBYTE) > planned.largest(512 * MEBIBYTE) > 100
        True
    """
    # PeakMemory is for processes without TensorFlow, too
    from gradlab.fit.sizes.memory_plan import plan_memory

    return plan_memory(model, loss, optimizer, example, in_flight=in_flight)

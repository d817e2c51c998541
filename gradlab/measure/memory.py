"""The peak memory of this process or its GPU, and a plan of it before a training runs."""

from typing import TYPE_CHECKING, Any

from gradlab._peak_memory import PeakMemory

if TYPE_CHECKING:
    import keras

    from gradlab.fit.sizes.memory_plan import MemoryPlan

__all__ = ["MEBIBYTE", "PeakMemory", "plan"]

MEBIBYTE = 2**20


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

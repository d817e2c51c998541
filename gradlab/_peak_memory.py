"""The peak memory of this process or its GPU."""

import contextlib
import ctypes
import pathlib


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


def return_freed_memory() -> None:
    """Returns memory that was freed to the system, where glibc manages it. Elsewhere it does
    nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

"""Memory: the most that was held while something ran."""

import contextlib
import pathlib

MEBIBYTE = 2**20


class PeakMemory:
    """The most memory held since it was made, where that can be read: on a GPU, and of a process on Linux.

    Of a process it is the resident set. Memory that an earlier training left behind counts, because the process still
    has it: compare in processes of their own.
    """

    def __init__(self):
        import tensorflow as tf

        self._gpu = "GPU:0" if tf.config.list_logical_devices("GPU") else None
        self._readable = True
        if self._gpu:
            tf.config.experimental.reset_memory_stats(self._gpu)
        else:
            try:
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak back to what is held now
            except OSError:
                self._readable = False

    def bytes(self) -> float:
        """The peak so far; NaN where it cannot be read."""
        import tensorflow as tf

        if self._gpu:
            return float(tf.config.experimental.get_memory_info(self._gpu)["peak"])
        if self._readable:
            with contextlib.suppress(OSError):
                for line in pathlib.Path("/proc/self/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        return 1024.0 * int(line.split()[1])
        return float("nan")

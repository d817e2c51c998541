"""The kernels of a classroom. Those whose page was never opened end after a while."""

import time
from typing import Any

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager


class Kernels(AsyncMappingKernelManager):
    """Jupyter's kernels, whose idle time counts from when they left Voila's reserve.

    Every few seconds, Voila asks about each kernel outside of its reserve. If the time in the
    reserve counted as idle time, a page could lose its kernel before it has opened its socket.
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._left_reserve: dict[str, float] = {}

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """Ends the kernel if it is idle and has no page for `cull_idle_timeout` seconds."""
        now = time.monotonic()
        self._left_reserve = {
            kernel: left for kernel, left in self._left_reserve.items() if kernel in self
        }
        if now - self._left_reserve.setdefault(kernel_id, now) >= self.cull_idle_timeout:
            await super().cull_kernel_if_idle(kernel_id)

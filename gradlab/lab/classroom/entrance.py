"""The page of a classroom, for as many visitors as there may be. Others see a page that says so,
and tries again.

A visitor counts from the creation of the kernel on, not from the page's first message: a kernel
takes 100 MiB, and a program that only loads the page would start one after another.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from jupyter_core.utils import ensure_async
from tornado.web import authenticated
from voila.tornado.handler import TornadoVoilaHandler

VISITORS = "gradlab_visitors"
AGAIN_SECONDS = 3  # until the page of a full classroom loads again

# A page that is reloaded gives its kernel back when it is replaced, so its visitor is let in the
# next time.
FULL = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gradlab</title></head>
<body>
<p role="status">The classroom is full: it has {visitors} visitors. This page tries again every {again} seconds.</p>
</body></html>
"""


class Entrance(TornadoVoilaHandler):
    """Voila's page, if there is room."""

    arriving: ClassVar[int] = 0  # visitors without a kernel yet
    entered: ClassVar[set[str]] = set()  # the kernels of the others, and some that have ended

    _arrival: "_Arrival | None" = None

    @property
    def kernel_manager(self) -> Any:
        return self._arrival or super().kernel_manager

    @authenticated
    async def get(self, path: str | None = None) -> None:
        if path:  # no page
            await super().get(path)
            return
        kernels = self.kernel_manager
        visitors = self.settings[VISITORS]
        Entrance.entered -= {
            kernel for kernel in list(self.entered) if not await _is_alive(kernels, kernel)
        }
        if self.arriving + len(self.entered) >= visitors:
            self.set_status(503)
            self.set_header("Refresh", str(AGAIN_SECONDS))
            self.finish(FULL.format(visitors=visitors, again=AGAIN_SECONDS))
            return
        Entrance.arriving += 1
        self._arrival = _Arrival(kernels, self._enter)
        try:
            await super().get(path)
        finally:
            if self._arrival is not None:  # it got no kernel
                self._leave()

    def _enter(self, kernel: str) -> None:
        self.entered.add(kernel)
        self._leave()

    def _leave(self) -> None:
        """Is not arriving any more."""
        Entrance.arriving -= 1
        self._arrival = None


async def _is_alive(kernels: Any, kernel: str) -> bool:
    """Whether a kernel runs. The page of one that was released may still be open."""
    return kernel in kernels and await ensure_async(kernels.get_kernel(kernel).is_alive())


class _Arrival:
    """Voila's kernels, as one visitor sees them, who gets one.

    Args:
        kernels: the kernels.
        enter: called with the visitor's kernel.
    """

    def __init__(self, kernels: Any, enter: Callable[[str], None]):
        self._kernels = kernels
        self._enter = enter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    async def get_rendered_notebook(self, **more: Any) -> Any:
        """One from Voila's reserve: its rendering, and at the end the kernel."""
        found = await self._kernels.get_rendered_notebook(**more)
        self._enter(found[-1])
        return found

    async def start_kernel(self, **more: Any) -> str:
        """A new one, when the reserve is empty."""
        kernel = await ensure_async(self._kernels.start_kernel(**more))
        self._enter(kernel)
        return kernel

"""The kernels of a classroom: how long one without a page stays."""

from coroutines import result_of
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from gradlab.lab.classroom import kernels


def test_idle_time_counts_from_when_a_kernel_left_the_reserve(monkeypatch):
    now, ended = [1000.0], []

    async def end(self, kernel_id):
        ended.append(kernel_id)

    monkeypatch.setattr(AsyncMappingKernelManager, "cull_kernel_if_idle", end)
    monkeypatch.setattr(kernels.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        kernels.Kernels, "__contains__", lambda self, kernel_id: kernel_id != "gone"
    )
    manager = kernels.Kernels(cull_idle_timeout=45)
    seen = []
    for second in range(0, 61, 15):
        now[0] = 1000.0 + second
        for kernel in ("one", "gone"):
            result_of(manager.cull_kernel_if_idle(kernel))
        seen.append(list(ended))
    assert seen == [[], [], [], ["one"], ["one", "one"]]

"""A Dask cluster of real processes, which tests kill."""

import pathlib
import subprocess
import sys

from events import LIMIT
from lab_page import free_port, listens, until_up


class DaskProcesses:
    """A scheduler and workers with one thread each.

    Args:
        folder: for their logs and files.
        workers: the number of workers.
    """

    def __init__(self, folder: pathlib.Path, workers: int):
        self.port, self._folder, self._count = free_port(), folder, workers
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start all of them, at the same address as before."""
        self.scheduler = self._run(
            "scheduler", "--host=127.0.0.1", f"--port={self.port}", "--no-dashboard"
        )
        until_up(lambda: listens(self.port), self.scheduler, self._folder / "dask.log", LIMIT)
        options = [self.address, "--nthreads=1", "--no-nanny", "--no-dashboard", "--host=127.0.0.1"]
        self.workers = [self._run("worker", *options, f"--name={i}") for i in range(self._count)]

    def stop(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()

    def _run(self, *command: str) -> subprocess.Popen:
        with (self._folder / "dask.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *command],
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

"""Waiting for events. A test that waits for what it needs, not for a fixed time, passes on a
machine of any speed."""

import pathlib
import subprocess
import time
from collections.abc import Callable

# Seconds after which a test that hangs ends with an error; nothing that works takes so long
LIMIT = 600


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Wait until a condition is true. Fails when the process that should make it true has ended, or
    after the limit."""
    began = time.monotonic()
    while not condition():
        if process is not None and process.poll() is not None and not condition():
            raise AssertionError(
                f"the process ended with status {process.returncode} before the event"
            )
        if time.monotonic() - began > LIMIT:
            raise AssertionError(f"the event did not happen within {LIMIT} seconds")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie, which only waits for its parent to ask for its status, does
    not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

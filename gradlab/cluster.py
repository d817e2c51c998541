"""Strategies over towers and workers, and a local cluster to try them on one machine."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, TextIO

from gradlab import _checks, runtime

if TYPE_CHECKING:
    import tensorflow as tf


@functools.cache  # TensorFlow confuses the collective operations of two strategies in one process
def strategy() -> "tf.distribute.Strategy":
    """The tf.distribute strategy for the available workers and devices.

    - Several workers, each a process that a scheduler or `python -m gradlab launch` started: a
      MultiWorkerMirroredStrategy over them. They are listed in TF_CONFIG or, on SLURM, found by
      TensorFlow's resolver. A worker computes on its GPUs, or on its CPU as one device.
    - Several towers, configured by `gradlab.setup`: a MirroredStrategy over their devices.
    - Otherwise: TensorFlow's default strategy for a single device.

    Call it right after `gradlab.setup`, and create the model and the optimizer inside `with
    strategy.scope():`.

    Returns:
        A tf.distribute.Strategy, the same object on every call.

    Raises:
        RuntimeError: there are several workers, and TensorFlow has already started its devices.

    Example:
        >>> strategy().num_replicas_in_sync      # after gradlab.setup(towers=3)
        3
    """
    import tensorflow as tf

    with runtime.without_startup_noise():
        if runtime.workers() > 1:
            return _over_workers()
        chosen = runtime.current()
        gpus = tf.config.list_logical_devices("GPU")
        devices = chosen.devices if chosen is not None else runtime.tower_devices(max(1, len(gpus)))
        return (
            tf.distribute.MirroredStrategy(devices)
            if len(devices) > 1
            else tf.distribute.get_strategy()
        )


def _over_workers() -> "tf.distribute.Strategy":
    import tensorflow as tf

    resolver = None  # TF_CONFIG
    if "TF_CONFIG" not in os.environ:
        # SLURM already assigns each task its own GPUs (srun --gpus-per-task). TensorFlow's resolver
        # would assign them again, and fails to count tasks without GPUs. So it gets the number of
        # one GPU per task, and assigns none.
        # Two jobs may share a machine
        port = 12000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=runtime.workers(), gpus_per_task=1, auto_set_gpu=False
        )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        raise RuntimeError(
            "gradlab.cluster.strategy must run before TensorFlow starts its devices, that is "
            "before its first operation: call it right after gradlab.setup. TensorFlow's message: "
            f"{error}"
        ) from None


def launch(
    command: Sequence[str], workers: int, out: TextIO | None = None, grace: float = 5.0
) -> int:
    """Run a command as a cluster of local processes, until all have ended or one fails.

    Each process has its own TF_CONFIG. The workers communicate over the loopback interface, on
    ports that were free just before. Each line of their output is preceded by the worker's number.
    If a worker fails, or this process is interrupted or terminated, the remaining workers are
    terminated, and killed after the grace period, so that no process is left behind.

    Args:
        command: the program and its arguments.
        workers: the number of processes.
        out: the stream to which the workers' output is written. None: standard output.
        grace: the seconds between terminating and killing a worker.

    Returns:
        0 if all workers succeeded, otherwise the exit status of one that failed; 128 + n after
        signal n, as in a shell.

    Raises:
        ValueError: workers is not a positive integer, or the command is empty.
    """
    _checks.positive_integer("workers", workers)
    if not command:
        raise ValueError("launch needs a command to run. Received: none")
    out = out or sys.stdout
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    lock = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    received: list[int] = []  # the signals that ask this process to stop
    handlers = {
        n: signal.signal(n, lambda number, _: received.append(number))
        for n in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for index in range(workers):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            process = subprocess.Popen(
                command,
                env={**os.environ, "TF_CONFIG": json.dumps(task), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A process group of its own, which also ends the processes that it starts
                start_new_session=True,
            )
            processes.append(process)
            readers.append(
                threading.Thread(
                    target=_relay, args=(process.stdout, index, out, lock), daemon=True
                )
            )
            readers[-1].start()
        while not received:
            statuses = [process.poll() for process in processes]
            if any(statuses) or None not in statuses:
                break
            time.sleep(0.05)
    finally:
        failed = next((process.returncode for process in processes if process.returncode), None)
        _end(processes, grace)
        for reader in readers:
            reader.join(timeout=grace)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    return 0 if failed is None else failed if failed > 0 else 128 - failed


def _free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface that no process uses at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _relay(stream: IO[bytes], index: int, out: TextIO, lock: threading.Lock) -> None:
    """Copy the output of a worker line by line, each line with the worker's number."""
    for line in stream:
        with lock:
            out.write(f"[worker {index}] {line.decode(errors='replace').rstrip()}\n")
            out.flush()


def _end(processes: list[subprocess.Popen], grace: float) -> None:
    """End the workers' process groups: SIGTERM, then SIGKILL when all workers have ended or the
    grace is over."""
    for number, until in (
        (signal.SIGTERM, time.monotonic() + grace),
        (signal.SIGKILL, time.monotonic() + 2 * grace),
    ):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.02)

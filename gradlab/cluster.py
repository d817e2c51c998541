"""Strategies over towers and workers, and a local cluster for trying them out."""

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
from typing import TextIO

from gradlab import _checks, runtime


@functools.cache  # TensorFlow mixes up the collectives of two strategies in one process
def strategy():
    """The tf.distribute strategy for what is there: several workers, several towers, or one device.

    - Several workers, each a process that a scheduler or `python -m gradlab launch` started: a
      MultiWorkerMirroredStrategy over them. They are found in TF_CONFIG, or on SLURM by TensorFlow's own resolver. A
      worker computes on its GPUs, or on its CPU as one device.
    - Several towers, as `gradlab.setup` made them: a MirroredStrategy over their devices.
    - Else TensorFlow's default, which does nothing special.

    Call it right after `gradlab.setup`, and make the model and the optimizer `with strategy.scope():`.

    Returns:
        A tf.distribute.Strategy: the same one each time.

    Raises:
        RuntimeError: there are several workers, and TensorFlow has already started its devices.

    Example:
        >>> strategy().num_replicas_in_sync      # here, setup made three towers
        3
    """
    import tensorflow as tf

    with runtime.without_startup_noise():
        if runtime.workers() > 1:
            return _over_workers()
        chosen = runtime.current()
        gpus = tf.config.list_logical_devices("GPU")
        devices = chosen.devices if chosen is not None else runtime.tower_devices(max(1, len(gpus)))
        return tf.distribute.MirroredStrategy(devices) if len(devices) > 1 else tf.distribute.get_strategy()


def _over_workers():
    import tensorflow as tf

    resolver = None  # TF_CONFIG
    if "TF_CONFIG" not in os.environ:
        # SLURM itself shows each task its own GPUs (srun --gpus-per-task). TensorFlow's resolver would share them out
        # again, and cannot count tasks without any; so it is told of one a task, and to leave them alone.
        port = 12000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000  # two jobs may meet on a machine
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=runtime.workers(), gpus_per_task=1, auto_set_gpu=False
        )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        raise RuntimeError(
            "gradlab.cluster.strategy must run before TensorFlow starts its devices, that is before its first "
            f"operation: call it right after gradlab.setup. TensorFlow says: {error}"
        ) from None


def launch(command: Sequence[str], workers: int, out: TextIO | None = None, grace: float = 5.0) -> int:
    """Runs a command as a cluster of local processes, each with its TF_CONFIG, until all are done or one fails.

    The workers talk over the loopback interface, on ports that were free a moment ago. Their output comes line by line
    with the worker's number before it. When one fails, or this process is interrupted or terminated, the others are
    terminated, and killed after the grace: none is left behind.

    Args:
        command: the program and its arguments.
        workers: how many to start.
        out: where to write the workers' output. None: standard output.
        grace: seconds from terminating to killing.

    Returns:
        0 when all ended well, else the exit status of the first that did not; 128 + n after signal n, as in a shell.

    Raises:
        ValueError: workers is not a positive integer, or there is no command.
    """
    _checks.positive_integer("workers", workers)
    if not command:
        raise ValueError("launch needs a command to run. Received: none")
    out = out or sys.stdout
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    lock, processes, readers = threading.Lock(), [], []
    asked = []  # the signals that asked this process to stop
    handlers = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for index in range(workers):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            process = subprocess.Popen(
                command,
                env={**os.environ, "TF_CONFIG": json.dumps(task), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group to end, with whatever the worker itself starts
            )
            processes.append(process)
            readers.append(threading.Thread(target=_relay, args=(process.stdout, index, out, lock), daemon=True))
            readers[-1].start()
        while not asked:
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
    if asked:
        return 128 + asked[0]
    return 0 if failed is None else failed if failed > 0 else 128 - failed


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _relay(stream, index: int, out: TextIO, lock: threading.Lock) -> None:
    for line in stream:
        with lock:
            out.write(f"[worker {index}] {line.decode(errors='replace').rstrip()}\n")
            out.flush()


def _end(processes: list[subprocess.Popen], grace: float) -> None:
    """Ends the workers' process groups: politely, then not."""
    for number, until in ((signal.SIGTERM, time.monotonic() + grace), (signal.SIGKILL, time.monotonic() + 2 * grace)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.02)

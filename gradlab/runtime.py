"""Configuration of TensorFlow: towers, threads, random seeds and quiet start-up. Only this module
does it."""

import contextlib
import gc
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlab import _checks

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Runtime:
    """The configuration that `setup` chose.

    Attributes:
        devices: the device of each tower, such as "/device:GPU:0" or "/device:CPU:1".
        threads: the number of operations that may run at once, each on one thread. None:
            TensorFlow's default.
        seed: the seed of Python, NumPy and TensorFlow, or None.
    """

    devices: tuple[str, ...]
    threads: int | None
    seed: int | None


CONTAINER = pathlib.Path("/sys/fs/cgroup")

_arguments: dict[str, Any] | None = None
_runtime: Runtime | None = None


def setup(
    towers: int | None = None, threads: int | str = "auto", seed: int | None = None
) -> Runtime:
    """Configure TensorFlow for this process, and print the configuration in one line.

    Call it once, before TensorFlow's first operation.

    The number of threads matters on CPUs: the operations of a small micro-batch are too small to be
    split over several cores, but several micro-batches (or towers) can run in parallel. With
    "auto", each operation therefore gets one thread, and as many operations run at once as there
    are cores. On GPUs, "auto" is TensorFlow's default.

    It also sets TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE=false, unless this variable is set already, so
    that oneDNN keeps its compiled primitives. Otherwise the gradients of small convolutions spend
    most of their time compiling them again.

    Args:
        towers: the number of towers. None: one for each GPU, or one on the CPU. A GPU that was
            divided into logical devices counts as that many. If there are more towers than GPUs,
            the CPU is divided into logical devices, so tower averaging can be tried on any machine.
        threads: "auto"; "tensorflow" for TensorFlow's default; or the number of operations that may
            run at once.
        seed: seeds the random numbers of Python, NumPy and TensorFlow, and makes TensorFlow's
            operations deterministic. The same program on the same machine then gives the same bits.

    Returns:
        The `Runtime`. A second call with the same arguments prints and returns the same.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: TensorFlow has already started its devices, or setup ran before with other
            arguments.

    Example:
        >>> import gradlab
        >>> runtime = gradlab.setup(towers=3, seed=0)    # doctest: +ELLIPSIS
        gradlab: 3 towers (...), ..., seed 0
        >>> len(runtime.devices)
        3
    """
    global _arguments, _runtime
    if towers is not None:
        _checks.positive_integer("towers", towers)
    if threads not in ("auto", "tensorflow"):
        _checks.positive_integer("threads", threads, otherwise='"auto", "tensorflow" or ')
    if seed is not None:
        _checks.natural_number("seed", seed)
    received = {"towers": towers, "threads": threads, "seed": seed}
    if _runtime is None:
        _arguments = received
        _runtime = _configure(towers, threads, seed)
    elif _arguments != received:
        raise RuntimeError(
            "gradlab.setup configures a process only once, and already ran with "
            f"{_spell(_arguments or {})}: restart the kernel to change that. Received: "
            f"{_spell(received)}"
        )
    print(_sentence(_runtime))
    return _runtime


def _configure(towers: int | None, threads: int | str, seed: int | None) -> Runtime:
    """Start TensorFlow with checked arguments of `setup`."""
    os.environ.setdefault("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", "false")
    with without_startup_noise():
        import tensorflow as tf

        # Otherwise tf.distribute logs every strategy and every all-reduce
        tf.get_logger().setLevel("WARNING")
        gpus = tf.config.list_physical_devices("GPU")
    chosen = _thread_count(threads, bool(gpus))
    try:
        if chosen is not None:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(chosen)
        divided = {gpu: tf.config.get_logical_device_configuration(gpu) for gpu in gpus}
        for gpu, parts in divided.items():
            if parts is None:  # the parts of a divided GPU have their memory
                tf.config.experimental.set_memory_growth(gpu, True)
        logical = sum(1 if parts is None else len(parts) for parts in divided.values())
        if towers is not None and towers > max(1, logical):
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * towers
            )
    except RuntimeError as error:
        raise RuntimeError(
            "gradlab.setup must run before TensorFlow starts its devices, that is before its "
            f"first operation: restart the kernel and call it first. TensorFlow's message: {error}"
        ) from None
    with without_startup_noise():
        if seed is not None:
            tf.keras.utils.set_random_seed(seed)
            tf.config.experimental.enable_op_determinism()
        return Runtime(
            _devices(towers if towers is not None else max(1, logical), logical), chosen, seed
        )


def _thread_count(threads: int | str, has_gpu: bool) -> int | None:
    """The number of operations that may run at once; None for TensorFlow's default."""
    if threads == "auto":
        return None if has_gpu else cores()
    return None if threads == "tensorflow" else int(threads)


def _devices(towers: int, gpus: int) -> tuple[str, ...]:
    """The devices of the towers. With several workers they are not listed, because that would start
    them."""
    if workers() == 1:
        return tower_devices(towers)
    # The strategy over the workers must be created before the devices start.
    return tuple(f"/device:{'GPU' if towers <= gpus else 'CPU'}:{i}" for i in range(towers))


def current() -> Runtime | None:
    """The configuration that `setup` chose, or None if it was not called."""
    return _runtime


def arguments() -> dict[str, Any] | None:
    """The arguments that `setup` was called with, to configure another process alike, or None if it
    was not called."""
    return _arguments


def workers() -> int:
    """The number of processes that train together, according to TF_CONFIG or SLURM; 1 if neither is
    set."""
    if "TF_CONFIG" in os.environ:
        return max(1, len(_addresses()))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def workers_here() -> int:
    """How many of them share this machine and its memory."""
    if "TF_CONFIG" in os.environ:
        task = json.loads(os.environ["TF_CONFIG"]).get("task", {})
        hosts = {name: address.rpartition(":")[0] for name, address in _addresses().items()}
        own = hosts.get((task.get("type"), int(task.get("index", 0))), "")
        return max(1, list(hosts.values()).count(own))
    # SLURM writes "2(x3),1": two tasks on each of three machines, one on the fourth. The largest
    # number is safe.
    tasks = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return max(1, *map(int, tasks))


def _addresses() -> dict[tuple[str, int], str]:
    """For each worker of TF_CONFIG, by job and index, its address."""
    cluster = json.loads(os.environ["TF_CONFIG"]).get("cluster", {})
    return {
        (job, i): address
        for job in ("chief", "worker")
        for i, address in enumerate(cluster.get(job, ()))
    }


def tower_devices(towers: int) -> tuple[str, ...]:
    """The device names for a number of towers: GPUs if there are enough, otherwise (logical) CPU
    devices.

    Raises:
        ValueError: there are fewer devices than towers.
    """
    import tensorflow as tf

    _checks.positive_integer("towers", towers)
    most = 0
    for kind in ("GPU", "CPU"):
        found = len(tf.config.list_logical_devices(kind))
        if found >= towers:
            return tuple(f"/device:{kind}:{i}" for i in range(towers))
        most = max(most, found)
    raise ValueError(
        f"towers must be at most {most}, the number of devices; for more, call "
        f"gradlab.setup(towers={towers}) at the start of the program. Received: {towers}"
    )


def session(graph: "tf.Graph") -> "tf.compat.v1.Session":
    """A tf.compat.v1.Session for a static graph, with the threads that `gradlab.setup` chose.

    TensorFlow's own sessions ignore the threads that are configured for eager code.
    """
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.allow_growth = True
    if _runtime is not None and _runtime.threads is not None:
        config.intra_op_parallelism_threads = 1
        config.inter_op_parallelism_threads = _runtime.threads
    return tf.compat.v1.Session(graph=graph, config=config)


# The lines that TensorFlow's C++ code logs at its start below the level of an error, and the line
# that precedes them.
_NOISE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:)"
)


@contextlib.contextmanager
def without_startup_noise() -> Iterator[None]:
    """Context for importing TensorFlow: its start-up messages are dropped. Every other line still
    reaches stderr.

    File descriptor 2 is redirected, because C++ code writes these messages before Python can
    configure its logging. Python's garbage collection is paused: it finds nothing to free, and
    takes a fifth of the time of the import.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    collecting = gc.isenabled()
    gc.disable()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        kept = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            if collecting:
                gc.enable()
            os.dup2(kept, 2)
            os.close(kept)
            captured.seek(0)
            rest = b"".join(line for line in captured if not _NOISE.match(line))
            if rest:
                os.write(2, rest)


def cores() -> int:
    """The number of cores that this process may use. In containers it is often below the machine's
    number of cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> float:
    """The bytes that this process can still take without swapping; infinite where Linux does not
    tell."""
    available = float("inf")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        available = 1024.0 * next(
            int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    with contextlib.suppress(OSError, ValueError):  # a container has a limit of its own, or "max"
        limit, used = (
            int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current")
        )
        available = min(available, float(limit - used))
    return available


def _spell(arguments: dict) -> str:
    return "(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"


def _sentence(runtime: Runtime) -> str:
    names = ", ".join(device.removeprefix("/device:") for device in runtime.devices)
    threads = (
        "TensorFlow's own threads"
        if runtime.threads is None
        else f"operations at once: {runtime.threads}"
    )
    seed = "no seed" if runtime.seed is None else f"seed {runtime.seed}"
    return f"gradlab: {len(runtime.devices)} tower{'s' * (len(runtime.devices) > 1)} ({names}), {threads}, {seed}"

"""The one place that configures TensorFlow: towers, threads, determinism, a quiet start."""

import contextlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass

from gradlab import _checks


@dataclass(frozen=True)
class Runtime:
    """What `setup` chose.

    Attributes:
        devices: one device name a tower, such as "/device:GPU:0" or "/device:CPU:1".
        threads: how many operations may run at once, each on one thread; None is TensorFlow's own choice.
        seed: the seed of Python, NumPy and TensorFlow, or None.
    """

    devices: tuple[str, ...]
    threads: int | None
    seed: int | None


_arguments: dict | None = None
_runtime: Runtime | None = None


def setup(towers: int | None = None, threads: int | str = "auto", seed: int | None = None) -> Runtime:
    """Configures TensorFlow for this process, once, and says in a line what it chose.

    Why the threads matter: the operations of a small micro-batch are too small to be cut over several cores, but the
    micro-batches (or towers) can run beside each other. So on CPUs "auto" gives each operation one thread and runs as
    many operations at once as there are cores. On GPUs it leaves TensorFlow's own choice.

    It also makes oneDNN keep its primitives (TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE=false, unless that is set already): the
    gradients of small convolutions otherwise take most of their time to make them anew.

    Args:
        towers: how many towers. None: one a GPU, or one on the CPU. More than there are GPUs: that many logical CPU
            devices, so that tower averaging can be tried on any machine.
        threads: "auto", "tensorflow" (its own choice), or how many operations may run at once.
        seed: when given, Python's, NumPy's and TensorFlow's random numbers are seeded and TensorFlow's operations are
            made deterministic: the same program on the same machine then gives the same bits.

    Returns:
        The `Runtime`. A second call with the same arguments says and returns the same.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: TensorFlow has started its devices already, or setup ran before with other arguments.

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

    arguments = {"towers": towers, "threads": threads, "seed": seed}
    if _runtime is not None:
        if arguments != _arguments:
            raise RuntimeError(
                f"gradlab.setup runs once a process, and ran with {_spell(_arguments)}: restart the kernel to choose "
                f"again. Received: {_spell(arguments)}"
            )
        print(_sentence(_runtime))
        return _runtime

    os.environ.setdefault("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", "false")
    with without_startup_noise():
        import tensorflow as tf

        tf.get_logger().setLevel("WARNING")  # tf.distribute tells of each strategy and each all-reduce
        gpus = tf.config.list_physical_devices("GPU")
    if threads == "auto":
        threads = None if gpus else _cores()
    elif threads == "tensorflow":
        threads = None
    try:
        if threads is not None:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if towers is not None and towers > max(1, len(gpus)):
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * towers)
    except RuntimeError as error:
        raise RuntimeError(
            "gradlab.setup must run before TensorFlow starts its devices, that is before its first operation: "
            f"restart the kernel and call it first. TensorFlow says: {error}"
        ) from None
    with without_startup_noise():
        if seed is not None:
            tf.keras.utils.set_random_seed(seed)
            tf.config.experimental.enable_op_determinism()
        wanted = towers if towers is not None else max(1, len(gpus))
        if workers() > 1:
            # Asking for devices would start them, and a cluster's strategy must come first.
            devices = tuple(f"/device:{'GPU' if wanted <= len(gpus) else 'CPU'}:{i}" for i in range(wanted))
        else:
            devices = tower_devices(wanted)
    _arguments, _runtime = arguments, Runtime(devices, threads, seed)
    print(_sentence(_runtime))
    return _runtime


def current() -> Runtime | None:
    """What `setup` chose, or None when it was not called."""
    return _runtime


def arguments() -> dict | None:
    """What `setup` was called with, to set up another process alike, or None when it was not called."""
    return _arguments


def workers() -> int:
    """How many processes train together, as TF_CONFIG or SLURM say: 1 when neither does."""
    if "TF_CONFIG" in os.environ:
        cluster = json.loads(os.environ["TF_CONFIG"]).get("cluster", {})
        return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def tower_devices(towers: int) -> tuple[str, ...]:
    """The names of the devices for so many towers: GPUs where there are enough, else (logical) CPU devices.

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
        f"towers must be at most {most}, the number of devices here; gradlab.setup(towers={towers}) at the start of "
        f"the program makes more. Received: {towers}"
    )


def session(graph):
    """A tf.compat.v1.Session for a static graph, with the threads that `setup` chose (sessions do not inherit them)."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.allow_growth = True
    if _runtime is not None and _runtime.threads is not None:
        config.intra_op_parallelism_threads = 1
        config.inter_op_parallelism_threads = _runtime.threads
    return tf.compat.v1.Session(graph=graph, config=config)


# What TensorFlow's C++ code says at its start below the level of an error, and the line that announces it.
_NOISE = re.compile(rb"^(WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:)")


@contextlib.contextmanager
def without_startup_noise():
    """Keeps TensorFlow's start-up remarks off the notebook; every other line still reaches stderr.

    They are written by C++ code to file descriptor 2 before any Python switch can reach them, hence the redirection.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            rest = b"".join(line for line in said if not _NOISE.match(line))
            if rest:
                os.write(2, rest)


def _cores() -> int:
    """The cores this process may use: containers and schedulers often give fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _spell(arguments: dict) -> str:
    return "(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"


def _sentence(runtime: Runtime) -> str:
    names = ", ".join(device.removeprefix("/device:") for device in runtime.devices)
    threads = "TensorFlow's own threads" if runtime.threads is None else f"operations at once: {runtime.threads}"
    seed = "no seed" if runtime.seed is None else f"seed {runtime.seed}"
    return f"gradlab: {len(runtime.devices)} tower{'s' * (len(runtime.devices) > 1)} ({names}), {threads}, {seed}"

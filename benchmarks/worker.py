"""A process that times ways to make an update, one at a time.

    python -m benchmarks.worker tensorflow-auto

Each thread setting needs a process of its own, because the number of threads can be set only once
per process. The worker first writes one line: {"ways": pairs (way, variant)}, or {"missing": the
module that is not installed}. It then reads requests from stdin, one JSON object per line: {"way",
"variant", "network", "k", "b", "updates", "warm"}, where warm is the number of updates before a way
is timed for the first time. It answers each request with one line: {"seconds"} or {"error"}.
"""

import gc
import importlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.networks import Run

# For each setting, the module with its ways, and for TensorFlow the `threads` argument of
# `gradlab.setup`.
SETTINGS: dict[str, tuple[str, str | None]] = {
    "tensorflow-auto": ("benchmarks.tensorflow_ways", "auto"),
    "tensorflow-default": ("benchmarks.tensorflow_ways", "tensorflow"),
    "torch": ("benchmarks.torch_ways", None),
    "torch-one-thread": ("benchmarks.torch_ways", None),
    "jax": ("benchmarks.jax_ways", None),
    "jax-one-thread": ("benchmarks.jax_ways", None),
}
ONE_PER_FRAMEWORK = ("tensorflow-auto", "torch", "jax")


def set_up(setting: str) -> None:
    """Configures the threads of this process.

    Args:
        setting: a key of `SETTINGS`.

    Raises:
        ImportError: the framework is not installed.
    """
    threads = SETTINGS[setting][1]
    if threads is not None:
        import gradlab

        gradlab.setup(threads=threads)
    if setting.startswith("jax"):
        # Otherwise JAX takes three quarters of a GPU's memory at its start
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if setting == "torch-one-thread":
        importlib.import_module("torch").set_num_threads(1)
    if setting == "jax-one-thread":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


class Timer:
    """Times ways, and keeps those of the last network and shape compiled: all of them would fill
    the memory.

    Args:
        ways: for each name, its variants: a `benchmarks.networks.Way` for each name.
    """

    def __init__(self, ways: dict):
        self._ways = ways
        self._kept: tuple = ()
        self._runs: dict[tuple, Run] = {}

    def seconds(
        self, way: str, variant: str, network: str, k: int, b: int, updates: int, warm: int
    ) -> float:
        """Times updates.

        Args:
            way, variant: the names of the way and of its variant.
            network: the name of the network.
            k: the micro-batches per update.
            b: the examples per micro-batch.
            updates: the number of updates to time.
            warm: the number of updates to make before the first time that this way is timed with
                this k and b.

        Returns:
            The seconds that the updates took.
        """
        # With k = 1, it may be the big batch of the shape that is kept.
        if (network, k, b) != self._kept and (k > 1 or network not in self._kept):
            self._kept, self._runs = (network, k, b), {}
            gc.collect()
        key = way, variant, k, b
        if key not in self._runs:
            from benchmarks import networks

            built = networks.build(network)
            self._runs[key] = self._ways[way][variant](built, k, b, *networks.batch(built, k * b))
            self._runs[key](warm)  # traces, compiles, allocates
        began = time.perf_counter()
        measured = self._runs[key](updates)
        return measured if isinstance(measured, float) else time.perf_counter() - began

    def forget(self, way: str, variant: str) -> None:
        """Frees the memory of a variant that is not timed again, with any k and b."""
        self._runs = {key: run for key, run in self._runs.items() if key[:2] != (way, variant)}
        gc.collect()


def main() -> None:
    """Answers requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps whatever a framework prints apart from the answers
    setting = sys.argv[1]
    try:
        set_up(setting)
        module = importlib.import_module(SETTINGS[setting][0])
    except ImportError as error:
        print(json.dumps({"missing": error.name}), file=answers)
        return
    pairs = [(way, variant) for way, variants in module.WAYS.items() for variant in variants]
    print(json.dumps({"ways": pairs}), file=answers)
    timer = Timer(module.WAYS | getattr(module, "TRAININGS", {}))
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            if wanted.pop("forget", False):
                timer.forget(**wanted)
                continue
            answer: dict = {"seconds": timer.seconds(**wanted)}
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {first_line[:200]}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()

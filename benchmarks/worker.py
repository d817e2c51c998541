"""A process that times ways, one at a time, as it is told: threads can be set once a process only.

    python -m benchmarks.worker tensorflow-auto

It reads one JSON object a line, {"way", "network", "k", "b", "updates", "warm": updates before the first time}, and
answers {"seconds"} or {"error"}; the first line that it writes lists its ways.
"""

import importlib
import json
import os
import sys
import time

import numpy as np

# setting: module with the ways, and the threads that gradlab.setup is told, where that is TensorFlow's
SETTINGS = {
    "tensorflow-auto": ("benchmarks.tensorflow_ways", "auto"),
    "tensorflow-default": ("benchmarks.tensorflow_ways", "tensorflow"),
    "torch": ("benchmarks.torch_ways", None),
    "torch-one-thread": ("benchmarks.torch_ways", None),
    "jax": ("benchmarks.jax_ways", None),
}


def batch(network, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and classes: what is timed does not depend on what they show."""
    rng = np.random.default_rng(0)
    x = rng.random([examples, *network.input_shape], np.float32)
    return x, rng.integers(0, 10, examples).astype(np.int32)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a framework prints must not be taken for an answer
    module, threads = SETTINGS[sys.argv[1]]
    if threads is not None:
        import gradlab

        gradlab.setup(threads=threads)
    try:
        loaded = importlib.import_module(module)
        ways = loaded.WAYS | getattr(loaded, "TRAININGS", {})
    except ImportError as error:
        print(json.dumps({"missing": error.name}), file=answers)
        return
    if sys.argv[1] == "torch-one-thread":
        importlib.import_module("torch").set_num_threads(1)
    from benchmarks import networks

    print(json.dumps({"ways": list(loaded.WAYS)}), file=answers)
    kept: tuple = (None, {})  # the ways of one network: those of the last are forgotten
    for line in sys.stdin:
        wanted = json.loads(line)
        if kept[0] != wanted["network"]:
            kept = wanted["network"], {}
        key = wanted["way"], wanted["k"], wanted["b"]
        try:
            if key not in kept[1]:
                network = networks.build(wanted["network"])
                kept[1][key] = ways[wanted["way"]](network, *key[1:], *batch(network, wanted["k"] * wanted["b"]))
                kept[1][key](wanted["warm"])  # traces, compiles, allocates
            began = time.perf_counter()
            told = kept[1][key](wanted["updates"])
            seconds = told if isinstance(told, float) else time.perf_counter() - began
            print(json.dumps({"seconds": seconds}), file=answers)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}), file=answers)


if __name__ == "__main__":
    main()

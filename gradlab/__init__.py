"""gradlab: gradient averaging and gradient accumulation in TensorFlow, to learn and to use.

Importing gradlab starts nothing: TensorFlow, matplotlib and the widgets are imported by the names that need them.
Call `gradlab.setup()` first when you want several towers, chosen threads or repeatable runs.
"""

import importlib

from gradlab import cluster, runtime

__version__ = "0.1.0"

# public name: the module it lives in
_HOME = {
    "setup": "gradlab.runtime",
    "average_gradients": "gradlab.averaging",
    "GradientAccumulator": "gradlab.accumulator",
    "microbatched": "gradlab.keras_model",
    "Trainer": "gradlab.trainer",
    "draw_graph": "gradlab.graph_view",
    "gradient_noise_scale": "gradlab.noise_scale",
    "Experiment": "gradlab.lab.experiment",
    "Result": "gradlab.lab.result",
    "run": "gradlab.lab.sweep",
    "sweep": "gradlab.lab.sweep",
    "AccumulationLab": "gradlab.lab.widget",
}

__all__ = [*_HOME, "__version__", "cluster"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"gradlab has {', '.join(_HOME)}. Received: {name!r}")
    with runtime.without_startup_noise():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

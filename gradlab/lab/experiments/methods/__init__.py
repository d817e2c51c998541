"""The five methods that make an update, behind one protocol so that they can be compared.

Each is a real implementation: "towers", "placeholders" and "variables" run a tf.compat.v1 static
graph in a session, "large_batch" and "microbatched" run one compiled TensorFlow 2 function. All
five make the same update.
"""

from typing import Any

from gradlab import _checks
from gradlab.lab.experiments.choices import check_towers
from gradlab.lab.experiments.methods.compiled import CompiledMethod, LargeBatch, Microbatched
from gradlab.lab.experiments.methods.method import Cancelled, Method
from gradlab.lab.experiments.methods.session_graphs import (
    Placeholders,
    StaticGraphMethod,
    Towers,
    Variables,
)
from gradlab.lab.experiments.models import Model
from gradlab.lab.experiments.optimizers import OptimizerConfig

__all__ = [
    "METHODS",
    "Cancelled",
    "CompiledMethod",
    "LargeBatch",
    "Method",
    "Microbatched",
    "Placeholders",
    "StaticGraphMethod",
    "Towers",
    "Variables",
    "build",
]

METHODS: dict[str, type[CompiledMethod] | type[StaticGraphMethod]] = {
    "large_batch": LargeBatch,
    "towers": Towers,
    "placeholders": Placeholders,
    "variables": Variables,
    "microbatched": Microbatched,
}


def build(
    name: str, model: Model, optimizer: OptimizerConfig, towers: int = 1, dtype: Any = "float32"
) -> Method:
    """Builds a method: its graph and session, or its compiled function.

    Args:
        name: "large_batch", "towers", "placeholders", "variables" or "microbatched".
        model: the network.
        optimizer: the optimizer that gets the mean gradient.
        towers: the number of towers over which the examples of each run are split; only static
            graphs take more than 1.
        dtype: the type of features and weights.

    Raises:
        ValueError: an unknown name, or more towers than the method or the machine takes.
    """
    _checks.one_of("method", name, METHODS)
    check_towers(name, towers)
    method = METHODS[name]
    if issubclass(method, StaticGraphMethod):
        return method(model, optimizer, towers, dtype)
    return method(model, optimizer, dtype)

"""How much memory a traced function needs while it runs, from its graph alone."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Operations whose output is their input's memory.
ALIASES = {
    "Bitcast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient",
    "ReadVariableOp", "Reshape", "Squeeze", "StopGradient",
}  # fmt: skip
# Operations that may write their output over an input of the same size that nothing else needs.
IN_PLACE = {
    "Add", "AddN", "AddV2", "BiasAdd", "Cast", "Cos", "Div", "DivNoNan", "Elu", "EluGrad", "Erf", "Exp", "Log",
    "Log1p", "LogicalAnd", "LogicalNot", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "Relu", "Relu6",
    "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sin",
    "Softmax", "Softplus", "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh", "TanhGrad",
}  # fmt: skip
# What they return takes no memory of its own: handles, and values that TensorFlow keeps with the
# graph.
FREE = {"Const", "VarHandleOp"}
# Operations whose body is another graph, which this module does not read.
HIDING = {
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
}


class Liveness(NamedTuple):
    """The bytes in memory while each operation of a function runs: fixed + examples * per_example.

    Attributes:
        fixed, per_example: for each operation, shape (operations,).
        gradients: the part of `fixed` that is gradients of variables, shape (operations,).
    """

    fixed: np.ndarray
    per_example: np.ndarray
    gradients: np.ndarray

    def peak(self, examples: float) -> tuple[float, float]:
        """The most bytes at once, and how many of these are gradients of variables."""
        now = self.fixed + examples * self.per_example
        at = int(np.argmax(now))
        return float(now[at]), float(self.gradients[at])

    def most_examples(self, memory: float) -> float:
        """The number of examples that takes so many bytes at the peak; below 0 if what is fixed
        takes more."""
        if (self.fixed > memory).any():
            return -1.0
        growing = self.per_example > 0
        return float(
            np.min((memory - self.fixed[growing]) / self.per_example[growing], initial=np.inf)
        )


def liveness(
    trace: Callable[[int], tf.Graph], gradients: Callable[[tf.Graph], set[str]]
) -> Liveness | None:
    """The memory of a function.

    Operations run in the order in which they were traced. An output is freed after the last
    operation that reads it, or that reads a tensor which has its memory. So is an input of the
    function. Variables and constants do not count.

    Args:
        trace: a function (number of examples) -> the function's graph, with all shapes known. It is
            traced for two and for four examples: the sizes in between and beyond lie on a line. If
            the two graphs differ, it is traced for more: TensorFlow makes a constant of up to 999
            ones, and an operation of more.
        gradients: a function (graph) -> the names of the tensors that are gradients of variables.

    Returns:
        The `Liveness`, or None if an operation of `HIDING` hides what it computes.
    """
    for examples in (2, 1000):
        few = trace(examples)
        small = _sizes(few)
        large = _sizes(trace(2 * examples))
        if small.keys() == large.keys():
            break
    else:
        return None
    if any(op.type in HIDING for op in few.get_operations()):
        return None
    slope = {name: (large[name] - small[name]) / examples for name in small}
    fixed = {name: small[name] - examples * slope[name] for name in small}
    born_and_last = _lives(few, lambda name: (small[name], large[name]))
    count = len(few.get_operations())
    wanted = gradients(few)
    changes = np.zeros([3, count + 1])
    for name, (born, last) in born_and_last.items():
        values = fixed[name], slope[name], fixed[name] if name in wanted else 0.0
        changes[:, born] += values
        changes[:, last + 1] -= values
    found = np.cumsum(changes, axis=1)[:, :count]
    return Liveness(*found)


def _sizes(graph: tf.Graph) -> dict[str, float]:
    """For each tensor its bytes, 0 for handles and for a few numbers of an unknown count."""
    tensors = [*graph.inputs, *(tensor for op in graph.get_operations() for tensor in op.outputs)]
    return {t.name: float((t.shape.num_elements() or 0) * t.dtype.size) for t in tensors}


def memories(graph: tf.Graph) -> dict[str, str | None]:
    """For each tensor, the first one that has its memory; None if it takes none."""
    memory: dict[str, str | None] = {}
    for op in graph.get_operations():
        for tensor in op.outputs:
            if op.type in FREE or tensor.dtype in (tf.resource, tf.variant):
                memory[tensor.name] = None
            elif op.type in ALIASES and op.inputs:
                memory.setdefault(tensor.name, memory[op.inputs[0].name])
            else:
                memory.setdefault(tensor.name, tensor.name)
    return memory


def _lives(graph: tf.Graph, size: Callable[[str], tuple]) -> dict[str, tuple[int, int]]:
    """For each tensor with memory of its own, the first and the last operation during which it is
    there."""
    memory = memories(graph)
    operations = graph.get_operations()
    last: dict[str, int] = {}
    for i, op in enumerate(operations):
        for tensor in op.inputs:
            last[memory[tensor.name] or ""] = i
    for tensor in graph.outputs:  # what is returned stays
        last[memory[tensor.name] or ""] = len(operations) - 1
    lives: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(operations):
        ending = [
            one
            for one in {memory[t.name] for t in op.inputs}
            if one in lives and lives[one][1] == i
        ]
        for tensor in op.outputs:
            name = tensor.name
            if memory[name] != name:
                continue
            lives[name] = i, max(i, last.get(name, i))
            over = (
                next((one for one in ending if size(one) == size(name)), None)
                if op.type in IN_PLACE
                else None
            )
            if over is not None:
                ending.remove(over)
                lives[over] = lives[over][0], i - 1
    return lives

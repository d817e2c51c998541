"""What a traced graph shows: which tensors depend on which, and which operations draw numbers."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import tensorflow as tf

# How the types of operations begin, or end, that draw other numbers each time they run.
STATEFUL = (
    "Multinomial", "ParameterizedTruncated", "Random", "Rng", "SampleDistortedBoundingBox", "StatefulRandom",
    "StatefulStandard", "StatefulTruncated", "StatefulUniform", "Truncated",
)  # fmt: skip
SAMPLERS = ("CandidateSampler", "CandidateSamplerV2")


class Dependence:
    """A function (tensor) -> whether a traced tensor was computed from one of some other tensors of
    its graph.

    Args:
        sources: the other tensors.
        until: tensors on which it may depend: what these were computed from does not count.
        types: the types of operations whose results count as sources too.
    """

    def __init__(self, sources: list, until: Sequence = (), types: Sequence[str] = ()):
        self._sources = {source.name for source in sources if source is not None}
        self._until = {tensor.name for tensor in until}
        self._types = types

    def __call__(self, tensor: Any) -> bool:
        waiting = [tensor]
        seen = set()
        while waiting:
            one = waiting.pop()
            if one.name in self._until:
                continue
            if one.name in self._sources or one.op.type in self._types:
                return True
            if one.op.name not in seen:
                seen.add(one.op.name)
                waiting.extend(one.op.inputs)
        return False


def stateful_draws(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that draw other random numbers each time they run; those of Keras' layers do
    not.

    An operation draws, too, if a function that it calls does: loops, branches and functions of a
    layer are such calls.
    """
    functions = {
        function.signature.name: function for function in graph.as_graph_def().library.function
    }
    drawing: dict[str, bool] = {}

    def draws(node: Any) -> bool:
        names = chain.from_iterable(
            [value.func.name, *(f.name for f in value.list.func)] for value in node.attr.values()
        )
        is_draw = node.op.startswith(STATEFUL) or node.op.endswith(SAMPLERS)
        return is_draw or (node.op in functions and has_draw(node.op)) or any(map(has_draw, names))

    def has_draw(name: str) -> bool:
        if name in functions and name not in drawing:
            drawing[name] = False  # of a function that calls itself
            drawing[name] = any(map(draws, functions[name].node_def))
        return drawing.get(name, False)

    return [operation for operation in graph.get_operations() if draws(operation.node_def)]

"""Variables that forward passes assign at once: TensorFlow's own, and Keras' inside of loops,
branches and functions.

Their values cannot be carried from one micro-batch to the next like those of other variables. So
they are read before a window, and get that value back wherever gradlab looks at the model, and
before each micro-batch if the new value does not depend on the examples, like that of a counter.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab.fit import keras_private as internals

# How the types of operations begin that assign the variable which is their first input.
ASSIGNING = (
    "Assign",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)


class Direct(NamedTuple):
    """A variable that forward passes assign at once.

    Attributes:
        handle: the resource behind it.
        dtype: its type.
        name: the name of the operation that assigns it, or the variable's path.
        of_data: whether the new value may depend on the examples.
        draws: whether it is a random seed.
    """

    handle: tf.Tensor
    dtype: tf.DType
    name: str
    of_data: bool
    draws: bool

    def value(self) -> tf.Tensor:
        """Its value now."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def direct_variables(
    graph: Any, of_keras: Iterable, depends: Callable[[tf.Tensor], bool]
) -> list[Direct]:
    """The variables that a traced function assigns at once.

    Args:
        graph: its graph.
        of_keras: the Keras variables among them.
        depends: a function (tensor) -> whether it depends on the examples.
    """
    found = []
    known = set()
    for variable in of_keras:
        handle = variable.value.handle
        known.add(graph.capture(handle).name)
        draws = internals.is_seed_state(variable)
        found.append(Direct(handle, variable.value.dtype, variable.path, not draws, draws))
    outside = {inner.name: outer for outer, inner in graph.captures}
    for operation, handle in assignments(graph):
        dtype = internals.variable_of_handle(outside.get(handle.name))
        if handle.name in known or dtype is None:
            continue
        known.add(handle.name)
        # What a function or a loop assigns does not show: it may depend on the examples.
        of_data = not operation.type.startswith("Assign") or any(
            map(depends, list(operation.inputs)[1:])
        )
        found.append(Direct(outside[handle.name], dtype, operation.name, of_data, False))
    return found


def assignments(graph: tf.Graph) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """The operations of a graph that assign variables, or call a function that does: with the
    variable's resource."""
    for operation in graph.get_operations():
        if operation.type.startswith(ASSIGNING):
            yield operation, operation.inputs[0]
        elif "_read_only_resource_inputs" in operation.node_def.attr:
            only_read = set(operation.get_attr("_read_only_resource_inputs"))
            for position, tensor in enumerate(operation.inputs):
                if tensor.dtype == tf.resource and position not in only_read:
                    yield operation, tensor

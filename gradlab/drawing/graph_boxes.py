"""The boxes of a diagram: the operations of a TensorFlow graph, grouped by their names."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from gradlab.drawing._tensorflow_internals import called_graph

# The scopes of the operations that initialize a variable
OWN = ("Initializer", "IsInitialized", "Assign", "Read")
# Operations that change a variable
WRITES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")


@dataclass
class Box:
    """One box of a diagram: an operation, a variable, or all operations in a name scope.

    Attributes:
        name: the common name of its operations, including the scopes.
        types: the types of its operations. Constants, and the operations that belong to a variable,
            are not counted.
        devices: the devices of its operations, such as "CPU:1".
        reads: the names of the boxes whose tensors it uses.
        writes: the names of the variables' boxes that it changes, whether or not it also reads
            them.
        after: the names of the boxes that must run before it, although it uses none of their
            tensors.
        operations: its operations, those of a variable that only initialize it included.
    """

    name: str
    types: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    operations: list[tf.Operation] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """A short description of its operations, such as "2 variables"."""
        if set(self.types) == {"variable"}:
            return "variable" if len(self.types) == 1 else f"{len(self.types)} variables"
        if len(set(self.types)) == 1:
            return self.types[0] if len(self.types) == 1 else f"{len(self.types)} × {self.types[0]}"
        return f"{len(self.types)} operations"

    @property
    def device(self) -> str:
        """The names of its devices; "" if the graph does not assign any."""
        return ", ".join(sorted(self.devices))


def scopes_of(name: str) -> list[str]:
    """The name and all scopes around it: "a/b/c" -> "a", "a/b", "a/b/c"."""
    levels = name.split("/")
    return ["/".join(levels[:end]) for end in range(1, len(levels) + 1)]


def operations_of(graph: tf.Graph, expand: Sequence[str], scope: str = "") -> tuple[list, dict]:
    """All operations of a graph with their names. Expanded loops and function calls are replaced by
    their operations.

    Args:
        graph: the graph.
        expand: the names of the calls to replace.
        scope: the name of the call whose function the graph is, followed by "/"; "" for the
            outermost graph.

    Returns:
        (operation, name) pairs, and a mapping from each tensor that is only passed on to the tensor
        that it stands for: from a function's inputs to the arguments of the call, and from the
        call's outputs to the function's results.
    """
    operations: list[tuple[tf.Operation, str]] = []
    bound: dict[tuple, tf.Tensor] = {}
    captured = {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
    handles = {
        id(variable.handle): variable.name.split(":")[0]
        for variable in getattr(graph, "variables", ())
    }
    for op in graph.get_operations():
        handle = captured.get(id(op.outputs[0])) if op.outputs else None
        name = handles.get(id(handle), op.name)
        operations.append((op, name if name.startswith(scope) else scope + name))
    for op, name in list(operations):
        if name not in expand or (inside := _called(op)) is None:
            continue
        operations.remove((op, name))
        inputs = {id(tensor.op) for tensor in inside.inputs}
        bound |= {_key(inner): outer for inner, outer in zip(inside.inputs, op.inputs)}
        bound |= {_key(outer): inner for outer, inner in zip(op.outputs, inside.outputs)}
        deeper, more = operations_of(inside, expand, f"{name}/")
        bound |= more
        operations += [
            (inner, inner_name) for inner, inner_name in deeper if id(inner) not in inputs
        ]
    return operations, bound


def _called(op: tf.Operation) -> tf.Graph | None:
    """The graph of the function that an operation calls once or in a loop, or None."""
    attribute = "body" if "While" in op.type else "f" if "PartitionedCall" in op.type else None
    return called_graph(op, attribute) if attribute else None


def changed_inputs(op: tf.Operation) -> set[int]:
    """The numbers of an operation's inputs that are variables which it changes, itself or in the
    function that it calls."""
    if op.type.startswith(WRITES):
        return {number for number, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource}
    if (inside := _called(op)) is None:
        return set()
    changed = {
        _key(inner.inputs[number])
        for inner in inside.get_operations()
        for number in changed_inputs(inner)
    }
    return {number for number, tensor in enumerate(inside.inputs) if _key(tensor) in changed}


def _key(tensor: tf.Tensor) -> tuple:
    """A key for a tensor in dictionaries: names are unique within one graph only."""
    return id(tensor.graph), tensor.name


def boxes_of(operations: list, bound: dict, depth: int, expand: Sequence[str]) -> dict[str, Box]:
    """The boxes of a diagram by name, in the order of the graph.

    Args:
        operations, bound: the results of `operations_of`.
        depth, expand: the arguments of `draw_graph`.
    """
    variables = {name for op, name in operations if op.type == "VarHandleOp" or _is_handle(op)}
    home = {
        (id(op.graph), op.name): _box_name(name, variables, depth, expand)
        for op, name in operations
    }

    def source(tensor: Any) -> str | None:
        while _key(tensor) in bound:
            tensor = bound[_key(tensor)]
        return home.get((id(tensor.graph), tensor.op.name))

    boxes: dict[str, Box] = {}
    for op, name in operations:
        box = boxes.setdefault(home[id(op.graph), op.name], Box(""))
        box.name = home[id(op.graph), op.name]
        box.operations.append(op)
        if name in variables:
            box.types.append("variable")
        elif op.type not in ("Const", "NoOp") and not _belongs_to_a_variable(name, variables):
            box.types.append(op.type)
        if op.device and op.type != "Const":
            device = tf.DeviceSpec.from_string(op.device)
            _add(box.devices, f"{device.device_type}:{device.device_index or 0}")
        if _belongs_to_a_variable(name, variables):
            continue  # initialization is not drawn
        changed = changed_inputs(op)
        for number, tensor in enumerate(op.inputs):
            _add(box.writes if number in changed else box.reads, source(tensor), but=box.name)
        constants = [
            tensor.op for tensor in op.inputs if tensor.op.type == "Const"
        ]  # not drawn, but what they depend on is
        for before in itertools.chain(
            op.control_inputs, *(constant.control_inputs for constant in constants)
        ):
            _add(box.after, home.get((id(before.graph), before.name)), but=box.name)
    return _without_constants(boxes)


def _is_handle(op: tf.Operation) -> bool:
    return op.type == "Placeholder" and op.outputs[0].dtype == tf.resource


def _box_name(name: str, variables: set[str], depth: int, expand: Sequence[str]) -> str:
    """The name of the box that an operation belongs to."""
    scopes = scopes_of(name)
    take = min(depth, len(scopes))
    while take < len(scopes) and scopes[take - 1] in expand:
        take += 1
    while take > 1 and _belongs_to_a_variable(scopes[take - 1], variables):
        take -= 1
    return scopes[take - 1]


def _belongs_to_a_variable(name: str, variables: set[str]) -> bool:
    """Whether this is one of the operations that TensorFlow adds to each variable."""
    scopes = scopes_of(name)
    return any(
        scope in variables and inner.split("/")[-1].startswith(OWN)
        for scope, inner in itertools.pairwise(scopes)
    )


def _add(names: list[str], name: str | None, but: str | None = None) -> None:
    if name is not None and name != but and name not in names:
        names.append(name)


def _without_constants(boxes: dict[str, Box]) -> dict[str, Box]:
    """Remove boxes that contain only constants, and arrows that are implied by a stronger one."""
    boxes = {name: box for name, box in boxes.items() if box.types}
    place = {name: number for number, name in enumerate(boxes)}
    for box in boxes.values():
        box.writes = [name for name in box.writes if name in boxes]
        box.reads = [name for name in box.reads if name in boxes and name not in box.writes]
        # Sorted, because TensorFlow does not always list control inputs in the same order.
        box.after = sorted(
            (name for name in box.after if name in place and name not in box.reads),
            key=place.__getitem__,
        )
    return boxes

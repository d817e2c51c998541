"""A TensorFlow graph read for a diagram: its operations, gathered into boxes by their names."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

OWN = ("Initializer", "IsInitialized", "Assign", "Read")  # the scopes in which TensorFlow gives a variable its value
WRITES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")  # operations that change a variable


@dataclass
class Box:
    """What is drawn as one: an operation, a variable, or all operations under a name.

    Attributes:
        name: their common name, scopes and all.
        types: the operations' types; the constants and the parts of a variable are not counted.
        devices: where they stand, such as "CPU:1".
        reads: the boxes whose tensors they take.
        writes: the variables' boxes that they change, whether or not they read them as well.
        after: the boxes that must have run before, without a tensor of theirs being taken.
    """

    name: str
    types: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if set(self.types) == {"variable"}:
            return "variable" if len(self.types) == 1 else f"{len(self.types)} variables"
        if len(set(self.types)) == 1:
            return self.types[0] if len(self.types) == 1 else f"{len(self.types)} × {self.types[0]}"
        return f"{len(self.types)} operations"

    @property
    def device(self) -> str:
        """Where it stands, in words; "" where the graph does not say."""
        return ", ".join(sorted(self.devices))


def scopes_of(name: str) -> list[str]:
    """The name and all scopes it stands in: "a/b/c" -> "a", "a/b", "a/b/c"."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def operations_of(graph: tf.Graph, expand: Sequence[str], scope: str = "") -> tuple[list, dict]:
    """All operations with their names, those of opened loops and functions in place of the call.

    Args:
        graph: where they are.
        expand: the names of the calls to open.
        scope: the name of the call whose inside the graph is.

    Returns:
        (operation, name) pairs, and the tensors that stand for another one: a function's inputs for what it is called
        with, a call's outputs for what the function returns.
    """
    operations, bound = [], {}
    captured = {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
    handles = {id(variable.handle): variable.name.split(":")[0] for variable in getattr(graph, "variables", ())}
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
        operations += [(inner, inner_name) for inner, inner_name in deeper if id(inner) not in inputs]
    return operations, bound


def _called(op: tf.Operation) -> tf.Graph | None:
    """The graph of the function that an operation calls, once or in a loop."""
    attribute = "body" if "While" in op.type else "f" if "PartitionedCall" in op.type else None
    return op.graph._get_function(op.get_attr(attribute).name).graph if attribute else None


def _key(tensor: tf.Tensor) -> tuple:
    return id(tensor.graph), tensor.name


def boxes_of(operations: list, bound: dict, depth: int, expand: Sequence[str]) -> dict[str, Box]:
    """The boxes by name, in the graph's order: see `draw_graph` for depth and expand."""
    variables = {name for op, name in operations if op.type == "VarHandleOp" or _is_handle(op)}
    home = {(id(op.graph), op.name): _box_name(name, variables, depth, expand) for op, name in operations}

    def source(tensor):
        while _key(tensor) in bound:
            tensor = bound[_key(tensor)]
        return home.get((id(tensor.graph), tensor.op.name))

    boxes: dict[str, Box] = {}
    for op, name in operations:
        box = boxes.setdefault(home[id(op.graph), op.name], Box(""))
        box.name = home[id(op.graph), op.name]
        if name in variables:
            box.types.append("variable")
        elif op.type not in ("Const", "NoOp") and not _belongs_to_a_variable(name, variables):
            box.types.append(op.type)
        if op.device and op.type != "Const":
            device = tf.DeviceSpec.from_string(op.device)
            _add(box.devices, f"{device.device_type}:{device.device_index or 0}")
        if _belongs_to_a_variable(name, variables):
            continue  # its first value is no part of the training
        for tensor in op.inputs:
            written = tensor.dtype == tf.resource and op.type.startswith(WRITES)
            _add(box.writes if written else box.reads, source(tensor), but=box.name)
        constants = [tensor.op for tensor in op.inputs if tensor.op.type == "Const"]  # not drawn: what they wait for is
        for before in itertools.chain(op.control_inputs, *(constant.control_inputs for constant in constants)):
            _add(box.after, home.get((id(before.graph), before.name)), but=box.name)
    return _without_constants(boxes)


def _is_handle(op: tf.Operation) -> bool:
    return op.type == "Placeholder" and op.outputs[0].dtype == tf.resource


def _box_name(name: str, variables: set[str], depth: int, expand: Sequence[str]) -> str:
    """The name of the box an operation falls into."""
    scopes = scopes_of(name)
    take = min(depth, len(scopes))
    while take < len(scopes) and scopes[take - 1] in expand:
        take += 1
    while take > 1 and _belongs_to_a_variable(scopes[take - 1], variables):
        take -= 1
    return scopes[take - 1]


def _belongs_to_a_variable(name: str, variables: set[str]) -> bool:
    """Whether it is one of the operations with which TensorFlow surrounds a variable."""
    scopes = scopes_of(name)
    return any(
        scope in variables and inner.split("/")[-1].startswith(OWN) for scope, inner in itertools.pairwise(scopes)
    )


def _add(names: list[str], name: str | None, but: str | None = None) -> None:
    if name is not None and name != but and name not in names:
        names.append(name)


def _without_constants(boxes: dict[str, Box]) -> dict[str, Box]:
    """Without the boxes in which nothing is computed, and without arrows that a stronger one makes superfluous."""
    boxes = {name: box for name, box in boxes.items() if box.types}
    place = {name: number for number, name in enumerate(boxes)}
    for box in boxes.values():
        box.writes = [name for name in box.writes if name in boxes]
        box.reads = [name for name in box.reads if name in boxes and name not in box.writes]
        # TensorFlow's order of these is not always the same
        box.after = sorted((name for name in box.after if name in place and name not in box.reads), key=place.get)
    return boxes

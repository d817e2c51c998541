"""draw_graph: a TensorFlow graph as a diagram of its operations, their dependencies and their
devices."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradlab import _checks
from gradlab.drawing.graph_boxes import Box, boxes_of, operations_of, scopes_of

MOST_BOXES = 80
# Okabe and Ito's colors with a light fill, so that black text is legible on light and dark pages.
_COLORS = (
    ("#D6E9F5", "#0072B2"), ("#FBE3D3", "#D55E00"), ("#D5EFE6", "#009E73"), ("#FAEBCF", "#E69F00"),
    ("#F5E3EE", "#CC79A7"), ("#E0F1FB", "#56B4E9"),
)  # fmt: skip
# Labels of HTML would be missing where a page shows the picture and not the source.
_CONFIG = """config:
  htmlLabels: false
  flowchart:
    wrappingWidth: 400
    nodeSpacing: 30
    rankSpacing: 35
    subGraphTitleMargin:
      bottom: 15"""
_NO_DEVICE = ("#F2F2F2", "#767676")  # for a box with no device, or with several


class Diagram:
    """A diagram of a graph. JupyterLab draws it; elsewhere, its `repr` lists the boxes and arrows
    as text.

    Attributes:
        boxes: the boxes by name, in the order in which the graph was built.
        title: the line above the diagram, or "".
    """

    def __init__(self, boxes: dict[str, Box], title: str = "") -> None:
        self.boxes = boxes
        self.title = title

    @property
    def mermaid(self) -> str:
        """The diagram as Mermaid source."""
        numbers = {name: f"box{i}" for i, name in enumerate(self.boxes)}
        devices = sorted({box.device for box in self.boxes.values() if len(box.devices) == 1})
        lines = [
            "---",
            *([f"title: {self.title}"] if self.title else []),
            _CONFIG,
            "---",
            "flowchart TD",
        ]
        lines += [
            f"    accTitle: {self.title or 'a graph'}",
            "    accDescr: "
            f"{'; '.join(map(self._words, self.boxes.values())).replace('<-', 'from')}",
        ]
        lines += self._nested(list(self.boxes.values()), 0, numbers, devices)
        for box in self.boxes.values():
            me = numbers[box.name]
            lines += [f"    {numbers[other]} --> {me}" for other in box.reads]
            lines += [f"    {numbers[other]} -.-> {me}" for other in box.after]
            for other in box.writes:
                written = numbers[other]
                # An arrow back to the variable would reverse the layout, so its new value is drawn
                # as a second box.
                if self._leads_to(other, box.name):
                    written += "new"
                    lines.append(self._node(self.boxes[other], f"{other}, new", written, devices))
                lines.append(f"    {me} == writes ==> {written}")
        for i, device in enumerate(["", *devices]):
            fill, stroke = _NO_DEVICE if not device else _COLORS[(i - 1) % len(_COLORS)]
            lines.append(
                f"    classDef device{i} fill:{fill},stroke:{stroke},stroke-width:2px,color:#000"
            )
        return "\n".join(lines)

    def _leads_to(self, start: str, end: str) -> bool:
        """Whether arrows lead from one box to another."""
        reached = set()
        new = {start}
        while new:
            reached |= new
            new = {
                box.name for box in self.boxes.values() if new & {*box.reads, *box.after}
            } - reached
        return end in reached

    def _nested(self, boxes: list[Box], depth: int, numbers: dict, devices: list) -> list[str]:
        """The lines for the boxes, with those of a common scope inside a frame."""
        lines: list[str] = []
        done: set[str] = set()
        for box in boxes:
            levels = box.name.split("/")
            if len(levels) <= depth + 1:
                lines.append(self._node(box, levels[-1], numbers[box.name], devices))
            elif (scope := "/".join(levels[: depth + 1])) not in done:
                done.add(scope)
                inside = [b for b in boxes if b.name.startswith(scope + "/")]
                frame = f"scope{depth}{numbers[inside[0].name]}"
                lines.append(f'    subgraph {frame} ["{scope}"]')
                lines += self._nested(inside, depth + 1, numbers, devices)
                lines += [
                    "    end",
                    f"    style {frame} fill:none,stroke:{_NO_DEVICE[1]},stroke-dasharray:4",
                ]
        return lines

    def _node(self, box: Box, name: str, number: str, devices: list) -> str:
        """The line for one box, whose shape and color show its kind and its device."""
        left = "("
        right = ")"
        if "variable" in box.kind:
            left = "[("
            right = ")]"
        elif set(box.types) == {"Placeholder"}:
            left = "[/"
            right = "/]"
        elif len(box.types) > 1:
            left = "["
            right = "]"
        words = "<br/>".join(filter(None, (name, box.kind if box.kind != name else "", box.device)))
        shade = devices.index(box.device) + 1 if box.device in devices else 0
        return f'    {number}{left}"{words}"{right}:::device{shade}'

    def __repr__(self) -> str:
        width = max(map(len, self.boxes), default=0)
        kinds = max((len(box.kind) for box in self.boxes.values()), default=0)
        devices = max((len(box.device) for box in self.boxes.values()), default=0)
        lines = [self.title] if self.title else []
        lines += [self._words(box, width, kinds, devices) for box in self.boxes.values()]
        return "\n".join(lines)

    def _words(self, box: Box, width: int = 0, kinds: int = 0, devices: int = 0) -> str:
        """One box and its arrows as a line of text, with columns of these widths."""
        line = f"{box.name:{width}}  {box.kind:{kinds}}  {box.device:{devices}}"
        for sign, others in (("<- ", box.reads), ("writes ", box.writes), ("after ", box.after)):
            line += f"  {sign}{', '.join(others)}" if others else ""
        return line.rstrip()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return {"text/vnd.mermaid": self.mermaid, "text/plain": repr(self)}


def draw_graph(
    graph_or_function: Any,
    *arguments: Any,
    depth: int = 1,
    expand: str | Sequence[str] = (),
    hide: str | Sequence[str] = (),
    title: str = "",
) -> Diagram:
    """Draw a graph, with a box for each name scope and arrows for dependencies.

    Each box shows its device. A plain arrow passes a tensor, a thick one changes a variable, and a
    dotted one is a control dependency: it only fixes the order. Constants, and the operations that
    initialize variables, are not drawn.

    Args:
        graph_or_function: a tf.Graph, an object with an attribute `graph` (such as those that
            `gradlab.static_graph` builds), or a `tf.function`.
        *arguments: the arguments with which to trace the `tf.function`.
        depth: the number of levels of name scopes that are shown: 1 shows one box for each
            outermost name.
        expand: names to show one level deeper; loops and function calls can be expanded too.
        hide: names that are not drawn, with everything inside them.
        title: a line above the diagram.

    Returns:
        A `Diagram`, which JupyterLab displays as a Mermaid diagram and which is printed as text
        elsewhere.

    Raises:
        ValueError: the first argument is not a graph, a name is not in the graph, or there are more
            than 80 boxes.

    Example:
        >>> with tf.Graph().as_default() as graph:
        ...     with tf.name_scope("tower_0"), tf.device("/cpu:0"):
        ...         x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        ...         loss = tf.reduce_mean(x * x, name="loss")
        >>> draw_graph(graph)
        tower_0  3 operations  CPU:0
        >>> draw_graph(graph, expand=["tower_0"])
        tower_0/x     Placeholder  CPU:0
        tower_0/mul   Mul          CPU:0  <- tower_0/x
        tower_0/loss  Mean         CPU:0  <- tower_0/mul
    """
    return Diagram(drawn_boxes(_graph(graph_or_function, arguments), depth, expand, hide), title)


def drawn_boxes(
    graph: tf.Graph, depth: int, expand: str | Sequence[str], hide: str | Sequence[str]
) -> dict[str, Box]:
    """The boxes of a graph by name; the arguments and errors are those of `draw_graph`."""
    _checks.positive_integer("depth", depth)
    expand, hide = (
        (names,) if isinstance(names, str) else tuple(names) for names in (expand, hide)
    )
    operations, bound = operations_of(graph, expand)
    names = {scope for _, name in operations for scope in scopes_of(name)}
    for name in (*expand, *hide):
        if name not in names:
            top = ", ".join(sorted({name.split("/")[0] for name in names}))
            raise ValueError(
                f"expand and hide must be names in the graph, such as: {top}. Received: {name!r}"
            )
    operations = [
        (op, name) for op, name in operations if not set(scopes_of(name)) & {*hide, "init"}
    ]
    boxes = boxes_of(operations, bound, depth, expand)
    if len(boxes) > MOST_BOXES:
        raise ValueError(
            f"A diagram must have at most {MOST_BOXES} boxes to be legible: choose a smaller "
            f"depth, expand less, or hide some. Received: depth={depth}, which gives {len(boxes)} "
            "boxes"
        )
    return boxes


def _graph(graph_or_function: Any, arguments: Sequence) -> tf.Graph:
    if hasattr(graph_or_function, "get_concrete_function"):
        return graph_or_function.get_concrete_function(*arguments).graph
    graph = getattr(graph_or_function, "graph", graph_or_function)
    if not isinstance(graph, tf.Graph) or arguments:
        raise ValueError(
            "draw_graph needs a tf.Graph, an object with a graph, or a tf.function and its "
            f"arguments. Received: {graph_or_function!r}"
        )
    return graph

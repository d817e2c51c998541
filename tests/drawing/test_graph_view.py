"""Diagrams of known graphs: their boxes and arrows, expanded and hidden names, and refused
arguments."""

import re

import pytest
import tensorflow as tf

from gradlab import draw_graph, static_graph

v1 = tf.compat.v1


def squared_errors(features, labels, dropout_seed):
    w = v1.get_variable("w", [2])
    return (tf.linalg.matvec(features, w) - tf.cast(labels, features.dtype)) ** 2


@pytest.fixture(scope="module")
def towers():
    return static_graph.tower_graph(squared_errors, v1.train.AdamOptimizer, [2], towers=2)


@pytest.fixture(scope="module")
def variables():
    return static_graph.variable_graph(squared_errors, v1.train.AdamOptimizer, [2])


def reachable(diagram, start: str) -> set[str]:
    """All boxes that depend on the value of a box."""
    found, new = set(), {start}
    while new:
        found |= new
        new = {box.name for box in diagram.boxes.values() if new & set(box.reads)} - found
    return found


def test_towers_meet_in_the_average_and_one_box_changes_the_weights(towers):
    diagram = draw_graph(towers)
    assert diagram.boxes["tower_0"].devices != diagram.boxes["tower_1"].devices
    assert diagram.boxes["average"].reads == ["tower_0", "tower_1"]
    assert [box.name for box in diagram.boxes.values() if "w" in box.writes] == ["train"]
    assert "average" in diagram.boxes["train"].reads and "init" not in diagram.boxes
    assert "tower_1" not in reachable(diagram, "tower_0")


def test_placeholders_split_the_graph_in_two():
    graph = static_graph.placeholder_graph(squared_errors, v1.train.GradientDescentOptimizer, [2])
    diagram = draw_graph(graph, depth=2)
    assert not any(name.startswith("train") for name in reachable(diagram, "split_0"))
    assert any(name.startswith("train") for name in reachable(diagram, "gradient/w"))


def test_accumulators_are_written_by_two_and_read_by_the_mean(variables):
    diagram = draw_graph(variables)
    writers = [box.name for box in diagram.boxes.values() if "accumulator" in box.writes]
    readers = [box.name for box in diagram.boxes.values() if "accumulator" in box.reads]
    assert writers == ["zero", "accumulate"] and readers == ["mean"]
    assert diagram.boxes["accumulator"].kind == "2 variables"
    assert "mean" in diagram.boxes["train_step"].reads


def test_names_are_expanded_and_hidden(towers):
    closed, opened = draw_graph(towers), draw_graph(towers, expand="average")
    assert "average" in closed.boxes and not any(
        name.startswith("average/") for name in closed.boxes
    )
    assert "average" not in opened.boxes and "average/stack" in opened.boxes
    assert "subgraph" in opened.mermaid and "subgraph" not in closed.mermaid
    hidden = draw_graph(towers, hide=["learning_rate", "tower_1"])
    assert not any(name.startswith(("learning_rate", "tower_1")) for name in hidden.boxes)
    assert "tower_1" not in repr(hidden) and hidden.boxes["average"].reads == ["tower_0"]
    opened = draw_graph(towers, depth=2, hide=["train", "split_0", "split_1"])
    assert set(opened.boxes) > {"tower_0/loss", "w", "w/Adam"}


def test_every_operation_is_in_one_box(towers):
    """Counts the operations independently: all but constants, NoOps and those that belong to a
    variable."""
    variables = ("w", "global_step", "beta1_power", "beta2_power", "w/Adam", "w/Adam_1")
    own = tuple(f"{name}/" for name in variables)
    counted = [
        op
        for op in towers.graph.get_operations()
        if op.type not in ("Const", "NoOp", "VarHandleOp") and not op.name.startswith(own)
    ]
    drawn = [kind for box in draw_graph(towers).boxes.values() for kind in box.types]
    assert sorted(kind for kind in drawn if kind != "variable") == sorted(op.type for op in counted)
    assert drawn.count("variable") == len(variables)


def test_mermaid_source_has_every_box_once_and_no_cycle(towers):
    text = draw_graph(towers, title="two towers").mermaid
    nodes = re.findall(r"^    (box\d+(?:new\d*)?)[\[(]", text, flags=re.M)
    assert len(nodes) == len(set(nodes))
    arrows = re.findall(r"^    (\w+) (?:-->|-\.->|== writes ==>) (\w+)$", text, flags=re.M)
    assert {name for arrow in arrows for name in arrow} <= set(nodes)
    order = {}  # a topological order exists, so there is no cycle
    while len(order) < len(nodes):
        free = [n for n in nodes if n not in order and all(a in order for a, b in arrows if b == n)]
        assert free
        order |= dict.fromkeys(free)
    assert "title: two towers" in text and "w, new" in text


def test_a_function_with_a_loop_and_a_variable():
    w = tf.Variable(1.0, name="w")

    @tf.function
    def total(x):
        with tf.name_scope("window"):
            result = tf.while_loop(
                lambda i, s: i < 3, lambda i, s: (i + 1, s + w * x[i]), (0, 0.0)
            )[1]
        return tf.identity(result, name="result")

    x = tf.ones([3])
    closed = draw_graph(total, x)
    assert closed.boxes["w"].kind == "variable" and closed.boxes["window"].reads == ["x", "w"]
    opened = draw_graph(total, x, expand=["window", "window/while"])
    products = [box for name, box in opened.boxes.items() if box.types == ["Mul"]]
    assert (
        len(products) == 1
        and "w" in "".join(products[0].reads)
        and products[0].name.startswith("window/while/")
    )
    assert "window/while" not in opened.boxes
    assert any("window/while/" in name for name in opened.boxes["result"].reads)
    assert draw_graph(total.get_concrete_function(x)).boxes.keys() == closed.boxes.keys()


def test_a_loop_writes_what_its_body_changes():
    read, added, inner_added = (tf.Variable(1.0, name=name) for name in ("read", "added", "inner"))

    @tf.function(autograph=False)
    def add_to(value):
        inner_added.assign_add(value)

    @tf.function
    def window(k):
        i = tf.constant(0)
        while i < k:
            added.assign_add(read)
            add_to(read)
            i += 1
        return added / 2.0

    boxes = draw_graph(window, tf.constant(3)).boxes
    loop = boxes["while"]
    assert sorted(loop.writes) == ["added", "inner"] and loop.reads == ["k", "read"]
    assert not boxes["truediv"].writes


def test_a_function_within_a_function_is_expanded():
    """Arrows lead through both calls: from the arguments to the operations, and from these to the
    results."""

    @tf.function(autograph=False)
    def inner(x, c):
        return tf.add(x, c, name="sum")

    @tf.function(autograph=False)
    def outer(x):
        return inner(x, tf.cos(x, name="cosine"))

    @tf.function(autograph=False)
    def both(x):
        return tf.exp(outer(x), name="last")

    x, call = tf.ones([]), "PartitionedCall"
    assert draw_graph(both, x).boxes["last"].reads == [call]
    opened = draw_graph(both, x, expand=[call]).boxes
    assert opened[f"{call}/{call}"].reads == ["x", f"{call}/cosine"] and opened[
        f"{call}/cosine"
    ].reads == ["x"]
    boxes = draw_graph(both, x, expand=[call, f"{call}/{call}"]).boxes
    assert f"{call}/{call}" not in boxes
    assert boxes[f"{call}/{call}/sum"].reads == ["x", f"{call}/cosine"]
    assert boxes[f"{call}/{call}/Identity"].reads == [f"{call}/{call}/sum"]
    assert boxes[f"{call}/Identity"].reads == [f"{call}/{call}/Identity"] and boxes[
        "last"
    ].reads == [f"{call}/Identity"]


def test_control_dependencies_of_a_constant_are_those_of_its_reader():
    """TensorFlow can attach a control dependency to a constant, which is not drawn."""
    with tf.Graph().as_default() as graph:
        v = v1.get_variable("v", initializer=tf.zeros([2]), use_resource=True)
        first = v.assign_add([1.0, 1.0], name="first", read_value=False)
        with tf.control_dependencies([first]):
            v.assign(tf.zeros([2]), name="second", read_value=False)
    assert draw_graph(graph).boxes["second"].after == ["first"]


def test_a_diagram_is_shown_as_mermaid_and_as_text(towers):
    bundle = draw_graph(towers)._repr_mimebundle_()
    assert set(bundle) == {"text/vnd.mermaid", "text/plain"} and "average" in bundle["text/plain"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(expand="towers_0"), "must be names in the graph.*tower_0.*Received: 'towers_0'"),
        (dict(hide=["nothing"]), "Received: 'nothing'"),
        (dict(depth=0), "depth must be a positive integer. Received: 0"),
        (dict(depth=9), r"at most 80 boxes to be legible.*depth=9, which gives \d+ boxes"),
    ],
)
def test_bad_arguments(towers, arguments, words):
    with pytest.raises(ValueError, match=words):
        draw_graph(towers, **arguments)


def test_not_a_graph():
    with pytest.raises(ValueError, match="needs a tf.Graph.*Received: 3"):
        draw_graph(3)

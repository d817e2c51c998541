"""GraphFilm: the order of the boxes, the values on the arrows and of the variables, what Python feeds
and gets, and the drawing."""

import html
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf

from gradlab.drawing.graph_boxes import Box
from gradlab.lab.widget.course import graph_layout
from gradlab.lab.widget.course.graph_film import GraphFilm

v1 = tf.compat.v1
X = np.array([[1, 0], [0, 1], [1, 1], [2, 1]], "float32")
Y = np.array([0, 3, 1, -1], "float32")


class Towers:
    """Two towers of one weight vector, whose mean gradient is applied."""

    def __init__(self):
        self.graph = tf.Graph()
        with self.graph.as_default(), v1.variable_scope("", use_resource=True, reuse=v1.AUTO_REUSE):
            self.x = v1.placeholder(tf.float32, [None, 2], name="x")
            self.y = v1.placeholder(tf.float32, [None], name="y")
            parts = zip(tf.split(self.x, 2, name="cut_x"), tf.split(self.y, 2, name="cut_y"))
            descent = v1.train.GradientDescentOptimizer(0.5)
            gradients = []
            for number, (x, y) in enumerate(parts):
                with tf.name_scope(f"tower_{number}"):
                    w = v1.get_variable("w", initializer=[1.0, -1.0])
                    loss = tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
                    gradients.append(descent.compute_gradients(loss)[0][0])
            with tf.name_scope("average"):
                mean = tf.add_n(gradients) / 2
            self.train = descent.apply_gradients([(mean, w)], name="train")
        self.gradients, self.mean, self.w = gradients, mean, w
        self.session = v1.Session(graph=self.graph)
        self.session.run(w.initializer)
        self.feed = {self.x: X, self.y: Y}


class Accumulator:
    """One weight, its sum, and three operations: add and apply, and zero after apply."""

    def __init__(self):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [], name="x")
            self.rate = v1.placeholder(tf.float32, [], name="rate")
            self.w = tf.Variable(3.0, name="w")
            self.total = tf.Variable(0.0, trainable=False, name="total")
            self.gradient = tf.multiply(self.w, self.x, name="gradient")
            with tf.name_scope("add"):
                self.add = self.total.assign_add(self.gradient, read_value=False)
            with tf.name_scope("apply"):
                moved = self.rate * self.total
                self.apply = self.w.assign_sub(moved, read_value=False)
            with tf.control_dependencies([self.apply]), tf.name_scope("zero"):
                self.zero = self.total.assign(0.0, read_value=False)
        self.session = v1.Session(graph=self.graph)
        self.session.run([self.w.initializer, self.total.initializer])


def vector(values) -> str:
    return f"[{' '.join(f'{value:.4g}' for value in values)}]"


def test_towers_run_in_one_step_and_every_arrow_has_its_value():
    towers = Towers()
    gradients, mean = towers.session.run([towers.gradients, towers.mean], towers.feed)
    by_hand = 2 * X.T @ (X @ [1.0, -1.0] - Y) / 4
    np.testing.assert_allclose(mean, by_hand)
    film = GraphFilm(towers.session, [("an update", towers.train, towers.feed)])
    assert [step.now for step in film.steps] == [
        ["x", "y"],
        ["cut_x", "cut_y"],
        ["tower_0", "tower_1"],
        ["average"],
        ["train"],
    ]
    assert [step.done for step in film.steps][2] == ["x", "y", "cut_x", "cut_y"]
    last = film.steps[-1]
    assert last.passed == {
        ("x", "cut_x"): "(4, 2)",
        ("y", "cut_y"): "(4,)",
        ("cut_x", "tower_0"): "(2, 2)",
        ("cut_x", "tower_1"): "(2, 2)",
        ("cut_y", "tower_0"): vector(Y[:2]),
        ("cut_y", "tower_1"): vector(Y[2:]),
        ("tower_0", "average"): vector(gradients[0]),
        ("tower_1", "average"): vector(gradients[1]),
        ("average", "train"): vector(by_hand),
    }
    assert [set(step.passed) <= set(last.passed) for step in film.steps] == [True] * 5
    assert ("tower_0", "average") in film.steps[2].passed
    assert ("tower_0", "average") not in film.steps[1].passed
    # The variable changes in the last step only, by the run that was filmed
    assert [step.variables["w"] for step in film.steps] == ["[1 -1]"] * 4 + [
        vector([1, -1] - 0.5 * by_hand)
    ]
    assert [step.written for step in film.steps] == [[]] * 4 + [["w"]]
    np.testing.assert_allclose(towers.session.run(towers.w), [1, -1] - 0.5 * by_hand)


def test_a_window_goes_through_the_sum():
    graph = Accumulator()
    runs = [(f"example {x:g}", graph.add, {graph.x: x}) for x in (1.0, 4.0)]
    film = GraphFilm(graph.session, [*runs, ("apply", graph.zero, {graph.rate: 0.1})])
    assert [(step.run, step.now) for step in film.steps] == [
        ("example 1", ["x"]),
        ("example 1", ["gradient"]),
        ("example 1", ["add"]),
        ("example 4", ["x"]),
        ("example 4", ["gradient"]),
        ("example 4", ["add"]),
        ("apply", ["rate"]),
        ("apply", ["apply"]),
        ("apply", ["zero"]),
    ]
    totals = [step.variables["total"] for step in film.steps]
    assert totals == ["0", "0", "3", "3", "3", "15", "15", "15", "0"]
    assert [step.variables["w"] for step in film.steps] == ["3"] * 7 + ["1.5"] * 2
    assert film.steps[-1].words == "apply, step 3 of 3: zero. total is now 0."


def test_python_feeds_and_gets():
    graph = Accumulator()
    fetched = {"of w": graph.gradient, "once more": [graph.gradient]}
    film = GraphFilm(graph.session, [("a run", fetched, {graph.x: 2.0})])
    assert repr(film).splitlines() == [
        "a run, step 1 of 2: x. Python feeds x = 2.",
        "a run, step 2 of 2: gradient. Python gets 6 from gradient.",
    ]
    assert film.steps[0].fetched == {} and film.steps[1].fed == {"x": "2"}
    # What is fed needs nothing: the variable stays unread, and its reader does not run
    film = GraphFilm(graph.session, [("fed", graph.add, {graph.gradient: 5.0})])
    assert [step.now for step in film.steps] == [["gradient"], ["add"]]
    assert film.steps[0].fed == {"gradient": "5"} and film.steps[1].variables["total"] == "5"


def test_names_can_be_hidden_and_expanded():
    towers = Towers()
    run = [("an update", towers.train, towers.feed)]
    hidden = GraphFilm(towers.session, run, hide=["x", "y", "cut_x", "cut_y"])
    assert [step.now for step in hidden.steps] == [["tower_0", "tower_1"], ["average"], ["train"]]
    expanded = GraphFilm(towers.session, run, expand="average")
    names = list(itertools.chain(*(step.now for step in expanded.steps)))
    assert "average" not in names and "average/AddN" in names


def test_bad_arguments():
    towers = Towers()
    run = [("an update", towers.train, towers.feed)]
    with pytest.raises(
        ValueError, match=r"session must be a tf.compat.v1.Session. Received: <tens"
    ):
        GraphFilm(towers.graph, run)
    with pytest.raises(ValueError, match=r"runs must contain a run. Received: \[\]"):
        GraphFilm(towers.session, [])


def test_boxes_that_need_parts_of_each_other_are_refused():
    boxes = {"a": Box("a", ["Mul", "Add"], reads=["b"]), "b": Box("b", ["Mul"], reads=["a"])}
    with pytest.raises(ValueError, match=r"one after the other. Received: (a, b|b, a), of which"):
        graph_layout.levels(boxes)


# ---- the drawing ----


def film_of(made) -> GraphFilm:
    if isinstance(made, Towers):
        return GraphFilm(made.session, [("an update", made.train, made.feed)])
    runs = [("add", made.add, {made.x: 1.0}), ("apply", made.zero, {made.rate: 0.1})]
    return GraphFilm(made.session, runs)


@pytest.mark.parametrize("kind", [Towers, Accumulator])
def test_boxes_stand_apart_and_below_what_they_need(kind):
    film = film_of(kind())
    layout, boxes = film._layout, film._boxes
    for place in layout.places.values():
        assert place.left >= 0 and place.right <= layout.width
        assert place.top >= 0 and place.bottom <= layout.height
    for one, other in itertools.combinations(layout.places.values(), 2):
        assert (
            one.right < other.left
            or other.right < one.left
            or one.bottom < other.top
            or other.bottom < one.top
        )
    for name, box in boxes.items():
        for other in graph_layout.needs(box, boxes):
            assert layout.places[other].bottom < layout.places[name].top
    if kind is Accumulator:
        # Built later, and through the sum: add above apply above zero
        assert layout.places["add"].bottom < layout.places["apply"].top
        assert layout.places["apply"].bottom < layout.places["zero"].top
        # A placeholder stands just above what uses it
        above = {round(layout.places[name].y) for name in ("rate", "add")}
        assert len(above) == 1


def test_a_frame_shows_each_value_and_says_it_in_words():
    film = film_of(Towers())
    for step, frame in zip(film.steps, film._frames):
        root = ElementTree.fromstring(frame)
        assert root.get("aria-label") == step.words and " id=" not in frame
        texts = [each.text for each in root.iter("text")]
        for value in [*step.passed.values(), *step.variables.values()]:
            assert value in texts or any(value in text for text in texts), value
        assert f"Python: {step.fed['x']}" in texts
        filled = {
            group.findtext("text"): group.find("rect").get("fill") for group in root.iter("g")
        }
        assert {name for name, fill in filled.items() if fill == "#F6C667"} == {
            *step.now,
            *step.written,
        }
    assert len(set(film._frames)) == len(film.steps)


def test_the_slider_shows_a_step_and_a_saved_page_has_all():
    film = film_of(Accumulator())
    for number, step in enumerate(film.steps):
        film.controls["step"].value = number
        values = [each.value for each in _all_html(film.view)]
        assert any(html.escape(step.words) in value for value in values)
    bundle = film._repr_mimebundle_()
    assert bundle["text/plain"] == repr(film)
    pictures = re.findall(r"data:image/svg\+xml", bundle["text/html"])
    assert (
        len(pictures) == len(film.steps) + 1
    )  # the last one also stands for pages without scripts
    for step in film.steps:
        assert html.escape(step.words) in bundle["text/html"].replace('\\"', '"')


def _all_html(widget) -> list:
    found = [widget]
    for each in found:
        found += getattr(each, "children", ())
    return [each for each in found if hasattr(each, "value") and isinstance(each.value, str)]

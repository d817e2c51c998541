"""GraphFilm: the order of the boxes, the values on the arrows and of the variables, what Python feeds
and gets, and the drawing."""

import html
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf

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
        ("x", "cut_x"): "shape (4, 2)",
        ("y", "cut_y"): "shape (4,)",
        ("cut_x", "tower_0"): "shape (2, 2)",
        ("cut_x", "tower_1"): "shape (2, 2)",
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
    with pytest.raises(
        ValueError, match="must be names in the graph, such as: .*tower_0.*'twoer_0'"
    ):
        GraphFilm(towers.session, run, hide="twoer_0")
    np.testing.assert_array_equal(towers.session.run(towers.w), [1, -1])  # nothing ran


def graph_of(build) -> tuple:
    """What a function builds in a graph, and a session in which its variables are initialized."""
    with tf.Graph().as_default() as graph:
        made = build()
        start = v1.variables_initializer([*v1.global_variables(), *v1.local_variables()])
    session = v1.Session(graph=graph)
    session.run(start)
    return made, session


def test_boxes_that_need_parts_of_each_other_are_refused_before_anything_runs():
    def build():
        w = tf.Variable(1.0, name="w")
        with tf.name_scope("a") as scope:
            first = tf.add(w, 1.0)
        with tf.name_scope("b"):
            second = tf.multiply(first, 2.0)
        with tf.name_scope(scope):
            return w, w.assign(second + first, read_value=False)

    (w, assign), session = graph_of(build)
    with pytest.raises(ValueError, match=r"one after the other. Received: (a, b|b, a), of which"):
        GraphFilm(session, [("a run", assign, {})])
    assert session.run(w) == 1


def test_two_writers_in_one_run_are_refused():
    graph = Accumulator()
    with pytest.raises(
        ValueError, match=r"one box of a run.* total in 'both', written by zero, add"
    ):
        GraphFilm(graph.session, [("both", [graph.add, graph.zero], {graph.x: 1, graph.rate: 1})])


def test_variables_have_a_box_of_their_own_and_are_initialized():
    def scoped():
        with v1.variable_scope("layer", use_resource=True):
            return tf.multiply(v1.get_variable("w", initializer=1.0), 2.0)

    doubled, session = graph_of(scoped)
    with pytest.raises(ValueError, match="expand its scope. Received: 'layer' with 3 operations"):
        GraphFilm(session, [("a run", doubled, {})])
    film = GraphFilm(session, [("a run", doubled, {})], expand="layer")
    assert film.steps[-1].variables == {"layer/w": "1"}

    def local():
        with v1.variable_scope("", use_resource=True):
            keys = [v1.GraphKeys.LOCAL_VARIABLES]
            return v1.get_variable("sum", initializer=3.0, collections=keys) + 1.0

    added, session = graph_of(local)
    assert GraphFilm(session, [("a run", added, {})]).steps[0].variables == {"sum": "3"}
    with pytest.raises(ValueError, match="before the runs. Received: one that is not, among sum"):
        GraphFilm(v1.Session(graph=session.graph), [("a run", added, {})])


def test_only_what_runs_of_a_box_is_shown():
    def build():
        x = v1.placeholder(tf.float32, [], name="x")
        one, two = (tf.Variable(0.0, name=name) for name in ("one", "two"))
        with tf.name_scope("both"):
            return x, one.assign(5.0, read_value=False), two.assign(x, read_value=False)

    (x, to_one, _), session = graph_of(build)
    film = GraphFilm(session, [("a run", to_one, {x: 7.0})])
    [step] = film.steps
    assert (step.now, step.written, step.arrows) == (["both"], ["one"], {("both", "one")})
    assert step.passed == {} and step.fed == {}
    assert step.variables == {"one": "5", "two": "0"}


def test_order_goes_through_what_is_not_drawn():
    def build():
        total, w = (tf.Variable(1.0, name=name) for name in ("total", "w"))
        with tf.name_scope("add"):
            added = [total.assign_add(1.0, read_value=False), w.assign_add(1.0, read_value=False)]
        with tf.control_dependencies([tf.group(*added, name="group")]):
            middle = tf.add(1.0, 1.0, name="middle")
        with tf.control_dependencies([middle]), tf.name_scope("zero"):
            return total.assign_sub(2.0, read_value=False)

    zero, session = graph_of(build)
    with pytest.raises(ValueError, match="total in 'a run', written by"):
        GraphFilm(session, [("a run", zero, {})])

    def without_two_writers():
        w, total = (tf.Variable(1.0, name=name) for name in ("w", "total"))
        with tf.name_scope("add"):
            added = w.assign_add(1.0, read_value=False)
        with tf.control_dependencies([tf.group(added, name="group")]):
            middle = tf.add(v1.placeholder_with_default(1.0, [], name="p"), 1.0, name="middle")
        with tf.control_dependencies([middle]), tf.name_scope("zero"):
            return total.assign(0.0, read_value=False)

    zero, session = graph_of(without_two_writers)
    shown = GraphFilm(session, [("a run", zero, {})], hide="p")
    assert [step.now for step in shown.steps] == [["add"], ["middle"], ["zero"]]
    hidden = GraphFilm(session, [("a run", zero, {})], hide=["middle", "p"])
    assert [step.now for step in hidden.steps] == [["add"], ["zero"]]


def test_values_from_python_inside_of_a_scope_and_to_it():
    def build():
        w = tf.Variable([[1.0, 2.0]], name="w")
        with tf.name_scope("left"):
            x = v1.placeholder(tf.int32, [], name="x")
            left = x + 1
        with tf.name_scope("right"):
            word = v1.placeholder(tf.string, [], name="word")
            right = tf.strings.join([word, "!"])
        return w, x, word, left, right

    (w, x, word, left, right), session = graph_of(build)
    film = GraphFilm(session, [("a run", [right, w, left], {x: 12344, word: "go"})])
    assert repr(film) == (
        "a run, step 1 of 1: left and right. Python feeds left = 12344. Python feeds right = go. "
        "Python gets 12345 from left. Python gets go! from right. Python gets [[1 2]] from w."
    )
    with pytest.raises(ValueError, match="must run a box that is drawn. Received: 'nothing'"):
        GraphFilm(session, [("nothing", w, {})])


def test_calls_of_functions_are_not_expanded():
    @tf.function
    def doubled(x):
        return 2.0 * x

    def build():
        x = v1.placeholder(tf.float32, [], name="x")
        return x, doubled(x)

    (x, y), session = graph_of(build)
    assert len(GraphFilm(session, [("a run", y, {x: 1.0})]).steps) == 2
    with pytest.raises(ValueError, match="no loop and no function inside"):
        GraphFilm(session, [("a run", y, {x: 1.0})], expand=y.op.name)


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


def test_arrows_lie_inside_the_drawing():
    towers, sums = Towers(), Accumulator()
    reads_in_the_first_row = GraphFilm(
        sums.session, [("add", sums.add, {sums.x: 1.0})], hide=["x", "rate"]
    )
    for film in film_of(towers), film_of(sums), reads_in_the_first_row:
        root = ElementTree.fromstring(film._frames[-1])
        width, height = map(float, root.get("viewBox").split()[2:])
        paths = [each.get("d") for each in root.iter("path") if not each.get("transform")]
        assert paths
        for x, y in itertools.chain(*map(points_of, paths)):
            assert 0 <= x <= width and 0 <= y <= height


def points_of(path: str) -> list[tuple[float, float]]:
    """The points of a path, control points included."""
    points: list[tuple[float, float]] = []
    for command, words in re.findall(r"([MCQHV]) ([-\d. ]+)", path):
        numbers = list(map(float, words.split()))
        if command == "H":
            points += [(x, points[-1][1]) for x in numbers]
        elif command == "V":
            points += [(points[-1][0], y) for y in numbers]
        else:
            points += zip(numbers[::2], numbers[1::2])
    return points


def test_a_frame_shows_each_value_and_says_it_in_words():
    film = film_of(Towers())
    for step, frame in zip(film.steps, film._frames):
        root = ElementTree.fromstring(frame)
        assert root.get("aria-label") == step.words and " id=" not in frame
        texts = [each.text for each in root.iter("text")]
        for value in step.passed.values():
            assert texts.count(value) >= list(step.passed.values()).count(value)
        assert f"{step.variables['w']}" in texts
        assert f"Python: {step.fed['x']}" in texts
        filled = {
            group.findtext("text"): group.find("rect").get("fill") for group in root.iter("g")
        }
        assert {name for name, fill in filled.items() if fill == "#F6C667"} == {
            *step.now,
            *step.written,
        }
    assert len(set(film._frames)) == len(film.steps)
    # Each label stands above the box that takes the value, in the order of those it comes from
    labels = {
        each.text: float(each.get("x"))
        for each in ElementTree.fromstring(film._frames[-1]).iter("text")
    }
    places = film._layout.places
    left, right = (labels[film.steps[-1].passed[f"tower_{i}", "average"]] for i in range(2))
    assert places["average"].left < left < right < places["average"].right
    assert places["tower_0"].x < places["tower_1"].x


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

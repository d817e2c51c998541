"""MemoryFilm: its curves against the plan's parts, one operation at a time, its controls, and its
picture."""

import math
import re
from xml.etree import ElementTree

import keras
import numpy as np
import pytest

from gradlab.lab.widget.course import memory_film
from gradlab.lab.widget.course.memory_film import MemoryFilm, curves, sentence, svg
from gradlab.measure.memory import MEBIBYTE, plan


@pytest.fixture(scope="module")
def planned():
    layers = [keras.Input([1000]), keras.layers.Dense(2000, "relu"), keras.layers.Dense(1)]
    example = np.zeros([1, 1000], "float32"), np.zeros([1, 1], "float32")
    return plan(keras.Sequential(layers), "mse", "adam", example)


def total(planned, batch, b):
    return sum(curves(planned, batch, b).values())


def test_each_operation_of_the_window(planned):
    parts = curves(planned, 64, 16)
    weights = 4 * (1000 * 2000 + 2000 + 2000 + 1)
    operations = len(planned.liveness.fixed)
    for i in range(4 * operations):
        here = i % operations
        alive = planned.liveness.fixed[here] + 16 * planned.liveness.per_example[here]
        assert parts["gradients"][i] + parts["activations"][i] == pytest.approx(alive)
        assert parts["weights"][i] == parts["accumulator"][i] == weights
        assert parts["optimizer state"][i] == planned.optimizer
    # While the hidden layer's gradient is computed: its input, its output, and that gradient
    assert parts["activations"].max() >= 16 * 4 * (1000 + 2000 + 2000)
    assert parts["gradients"].max() >= weights - 8000


def test_one_micro_batch_needs_no_accumulator(planned):
    assert not curves(planned, 64, 64)["accumulator"].any()
    assert curves(planned, 64, 32)["accumulator"].all()


def test_the_sentence_and_where_memory_ends(planned):
    whole, cut = total(planned, 16384, 16384), total(planned, 16384, 16)
    limit = (whole.max() + cut.max()) / 2
    end = next(i for i, now in enumerate(whole) if now > limit)
    said = sentence(planned, 16384, 16, limit)
    assert f"memory runs out after {end / len(whole):.0%} of the operations." in said
    assert "1024 micro-batches of 16" in said and "which fits" in said
    assert "does not" not in sentence(planned, 64, 64, 2 * whole.max())
    # Exactly as much as there is still fits
    assert "does not" not in sentence(planned, 64, 64, total(planned, 64, 64).max())


def points(path):
    return np.array(re.findall(r"([\d.]+) ([\d.]+)", path.get("d")), float)


@pytest.mark.parametrize("b", [16, 4096, 16384])
def test_the_picture_is_a_scale_drawing(planned, b, monkeypatch):
    monkeypatch.setattr(memory_film, "COLUMNS", 9)  # fewer than there are operations
    limit = 256 * MEBIBYTE
    drawn = ElementTree.fromstring(svg(planned, 16384, b, limit))
    paths = {}
    for path in drawn.iter("path"):
        title = path.find("title")
        if title is not None:
            paths.setdefault(title.text.partition(":")[0], []).append(path)
    assert {*memory_film.ORDER, "one large batch of 16384"} < paths.keys()
    scale = memory_film.HEIGHT / (
        1.08 * max(limit, total(planned, 16384, b).max(), total(planned, 16384, 16384).max())
    )
    floor = memory_film.TOP + memory_film.HEIGHT
    top = min(points(path)[:, 1].min() for path in paths["activations"])
    assert floor - top == pytest.approx(scale * total(planned, 16384, b).max(), abs=0.1)
    line = min(points(path)[:, 1].min() for path in paths["one large batch of 16384"])
    assert floor - line == pytest.approx(scale * total(planned, 16384, 16384).max(), abs=0.1)
    # Pale from where memory ends, and a cross there
    ends = total(planned, 16384, b).max() > limit
    assert {path.get("fill-opacity") for path in paths["weights"]} == (
        {"1", "0.3"} if ends else {"1"}
    )
    assert len(paths["memory runs out here"]) == 1


def test_controls_change_the_picture(planned):
    film = MemoryFilm({"dense": planned}, batch=1024, b=4, limit_mib=128)
    html = film.view.children[-1]
    before = html.value
    film.controls["b"].value = 1024
    assert html.value != before and "micro-batches of" not in repr(film)
    film.controls["limit_mib"].value = 64
    assert "The card has 64 MiB." in html.value
    assert all(control.description.strip() for control in film.controls.values())


def test_without_a_kernel(planned):
    shown = MemoryFilm({"dense": planned})._repr_mimebundle_()
    assert "<svg" not in shown["text/html"] and "script" not in shown["text/html"]
    assert shown["text/plain"] in shown["text/html"]
    ElementTree.fromstring(shown["image/svg+xml"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plans": {}}, "plans must contain a plan. Received: {}"),
        ({"batch": 100}, "batch must be one of 1, 2, 4, 8"),
        ({"b": 3}, "b must be one of 1, 2, 4, 8"),
        ({"batch": 4, "b": 8}, "b must be one of 1, 2, 4. Received: 8"),
        ({"limit_mib": 100}, "limit_mib must be one of 64, 128"),
        ({"limit_mib": math.nan}, "limit_mib must be one of 64, 128"),
    ],
)
def test_bad_arguments(planned, arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MemoryFilm(**{"plans": {"dense": planned}, **arguments})

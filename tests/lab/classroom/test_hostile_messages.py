"""A page can send anything: random and hostile messages change nothing for good, and crash
nothing."""

import contextlib
import random

import ipywidgets
import pytest
from events import wait_until
from lab_widgets import lab_threads, run_to_the_end

import gradlab
from gradlab.lab.classroom.hub import Hub
from gradlab.lab.classroom.limits import Limits
from gradlab.lab.classroom.visitor import Visitor
from gradlab.lab.experiments.run import run
from gradlab.lab.experiments.stream import train_and_send

VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        10**9,
        10**30,
        -(10**18),
        0.5,
        float("nan"),
        float("inf"),
        1e308,
        -0.0,
    ),
    *(
        "",
        "5",
        "x" * 100_000,
        "<script>alert(1)</script>",
        "sgd",
        "../../etc/passwd",
        "\ud83d",
        "updates",
    ),
    *([], [1, 2], [[]], {}, {"a": {"b": []}}, {"value": 1}, [None] * 1000),
]
FIELDS = ["ask", "have", "revision", "seen", "rename", "name", "remove", "download", "nothing"]


class TrainerHere:
    """Trains in a thread of the hub."""

    def train(self, work):
        train_and_send(*work)

    def close(self):
        pass


@pytest.fixture
def lab():
    hub = Hub([TrainerHere()], Limits(examples=20_000, seconds=1.0))
    visitor = Visitor(hub.address, hub.key)
    lab = gradlab.AccumulationLab(executor=visitor, downloads=True, updates=5, seeds=2)
    yield lab
    lab.close()
    visitor.shutdown()
    hub.close()
    wait_until(lambda: "gradlab-visitor" not in lab_threads())


def parts(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


def message(rng, target):
    """A message of the page, as the kernel gets it: new values of a widget, or a question of the
    charts."""
    if isinstance(target, gradlab.lab.widget.charts.Charts) and rng.random() < 0.7:
        content = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(4))}
        return {"method": "custom", "content": content}
    names = [*target.keys, "unknown", "layout", "_dom_classes"]
    state = {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randrange(1, 3))}
    return {"method": rng.choice(["update"] * 8 + ["request_state", "wrong", None]), "state": state}


@pytest.mark.parametrize("seed", range(4))
def test_hostile_messages(seed, lab):
    rng = random.Random(seed)
    targets = [part for part in parts(lab.view) if isinstance(part, ipywidgets.Widget)]
    preset = lab.experiment
    for _ in range(250):
        target = rng.choice(targets)
        # ipykernel catches and logs whatever a message raises.
        with contextlib.suppress(Exception):
            target._handle_msg({"content": {"data": message(rng, target)}, "buffers": []})
    # Another visitor's page
    fresh = gradlab.AccumulationLab(executor=lab._controller._executor, updates=5, seeds=2)
    run_to_the_end(fresh)
    assert fresh.result == run(fresh.experiment)
    fresh.close()
    lab.reset()
    assert lab.experiment == preset
    run_to_the_end(lab)
    assert lab.result == run(preset)

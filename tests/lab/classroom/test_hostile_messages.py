"""A page can send anything: random and hostile messages change nothing for good, and crash
nothing."""

import contextlib
import random

import ipywidgets
import pytest
from distributed import Client, LocalCluster
from lab_widgets import run_to_the_end

import gradlab
from gradlab.lab.classroom.limits import Limits
from gradlab.lab.experiments.jobs.run import run

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


@pytest.fixture
def lab():
    with (
        LocalCluster(
            1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
        ) as workers,
        Client(workers, set_as_default=False) as client,
    ):
        lab = gradlab.AccumulationLab(executor=client, updates=5, seeds=2)
        lab._controller.cluster.check = Limits(examples=20_000, seconds=1.0).check
        yield lab
        lab.close()


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
    fresh = gradlab.AccumulationLab(executor=lab._controller.cluster.client(), updates=5, seeds=2)
    run_to_the_end(fresh)
    assert fresh.result == run(fresh.experiment)
    fresh.close()
    lab.reset()
    assert lab.experiment == preset
    run_to_the_end(lab)
    assert lab.result == run(preset)

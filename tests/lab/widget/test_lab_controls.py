"""The controls of the lab: each one reruns the training, and values that cannot be run are
refused."""

import re
import subprocess
import sys
import threading

import ipywidgets
import pytest
from events import wait_until
from lab_widgets import run_to_the_end, updates_made, widget

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.widget import controls, lab_controller
from gradlab.lab.widget.live_run import State


def test_a_changed_control_reruns(make):
    lab = make()
    run_to_the_end(lab)
    for name, value in {
        "accumulation_steps": 2,
        "microbatch_size": 3,
        "learning_rate": 0.01,
        "budget": 7.0,
        "optimizer": "sgd",
        "method": "variables",
        "model": "lenet",
    }.items():
        widget(lab, name).value = value
        assert getattr(lab.experiment, "updates" if name == "budget" else name) == value
        assert lab.wait() is State.FINISHED
        # The result of a new run: the one before had another
        assert lab.result.experiment == lab.experiment, name


def test_without_rerun_a_changed_control_waits_for_run(make):
    lab = make(rerun=False)
    widget(lab, "accumulation_steps").value = 7
    assert (
        lab.state is State.IDLE
        and "press Run" in lab.status
        and "7 × 20" in widget(lab, "batch").value
    )
    run_to_the_end(lab)
    assert lab.result.losses.shape == (2, 5, 7)


def test_what_the_lab_says_after_a_run_is_not_replaced_by_the_end_of_the_run(make):
    lab = make(rerun=False)
    run_to_the_end(lab)
    widget(lab, "accumulation_steps").value = 7
    lab.stop()  # shows how far the run is
    lab.wait()
    assert "the controls have changed: press Run" in lab.status


def test_of_many_quick_changes_the_run_of_the_last_one_survives(make, monkeypatch):
    monkeypatch.setattr(lab_controller, "QUIET_SECONDS", 600)  # quick enough on a slow machine
    lab = make(updates=50)
    begun = []
    for steps in range(1, 21):
        widget(lab, "accumulation_steps").value = steps
        begun.append(lab._controller.runner.current)
    assert lab.wait() is State.FINISHED
    assert lab.result.losses.shape == (2, 50, 20)
    assert [run.delay for run in begun] == [0.0] + 19 * [lab_controller.DRAG_SECONDS]
    assert "20 × 20" in widget(lab, "batch").value


def test_towers_are_for_the_static_graphs(make):
    lab = make()
    towers = widget(lab, "towers")
    assert towers.disabled and towers.max == 3
    widget(lab, "method").value = "towers"
    assert not towers.disabled
    towers.value = 3
    assert lab.wait() is State.FINISHED
    assert (
        lab.experiment.effective_batch == 300
        and "3 × 5 × 20 = <b>300</b>" in widget(lab, "batch").value
    )
    widget(lab, "method").value = "microbatched"
    assert lab.experiment.towers == 1 and lab.wait() is State.FINISHED


def test_more_towers_than_this_machine_has_are_shown_as_they_are():
    e = Experiment(method="towers", towers=5)
    built = controls.build(e, lambda: None, hide=(), lock=())
    assert built.widgets["towers"].value == 5


def test_a_lab_opens_with_few_models(make):
    """The page shows the lab when it has made all of them."""
    models = []
    ipywidgets.Widget.on_widget_constructed(models.append)
    try:
        make(hide=(), rerun=False)
    finally:
        ipywidgets.Widget.on_widget_constructed(None)
    assert 50 < len(models) <= 97


def test_the_batch_line_predicts_the_noise_of_a_window(make):
    lab = make(rerun=False, accumulation_steps=4)
    assert "4 × 20 = <b>80</b> examples" in widget(lab, "batch").value
    assert "noise of the loss ÷ <b>2.0</b>" in widget(lab, "batch").value
    widget(lab, "method").value = "variables"
    widget(lab, "towers").value = 3
    assert "noise of the loss ÷ <b>3.5</b>" in widget(lab, "batch").value
    widget(lab, "method").value = "microbatched"  # has no towers
    widget(lab, "accumulation_steps").value = 1
    assert "noise" not in widget(lab, "batch").value  # one micro-batch: nothing is averaged


def test_the_button_says_what_the_controls_behind_it_say(make):
    lab = make(updates=5, seeds=2)
    assert widget(lab, "more").description == "Settings: dense · mnist · adam · 2 seeds · 5 updates"
    assert widget(lab, "drawer").layout.display == "none"
    widget(lab, "more").value = True
    assert widget(lab, "drawer").layout.display == "flex"
    widget(lab, "seeds").value = 1
    assert widget(lab, "more").description == "Settings: dense · mnist · adam · 1 seed · 5 updates"


def test_the_bar_shows_what_is_in_memory_of_the_batch(make):
    lab = make(accumulation_steps=5, microbatch_size=20)

    def bar() -> tuple[str, dict[str, float]]:
        value = widget(lab, "batch").value
        parts = re.findall(r'class="gradlab-([a-z-]+)" style="width: ([0-9.]+)%', value)
        return re.search('aria-label="([^"]*)"', value)[1], {
            name: float(width) for name, width in parts
        }

    words, parts = bar()
    assert words == "20 of 100 examples are in memory at once; they fit on a card for 50"
    assert parts == {"batch-outline": 100, "held": 20, "room": 50}
    widget(lab, "accumulation_steps").value = 1
    assert bar()[1] == {"batch-outline": 40, "held": 40, "room": 100}
    widget(lab, "microbatch_size").value = 80
    assert bar()[0] == "80 of 80 examples are in memory at once; they do not fit on a card for 50"
    widget(lab, "microbatch_size").value = 20
    widget(lab, "method").value = "towers"
    widget(lab, "towers").value = 2
    wanted = "20 of 40 examples are in memory at once on each device; they fit on a card for 50"
    assert bar()[0] == wanted


def test_values_that_cannot_be_run_are_refused(make):
    lab = make(microbatch_size=5000)
    widget(lab, "accumulation_steps").value = 12
    assert (
        lab.status.startswith("not run: ") and "at most the 55000 training examples" in lab.status
    )
    assert lab.state is State.IDLE and lab.result is None
    batch = widget(lab, "batch")
    # Beside k and b
    assert "12 × 5000" not in batch.value and "at most the 55000 training examples" in batch.value
    widget(lab, "accumulation_steps").value = 2
    assert "2 × 5000" in batch.value and lab.wait() is State.FINISHED


@pytest.mark.parametrize(
    ("kind", "budget", "rule"),
    [
        ("updates", -5.0, "from 1 to 1,000,000 updates in a lab. Received: -5"),
        ("updates", 1e9, "from 1 to 1,000,000 updates in a lab. Received: 1,000,000,000"),
        ("examples", 0.0, "from 1 to 1,000,000,000 examples in a lab. Received: 0"),
        ("seconds", 0.01, "from 0.1 to 86,400 seconds in a lab. Received: 0.01"),
        ("updates", float("nan"), "from 1 to 1,000,000 updates in a lab. Received: nan"),
    ],
)
def test_lengths_that_cannot_be_run_are_refused(make, kind, budget, rule):
    lab = make(rerun=False)
    widget(lab, "budget_kind").value = kind
    widget(lab, "budget").value = budget
    assert lab.status == f"not run: the budget must be {rule}"


def test_a_refusal_ends_the_run_before_and_stays_on_the_page(make):
    lab = make(microbatch_size=5000, accumulation_steps=1, updates=100_000)
    lab.run()
    wait_until(lambda: updates_made(lab) > 1)
    widget(lab, "accumulation_steps").value = 12
    assert lab.wait() is State.FINISHED
    assert lab.status.startswith("not run: ")
    widget(lab, "accumulation_steps").value = 2
    wait_until(lambda: ", update " in lab.status)
    lab.stop()
    assert lab.wait() is State.FINISHED and lab.status.startswith("stopped: ")


def test_a_held_run_says_what_it_waits_for(make, monkeypatch):
    ends = []
    monkeypatch.setattr(lab_controller, "call_after_cell", lambda end: not ends.append(end))
    lab = make()
    charts = widget(lab, "charts")
    charts.preview = {"worker": "of the page"}
    lab._controller.hold()
    threading.Thread(target=lab._controller.start).start()  # as the page does
    wait_until(lambda: lab._controller._asked)
    assert lab.status.startswith("waiting: the first run begins when")
    assert charts.preview
    ends[0]()  # the cell has ended
    assert lab.wait() is State.FINISHED
    assert charts.preview == {}


@pytest.mark.parametrize("budget", [5.0, -5.0])
def test_the_page_stops_training_when_a_run_has_updates_or_is_refused(make, budget):
    lab = make(rerun=False)
    charts = widget(lab, "charts")
    charts.preview = {"worker": "of the page"}
    widget(lab, "budget").value = budget
    if budget > 0:
        assert charts.preview
        lab.run()
        assert lab.wait() is State.FINISHED
    assert charts.preview == {}


PREVIEWS = """
import sys, gradlab
for preset in ({}, {"rerun": False}, {"model": "lenet"}, {"hide": gradlab_views}):
    lab = gradlab.AccumulationLab(**preset)
    print(bool(lab._controller.layout.charts.preview), end=" ")
    if "hide" not in preset:  # the toy alone draws its picture, as it needs no recorded run
        lab._repr_mimebundle_()
print("tensorflow" in sys.modules, "matplotlib" in sys.modules)
"""


def test_a_page_trains_only_what_it_can_show_before_tensorflow_is_loaded():
    views = ("losses", "accuracy", "noise", "scale", "cost")
    code = PREVIEWS.replace("gradlab_views", repr(views))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    # and neither TensorFlow nor Matplotlib, which takes longer to import than the page to appear
    assert done.stdout.split() == ["True", "False", "False", "False", "False", "False"]

"""Timelines: the schedules compared with the formulas and with schedules made by hand, the drawing,
and the widget."""

import base64
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction
from xml.etree import ElementTree

import pytest

from gradlab.lab.widget.course import schedules
from gradlab.lab.widget.course.schedules import NAMES, PIPELINES, PipelineStep, schedule
from gradlab.lab.widget.course.timeline import Timeline, compare, orders

SIZES = [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in (1, 2, 3, 4, 5, 8, 16)]
RATIOS = [(1, 1), (1, 2), (2, 1), (3, 5), (Fraction(1, 3), Fraction(1, 2))]


def test_the_bubble_is_exactly_the_formula():
    for name, (p, m), (forward, backward) in itertools.product(PIPELINES, SIZES, RATIOS):
        case = (name, p, m, forward, backward)
        update = schedule(*case)
        assert update.idle_share == Fraction(p - 1, m + p - 1), case
        assert update.seconds == (m + p - 1) * (forward + backward), case
        formula, value = schedules.expected_idle_share(*case)
        assert formula == "(p - 1) / (m + p - 1)", case
        assert value == pytest.approx(float(update.idle_share), abs=1e-15), case


def test_activations_that_are_held():
    for p, m in SIZES:
        assert [schedule("gpipe", p, m).held(stage) for stage in range(p)] == [m] * p, (p, m)
        held = [schedule("1f1b", p, m).held(stage) for stage in range(p)]
        assert held == [min(p - stage, m) for stage in range(p)], (p, m)
        for name in ("each", "window"):
            assert {schedule(name, p, m, all_reduce=1).held(device) for device in range(p)} == {
                1
            }, (name, p, m)


def test_data_parallelism_waits_for_its_all_reduces_only():
    for p, m in SIZES:
        once = schedule("window", p, m, 1, 2, 5)
        often = schedule("each", p, m, 1, 2, 5)
        assert (once.seconds, often.seconds) == (3 * m + 5, (3 + 5) * m), (p, m)
        assert (once.idle_share, often.idle_share) == (Fraction(5, 3 * m + 5), Fraction(5, 8)), (
            p,
            m,
        )
        for update in (once, often):
            value = schedules.expected_idle_share(update.name, p, m, 1, 2, 5)[1]
            assert value == pytest.approx(float(update.idle_share), abs=1e-15), (update.name, p, m)


# By hand, forward 1 and backward 2: a row is a device; what it does at each time, with a dot where
# it waits.
BY_HAND = {
    ("gpipe", 2, 2): ["FF...BBBB", ".FFBBBB.."],
    ("gpipe", 3, 2): ["FF......BBBB", ".FF...BBBB..", "..FFBBBB...."],
    ("1f1b", 2, 3): ["FF..BBFBB.BB", ".FBBFBBFBB.."],
    ("1f1b", 3, 1): ["F......BB", ".F...BB..", "..FBB...."],
    ("each", 2, 2): ["FBBAAAAFBBAAAA"] * 2,
    ("window", 2, 2): ["FBBFBBAAAA"] * 2,
    ("window", 1, 2): ["FBBFBB"],
}


@pytest.mark.parametrize(("name", "p", "m"), BY_HAND)
def test_schedules_made_by_hand(name, p, m):
    update = schedule(name, p, m, 1, 2, 4 if p > 1 else 0)
    for device, wanted in enumerate(BY_HAND[name, p, m]):
        row = ["."] * update.seconds
        for task in update.of(device):
            letter = task.step.kind[0].upper()
            row[task.start : task.end] = letter * (task.end - task.start)
        assert "".join(row) == wanted


def test_every_task_starts_after_what_it_needs_and_devices_do_one_thing_at_a_time():
    for name in NAMES:
        update = schedule(name, 4, 6, 1, 2, 3)
        ends = {(task.device, task.step): task.end for task in update.tasks}
        assert len(ends) == len(update.tasks)
        for device in range(4):
            tasks = update.of(device)
            assert all(before.end <= after.start for before, after in itertools.pairwise(tasks))
            for kind in ("forward", "backward"):
                assert [task.step.microbatch for task in tasks if task.step.kind == kind] == [
                    1,
                    2,
                    3,
                    4,
                    5,
                    6,
                ]
        for task in update.tasks:
            if name in PIPELINES and task.step.kind == "forward" and task.device:
                assert task.start >= ends[task.device - 1, task.step]
            if name in PIPELINES and task.step.kind == "backward" and task.device < 3:
                assert task.start >= ends[task.device + 1, task.step]
            if task.step.kind == "backward":
                assert (
                    task.start >= ends[task.device, PipelineStep("forward", task.step.microbatch)]
                )


def test_a_planted_bug_breaks_the_formula():
    """One forward pass more or less before the first backward pass: the checks above see it."""
    right = [[task.step for task in schedule("1f1b", 3, 4).of(stage)] for stage in range(3)]

    def needs(device, step):
        after = device + 1 if step.kind == "backward" else device - 1
        return [(after, step)] if 0 <= after < 3 else []

    def seconds(rows):
        return max(task.end for task in schedules.simulate(rows, lambda *at: 1, needs))

    assert seconds(right) == 2 * (4 + 2)
    wrong = [[*right[0][:2], right[0][3], right[0][2], *right[0][4:]], *right[1:]]
    assert wrong != right and seconds(wrong) > seconds(right)


def test_steps_that_wait_for_each_other_are_refused():
    one, two = PipelineStep("forward", 1), PipelineStep("forward", 2)
    with pytest.raises(
        ValueError, match=r"wait for each other. Received: waiting are \[\('forward', 1\)"
    ):
        schedules.simulate(
            [[one], [two]],
            lambda *at: 1,
            lambda device, step: [(1 - device, two if device == 0 else one)],
        )


def test_the_ring():
    assert schedules.ring_seconds(1, 400e6, 1e9) == 0
    assert schedules.ring_seconds(2, 400e6, 1e9) == pytest.approx(0.4)
    assert schedules.ring_seconds(8, 400e6, 1e9) == pytest.approx(0.7)
    assert 0.79 < schedules.ring_seconds(1000, 400e6, 1e9) < 0.8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("zb", 2, 2), "name must be one of each, window, gpipe, 1f1b. Received: 'zb'"),
        (("gpipe", 0, 2), "devices must be a positive integer. Received: 0"),
        (("gpipe", 2, 1.5), "microbatches must be a positive integer. Received: 1.5"),
        (("gpipe", 2, 2, -1), "forward must be a finite number above 0. Received: -1"),
        (
            ("gpipe", 2, 2, 1, float("nan")),
            "backward must be a finite number above 0. Received: nan",
        ),
        (("window", 2, 2, 1, 2, -3), "all_reduce must be a finite number above 0. Received: -3"),
    ],
)
def test_bad_input_of_a_schedule_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        schedule(*arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"schedule": "dp"}, "schedule must be one of each, window, gpipe, 1f1b. Received: 'dp'"),
        ({"devices": 17}, "devices must be at most 16 in a timeline. Received: 17"),
        ({"devices": True}, "devices must be a positive integer. Received: True"),
        ({"microbatches": 65}, "microbatches must be at most 64 in a timeline. Received: 65"),
        ({"megabytes": 0}, "megabytes must be a positive integer. Received: 0"),
        ({"backward": 5}, "backward must be from 0.5 to 4. Received: 5"),
        ({"backward": "2"}, "backward must be a finite number above 0. Received: '2'"),
        ({"gigabits": 0}, "gigabits must be a positive integer. Received: 0"),
    ],
)
def test_bad_input_of_a_timeline_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Timeline(**arguments)


# ---- the drawing and the widget ----


def svg(html: str) -> ET.Element:
    """The drawing in the image of a page."""
    [content] = re.findall('src="data:image/svg[+]xml;base64,(.*?)"', html)
    return ET.fromstring(
        base64.b64decode(content).decode().replace(' xmlns="http://www.w3.org/2000/svg"', "")
    )


def boxes(drawn: ET.Element, kind: str) -> list[ET.Element]:
    """The boxes of the rows; the first of each kind is the legend's."""
    return [each for each in drawn.iter("rect") if each.get("class") == kind][1:]


@pytest.mark.parametrize(
    ("name", "reduces"), [("each", 12), ("window", 4), ("gpipe", 0), ("1f1b", 0)]
)
def test_every_task_is_a_box_of_its_length(name, reduces):
    timeline = Timeline(name, devices=4, microbatches=3)
    drawn = svg(timeline._repr_mimebundle_()["text/html"])
    assert len(boxes(drawn, "all-reduce")) == reduces
    for kind in ("forward", "backward"):
        assert len(boxes(drawn, kind)) == 4 * 3
    first = boxes(drawn, "forward")[0]
    ratio = float(boxes(drawn, "backward")[0].get("width")) / float(first.get("width"))
    assert ratio == pytest.approx(2, rel=0.02)
    right = max(float(each.get("x")) + float(each.get("width")) for each in drawn.iter("rect"))
    assert right <= float(drawn.get("viewBox").split()[2])
    assert drawn.get("role") == "img" and NAMES[name] in drawn.get("aria-label")
    texts = [each.text for each in drawn.iter("text")]
    assert texts.count("3") == 2 * 4 and {"device 1", "device 4", "time in seconds"} <= set(texts)


def test_the_drawing_follows_the_theme_and_has_no_ids():
    page = Timeline()._drawing.value
    assert 'fill="currentColor"' in page and 'stroke="currentColor"' in page
    assert " id=" not in page and "url(" not in page and "<script" not in page


def test_the_page_without_a_kernel_is_the_same_each_time():
    one, two = Timeline("1f1b")._repr_mimebundle_(), Timeline("1f1b")._repr_mimebundle_()
    view = "application/vnd.jupyter.widget-view+json"
    assert one.keys() == {view, "text/html", "image/svg+xml", "text/plain"}
    assert {**one, view: None} == {**two, view: None}
    assert ElementTree.fromstring(one["image/svg+xml"]).tag == "{http://www.w3.org/2000/svg}svg"
    assert "device 1: F1 F2 F3 F4 B1 B2 B3 B4" in one["text/plain"]
    assert "device 4: F1 B1 F2 B2 F3 B3 F4 B4" in one["text/plain"]


def test_the_controls_redraw_and_have_labels():
    timeline = Timeline("window", devices=4, microbatches=4, megabytes=400, gigabits=10)
    assert "Time of an update: 1.68 s for 16 micro-batches" in timeline.words
    assert (
        "28.6%. Formula: a / (m (f + b) + a) with an all-reduce of a = 0.48 s: 28.6%"
        in timeline.words
    )
    drawing, words = timeline._drawing.value, timeline._words.value
    timeline.controls["schedule"].value = "gpipe"
    timeline.controls["microbatches"].value = 8
    assert timeline._drawing.value != drawing and timeline._words.value != words
    assert "27.3%. Formula: (p - 1) / (m + p - 1): 27.3%" in timeline.words
    assert "8 micro-batches, of 1/4 of the layers (device 1)" in timeline.words
    assert timeline.controls["gigabits"].disabled and timeline.controls["megabytes"].disabled
    timeline.controls["schedule"].value = "each"
    assert not timeline.controls["gigabits"].disabled
    assert all(control.description and control.tooltip for control in timeline.controls.values())
    assert 'role="status"' in timeline._words.value
    timeline.close()


@pytest.mark.parametrize("name", NAMES)
def test_extreme_settings_are_drawn(name):
    for p, m in ((1, 1), (1, 64), (16, 1), (16, 64)):
        timeline = Timeline(name, p, m, backward=0.5, megabytes=10_000, gigabits=1)
        svg(timeline._repr_mimebundle_()["text/html"])
        said = re.findall(r"([\d.]+)%", timeline.words)
        assert len(said) == 2 and said[0] == said[1]
        assert timeline.controls["megabytes"].value == 10_000


def test_a_comparison_has_one_scale_of_time():
    both = compare({"often <": Timeline("each"), "once": Timeline("window")})
    drawn = svg(both._repr_mimebundle_()["text/html"])
    widths = {
        round(float(each.get("width")))
        for kind in ("forward", "backward")
        for each in boxes(drawn, kind)
    }
    assert len(widths) == 2  # one of all forward passes, one of all backward passes
    assert (
        "often &lt;" in both.svg
        and "often <: 3.12 s" in repr(both)
        and "once: 1.68 s" in repr(both)
    )
    assert orders(Timeline("window").schedule) in repr(both)


def test_it_needs_no_tensorflow():
    program = "import sys; from gradlab.lab.widget.course.timeline import Timeline; Timeline()"
    subprocess.run(
        [sys.executable, "-c", f"{program}; assert 'tensorflow' not in sys.modules"], check=True
    )

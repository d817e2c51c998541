"""A saved notebook as HTML, in a real Chromium without a kernel and without a network."""

import re
import subprocess
import sys

import pytest
import tensorflow as tf
from lab_page import SCREENSHOTS, frames, new_page, press, until
from paths import ROOT

from gradlab.lab.figures import toy
from gradlab.lab.widget import presets, saved_page
from gradlab.lab.widget.course import graph_film
from gradlab.lab.widget.course.graph_film import GraphFilm
from gradlab.lab.widget.course.memory_bars import MemoryBars
from gradlab.lab.widget.course.memory_count import sentence
from gradlab.lab.widget.course.timeline import Timeline
from gradlab.lab.widget.layout import memory_bar

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Notebook 00 as it is saved, as HTML."""
    folder = tmp_path_factory.mktemp("page")
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "nbconvert",
        "--to",
        "html",
        "--output-dir",
        str(folder),
    ]
    subprocess.run(
        [*command, ROOT / "notebooks" / "00_start_here.ipynb"],
        check=True,
        capture_output=True,
        timeout=600,
    )
    return folder / "00_start_here.html"


@pytest.fixture
def opened(browser, exported):
    """A function that opens the page; what is not on this machine cannot be reached."""
    contexts = []

    def open_page(**settings):
        page = new_page(browser, viewport={"width": 1100, "height": 800}, **settings)
        contexts.append(page.context)
        page.context.route(lambda url: url.startswith("http"), lambda route: route.abort())
        page.goto(exported.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def updates_of(lab, view="losses"):
    return int(lab.locator(f"[data-view={view}]").get_attribute("data-updates"))


def is_finished(lab):
    return lab.get_attribute("data-state") == "finished"


def test_without_a_kernel_every_slider_trains_in_the_page(opened):
    page = opened()
    lab = page.locator(".gradlab-offline").first
    lab.scroll_into_view_if_needed()
    losses, noise, one_update = (
        lab.locator(f".gradlab-words-{name}") for name in ("losses", "noise", "toy")
    )
    until(lambda: is_finished(lab) and updates_of(lab) == 300, lab.inner_text)
    assert "k = 5, b = 20: from" in losses.inner_text()
    assert one_update.inner_text() == toy.describe(toy.descend(5))
    first = re.search(r"windows of 5: ([0-9.]+) nats measured", noise.inner_text())
    # A larger window: less noise, by what is predicted from the first run to within a third
    press(lab.locator("[data-control=accumulation_steps]"), "PageUp")
    k = int(lab.locator("[data-control=accumulation_steps]").input_value())
    assert k > 5
    until(lambda: is_finished(lab) and f"windows of {k}:" in noise.inner_text(), lab.inner_text)
    assert one_update.inner_text() == toy.describe(toy.descend(k))
    second = re.search(rf"windows of {k}: ([0-9.]+) nats measured", noise.inner_text())
    assert float(second[1]) == pytest.approx(float(first[1]) * (5 / k) ** 0.5, rel=0.34)
    contrast = lab.locator(".gradlab-contrast").inner_text()
    assert (
        f"From windows of 5 to {k} micro-batches: noise ÷ {(k / 5) ** 0.5:.1f} predicted"
        in contrast
    )
    assert "before: k = 5, b = 20" in losses.inner_text()  # the run before stays in the views
    bar = lab.locator(".gradlab-memory")
    assert bar.get_attribute("aria-label") in memory_bar(20, 20 * k)
    accuracy = lab.locator(".gradlab-view-accuracy")
    assert not accuracy.is_visible()
    press(lab.locator(".gradlab-more-views"), "Enter")
    accuracy.wait_for()
    press(lab.locator("[data-control=microbatch_size]"), "End")
    until(lambda: bar.get_attribute("aria-label") in memory_bar(100, 100 * k))
    press(lab.locator("[data-control=microbatch_size]"), "Home")
    until(lambda: f"k = {k}, b = 1: from" in losses.inner_text(), losses.inner_text)
    lab.locator("[data-control=optimizer]").select_option("sgd")
    press(lab.locator("[data-control=learning_rate]"), "End")
    until(lambda: "rate 1, sgd: from" in losses.inner_text(), losses.inner_text)
    accuracy = lab.locator(".gradlab-words-accuracy")
    lab.locator("[data-control=against]").select_option("examples")
    until(lambda: "examples" in accuracy.inner_text(), accuracy.inner_text)
    press(lab.locator(".gradlab-toy-step"), "Enter")
    until(lambda: lab.locator(".gradlab-added").inner_text() == "applied")
    press(lab.locator(".gradlab-view-toy canvas"), "ArrowUp")
    until(lambda: lab.locator(".gradlab-view-toy").get_attribute("data-start") == "-4.00,2.45")
    curve = lab.locator(".gradlab-view-losses")
    until(lambda: is_finished(lab), lab.inner_text)
    press(curve.locator("canvas"), "End")
    until(lambda: curve.locator("[aria-live]").inner_text().startswith("update 300:"))
    lab.screenshot(path=SCREENSHOTS / "saved_page.png")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, context=".gradlab-offline").response["violations"]
    assert not [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def page_of(browser, *arguments):
    """A page with a lab alone."""
    page = new_page(browser, viewport={"width": 1100, "height": 800})
    page.set_content(saved_page.page(*arguments))
    return page, page.locator(".gradlab-offline")


def test_two_labs_on_a_page_keep_their_own_settings(browser):
    page = new_page(browser, viewport={"width": 1100, "height": 800})
    both = [presets.experiment(0, {"accumulation_steps": k, "updates": 30}) for k in (3, 9)]
    page.set_content("".join(map(saved_page.page, both)))
    for lab, k in zip(page.locator(".gradlab-offline").all(), (3, 9)):
        lab.scroll_into_view_if_needed()
        until(lambda lab=lab: is_finished(lab), lab.inner_text)
        assert f"k = {k}, b = 20: from" in lab.locator(".gradlab-words-losses").inner_text()
    page.context.close()


def test_a_page_that_cannot_start_workers_says_so(browser):
    page = new_page(browser)
    page.add_init_script("window.Worker = class { constructor() { throw new Error('not here'); } }")
    page.goto("about:blank")
    page.set_content(saved_page.page(presets.experiment(0, {})))
    lab = page.locator(".gradlab-offline")
    until(lambda: lab.get_attribute("data-state") == "failed", lab.inner_text)
    assert "failed: not here" in lab.inner_text()
    page.context.close()


def test_the_front_page_moves_k_until_it_is_touched(browser):
    page = new_page(browser, viewport={"width": 1100, "height": 800})
    short = presets.experiment(0, {"accumulation_steps": 1, "updates": 30})
    page.set_content(saved_page.page(short, tour=True))
    lab = page.locator(".gradlab-offline")
    until(lambda: "k = 5, b = 20: from" in lab.locator(".gradlab-words-losses").inner_text())
    press(lab.locator("[data-control=accumulation_steps]"), "Home")
    until(lambda: is_finished(lab) and "k = 1, b = 20: from" in lab.inner_text(), lab.inner_text)
    assert lab.locator("[data-control=accumulation_steps]").input_value() == "1"
    page.context.close()


def test_a_page_pauses_and_resumes(browser):
    page, lab = page_of(browser, presets.experiment(0, {"updates": 100_000, "seeds": 2}))
    until(lambda: updates_of(lab) > 0)
    press(lab.locator("[data-control=pause]"), "Enter")
    until(lambda: lab.get_attribute("data-state") == "paused")

    def rests():
        before = updates_of(lab)
        for _ in range(20):
            frames(page)
        return updates_of(lab) == before

    until(rests)  # what was under way has arrived
    held = updates_of(lab)
    press(lab.locator("[data-control=pause]"), "Enter")
    until(lambda: updates_of(lab) > held)
    assert lab.get_attribute("data-state") == "running"
    page.context.close()


def test_a_page_begins_with_the_experiment_of_its_lab(browser):
    preset = {"accumulation_steps": 7, "microbatch_size": 3, "updates": 40, "seeds": 3}
    chosen = presets.experiment(0, preset | {"optimizer": "momentum", "learning_rate": 0.01})
    page, lab = page_of(browser, chosen, ("toy", "cost", "optimizer"), ("microbatch_size",))
    until(lambda: is_finished(lab), lab.inner_text)
    words = lab.locator(".gradlab-words-losses").inner_text()
    assert "k = 7, b = 3: from" in words and updates_of(lab) == 40
    views = lab.locator(".gradlab-view").evaluate_all(
        "(all) => all.map((view) => view.dataset.view)"
    )
    assert views == ["toy", "losses", "noise", "accuracy", "scale"]
    shown = [view for view in views if lab.locator(f"[data-view={view}]").is_visible()]
    assert shown == ["losses", "noise", "accuracy"]
    assert not lab.locator("[data-control=optimizer]").is_visible()
    assert lab.locator("[data-control=microbatch_size]").is_disabled()
    page.context.close()


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ({"model": "lenet", "updates": 20}, "lenet on mnist"),
        (
            {"examples": 30_000, "method": "variables", "towers": 2},
            "on 2 towers, for 30,000 examples",
        ),
    ],
)
def test_what_a_page_cannot_train_is_said(browser, preset, reason):
    page, lab = page_of(browser, presets.experiment(0, preset))
    until(lambda: is_finished(lab), lab.inner_text)
    assert f"This lab itself needs a kernel: it trains {reason}." in lab.inner_text()
    assert updates_of(lab) == 300  # the default
    page.context.close()


def test_losses_that_are_not_finite_are_said(browser):
    wild = presets.experiment(0, {"optimizer": "sgd", "learning_rate": 1e30, "seeds": 2})
    page, lab = page_of(browser, wild)
    until(lambda: lab.get_attribute("data-state") == "diverged", lab.inner_text)
    page.context.close()


def test_where_scripts_are_dropped_a_picture_and_a_table_are_left(opened):
    page = opened(java_script_enabled=False)
    lab = page.locator(".gradlab-offline").first
    assert "recorded, k = 50" in lab.locator("tr").last.inner_text()
    size = lab.locator("img").bounding_box()
    assert size["width"] > 500 and size["height"] > 200


def words(root):
    return re.sub(r"\s+", " ", root.inner_text())


def test_bars_and_timelines_follow_their_controls(browser):
    bars, timeline = MemoryBars(), Timeline("window")
    page = new_page(browser)
    page.set_content("".join(each._repr_mimebundle_()["text/html"] for each in (bars, timeline)))
    shown = page.locator(".gradlab-saved-memory_bars")
    shown.locator("[data-control=preset]").select_option(label="GPT-2 small, 1,024 tokens")
    bars.controls["preset"].value = "GPT-2 small, 1,024 tokens"
    assert sentence(bars.training, bars.limit) in words(shown)
    shown.locator("[data-control=microbatch_size]").fill("4")  # a power of two
    bars.controls["microbatch_size"].value = 16
    assert sentence(bars.training, bars.limit) in words(shown)
    shown.locator("[data-control=checkpointing]").check()
    bars.controls["checkpointing"].value = True
    assert sentence(bars.training, bars.limit) in words(shown)
    assert shown.locator("svg rect").count() == 10

    shown = page.locator(".gradlab-saved-timeline")
    bandwidth = shown.locator("[data-control=gigabits]")
    assert not bandwidth.is_disabled()
    shown.locator("[data-control=schedule]").select_option(label="pipeline, 1F1B")
    shown.locator("[data-control=microbatches]").fill("11")  # from 1 on
    timeline.controls["schedule"].value, timeline.controls["microbatches"].value = "1f1b", 12
    assert timeline.words.replace("\n", " ") in words(shown) and bandwidth.is_disabled()
    page.screenshot(path=SCREENSHOTS / "saved_widgets.png", full_page=True)
    page.context.close()


def test_a_film_of_a_graph_runs_and_follows_its_slider(browser, monkeypatch):
    monkeypatch.setattr(graph_film, "MILLISECONDS", 50)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        doubled = tf.multiply(2.0, x, name="doubled")
    with tf.compat.v1.Session(graph=graph) as session:
        film = GraphFilm(session, [("first", doubled, {x: 3.0}), ("second", doubled, {x: 4.0})])
    page = new_page(browser)
    page.set_content(film._repr_mimebundle_()["text/html"])
    shown = page.locator(".gradlab-saved-graph_film")
    run, slider = shown.locator("button"), shown.locator("[data-control=step]")
    assert "first, step 1 of 2: x. Python feeds x = 3." in words(shown)
    press(slider, "ArrowRight")
    assert "first, step 2 of 2: doubled. Python gets 6 from doubled." in words(shown)
    assert "2 of 4" in words(shown)
    until(lambda: shown.locator("img").evaluate("(each) => each.naturalWidth") > 50)
    run.click()
    until(lambda: "second, step 2 of 2: doubled. Python gets 8 from doubled." in words(shown))
    until(lambda: run.inner_text() == "run")
    run.click()  # from the beginning
    press(slider, "End")  # while it plays
    until(lambda: slider.input_value() == "3" and run.inner_text() == "run")
    page.context.close()

"""A saved notebook as HTML, in a real Chromium without a kernel and without a network."""

import subprocess
import sys

import pytest
from lab_page import SCREENSHOTS, new_page, press, until
from paths import ROOT

from gradlab.lab.figures import toy
from gradlab.lab.widget import record, saved_page

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


def test_without_a_kernel_k_moves_among_recorded_runs_and_the_toy_is_live(opened):
    page = opened()
    lab = page.locator(".gradlab-recorded").first
    lab.scroll_into_view_if_needed()
    slider = lab.locator("input[type=range]")
    slider.wait_for()
    losses, noise, one_update = (
        lab.locator(f".gradlab-words-{name}") for name in ("losses", "noise", "toy")
    )
    until(lambda: "k = 5, b = 20: from" in losses.inner_text())
    until(lambda: one_update.inner_text() == toy.describe(toy.descend(5)), one_update.inner_text)
    press(slider, "Home")
    for run, steps in zip(saved_page.recorded()["runs"], record.STEPS):
        until(
            lambda steps=steps: f"k = {steps}, b = 20: from" in losses.inner_text(),
            losses.inner_text,
        )
        until(
            lambda steps=steps: one_update.inner_text() == toy.describe(toy.descend(steps)),
            one_update.inner_text,
        )
        measured = f"k = {steps}: {run['point']['window']:.3f} nats measured"
        until(lambda measured=measured: measured in noise.inner_text(), noise.inner_text)
        press(slider, "ArrowRight")
    press(lab.locator(".gradlab-toy-step"), "Enter")
    until(lambda: lab.locator(".gradlab-added").inner_text() == "applied")
    press(lab.locator(".gradlab-view-toy canvas"), "ArrowUp")
    until(lambda: lab.locator(".gradlab-view-toy").get_attribute("data-start") == "-4.00,2.45")
    curve = lab.locator(".gradlab-view-losses")
    press(curve.locator("canvas"), "End")
    until(lambda: curve.locator("[aria-live]").inner_text().startswith("update 300:"))
    lab.screenshot(path=SCREENSHOTS / "saved_page.png")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, context=".gradlab-recorded").response["violations"]
    assert not [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def test_where_scripts_are_dropped_a_picture_and_a_table_are_left(opened):
    page = opened(java_script_enabled=False)
    lab = page.locator(".gradlab-recorded").first
    assert "recorded, k = 50" in lab.locator("tr").last.inner_text()
    size = lab.locator("img").bounding_box()
    assert size["width"] > 500 and size["height"] > 200

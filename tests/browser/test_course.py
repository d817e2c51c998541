"""Notebooks of the course in a real JupyterLab, and the lab alone in Voila, as a student opens them."""

import contextlib
import json
import os
import signal
import socket
import subprocess

import pytest
from lab_page import (
    SCREENSHOTS,
    Lab,
    close,
    end_kernels,
    free_port,
    listens,
    open_notebook,
    run_notebook,
    set_setting,
    until,
    until_up,
    use_by_keyboard,
    write_notebook,
)
from paths import ROOT

pytestmark = pytest.mark.browser

COURSE = ("02_tower_averaging", "04_variable_accumulation", "07_pitfalls")
VIEWPORT = {"width": 1000, "height": 2400}


@pytest.mark.parametrize("notebook", COURSE)
def test_a_notebook_of_the_course_runs_and_shows_its_diagrams_and_figures(
    browser, whole_notebooks, notebooks, notebook
):
    """Run as a whole in the light theme and saved, then opened in the dark theme: every diagram and figure is there."""
    set_setting(whole_notebooks, "apputils-extension:themes", theme="JupyterLab Light")
    page = run_notebook(browser, whole_notebooks, f"{notebook}.ipynb", "not yet: ", VIEWPORT)
    pending = page.locator(".jp-InputPrompt", has_text="[*]")
    until(lambda: pending.count() == 0)
    check_that_everything_is_shown(page, notebook, "light")
    file = notebooks / f"{notebook}.ipynb"
    before = file.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    until(lambda: file.stat().st_mtime_ns != before)
    page.context.close()

    set_setting(whole_notebooks, "apputils-extension:themes", theme="JupyterLab Dark")
    page = open_notebook(browser, whole_notebooks, f"{notebook}.ipynb", VIEWPORT)
    page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    check_that_everything_is_shown(page, notebook, "dark")
    page.context.close()
    end_kernels(whole_notebooks)


def test_who_opens_notebook_00_sees_a_run_without_scrolling(browser, server):
    """At 1280 x 800 with the file browser open: Shift+Enter three times, then the right arrow on k."""
    page = open_notebook(browser, server, "00_start_here.ipynb", {"width": 1280, "height": 800})
    page.locator(".jp-OutputArea-output img[alt^='Recorded runs']").wait_for()  # the saved notebook shows no blank
    for _ in range(3):
        page.keyboard.press("Shift+Enter")
    lab = Lab(page)
    lab.wait_for("finished")
    shown = page.locator(".jp-NotebookPanel-notebook").bounding_box()
    for part in (
        "[data-control=accumulation_steps]",
        *(f"[data-view={name}]" for name in ("toy", "losses", "accuracy")),
    ):
        box = lab.root.locator(part).first.bounding_box()
        assert shown["y"] <= box["y"] and box["y"] + box["height"] <= shown["y"] + shown["height"], part
    page.screenshot(path=SCREENSHOTS / "first_sight.png")
    toy = lab.root.locator(".gradlab-words-toy")
    before = toy.inner_text()
    lab.press("accumulation_steps", "ArrowRight")
    until(lambda: toy.inner_text() != before)
    for name in ("losses", "noise"):
        words = lab.root.locator(f".gradlab-words-{name}")
        until(lambda words=words: "k = 6" in words.inner_text(), words.inner_text)
    close(page)
    end_kernels(server)


ASK = """from gradlab.lab.predict import ask
with ask("What is 7 times 6?", "13", "42", right="42", why="Seven sixes."):
    print("it is", 7 * 6)
"""


def test_a_prediction_comes_before_its_result_by_keyboard(browser, server, notebooks):
    """Enter on a choice opens it, and not the cell; nothing of the result is visible before."""
    write_notebook(notebooks / "ask.ipynb", ASK)
    page = run_notebook(browser, server, "ask.ipynb", "What is 7 times 6?")
    choices = page.locator(".gradlab-predict summary")
    result = page.locator(".gradlab-predict pre", has_text="it is 42")
    assert choices.count() == 2 and result.locator("visible=true").count() == 0
    choices.first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    result.locator("visible=true").wait_for()
    shown = page.locator(".gradlab-predict").inner_text()
    assert "You said: 42. This is right." in shown and "Seven sixes." in shown
    assert page.locator(".jp-mod-editMode").count() == 0
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert not axe.run(page, context=".gradlab-predict").response["violations"]
    close(page)
    end_kernels(server)


def check_that_everything_is_shown(page, notebook: str, theme: str) -> None:
    """As many diagrams and figures as the committed notebook has, none empty, no syntax error, no error output."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    diagrams = sum("text/vnd.mermaid" in data for data in outputs)
    figures = sum("image/png" in data for data in outputs)
    errors = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
    faults = page.locator(f".jp-RenderedMermaid.jp-mod-warning, {errors}")
    for kind, wanted in (
        (".jp-RenderedMermaid img", diagrams),
        (".jp-OutputArea-output img[alt][src^='data:image/png']", figures),
    ):
        images = page.locator(kind)
        until(lambda images=images, wanted=wanted: images.count() == wanted or faults.count(), images.count)
        assert faults.count() == 0 and images.count() == wanted
        for number in range(wanted):
            images.nth(number).scroll_into_view_if_needed()
            size = images.nth(number).evaluate("async (i) => { await i.decode(); return [i.naturalWidth, i.width]; }")
            assert min(size) > 50, (kind, number, size)
        if wanted:
            page.screenshot(path=SCREENSHOTS / f"{notebook}_{theme}_{wanted}.png")
    assert faults.count() == 0


def test_the_lab_alone_through_voila(browser, tmp_path):
    """make app: the lab without code, reachable from this machine only."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "app", f"PORT={port}", "BROWSER=no"]
    context = browser.new_context(viewport={"width": 1280, "height": 1300})
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            until_up(lambda: listens(port), job, tmp_path / "log")
            page = context.new_page()
            page.set_default_timeout(180_000)
            page.goto(f"http://127.0.0.1:{port}/", wait_until="domcontentloaded", timeout=180_000)
            page.locator(".gradlab-lab").wait_for()
            lab = Lab(page)
            lab.press("accumulation_steps", "ArrowRight")
            lab.wait_for("finished")
            assert "6 × 20 = 120" in lab.text("batch") and page.locator(".jp-InputArea-editor:visible").count() == 0
            page.screenshot(path=SCREENSHOTS / "voila.png")
            use_by_keyboard(lab)
            other = socket.gethostbyname(socket.gethostname())
            assert other.startswith("127.") or not listens(port, other)
        finally:
            context.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            job.wait(120)

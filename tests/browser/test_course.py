"""Notebooks of the course in a real JupyterLab, and the lab alone in Voila, as a student opens
them."""

import contextlib
import json
import os
import signal
import socket
import subprocess

import pytest
from lab_page import (
    FOCUSED,
    SCREENSHOTS,
    Lab,
    close,
    end_kernel,
    frames,
    free_port,
    listens,
    new_page,
    open_notebook,
    press,
    run_notebook,
    set_setting,
    until,
    until_up,
    use_by_keyboard,
    write_notebook,
)
from paths import ROOT

pytestmark = pytest.mark.browser

# Notebooks with diagrams, figures and a widget. nbval runs all notebooks of the course; here it is
# seen how JupyterLab shows their outputs, those of a run and those that are saved.
RUN = ("02_tower_averaging",)
SAVED = ("04_variable_accumulation", "07_pitfalls")
VIEWPORT = {"width": 1000, "height": 2400}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", RUN)
def test_a_notebook_of_the_course_runs_and_shows_its_diagrams_and_figures(
    browser, whole_notebooks, notebooks, notebook
):
    """Run as a whole in the light theme and saved, then opened in the dark theme: every diagram and
    figure is there."""
    set_setting(whole_notebooks, "apputils-extension:themes", theme="JupyterLab Light")
    page = run_notebook(browser, whole_notebooks, f"{notebook}.ipynb", "not yet: ", VIEWPORT)
    pending = page.locator(".jp-InputPrompt", has_text="[*]")
    until(lambda: pending.count() == 0)
    check_that_everything_is_shown(page, notebook, "light")
    file = notebooks / f"{notebook}.ipynb"
    before = file.stat().st_mtime_ns

    def is_saved() -> bool:
        page.keyboard.press("Control+s")
        frames(page, 20)
        return file.stat().st_mtime_ns != before

    until(is_saved)
    page.context.close()
    check_in_the_dark(browser, whole_notebooks, notebook)
    end_kernel(whole_notebooks, f"{notebook}.ipynb")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", SAVED)
def test_a_saved_notebook_of_the_course_shows_its_diagrams_and_figures(
    browser, whole_notebooks, notebook
):
    check_in_the_dark(browser, whole_notebooks, notebook)
    end_kernel(whole_notebooks, f"{notebook}.ipynb")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["09_memory", "14_scale_out"])
def test_a_notebook_that_is_not_trusted_shows_its_drawings(browser, whole_notebooks, notebook):
    """As in a new checkout: JupyterLab takes scripts and SVG out of its HTML."""
    page = open_notebook(browser, whole_notebooks, f"{notebook}.ipynb", VIEWPORT)
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    saved = "".join(
        "".join(output.get("data", {}).get("text/html", "")) for output in outputs_of(cells)
    )
    drawings = page.locator(".jp-OutputArea-output img[alt][src^='data:image/svg+xml']")
    wanted = saved.count('src="data:image/svg+xml')
    until(lambda: drawings.count() == wanted, drawings.count)
    assert wanted
    for number in range(wanted):
        until_drawn(drawings.nth(number))
        drawings.nth(number).screenshot(path=SCREENSHOTS / f"{notebook}_not_trusted_{number}.png")
    assert page.locator(".jp-RenderedHTMLCommon", has_text="forwardbackward").count() == 0
    page.context.close()
    end_kernel(whole_notebooks, f"{notebook}.ipynb")


def outputs_of(cells: list) -> list:
    return [output for cell in cells for output in cell.get("outputs", [])]


def check_in_the_dark(browser, server: str, notebook: str) -> None:
    """Open a notebook in the dark theme, and check that everything is shown."""
    set_setting(server, "apputils-extension:themes", theme="JupyterLab Dark")
    page = open_notebook(browser, server, f"{notebook}.ipynb", VIEWPORT)
    page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    check_that_everything_is_shown(page, notebook, "dark")
    page.context.close()


def test_who_opens_notebook_00_sees_a_run_without_scrolling(browser, server):
    """At 1280 x 800 with the file browser open: Shift+Enter three times, then the right arrow on
    k."""
    page = open_notebook(browser, server, "00_start_here.ipynb", {"width": 1280, "height": 800})
    # The saved notebook shows no blank
    page.locator(".jp-OutputArea-output img[alt^='Recorded runs']").wait_for()
    active = "() => [...document.querySelectorAll('.jp-Cell')].findIndex((cell) => cell.matches('.jp-mod-active'))"
    until(lambda: page.evaluate(active) == 0 and page.evaluate(IN_NOTEBOOK))
    for number in (1, 2, 3):
        page.keyboard.press("Shift+Enter")
        until(lambda number=number: page.evaluate(active) == number, lambda: page.evaluate(active))
    lab = Lab(page)
    until(lambda: "update" in lab.status(), lab.status)
    until(lambda: not out_of_sight(page), lambda: out_of_sight(page))
    page.screenshot(path=SCREENSHOTS / "first_sight.png")
    toy = lab.root.locator(".gradlab-words-toy")
    before = toy.inner_text()
    lab.press("accumulation_steps", "ArrowRight")
    until(lambda: toy.inner_text() != before)
    for name, said in (("losses", "k = 6"), ("noise", "windows of 6")):
        words = lab.root.locator(f".gradlab-words-{name}")
        until(lambda words=words, said=said: said in words.inner_text(), words.inner_text)
    close(page)
    end_kernel(server, "00_start_here.ipynb")


# Whether the keys go to the notebook.
IN_NOTEBOOK = "() => document.activeElement.closest('.jp-Notebook') !== null"


def out_of_sight(page) -> list[str]:
    """Those of the lab's first parts that are not in the window, as a whole."""
    return page.evaluate(
        """(parts) => {
            const frame = document.querySelector(".jp-NotebookPanel-notebook").getBoundingClientRect();
            return parts.filter((part) => {
                const {top, bottom} = document.querySelector(`.gradlab-lab ${part}`).getBoundingClientRect();
                return top < frame.top || bottom > frame.bottom || top === bottom;
            });
        }""",
        [
            "[data-control=accumulation_steps]",
            ".gradlab-status",
            *(f"[data-view={name}]" for name in ("toy", "losses", "noise")),
        ],
    )


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
    press(choices.first, "Tab")
    until(lambda: choices.last.evaluate(FOCUSED))
    press(choices.last, "Enter")
    result.locator("visible=true").wait_for()
    shown = page.locator(".gradlab-predict").inner_text()
    assert "You said: 42. This is right." in shown and "Seven sixes." in shown
    assert page.locator(".jp-mod-editMode").count() == 0
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert not axe.run(page, context=".gradlab-predict").response["violations"]
    close(page)
    end_kernel(server, "ask.ipynb")


WAIT_FOR_THE_LAB = """import asyncio
from gradlab.lab.predict import ask
with ask("Does the kernel hear the page?", "yes", "no", right="yes", why="It does."):
    while lab.experiment.accumulation_steps == 5:
        await asyncio.sleep(0.05)
    print("k =", lab.experiment.accumulation_steps)
"""


@pytest.mark.slow
def test_a_lab_is_used_while_the_block_of_a_prediction_runs(browser, server, notebooks):
    """The kernel hears each message, and no traceback appears in the cell."""
    lab = "import gradlab\nlab = gradlab.AccumulationLab(rerun=False, updates=5, seeds=1)\nlab"
    write_notebook(notebooks / "block.ipynb", lab, WAIT_FOR_THE_LAB)
    page = run_notebook(browser, server, "block.ipynb", "examples an update")
    page.locator(".jp-InputPrompt", has_text="[*]").wait_for()
    faults = page.locator("[data-mime-type='application/vnd.jupyter.stderr']")
    answers = page.locator(".gradlab-predict")
    Lab(page).press("accumulation_steps", "ArrowRight")
    until(lambda: answers.count() or faults.count())
    assert faults.count() == 0, faults.first.inner_text()
    assert "k = 6" in answers.first.text_content()
    close(page)
    end_kernel(server, "block.ipynb")


def until_drawn(image) -> None:
    """Scroll to an image, and wait until it is decoded and shown in a size that can be read."""
    image.scroll_into_view_if_needed()

    def size() -> list[float]:
        return image.evaluate("(each) => each.complete ? [each.naturalWidth, each.width] : [0, 0]")

    until(lambda: min(size()) > 50, lambda: f"{image}: {size()}")


def check_that_everything_is_shown(page, notebook: str, theme: str) -> None:
    """As many diagrams and figures as the committed notebook has, none empty, no syntax error, no
    error output."""
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
        until(
            lambda images=images, wanted=wanted: images.count() == wanted or faults.count(),
            images.count,
        )
        assert faults.count() == 0 and images.count() == wanted
        for number in range(wanted):
            until_drawn(images.nth(number))
        if wanted:
            page.screenshot(path=SCREENSHOTS / f"{notebook}_{theme}_{wanted}.png")
    assert faults.count() == 0


@pytest.mark.slow
def test_the_lab_alone_through_voila(browser, tmp_path):
    """make app: the lab without code, reachable from this machine only."""
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    command = ["make", "app", f"PORT={port}", "BROWSER=no", "APP=--trainers=1"]
    page = new_page(browser, viewport={"width": 1280, "height": 1300})
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            until_up(lambda: listens(port), job, tmp_path / "log")
            page.goto(f"http://127.0.0.1:{port}/", wait_until="domcontentloaded")
            page.locator(".gradlab-lab").wait_for()
            lab = Lab(page)
            lab.set_budget(60)
            lab.press("more")
            lab.press("accumulation_steps", "ArrowRight")
            until(lambda: "6 × 20 = 120" in lab.text("batch"), lambda: lab.text("batch"))
            until(lambda: "now: k = 6, b = 20" in lab.words("losses"), lambda: lab.words("losses"))
            lab.wait_for("finished")
            assert page.locator(".jp-InputArea-editor:visible").count() == 0
            page.screenshot(path=SCREENSHOTS / "voila.png")
            use_by_keyboard(lab)
            other = socket.gethostbyname(socket.gethostname())
            assert other.startswith("127.") or not listens(port, other)
        finally:
            page.context.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            job.wait(120)

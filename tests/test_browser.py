"""Notebook 00 in a real JupyterLab and a real Chromium: what a newcomer does, and what he sees."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCREENSHOTS = ROOT / "tests" / "screenshots"
TOKEN = "a-token-for-tests"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.browser


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    path = _chromium()
    if path is None:
        # .ci/run installs Chromium and asks for these tests; a user's machine may go without.
        if os.environ.get("GRADLAB_NEEDS_BROWSER"):
            pytest.fail("GRADLAB_NEEDS_BROWSER is set, but there is no Chromium on the PATH")
        pytest.skip("no Chromium on the PATH: install the package chromium to run the browser tests")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(headless=True, executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """A JupyterLab of its own: temporary settings, a free port, a copy of the notebooks."""
    home = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", home / "notebooks")
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    environment = os.environ | {name: str(home / folder) for name, folder in folders.items()}
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={home / 'notebooks'}"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    log = (home / "log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(f"{address}/api?token={TOKEN}"), 60, lambda: (home / "log").read_text())
        yield address
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=2).status == 200
    except OSError:
        return False


def _until(condition, seconds: float, explain=lambda: "") -> float:
    """Waits for a condition; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            pytest.fail(f"not within {seconds} s. {explain()}")
        time.sleep(0.02)
    return time.monotonic() - began


class Lab:
    """The lab on the page, by the names that its widgets carry."""

    def __init__(self, page):
        self.page = page

    def status(self) -> str:
        return self.page.locator(".gradlab-status [role=status]").inner_text()

    def slider(self, name: str):
        return self.page.locator(f".gradlab-{name} [role=slider]")

    def button(self, name: str):
        return self.page.locator(f"button.gradlab-{name}")

    def pixels(self) -> str:
        """The plot as drawn, pixel by pixel: addresses of images differ even when the images do not."""
        return self.page.locator("img.gradlab-plot").evaluate(
            """async (image) => {
                await image.decode();
                const canvas = document.createElement("canvas");
                [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
                canvas.getContext("2d").drawImage(image, 0, 0);
                return canvas.toDataURL();
            }"""
        )

    def wait_for(self, word: str, seconds: float = 60) -> float:
        return _until(lambda: word in self.status(), seconds, self.status)


@pytest.fixture
def page(browser, server):
    """Notebook 00, opened and run, at a laptop's size."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{server}/lab/tree/00_start_here.ipynb?reset&token={TOKEN}")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".gradlab-lab").wait_for()
    # The cells after the lab train too: let them end before anything is timed.
    page.locator(".jp-OutputArea-output", has_text="test accuracy after 10 updates").wait_for()
    assert page.locator(".jupyter-widgets-error-widget").count() == 0
    yield page
    # What goes wrong in a thread or a callback shows in the log console alone.
    assert page.locator(".jp-LogConsoleStatusItem.lm-mod-hidden").count() == 1, "JupyterLab's log console has news"
    context.close()


def test_a_slider_reruns_the_training_and_stop_stops_it(page):
    lab = Lab(page)
    SCREENSHOTS.mkdir(exist_ok=True)
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert "ready" in lab.status()
    untouched = lab.pixels()

    slider = lab.slider("accumulation_steps")
    slider.scroll_into_view_if_needed()
    assert slider.get_attribute("aria-valuetext") == "5"
    slider.focus()
    began = time.monotonic()
    slider.press("ArrowRight")
    _until(lambda: lab.pixels() != untouched, 10)
    print(f"key to changed plot: {time.monotonic() - began:.3f} s")
    assert slider.get_attribute("aria-valuetext") == "6"
    lab.wait_for("finished")
    assert "update 300 of 300" in lab.status()
    finished = lab.pixels()
    assert finished != untouched
    assert "width: 100%" in page.locator(".gradlab-progress .progress-bar").get_attribute("style")
    assert "6 × 20 = 120" in page.locator(".gradlab-lab").inner_text()

    # A second run, without accumulation: the plot changes again.
    slider.press("Home")
    _until(lambda: lab.pixels() != finished, 10)
    lab.wait_for("finished")

    # A slider on its way through nineteen values: each cancels the one before, and the last one's run is shown.
    for _ in range(19):
        slider.press("ArrowRight")
    _until(lambda: "20 × 20 = 400" in page.locator(".gradlab-lab").inner_text(), 10)
    lab.wait_for("running")
    lab.wait_for("finished")
    assert "update 300 of 300" in lab.status()
    page.screenshot(path=SCREENSHOTS / "lab_1280.png")
    page.set_viewport_size({"width": 1280, "height": 1200})
    page.locator(".gradlab-lab").screenshot(path=SCREENSHOTS / "lab.png")
    page.set_viewport_size({"width": 1280, "height": 900})

    # A run with small micro-batches, stopped.
    lab.slider("microbatch_size").focus()
    lab.slider("microbatch_size").press("Home")  # one example a micro-batch
    lab.slider("accumulation_steps").press("End")  # fifty of them: a run long enough to be stopped
    lab.wait_for("running")
    lab.button("stop").click()
    seconds = lab.wait_for("stopped", 10)
    print(f"Stop to stopped: {seconds:.3f} s")
    assert seconds < 0.5
    assert "of 300" in lab.status() and "update 300" not in lab.status()


def test_the_lab_fits_a_narrow_window(page):
    page.set_viewport_size({"width": 800, "height": 900})
    # The file browser would take a third of a narrow window; its user closes it.
    page.keyboard.press("Control+b")
    lab_box = page.locator(".gradlab-lab").bounding_box()
    page.locator("img.gradlab-plot").scroll_into_view_if_needed()
    for selector in ("img.gradlab-plot", ".gradlab-accumulation_steps", "button.gradlab-stop"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= lab_box["x"] - 1 and box["x"] + box["width"] <= 800, selector
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "lab_800.png")

"""The lab in a real JupyterLab and a real Chromium: what its user does, by keyboard, and what he sees."""

import io
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import pytest
from paths import ROOT

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
    _write_notebook(home / "notebooks" / "labs.ipynb", *LABS)
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


LABS = (
    "import gradlab\ngradlab.setup(seed=0)",
    "one = gradlab.AccumulationLab(updates=60, seeds=2, hide=('toy', 'cost'))\none.view.add_class('one')\none",
    "two = gradlab.AccumulationLab(updates=60, seeds=2, seed=7, hide=('toy', 'cost'))\ntwo.view.add_class('two')\ntwo",
    "wild = gradlab.AccumulationLab(optimizer='sgd', learning_rate=1e30, updates=60, hide=('toy', 'cost'))\n"
    "wild.view.add_class('wild')\nwild",
    "print('the kernel', 'is free')",
)


def _write_notebook(path: pathlib.Path, *sources: str) -> None:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [cell | {"id": f"cell-{number}", "source": source} for number, source in enumerate(sources)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    path.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )


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
    """A lab on the page, by the names that its widgets carry."""

    def __init__(self, page, root=".gradlab-lab"):
        self.page, self.root = page, page.locator(root).first

    def status(self) -> str:
        return self.root.locator(".gradlab-status [role=status]").inner_text()

    def text(self, name: str) -> str:
        return self.root.locator(f".gradlab-{name}").inner_text()

    def words(self, view: str) -> str:
        return self.root.locator(f".gradlab-words-{view}").inner_text()

    def control(self, name: str):
        return self.root.locator(f".gradlab-{name}").locator("[role=slider], select, input").first

    def press(self, name: str, key: str = "Enter") -> None:
        """Presses a key on a button or a control: nothing here uses the mouse."""
        button = self.root.locator(f"button.gradlab-{name}")
        target = button if button.count() else self.control(name)
        target.focus()
        target.press(key)

    def choose(self, name: str, option: str) -> None:
        """Types an option's name with its list focused: what a list does with keys."""
        self.control(name).focus()
        self.control(name).press_sequentially(option)
        assert self.control(name).locator("option:checked").inner_text() == option

    def pixels(self, view: str) -> str:
        """A view as drawn, pixel by pixel: addresses of images differ even when the images do not."""
        return self.root.locator(f"img.gradlab-view-{view}").evaluate(
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


def _set(server, plugin: str, **settings) -> None:
    """Sets what a user would set in JupyterLab's settings."""
    address = f"{server}/lab/api/settings/@jupyterlab/{plugin}?token={TOKEN}"
    content = json.dumps({"raw": json.dumps(settings)}).encode()
    urllib.request.urlopen(urllib.request.Request(address, content, method="PUT"), timeout=10)


def _open(browser, server, notebook: str, ready: str, viewport=None):
    context = browser.new_context(viewport=viewport or {"width": 1280, "height": 1300})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{server}/lab/tree/{notebook}?reset&token={TOKEN}")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()
    _menu(page, "Run", "Run All Cells")
    page.locator(".jp-OutputArea-output", has_text=ready).first.wait_for()
    assert page.locator(".jupyter-widgets-error-widget").count() == 0
    return page


def _menu(page, menu: str, *items: str) -> None:
    page.get_by_role("menuitem", name=menu, exact=True).click()
    for item in items:
        page.get_by_role("menuitem", name=item).first.click()


def _close(page) -> None:
    # What goes wrong in a thread or a callback shows in the log console alone.
    assert page.locator(".jp-LogConsoleStatusItem.lm-mod-hidden").count() == 1, "JupyterLab's log console has news"
    page.context.close()


@pytest.fixture(scope="module")
def page(browser, server):
    """Notebook 00, opened and run, at a laptop's width."""
    page = _open(browser, server, "00_start_here.ipynb", "test accuracy after 10 updates")
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    page.keyboard.press("Control+b")  # the file browser goes away
    SCREENSHOTS.mkdir(exist_ok=True)
    yield page
    _close(page)


@pytest.fixture
def lab(page):
    """The notebook's first lab, as it was at first."""
    lab = Lab(page)
    lab.press("reset")
    lab.wait_for("idle")
    pinned = lab.root.locator("button.gradlab-remove")
    while count := pinned.count():
        pinned.first.press("Enter")
        _until(lambda: pinned.count() < count, 30)
    return lab


# When what happens on the page, in its own clock: keys, the first words and pixels that answer, a run's first point.
WATCH = """(lab) => {
    const watch = window.gradlabWatch = {keys: [], words: [], toy: [], points: []};
    const now = (list) => list.push(performance.now());
    document.addEventListener("keydown", () => now(watch.keys), true);
    const seen = {childList: true, subtree: true, characterData: true};
    new MutationObserver(() => now(watch.words)).observe(lab.querySelector(".gradlab-batch"), seen);
    lab.querySelector("img.gradlab-view-toy").addEventListener("load", () => now(watch.toy));
    const words = lab.querySelector(".gradlab-words-losses");
    new MutationObserver(() => watch.points.push([performance.now(), words.innerText])).observe(words, seen);
}"""


def test_a_slider_reruns_and_answers_at_once(page, lab):
    lab.press("run")
    lab.wait_for("finished")  # warm
    began = time.monotonic()
    lab.press("run")
    _until(lambda: "finished" not in lab.status(), 10)
    lab.wait_for("finished")
    run = time.monotonic() - began
    assert "5 seeds, update 300 of 300" in lab.status()
    assert "width: 100%" in lab.root.locator(".gradlab-progress .progress-bar").get_attribute("style")

    lab.root.evaluate(WATCH)
    before = {view: lab.pixels(view) for view in ("losses", "toy")}
    slider = lab.control("accumulation_steps")
    assert slider.get_attribute("aria-valuetext") == "5"
    slider.focus()
    for steps in range(6, 13):
        slider.press("ArrowRight")
        _until(lambda steps=steps: f"now: k = {steps}, b = 20: from" in lab.words("losses"), 10)
    assert lab.pixels("losses") != before["losses"] and lab.pixels("toy") != before["toy"]
    assert "12 × 20 = 240" in lab.text("batch") and "0.29" in lab.text("batch")
    watch = page.evaluate("window.gradlabWatch")
    first, toy, point = [], [], []
    for number, key in enumerate(watch["keys"][-7:]):
        first.append(next(t for t in watch["words"] if t > key) - key)
        toy.append(next(t for t in watch["toy"] if t > key) - key)
        wanted = f"k = {6 + number}, b = 20: from"
        point.append(next(t for t, words in watch["points"] if t > key and wanted in words) - key)
    print(
        f"the default run: {run:.1f} s; medians of 7, from key to first words {statistics.median(first):.0f} ms, to "
        f"the toy's pixels {statistics.median(toy):.0f} ms, to the run's first point {statistics.median(point):.0f} ms"
    )
    lab.wait_for("finished")
    page.screenshot(path=SCREENSHOTS / "lab_1280.png")
    lab.root.screenshot(path=SCREENSHOTS / "lab.png")


def test_a_slider_dragged_through_twenty_values_ends_in_one_run_the_right_one(page, lab):
    from PIL import Image

    slider = lab.control("accumulation_steps")
    slider.focus()
    slider.press("Home")
    lab.root.evaluate(WATCH)
    for _ in range(19):
        slider.press("ArrowRight")
        page.wait_for_timeout(50)  # a hand takes a second for this
    _until(lambda: "20 × 20 = 400" in lab.text("batch"), 10)
    watch = page.evaluate("window.gradlabWatch")
    seconds = (watch["keys"][-1] - watch["keys"][-19]) / 1000
    pictures = sum(time > watch["keys"][-19] for time in watch["toy"])
    print(f"{pictures} pictures of the toy while the slider moved for {seconds:.1f} s")
    assert pictures >= 3
    slider.press("Home")
    frames = []
    for steps in range(2, 21):
        slider.press("ArrowRight")
        if steps in (2, 5, 8, 12, 16, 20):
            frames.append(lab.root.screenshot())
    _until(lambda: "20 × 20 = 400" in lab.text("batch"), 10)
    for _ in range(12):
        if "finished" in lab.status():
            break
        frames.append(lab.root.screenshot())
        page.wait_for_timeout(250)
    lab.wait_for("finished")
    frames.append(lab.root.screenshot())
    assert "update 300 of 300" in lab.status()
    assert "now: k = 20, b = 20: from" in lab.words("losses")
    images = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    small = [image.resize((640, round(640 * image.height / image.width))) for image in images]
    height = small[0].height
    small = [image.crop((0, 0, 640, height)).quantize(64) for image in small]
    small[0].save(SCREENSHOTS / "lab.gif", save_all=True, append_images=small[1:], duration=400, loop=0)


def test_stop_ends_a_run_of_many_micro_batches(lab):
    lab.press("microbatch_size", "Home")  # one example a micro-batch
    lab.press("accumulation_steps", "End")  # fifty of them: a run long enough to be stopped
    _until(lambda: "now: k = 50, b = 1: from" in lab.words("losses"), 20)
    lab.press("stop")
    seconds = lab.wait_for("stopped", 10)
    print(f"Stop to stopped: {seconds:.3f} s")
    assert "of 300" in lab.status() and "update 300" not in lab.status()


def test_steps_pause_and_slow_motion(page, lab):
    lab.press("step_microbatch")
    _until(lambda: "micro-batch 1 of 5: loss" in lab.text("narration"), 20)
    lab.wait_for("paused")
    lab.press("step_microbatch")
    _until(lambda: "micro-batch 2 of 5" in lab.text("narration"), 5)
    page.screenshot(path=SCREENSHOTS / "lab_step.png")
    lab.press("step_update")
    _until(lambda: "5 gradients averaged" in lab.text("narration"), 5)
    lab.press("pause")  # goes on
    lab.wait_for("running")
    lab.press("slow")
    _until(lambda: "added to the accumulator" in lab.text("narration"), 5)
    lab.press("slow")
    lab.wait_for("finished")


def test_pin_compare_rename_and_remove(lab):
    lab.press("accumulation_steps", "Home")
    _until(lambda: "now: k = 1, b = 20: from" in lab.words("losses"), 20)
    lab.wait_for("finished")
    lab.press("pin")
    rows = lab.root.locator(".gradlab-pins input")
    _until(lambda: rows.count() == 1, 10)
    rows.first.fill("no accumulation")
    rows.first.press("Enter")
    _until(lambda: "no accumulation: from" in lab.words("losses"), 10)
    for _ in range(19):
        lab.press("accumulation_steps", "ArrowRight")
    _until(lambda: "now: k = 20, b = 20: from" in lab.words("losses"), 20)
    lab.wait_for("finished")
    lab.root.screenshot(path=SCREENSHOTS / "lab_pins.png")
    assert "1 × 20 = 20" in lab.text("pins") and "±" in lab.text("pins")
    lab.press("pin")
    _until(lambda: rows.count() == 2, 10)
    lab.choose("against", "examples")
    _until(lambda: "examples" in lab.words("accuracy"), 10)
    lab.root.locator("button.gradlab-remove").first.press("Enter")
    _until(lambda: rows.count() == 1 and "no accumulation" not in lab.words("losses"), 10)
    lab.choose("against", "updates")


def test_export_and_code(lab):
    lab.press("run")
    lab.wait_for("finished")
    for name in ("csv", "png"):
        lab.press(name)
        lab.wait_for(f".{name}", 20)
        path = pathlib.Path(lab.status().split("written: ")[1])
        assert path.is_file() and path.stat().st_size > 10_000
    lab.press("code")
    _until(lambda: "gradlab.Experiment(" in lab.text("listing"), 5)
    lab.press("code")


def test_other_methods_models_and_budgets_by_keyboard(lab):
    lab.choose("method", "variables")
    lab.wait_for("seed 0, update", 60)
    lab.press("towers", "ArrowRight")
    _until(lambda: "2 × 5 × 20 = 200" in lab.text("batch"), 10)
    lab.press("seeds", "Home")
    lab.wait_for("seed 0, update 300", 60)
    lab.choose("budget_kind", "examples")
    _until(lambda: lab.control("budget").input_value().startswith("30000"), 10)
    lab.wait_for("finished: seed 0, update 150,", 60)  # 30,000 examples, 200 an update


def test_the_code_follows_every_control(lab):
    lab.press("seeds", "Home")
    lab.press("code")
    lab.press("learning_rate", "ArrowRight")
    lab.press("microbatch_size", "ArrowLeft")
    for name, option in (("optimizer", "adamw"), ("model", "lenet"), ("method", "placeholders")):
        lab.choose(name, option)
    for words in ("learning_rate=0.0012", "microbatch_size=19", "seeds=1", "optimizer='adamw'", "'placeholders'"):
        _until(lambda words=words: words in lab.text("listing"), 10, lambda: lab.text("listing"))
    lab.press("code")
    lab.press("stop")
    lab.choose("dataset", "fashion_mnist")  # it must be downloaded, which this machine may not be able to
    _until(lambda: any(word in lab.status() for word in ("failed", "running", "finished: seed")), 90, lab.status)
    if "failed" in lab.status():
        assert "fashion_mnist must be downloaded the first time" in lab.status()
        assert "Traceback" in lab.root.locator(".gradlab-status details").inner_html()


def test_without_rerun_a_moved_slider_waits(lab):
    lab.control("rerun").focus()
    lab.control("rerun").press("Space")
    lab.press("accumulation_steps", "ArrowRight")
    lab.wait_for("press Run", 10)
    lab.control("rerun").press("Space")
    lab.press("accumulation_steps", "ArrowRight")
    lab.wait_for("finished")


def test_keys_stay_in_the_lab(page, lab):
    """In command mode JupyterLab takes plain keys for its cells; not those of a control that has the focus."""
    cells = page.locator(".jp-Cell").count()
    lab.press("accumulation_steps", "d")
    lab.press("accumulation_steps", "d")
    lab.press("run", "x")
    page.wait_for_timeout(300)
    assert page.locator(".jp-Cell").count() == cells
    for name in ("method", "optimizer", "model", "dataset", "budget_kind", "against"):
        control = lab.control(name)
        value = control.input_value()
        for key in ("ArrowDown", "ArrowUp"):
            lab.press(name, key)
            if control.input_value() != value:
                break
        assert control.input_value() != value, name
        assert control.evaluate("(control) => control === document.activeElement"), name
    lab.press("reset")


def test_focus_is_seen(lab):
    for name in ("run", "pause", "stop"):
        lab.root.locator(f"button.gradlab-{name}").focus()
        lab.page.keyboard.press("Tab")
        outline = lab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", name


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_cut_off(page, lab, width):
    lab.press("run")
    lab.wait_for("finished")
    page.set_viewport_size({"width": width, "height": 1300})
    page.wait_for_timeout(500)
    frame = lab.root.bounding_box()
    for widget in lab.root.locator("img, button, .widget-inline-hbox, .gradlab-batch").all():
        box = widget.bounding_box()
        if box and box["width"]:
            assert box["x"] >= frame["x"] - 1 and box["x"] + box["width"] <= frame["x"] + frame["width"] + 1, box
    for name in ("accumulation_steps", "learning_rate", "against"):
        label = lab.root.locator(f".gradlab-{name} label").first
        assert label.evaluate("(each) => each.scrollWidth <= each.clientWidth"), name
    page.screenshot(path=SCREENSHOTS / f"lab_width_{width}.png")
    page.set_viewport_size({"width": 1280, "height": 1300})


def test_the_dark_theme_reads_well(browser, server):
    _set(server, "apputils-extension:themes", theme="JupyterLab Dark")
    page = _open(browser, server, "labs.ipynb", "the kernel is free")
    assert page.locator("body[data-jp-theme-light=false]").count() == 1
    lab = Lab(page, ".one")
    lab.press("run")
    lab.wait_for("finished")
    lab.press("pin")
    page.wait_for_timeout(500)
    page.screenshot(path=SCREENSHOTS / "lab_dark.png")
    text = lab.root.locator(".gradlab-status [role=status]").evaluate("(each) => getComputedStyle(each).color")
    assert min(int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]) > 150  # light words
    view = lab.root.locator("img.gradlab-view-losses")
    assert (
        view.evaluate("(each) => getComputedStyle(each).backgroundColor") == "rgb(255, 255, 255)"
    )  # pictures on white
    _set(server, "apputils-extension:themes", theme="JupyterLab Light")
    _close(page)


def test_labs_in_one_notebook_a_run_that_diverges_a_free_kernel_and_a_restart(browser, server):
    page = _open(browser, server, "labs.ipynb", "the kernel is free")
    one, two = Lab(page, ".one"), Lab(page, ".two")
    one.press("run")
    two.press("accumulation_steps", "ArrowRight")
    for lab in (one, two):
        lab.wait_for("finished")
        assert "update 60 of 60" in lab.status()
    assert "now: k = 5" in one.words("losses") and "now: k = 6" in two.words("losses")
    assert one.words("losses") != two.words("losses")

    wild = Lab(page, ".wild")
    wild.press("run")
    wild.wait_for("diverged", 20)
    assert "try a smaller learning rate" in wild.status()

    # While one trains, another cell runs; the same cell run twice leaves one lab on the page, and both work.
    one.control("budget").fill("100000")
    one.control("budget").press("Enter")
    one.wait_for("running")
    page.locator(".jp-Cell").last.click()
    page.keyboard.press("Control+Enter")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()
    assert "running" in one.status()

    # A restart in the middle of a run: a new kernel, a new lab, no remains.
    _menu(page, "Kernel", "Restart Kernel and Run All Cells")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    _until(lambda: page.locator(".one").count() == 1 and "idle" in one.status(), 60)
    one.press("run")
    one.wait_for("finished")
    assert "update 60 of 60" in one.status()
    _close(page)


def test_the_lab_alone_through_voila(browser, tmp_path):
    """make app: the lab without code, on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "app", f"PORT={port}", "BROWSER=no"]
    log = (tmp_path / "log").open("wb")
    job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    context = browser.new_context(viewport={"width": 1280, "height": 1300})
    try:
        _until(lambda: _listens(port), 60, lambda: (tmp_path / "log").read_text())
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"http://127.0.0.1:{port}/", wait_until="domcontentloaded")
        page.locator(".gradlab-lab").wait_for()
        lab = Lab(page)
        lab.press("accumulation_steps", "ArrowRight")
        lab.wait_for("finished")
        assert "6 × 20 = 120" in lab.text("batch") and page.locator(".jp-InputArea-editor:visible").count() == 0
        page.screenshot(path=SCREENSHOTS / "voila.png")
        # On loopback only: the machine's other address does not answer.
        other = socket.gethostbyname(socket.gethostname())
        assert other.startswith("127.") or not _listens(port, other)
    finally:
        context.close()
        os.killpg(job.pid, 15)
        job.wait(20)
        log.close()


def _listens(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0


COURSE = ("01_tower_averaging", "03_variable_accumulation", "06_pitfalls")


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("notebook", COURSE)
def test_a_notebook_of_the_course_runs_and_shows_its_diagrams_and_figures(browser, server, notebook, theme):
    """Opened as a student does, run as a whole: every diagram drawn, every figure there, nothing red."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    _set(server, "apputils-extension:themes", theme=theme)
    _set(server, "notebook-extension:tracker", windowingMode="none")  # the whole notebook in the page at once
    page = _open(browser, server, f"{notebook}.ipynb", "not yet: ", viewport={"width": 1000, "height": 2400})
    try:
        pending = page.locator(".jp-InputPrompt", has_text="[*]")
        _until(lambda: pending.count() == 0, 120)
        page.wait_for_timeout(1000)
        assert page.locator(".jp-RenderedMermaid.jp-mod-warning").count() == 0
        for fault in ("stderr", "error"):
            assert page.locator(f"[data-mime-type='application/vnd.jupyter.{fault}']").count() == 0
        for kind, wanted in (
            (".jp-RenderedMermaid img", sum("text/vnd.mermaid" in data for data in outputs)),
            (".jp-OutputArea-output img[alt][src^='data:image/png']", sum("image/png" in data for data in outputs)),
        ):
            images = page.locator(kind)
            assert images.count() == wanted
            for number in range(wanted):
                images.nth(number).scroll_into_view_if_needed()
                size = images.nth(number).evaluate(
                    "async (i) => { await i.decode(); return [i.naturalWidth, i.width]; }"
                )
                assert min(size) > 50, (kind, number, size)
            if wanted:
                page.screenshot(path=SCREENSHOTS / f"{notebook}_{theme.split()[-1].lower()}_{wanted}.png")
    finally:
        _set(server, "apputils-extension:themes", theme="JupyterLab Light")
        _set(server, "notebook-extension:tracker", windowingMode="full")
        page.context.close()

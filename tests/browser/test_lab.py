"""The lab in a real JupyterLab and a real Chromium: what its user does with the keyboard, and what the user sees.

The tests print how long the lab takes to answer (pytest -s shows it). None of them fails by it.
"""

import io
import pathlib
import re
import statistics
import time

import pytest
from lab_page import SCREENSHOTS, Lab, choose_menu, close, run_notebook, set_setting, until

pytestmark = pytest.mark.browser

ENDLESS = 1_000_000  # updates: such a run is under way until it is stopped

# Records on the page, by the page's own clock: the keys, and the first words and pixels that answer them.
WATCH = """(lab) => {
    const watch = window.gradlabWatch = {keys: [], words: [], toy: [], points: []};
    const now = (list) => list.push(performance.now());
    document.addEventListener("keydown", () => now(watch.keys), true);
    const seen = {childList: true, subtree: true, characterData: true};
    new MutationObserver(() => now(watch.words)).observe(lab.querySelector(".gradlab-batch"), seen);
    const toy = lab.querySelector(".gradlab-view-toy");
    new MutationObserver(() => now(watch.toy)).observe(toy, {attributes: true, attributeFilter: ["data-steps"]});
    const words = lab.querySelector(".gradlab-words-losses");
    new MutationObserver(() => watch.points.push([performance.now(), words.innerText])).observe(words, seen);
}"""


def test_a_slider_reruns_and_answers_at_once(page, lab):
    lab.press("run")
    lab.wait_for("finished")  # the next run compiles nothing
    began = time.monotonic()
    lab.press("run")
    until(lambda: "finished" not in lab.status())
    lab.wait_for("finished")
    run = time.monotonic() - began
    assert "5 seeds, update 300 of 300" in lab.status()
    assert "width: 100%" in lab.root.locator(".gradlab-progress .progress-bar").get_attribute("style")

    lab.root.evaluate(WATCH)
    before = lab.pixels("losses")
    slider = lab.control("accumulation_steps")
    assert slider.get_attribute("aria-valuetext") == "5"
    slider.focus()
    for steps in range(6, 13):
        slider.press("ArrowRight")
        until(lambda steps=steps: f"now: k = {steps}, b = 20: from" in lab.words("losses"))
    assert lab.pixels("losses") != before
    assert "12 × 20 = 240" in lab.text("batch") and "÷ 3.5" in lab.text("batch")
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

    def pictures() -> int:
        """The pictures of the toy that were drawn before the last key."""
        watch = page.evaluate("window.gradlabWatch")
        return sum(time < watch["keys"][-1] for time in watch["toy"])

    def move(keys) -> None:
        for key in keys:
            slider.press(key)
            page.wait_for_timeout(50)  # twenty values a second, as a hand drags it

    def move_on() -> bool:
        move(["ArrowLeft", "ArrowRight"])
        return pictures() >= 3

    # The toy follows while the slider moves. A slow machine may need more moves for three pictures.
    move(["ArrowRight"] * 19)
    if pictures() < 3:
        until(move_on)
    until(lambda: "20 × 20 = 400" in lab.text("batch"))
    watch = page.evaluate("window.gradlabWatch")
    seconds = (watch["keys"][-1] - watch["keys"][0]) / 1000
    print(f"{pictures()} pictures of the toy while the slider moved for {seconds:.1f} s")
    slider.press("Home")
    frames = []
    for steps in range(2, 21):
        slider.press("ArrowRight")
        if steps in (2, 5, 8, 12, 16, 20):
            frames.append(lab.root.screenshot())
    until(lambda: "20 × 20 = 400" in lab.text("batch"))
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


def test_stop_ends_a_run_of_many_micro_batches(small):
    small.set_budget(ENDLESS)
    small.press("microbatch_size", "Home")  # one example a micro-batch
    small.press("accumulation_steps", "End")  # fifty of them
    until(lambda: "now: k = 50, b = 1" in small.words("losses"))
    small.press("stop")
    seconds = small.wait_for("stopped")
    print(f"Stop to stopped: {seconds:.3f} s")
    assert f"of {ENDLESS}" in small.status() and f"update {ENDLESS}" not in small.status()


def test_steps_pause_and_slow_motion(page, small):
    small.press("step_microbatch")
    until(lambda: "micro-batch 1 of 5: loss" in small.text("narration"))
    small.wait_for("paused")
    small.press("step_microbatch")
    until(lambda: "micro-batch 2 of 5" in small.text("narration"))
    page.screenshot(path=SCREENSHOTS / "lab_step.png")
    small.press("step_update")
    until(lambda: "5 gradients averaged" in small.text("narration"))
    small.press("pause")  # resumes the run
    small.wait_for("finished")

    small.set_budget(ENDLESS)
    small.wait_for("running")
    small.press("slow")
    until(lambda: "added to the accumulator" in small.text("narration"))
    small.press("slow")
    until(lambda: not small.text("narration"))
    small.press("pause")
    small.wait_for("paused")
    small.press("pause")
    small.wait_for("running")
    small.press("stop")
    small.wait_for("stopped")


def test_pin_compare_rename_and_remove(small):
    small.press("accumulation_steps", "Home")
    until(lambda: "now: k = 1, b = 20: from" in small.words("losses"))
    small.wait_for("finished")
    small.press("pin")
    until(lambda: small.pinned().count() == 1, small.status)
    small.root.locator("button.gradlab-rename").press("Enter")
    name = small.root.locator(".gradlab-chip-field")
    assert name.evaluate("(field) => field === document.activeElement")
    name.fill("no accumulation")
    name.press("Enter")
    until(lambda: "no accumulation: from" in small.words("losses"))
    assert name.count() == 0
    focused = "document.activeElement.getAttribute('aria-label')"
    until(lambda: small.page.evaluate(focused) == "Rename no accumulation")
    for _ in range(19):
        small.press("accumulation_steps", "ArrowRight")
    until(lambda: "now: k = 20, b = 20: from" in small.words("losses"))
    small.wait_for("finished")
    small.press("toggle")
    small.root.screenshot(path=SCREENSHOTS / "lab_pins.png")
    assert "1 × 20 = 20" in small.text("table") and "±" in small.text("table")
    chip = small.root.locator(".gradlab-chip-name", has_text="no accumulation")
    chip.press("Space")
    until(lambda: "no accumulation" not in small.words("losses"))
    assert chip.get_attribute("aria-pressed") == "false"
    assert chip.evaluate("(chip) => chip === document.activeElement")
    chip.press("Space")
    until(lambda: "no accumulation: from" in small.words("losses"))
    small.press("pin")
    until(lambda: small.pinned().count() == 2)
    small.choose("against", "examples")
    until(lambda: "examples" in small.words("accuracy"))
    small.pinned().first.press("Enter")
    until(lambda: small.pinned().count() == 1 and "no accumulation" not in small.words("losses"))
    until(lambda: small.page.evaluate("document.activeElement.className") == "gradlab-chip-name")
    small.choose("against", "updates")


def test_export_and_code(small):
    small.press("run")
    small.wait_for("finished")
    for name in ("csv", "png"):
        small.press(name)
        small.wait_for(f".{name}")
        path = pathlib.Path(small.status().split("written: ")[1])
        assert path.is_file() and path.stat().st_size > 10_000
    small.press("code")
    until(lambda: "gradlab.Experiment(" in small.text("listing"))
    small.press("code")


def test_other_methods_models_and_budgets_by_keyboard(small):
    small.choose("method", "variables")
    until(
        lambda: small.status().partition(": ")[2].startswith("seed "), small.status
    )  # it trains one seed after the other
    small.press("towers", "ArrowRight")
    until(lambda: "2 × 5 × 20 = 200" in small.text("batch"))
    small.press("seeds", "Home")
    small.wait_for("seed 0, update 60")
    small.choose("budget_kind", "examples")
    until(lambda: small.control("budget").input_value().startswith("30000"))
    small.wait_for("finished: seed 0, update 150,")  # 30,000 examples, 200 per update


def test_the_code_follows_every_control(small):
    small.press("seeds", "Home")
    small.press("code")
    small.press("learning_rate", "ArrowRight")
    small.press("microbatch_size", "ArrowLeft")
    for name, option in (("optimizer", "adamw"), ("model", "lenet"), ("method", "placeholders")):
        small.choose(name, option)
    for words in ("learning_rate=0.0012", "microbatch_size=19", "seeds=1", "optimizer='adamw'", "'placeholders'"):
        until(lambda words=words: words in small.text("listing"), lambda: small.text("listing"))
    small.press("code")
    small.press("stop")
    until(lambda: any(word in small.status() for word in ("stopped", "finished")), small.status)
    before = small.status()
    small.choose("dataset", "fashion_mnist")  # it must be downloaded, which is not possible on every machine
    ends = ("failed", "running", "finished")
    until(lambda: small.status() != before and small.status().startswith(ends), small.status)
    if "failed" in small.status():
        assert "fashion_mnist must be downloaded the first time" in small.status()
        assert "Traceback" in small.root.locator(".gradlab-status details").inner_html()


def test_without_rerun_a_moved_slider_waits(page, small):
    def waits() -> bool:
        small.press("accumulation_steps", "ArrowRight")
        page.wait_for_timeout(500)
        return "changed: press Run" in small.status()

    small.control("rerun").focus()
    small.control("rerun").press("Space")
    # JupyterLab sends a widget's first message to the kernel's main thread and later ones to another thread, so the
    # slider's message can overtake the checkbox's: move the slider until a move comes second.
    until(waits, small.status)
    small.control("rerun").press("Space")
    small.press("accumulation_steps", "ArrowRight")
    small.wait_for("finished")


def test_keys_stay_in_the_lab(page, small):
    """In command mode JupyterLab takes plain keys for its cells; not those of a control that has the focus."""
    cells = page.locator(".jp-Cell").count()
    small.press("accumulation_steps", "d")
    small.press("accumulation_steps", "d")
    small.press("run", "x")
    page.wait_for_timeout(300)
    assert page.locator(".jp-Cell").count() == cells
    for name in ("method", "optimizer", "model", "dataset", "budget_kind", "against"):
        control = small.control(name)
        value = control.input_value()
        for key in ("ArrowDown", "ArrowUp"):
            small.press(name, key)
            if control.input_value() != value:
                break
        assert control.input_value() != value, name
        assert control.evaluate("(control) => control === document.activeElement"), name


def test_the_lab_is_on_one_screen_of_a_laptop_with_the_file_browser(browser, whole_notebooks):
    """848 pixels are left for it, and more than 600 below the notebook's toolbar."""
    size = {"width": 1280, "height": 800}
    page = run_notebook(browser, whole_notebooks, "toy.ipynb", "the kernel is free", size)
    if not page.locator(".jp-DirListing:visible").count():
        page.keyboard.press("Control+b")
    lab = Lab(page)
    lab.wait_for("finished")  # it trains by itself

    def box():
        return lab.root.bounding_box()

    until(lambda: 840 < box()["width"] <= 848, lambda: str(box()))
    assert box()["height"] <= 600
    lab.press("pin")
    until(lambda: lab.pinned().count() == 1, lab.status)
    assert box()["height"] <= 600
    page.screenshot(path=SCREENSHOTS / "lab_one_screen.png")
    for text in lab.root.locator("button:visible, .gradlab-head *").all():
        assert text.evaluate("(each) => each.scrollWidth <= each.clientWidth + 1"), text.inner_text()
    close(page)


def test_axe_finds_nothing_against_the_lab(page, small):
    small.press("run")
    small.wait_for("finished")
    small.press("pin")
    small.control("method")  # with everything shown
    until(lambda: small.pinned().count() == 1, small.status)
    small.press("toggle")
    assert not violations(page, ".small")


def violations(page, root: str) -> list:
    """What axe finds against a part of the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, context=root).response["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def test_focus_is_seen(page):
    small = Lab(page, ".small")
    for name in ("run", "pause", "stop"):
        small.root.locator(f"button.gradlab-{name}").focus()
        small.page.keyboard.press("Tab")
        outline = small.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", name


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_cut_off(page, small, width):
    small.press("run")
    small.wait_for("finished")
    small.control("method")  # with everything shown
    page.set_viewport_size({"width": width, "height": 1300})
    until(lambda: small.root.bounding_box()["width"] < width)

    def cut_off() -> list:
        frame = small.root.bounding_box()
        left, right = frame["x"] - 1, frame["x"] + frame["width"] + 1
        parts = small.root.locator("canvas, button, .widget-inline-hbox, .gradlab-batch").all()
        boxes = [box for box in (part.bounding_box() for part in parts) if box and box["width"]]
        assert len(boxes) > 20
        return [box for box in boxes if box["x"] < left or box["x"] + box["width"] > right]

    until(lambda: not cut_off(), cut_off, seconds=30)  # the layout follows the page's width with a delay
    for name in ("accumulation_steps", "learning_rate", "seeds", "against"):
        label = small.root.locator(f".gradlab-{name} label").first
        assert label.evaluate("(each) => each.scrollWidth <= each.clientWidth"), name
    page.screenshot(path=SCREENSHOTS / f"lab_width_{width}.png")
    page.set_viewport_size({"width": 1280, "height": 1300})


@pytest.mark.parametrize("theme", ["Dark", "Dark High Contrast"])
def test_dark_themes_read_well(browser, whole_notebooks, theme):
    set_setting(whole_notebooks, "apputils-extension:themes", theme=f"JupyterLab {theme}")
    page = run_notebook(browser, whole_notebooks, "labs.ipynb", "the kernel is free")
    page.locator(f"body[data-jp-theme-name='JupyterLab {theme}']").wait_for(state="attached")
    lab = Lab(page, ".one")
    lab.wait_for("finished")  # the run it trains by itself; after Run, it could still be that one, with nothing to pin
    lab.press("pin")
    until(lambda: lab.pinned().count() == 1, lab.status)

    def darkest() -> int:
        """The smallest of the three components of the words' color."""
        color = lab.root.locator(".gradlab-status [role=status]").evaluate("(each) => getComputedStyle(each).color")
        # An element that was just replaced on the page has no color, and is asked again.
        return min(map(int, re.findall(r"\d+", color)[:3]), default=0)

    until(lambda: darkest() > 150, darkest)  # light words
    ground = lab.root.locator(".gradlab-view-losses").evaluate("(each) => getComputedStyle(each).backgroundColor")
    assert max(int(part) for part in ground[ground.index("(") + 1 : -1].split(",")[:3]) < 60
    assert not violations(page, ".one")
    page.screenshot(path=SCREENSHOTS / f"lab_{theme.lower().replace(' ', '_')}.png")
    close(page)


def test_labs_in_one_notebook_a_run_that_diverges_a_free_kernel_and_a_restart(browser, whole_notebooks):
    page = run_notebook(browser, whole_notebooks, "labs.ipynb", "the kernel is free")
    one, two = Lab(page, ".one"), Lab(page, ".two")
    one.press("run")
    two.press("accumulation_steps", "ArrowRight")
    until(lambda: "now: k = 6" in two.words("losses"), two.status)  # its first run may have finished before
    for lab in (one, two):
        lab.wait_for("finished")
        assert "update 60 of 60" in lab.status()
    assert "now: k = 5" in one.words("losses") and "now: k = 6" in two.words("losses")
    assert one.words("losses") != two.words("losses")

    wild = Lab(page, ".wild")
    wild.press("run")
    until(lambda: re.match("diverged: .*try a smaller learning rate", wild.status()), wild.status)

    # While one trains, another cell runs; the same cell run twice leaves one lab on the page, and both work.
    one.set_budget(ENDLESS)
    one.wait_for("running")
    page.locator(".jp-Cell").last.click()
    page.keyboard.press("Control+Enter")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()
    assert "running" in one.status()

    # A restart in the middle of a run: a new kernel, a new lab, no remains.
    choose_menu(page, "Kernel", "Restart Kernel and Run All Cells")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    until(lambda: page.locator(".one").count() == 1 and "of 1000000" not in one.status())
    one.root.scroll_into_view_if_needed()
    one.wait_for("finished")  # it trains by itself when it is seen
    assert "update 60 of 60" in one.status()
    close(page)

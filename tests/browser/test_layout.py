"""The lab at all sizes and in the other places where it is shown: boxes, sharpness, pictures,
Notebook 7, memory."""

import base64
import io
import pathlib

import numpy as np
import pytest
from lab_page import (
    CUT,
    SCREENSHOTS,
    TOKEN,
    Lab,
    choose_menu,
    close,
    frames,
    new_page,
    run_notebook,
    until,
    use_by_keyboard,
)

from gradlab.lab.widget import saved_page

pytestmark = pytest.mark.browser

PICTURES = pathlib.Path(__file__).parent / "pictures"
WIDE = {"width": 1900, "height": 900}
# The boxes of a lab's parts, relative to its own.
BOXES = """(lab) => {
    const frame = lab.getBoundingClientRect();
    const box = (each) => {
        const {left, top, width, height} = each.getBoundingClientRect();
        return {left: left - frame.left, top: top - frame.top, width, height};
    };
    const all = (selector) => [...lab.querySelectorAll(selector)].map(box).filter(({width}) => width);
    return {
        lab: box(lab),
        views: all(".gradlab-view"),
        k: box(lab.querySelector(".gradlab-accumulation_steps")),
        parts: all("canvas, button, .widget-inline-hbox, .gradlab-batch, .gradlab-chip"),
        ratios: [...lab.querySelectorAll("canvas")].flatMap(
            (each) => [each.width / each.clientWidth, each.height / each.clientHeight]
        ),
    };
}"""


@pytest.fixture
def wide(page, small):
    """The small lab on a wide page, and a DevTools session that can change the page's pixels a
    point."""
    session = page.context.new_cdp_session(page)
    page.set_viewport_size(WIDE)
    yield small, session
    session.send("Emulation.clearDeviceMetricsOverride")
    session.detach()


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1, 2])
def test_the_lab_fits_every_width_and_is_sharp(wide, ratio):
    lab, session = wide
    session.send(
        "Emulation.setDeviceMetricsOverride", WIDE | {"deviceScaleFactor": ratio, "mobile": False}
    )
    lab.press("accumulation_steps", "End")  # long words
    until(lambda: "now: k = 50, b = 20: from" in lab.words("losses"))
    lab.wait_for("finished")
    lab.press("pin")
    lab.show_more_views()
    until(lambda: lab.pinned().count() == 1)
    texts = lab.root.locator("button:visible, .gradlab-head, .gradlab-head *")
    heights = {}
    for width, columns in ((480, 1), (848, 3), (1008, 3), (1488, 3)):
        lab.root.evaluate("(lab, width) => { lab.style.width = `${width}px`; }", width)

        def found():
            return lab.root.evaluate(BOXES)

        until(
            lambda width=width: abs(found()["lab"]["width"] - width) <= 1,
            lambda: str(found()["lab"]),
        )
        until(
            lambda: all(each == pytest.approx(ratio, rel=0.02) for each in found()["ratios"]),
            lambda: str(found()),
        )
        frames(lab.page)
        boxes = found()
        views = boxes["views"]
        assert len(views) == 6 and len({round(view["left"]) for view in views}) == columns
        for part in boxes["parts"]:
            assert part["left"] >= -1 and part["left"] + part["width"] <= width + 1, (width, part)
        assert lab.root.evaluate("(lab) => lab.scrollWidth") <= width + 1
        assert not texts.evaluate_all(CUT), width
        heights[width] = views[0]["height"]
        if width == 848:
            assert boxes["lab"]["height"] <= 600
        if width == 480:  # k and the view that answers at once are seen together
            assert views[0]["top"] + views[0]["height"] - boxes["k"]["top"] < 700
        # Playwright's own would set the ratio to 1
        shot = session.send("Page.captureScreenshot")["data"]
        (SCREENSHOTS / f"lab_{width}_{ratio}.png").write_bytes(base64.b64decode(shot))
    assert heights[848] < heights[1008] < heights[1488]


# All views of a run that is made up, with a pinned one and earlier ones beside it.
DRAW = """async ([source, facts]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const columns = ["loss", "lossDeviation", "accuracy", "accuracyDeviation", "noiseScale"];
    const wave = (i) => Math.sin(12.9898 * i) * Math.cos(4.1414 * i * i);
    const run = (number, style, k, end) => ({
        number, style, k, b: 20, batch: 20 * k, name: `k = ${k}`, counts: [300], columns, perUpdate: 4,
        rows: Float32Array.from(Array.from({length: 300}, (_, i) => [
            (2.3 - end) * Math.exp(-i / 40) + end + 0.3 / k * wave(i), 0.2 / k,
            i % 50 === 49 ? 95 - 10 * Math.exp(-i / 99) - 20 * end : NaN, 0.4, 900 - 850 * Math.exp(-i / 60),
        ]).flat()),
        dots: Float32Array.from({length: 1200}, (_, i) => 2.1 * Math.exp(-i / 160) + end + 0.2 * wave(i + 0.5)),
    });
    const runs = [run(1, 0, 5, 0.1), run(2, 1, 20, 0.05)];
    const points = [1, 2, 10, 20, 50].map((k) => ({
        k, b: 20, window: 0.17 / k ** 0.48, law: 0.17 / k ** 0.5, microbatch: 0.17, milliseconds: 1 + k,
    }));
    const point = {...points[0], k: 5, window: 0.08, law: 0.076, milliseconds: 4.6};
    const data = {runs, current: runs[0], points, point, window: [], windowAt: 0, against: "updates",
        experiment: {k: 5, b: 20, updates: 300}};
    const root = document.querySelector(".gradlab-offline");
    const views = document.createElement("div");
    const toy = document.createElement("div");
    views.className = "gradlab-offline-views";
    const charts = Object.keys(module.VIEWS).map((name) => module.chart(name, () => data, root));
    views.append(toy, ...charts.map(({node}) => node));
    root.replaceChildren(views);
    module.showOneUpdate({model: module.modelOf(facts, 5), el: toy});
    charts.forEach(({schedule}) => schedule());
}"""


def view_pixels(page, theme: str) -> np.ndarray:
    from PIL import Image

    white, black = ("#ffffff", "#111111") if theme == "light" else ("#111111", "#eeeeee")
    style = f"html {{ background: {white}; color: {black}; }} body {{ margin: 0; width: 1000px; }}"
    body = f'<div class="gradlab-lab gradlab-offline"></div><style>{saved_page.css()}</style>'
    page.set_content(f"<!doctype html><style>{style}</style>{body}")
    page.evaluate(DRAW, [saved_page.javascript(), {"toy": saved_page.toy_facts()}])
    until(lambda: "k = 5" in page.locator(".gradlab-words-losses").inner_text())
    frames(page)  # there is no event for drawn pixels
    return np.asarray(
        Image.open(io.BytesIO(page.locator(".gradlab-offline-views").screenshot())).convert("RGB"),
        int,
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_views_look_as_they_did(browser, theme):
    """Beside a picture that was looked at. After an intended change: delete it, run this test,
    look, and commit."""
    from PIL import Image

    page = new_page(browser)
    seen = view_pixels(page, theme)
    page.context.close()
    kept = PICTURES / f"views_{theme}.png"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        Image.fromarray(seen.astype(np.uint8)).quantize(64, dither=Image.Dither.NONE).save(
            kept, optimize=True
        )
        pytest.fail(f"{kept} did not exist and was written: look at it, and run the test again")
    wanted = np.asarray(Image.open(kept).convert("RGB"), int)
    assert abs(seen.shape[0] - wanted.shape[0]) <= 2 and seen.shape[1] == wanted.shape[1]
    rows = min(len(seen), len(wanted))
    other = abs(seen[:rows] - wanted[:rows]).max(axis=2) > 80
    height, width = rows // 2, seen.shape[1] // 3
    for number in range(6):  # view by view: a curve is a small part of the whole
        row, column = divmod(number, 3)
        share = other[
            row * height : (row + 1) * height, column * width : (column + 1) * width
        ].mean()
        print(f"view {number}: {100 * share:.2f} % of the pixels differ")
        assert share < 0.006, number


@pytest.mark.slow
def test_the_lab_works_in_notebook_7(browser, whole_notebooks):
    page = new_page(browser, viewport={"width": 1280, "height": 900})
    page.goto(f"{whole_notebooks}/notebooks/labs.ipynb?token={TOKEN}")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    choose_menu(page, "Run", "Run All Cells")
    lab = Lab(page)
    asks = page.locator(".jp-Dialog .jp-mod-accept")

    def has_lab() -> bool:
        # While a kernel of the same file runs, of a page that was closed, it may ask for a kernel
        if asks.is_visible():
            asks.click()
        return lab.root.is_visible()

    until(has_lab)
    lab.wait_for("finished")
    cells = page.locator(".jp-Cell").count()
    lab.press("accumulation_steps", "ArrowRight")
    until(lambda: "now: k = 6, b = 20: from" in lab.words("losses"), lambda: lab.words("losses"))
    until(lambda: lab.root.locator(".gradlab-view-toy").get_attribute("data-steps") == "6")
    lab.press("run", "x")
    assert page.locator(".jp-Cell").count() == cells
    lab.wait_for("finished")
    page.screenshot(path=SCREENSHOTS / "notebook_7.png")
    use_by_keyboard(lab)
    assert page.locator(".jp-Cell").count() == cells
    page.context.close()


@pytest.mark.slow
def test_a_hundred_runs_do_not_grow_the_page(browser, whole_notebooks):
    page = run_notebook(
        browser, whole_notebooks, "toy.ipynb", "the kernel is free", {"width": 1280, "height": 800}
    )
    lab = Lab(page)
    lab.wait_for("finished")
    session = page.context.new_cdp_session(page)

    def heap() -> float:
        for _ in range(3):
            session.send("HeapProfiler.collectGarbage")
        return session.send("Runtime.getHeapUsage")["usedSize"] / 2**20

    sizes = []
    for number in range(130):
        steps = 2 + number % 2
        lab.press("accumulation_steps", "Home" if steps == 2 else "ArrowRight")
        wanted = f"now: k = {1 if steps == 2 else 2}, b = 20: from"
        until(lambda wanted=wanted: wanted in lab.words("losses"), lambda: lab.words("losses"))
        lab.wait_for("finished")
        if number % 10 == 9:
            sizes.append(round(heap(), 2))
    print(f"the page's heap after 10, 20, ... runs: {sizes} MiB")
    assert sizes[-1] < 1.05 * sizes[2]
    close(page)

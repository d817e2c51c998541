"""The views of a training in a real Chromium: what they draw beside what Python draws, and what is
read from them."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from lab_page import SCREENSHOTS, frames, new_page, press, until
from synthetic_results import synthetic

from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.lab_figure import lab_views
from gradlab.lab.figures.shown import Shown
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows
from gradlab.lab.widget.js_bundle import module

pytestmark = pytest.mark.browser

NOW, OTHER = synthetic(4), synthetic(8)
FULL = Shown(NOW.experiment, "now", NOW, pinned=[("other", OTHER)], points=[Point.of(OTHER)])
PLOTS = """async ([source, runs, data]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const floats = (values) => new Float32Array(values.map((value) => value ?? NaN));
    const known = runs.map(({rows, dots, ...sent}, i) => ({
        ...module.merged(undefined, sent, data.columns, floats(rows), floats(dots)),
        style: module.styleOf(i),
    }));
    const all = {...data, runs: known, current: known[0]};
    const found = Object.entries(module.VIEWS).map(([name, view]) => {
        const plots = view.plots(all);
        return [name, {plots, words: module.words(name, all, plots), latest: module.latest(all, plots)}];
    });
    const places = {losses: 17.3, accuracy: 500, noise: 7};
    const read = Object.entries(places).map(([name, x]) => module.nearest(module.VIEWS[name].plots(all)[0], x));
    return JSON.stringify({...Object.fromEntries(found), read});
}"""


@pytest.fixture
def compute(browser):
    """A function that calls a function of the page's module."""
    page = new_page(browser)
    yield lambda code, *arguments: page.evaluate(
        code, [module("canvas", "plots", "charts"), *arguments]
    )
    page.context.close()


def sent(result, name: str) -> dict:
    """A run as the page gets it, whole."""
    chart_rows, e = ChartRows.of(result), result.experiment
    arrays = {"rows": chart_rows.rows(0), "dots": chart_rows.dots(0)}
    numbers = {
        n: [None if np.isnan(value) else float(value) for value in a.ravel()]
        for n, a in arrays.items()
    }
    about = {
        "number": chart_rows.number,
        "name": name,
        "first": 0,
        "firstDot": 0,
        "counts": chart_rows.counts,
    }
    about |= {
        "perUpdate": chart_rows.dots(0).shape[1],
        "k": e.accumulation_steps,
        "b": 20,
        "batch": e.effective_batch,
    }
    return about | numbers


def point(result) -> dict:
    e = result.experiment
    known = dataclasses.asdict(Point.of(result)) | {
        "k": e.accumulation_steps,
        "b": e.microbatch_size,
    }
    return {name: value for name, value in known.items() if name != "experiment"}


@pytest.mark.parametrize("against", ["updates", "examples", "seconds"])
def test_the_page_draws_what_python_draws(compute, against):
    shown = dataclasses.replace(FULL, against=against)
    data = {
        "columns": list(COLUMNS),
        "points": [point(OTHER)],
        "point": point(NOW),
        "window": [1.5, None, 1.7, 1.6],
        "windowAt": 40,
        "against": against,
        "experiment": {"k": 4, "b": 20, "updates": 40},
    }
    found = json.loads(compute(PLOTS, [sent(NOW, "now"), sent(OTHER, "other")], data))
    for name in ("losses", "accuracy", "noise", "cost"):
        figure = lab_views(shown, [name])
        assert found[name]["words"] == figure.get_label(), name
        for plot, axes in zip(found[name]["plots"], figure.axes, strict=True):
            assert (plot["y"]["from"], plot["y"]["to"]) == pytest.approx(
                axes.get_ylim(), rel=1e-5
            ), name
            named = {line.get_label(): line for line in axes.get_lines()}
            # The points of earlier runs and of the current one have no label in Python.
            lines = [
                named.get(series["name"], axes.get_lines()[i])
                for i, series in enumerate(plot["series"])
            ]
            assert len(lines) == 2
            for series, line in zip(plot["series"], lines):
                np.testing.assert_allclose(series["xs"], line.get_xdata(), rtol=1e-5)
                np.testing.assert_allclose(series["ys"], line.get_ydata(), rtol=1e-5)
    assert [len(series["xs"]) for series in found["losses"]["plots"][0]["series"]] == [40, 40]
    measured = Point.of(NOW).window / Point.of(OTHER).window
    said = f"÷ {2**0.5:.1f} predicted, ÷ {measured:.1f} measured"
    assert found["noise"]["plots"][0]["note"] == said
    assert [len(series["xs"]) for series in found["accuracy"]["plots"][0]["series"]] == [4, 4]
    losses = found["losses"]["plots"][0]
    np.testing.assert_allclose(np.array(losses["dots"])[:, 1], NOW.losses[0].ravel(), rtol=1e-5)
    np.testing.assert_allclose(np.array(losses["dots"])[:4, 0], [0.125, 0.375, 0.625, 0.875])
    assert found["losses"]["latest"] == f"{NOW.window_losses.mean(axis=0)[-1]:.3f}"
    assert losses["marked"] == [[40.125, 1.5], [40.625, 1.7], [40.875, 1.6]]  # one was not finite
    np.testing.assert_allclose(
        losses["series"][0]["band"], NOW.window_losses.std(axis=0, ddof=1), rtol=1e-4
    )


def test_noise_scale_and_points_are_pythons(compute):
    data = {
        "columns": list(COLUMNS),
        "points": [point(OTHER), point(synthetic(2, b=7))],
        "point": point(NOW),
        "window": [],
        "windowAt": 0,
    }
    data |= {"against": "updates", "experiment": {"k": 4, "b": 20, "updates": 40}}
    found = json.loads(compute(PLOTS, [sent(NOW, "now"), sent(OTHER, "other")], data))
    [scale] = found["scale"]["plots"]
    [axes] = lab_views(FULL, ["scale"]).axes
    drawn = {line.get_label(): line for line in axes.get_lines()}
    assert (scale["y"]["from"], scale["y"]["to"]) == pytest.approx(axes.get_ylim(), rel=1e-4)
    for series, batch in zip(scale["series"], (80, 160)):
        there = np.isfinite(drawn[series["name"]].get_ydata())
        np.testing.assert_allclose(
            series["ys"], drawn[series["name"]].get_ydata()[there], rtol=1e-4
        )
        assert [batch] * 2 in [[y for _, y in line["points"]] for line in scale["lines"]]
    [noise] = found["noise"]["plots"]
    earlier, now = noise["series"]
    # The other point has micro-batches of another size
    assert (earlier["xs"], now["xs"]) == ([8], [4])
    assert now["ys"] == [pytest.approx(Point.of(NOW).window)]
    for k, y in noise["lines"][0]["points"]:
        assert y == pytest.approx(Point.of(NOW).microbatch / np.sqrt(k))
    at_17, at_500, at_7 = found["read"]
    means = [result.window_losses.mean(axis=0) for result in (NOW, OTHER)]
    assert at_17["x"] == 17 and at_17["said"] == "update 17"
    assert [each["said"] for each in at_17["values"]] == [f"{mean[16]:.3f}" for mean in means]
    assert (
        at_500["x"] == 40
        and len(at_500["values"]) == 2
        and at_500["values"][0]["said"].endswith(" %")
    )
    assert at_7["x"] == 8 and [each["name"] for each in at_7["values"]] == ["earlier"]


INCREMENTS = """async ([source]) => {
    const {merged, column} = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const answer = (first, firstDot, counts) => ({first, firstDot, counts, perUpdate: 1});
    const columns = ["a", "b"];
    const take = (run, first, firstDot, counts, rows, dots) =>
        merged(run, answer(first, firstDot, counts), columns, new Float32Array(rows), new Float32Array(dots));
    let run = take(undefined, 0, 0, [2, 0], [1, 10, 2, 20], [7, 8]);
    run = take(run, 2, 2, [3, 0], [3, 30], [9]); // a new update
    run = take(run, 0, 3, [3, 1], [4, 40, 2, 20, 3, 30], []); // the second seed changes the first mean
    run = take(run, 1, 1, [3, 1], [2, 20, 3, 30], [8, 9]); // the same again
    return [column(run, "a"), column(run, "b"), [...run.dots], run.counts];
}"""


def test_increments_take_their_place(compute):
    assert compute(INCREMENTS) == [[4, 2, 3], [40, 20, 30], [7, 8, 9], [3, 1]]


TICKS = """async ([source, axes]) => {
    const {ticksOf, plain, stepped} = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const say = String;
    const series = [{xs: [1, 2, 3, 99], ys: [1, 1, 1, 1]}, {xs: [2, 30], ys: [1, 1]}]; // 99 is beyond the axis
    const plot = {x: {from: 0, to: 40, say}, y: {say}, series};
    return [axes.map(ticksOf), [0.0123456, 12.345, 1234.5, 30000].map((number) => plain(number)),
        [[null, 1], [2.3, 1], [3, 10], [2, -1], [1, -1], [null, -1]].map(([x, step]) => stepped(plot, x, step))];
}"""


def test_axes_have_few_round_ticks_and_keys_step_from_value_to_value(compute):
    axes = [
        {"from": 0, "to": 300},
        {"from": 80, "to": 100},
        {"from": 0, "to": 2.91},
        {"from": 0, "to": 7},
    ]
    logs = [{"from": 0.02, "to": 0.4, "log": True}, {"from": 3, "to": 90_000, "log": True}]
    ticks, numbers, places = compute(TICKS, axes + logs)
    assert (
        ticks[0] == [0, 100, 200, 300]
        and ticks[1] == [80, 85, 90, 95, 100]
        and ticks[2] == [0, 1, 2]
    )
    assert ticks[3] == [0, 2, 4, 6]
    assert ticks[4] == pytest.approx([0.02, 0.05, 0.1, 0.2]) and ticks[5] == pytest.approx(
        [10, 100, 1000, 10_000]
    )
    assert numbers == ["0.0123", "12.3", "1,235", "30,000"]
    assert places == [1, 3, 30, 1, 1, 30]


@pytest.mark.slow
def test_values_are_read_with_pointer_and_keys_and_are_those_of_the_result(page, small):
    small.press("run")
    small.wait_for("finished")
    with page.expect_download() as download:
        small.press("csv")
    frame = pd.read_csv(download.value.path())
    windows = (
        frame.groupby(["seed", "update"])[["window_loss", "accuracy"]]
        .first()
        .groupby("update")
        .mean()
    )
    view = small.root.locator(".gradlab-view-losses")
    canvas, readout = view.locator("canvas"), view.locator(".gradlab-readout")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    until(readout.is_visible)
    at, shown = readout.inner_text().split("\n", 1)
    update = int(at.removeprefix("update "))
    assert 20 < update < 40
    assert f"{windows.window_loss[update]:.3f}" in shown
    page.screenshot(path=SCREENSHOTS / "lab_readout.png")
    page.mouse.move(0, 0)
    until(readout.is_hidden)

    said = view.locator("[aria-live]")
    for key, update in (
        ("End", 60),
        ("ArrowLeft", 59),
        ("PageDown", 49),
        ("ArrowRight", 50),
        ("Home", 1),
    ):
        press(canvas, key)
        until(
            lambda update=update: said.inner_text().startswith(f"update {update}:"), said.inner_text
        )
        assert f"{windows.window_loss[update]:.3f}" in said.inner_text()
    press(canvas, "Escape")
    until(readout.is_hidden)
    small.show_more_views()
    accuracy = small.root.locator(".gradlab-view-accuracy")
    press(accuracy.locator("canvas"), "End")
    until(
        lambda: (
            f"{100 * windows.accuracy[60]:.1f} %" in accuracy.locator("[aria-live]").inner_text()
        )
    )


# Counts the questions that the page sends.
COUNT = """() => {
    const send = WebSocket.prototype.send;
    const text = (data) => typeof data === "string" ? data : new TextDecoder().decode(data);
    window.gradlabAsked = 0;
    WebSocket.prototype.send = function (data) {
        if (text(data).includes('"ask"')) window.gradlabAsked += 1;
        return send.call(this, data);
    };
    window.gradlabUncount = () => { WebSocket.prototype.send = send; };
}"""


def test_a_lab_that_is_not_seen_asks_for_nothing(page, small):
    page.evaluate(COUNT)
    small.set_budget(1_000_000)

    def asked() -> int:
        return page.evaluate("window.gradlabAsked")

    def is_silent() -> bool:
        before = asked()
        frames(page, 30)
        return asked() == before

    def updates() -> int:
        return int(small.root.locator("[data-view=losses]").get_attribute("data-updates"))

    until(lambda: asked() > 3)
    small.root.evaluate("(lab) => { lab.style.display = 'none'; }")
    until(is_silent)  # the page notices in its next frames
    before = asked()
    frames(page, 60)
    assert asked() == before
    small.root.evaluate("(lab) => { lab.style.display = ''; }")
    until(lambda: asked() > before)
    until(lambda: small.root.get_attribute("data-state") == "running")
    made = updates()
    until(lambda: updates() > made)
    page.evaluate("window.gradlabUncount()")

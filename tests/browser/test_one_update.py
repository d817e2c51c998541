"""The view of one update in a real Chromium: its arithmetic beside that of toy.py, and what a hand
does with it."""

import json
import statistics

import numpy as np
import pytest
from lab_page import FOCUSED, SCREENSHOTS, new_page, press, until

from gradlab.lab.figures import toy
from gradlab.lab.widget.js_bundle import module
from gradlab.lab.widget.one_update import OneUpdate

pytestmark = pytest.mark.browser

MODULE = module("canvas", "race", "one_update")
# Loads the module as anywidget does, and computes descents from what Python sends.
COMPUTE = """async ([source, constants, noise, cases]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const toy = {...constants, noise: new Int16Array(noise)};
    return cases.map(([start, k]) => {
        const descent = module.descend(toy, start, k);
        const gradients = module.gradients(toy, descent.path[2], 2, k);
        return {...descent, gradients, words: module.describe(toy, descent, k, 2)};
    });
}"""
STEPS = """async ([source, k, updates, times]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const seen = [{update: 0, added: 0}];
    for (let i = 0; i < times; i++) seen.push(module.next(seen[i], k, updates));
    return seen.map((each) => [each.update, each.added]);
}"""


@pytest.fixture
def blank(browser):
    page = new_page(browser)
    yield page
    page.context.close()


@pytest.fixture
def view(small):
    """The view of a lab, with k = 5."""
    found = small.root.locator(".gradlab-view-toy")
    found.scroll_into_view_if_needed()
    until(
        lambda: state(found)["steps"] == "5" and said(found) == toy.describe(toy.descend(5)),
        lambda: said(found),
    )
    return found


def test_the_page_computes_what_python_computes(blank):
    sent = OneUpdate()
    cases = [
        [list(start), k]
        for k in (1, 2, 5, 20, 100)
        for start in (toy.START.tolist(), [5.5, -4.5], [0.0, 0.0])
    ]
    noise = np.frombuffer(sent.noise, "<i2").tolist()
    found = blank.evaluate(COMPUTE, [MODULE, sent.constants, noise, cases])
    for (start, k), seen in zip(cases, found):
        expected = toy.descend(k, start=start)
        for name in ("path", "losses", "gradients"):
            np.testing.assert_allclose(seen[name], getattr(expected, name), rtol=0, atol=1e-12)
        assert seen["floor"] == pytest.approx(expected.floor, abs=1e-15)
        assert seen["words"] == toy.describe(expected)


def test_a_step_adds_a_micro_batch_and_the_last_one_is_followed_by_the_update(blank):
    seen = blank.evaluate(STEPS, [MODULE, 2, 2, 6])
    assert seen == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [0, 0]]


RACE = """async ([source, constants, noise, start, k, rate]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const toy = {...constants, learningRate: rate, noise: new Int16Array(noise)};
    const runners = module.race(toy, start, k);
    return {runners, updates: runners.map((each) => module.updatesAt(each, 3 * k + 1))};
}"""


@pytest.mark.parametrize(("k", "rate"), [(2, 0.3), (20, 0.3), (20, 0.05)])
def test_a_race_is_of_three_descents_on_the_same_micro_batches(blank, k, rate):
    sent = OneUpdate()
    noise = np.frombuffer(sent.noise, "<i2")
    arguments = [sent.constants, noise.tolist(), toy.START.tolist(), k, rate]
    found = blank.evaluate(RACE, [MODULE, *arguments])
    # All micro-batches in the order in which windows of k use them
    stream = noise.reshape(toy.UPDATES, -1, 2)[:, :k].reshape(-1, 2) * toy.UNIT * toy.NOISE
    for runner, (steps, own_rate) in zip(found["runners"], [(1, rate), (k, rate), (1, rate / k)]):
        path = [toy.START]
        for window in stream.reshape(-1, steps, 2):
            path.append(path[-1] - own_rate * (toy.CURVATURE * path[-1] + window.mean(axis=0)))
        np.testing.assert_allclose(runner["path"], path, rtol=0, atol=1e-10)
        losses = (toy.CURVATURE * np.array(path) ** 2).sum(axis=1) / 2
        np.testing.assert_allclose(runner["losses"], losses, rtol=0, atol=1e-10)
        assert runner["floor"] == pytest.approx(toy.noise_floor(steps, own_rate), abs=1e-12)
    assert found["updates"] == [3 * k + 1, 3, 3 * k + 1]


# Shows the view with a model that only keeps what the view sends, and resets it.
RESET = """async ([source, values]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const heard = {}, sent = [];
    const model = {
        get: (name) => values[name],
        set: (name, value) => values[name] = value,
        on: (name, react) => heard[name] = react,
        save_changes: () => sent.push(["start", values.start]),
        send: (content) => sent.push(["message", content]),
    };
    values.noise = new DataView(new Int16Array(values.noise).buffer);
    module.showOneUpdate({model, el: document.body.appendChild(document.createElement("div"))});
    heard["msg:custom"]({start: [-4, 2.2]});
    return sent;
}"""


def test_the_page_answers_a_reset_after_all_that_it_has_sent_before(blank):
    sent = OneUpdate(5)
    values = {
        name: getattr(sent, name)
        for name in ("accumulation_steps", "towers", "constants", "looked_at")
    }
    values |= {"start": [1.0, 1.0], "noise": np.frombuffer(sent.noise, "<i2").tolist()}
    assert blank.evaluate(RESET, [MODULE, values]) == [
        ["start", [-4, 2.2]],
        ["message", {"reset": True}],
    ]


def state(view) -> dict:
    return json.loads(view.evaluate("(view) => JSON.stringify(view.dataset)"))


def said(view) -> str:
    """The text alternative."""
    return view.locator(".gradlab-words-toy").inner_text()


def drawn(view) -> int:
    """The number of the canvas' pixels that are not transparent."""
    return view.locator("canvas").evaluate(
        """(canvas) => {
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return data.filter((value, i) => i % 4 === 3 && value).length;
        }"""
    )


def test_it_follows_the_slider_in_the_page(page, small, view):
    until(lambda: drawn(view) > 2000)
    view.evaluate(
        """(view) => {
            const seen = window.gradlabSeen = {keys: [], views: []};
            document.addEventListener("keydown", () => seen.keys.push(performance.now()), true);
            new MutationObserver(() => seen.views.push([performance.now(), view.dataset.steps]))
                .observe(view, {attributes: true, attributeFilter: ["data-steps"]});
        }"""
    )
    slider = small.control("accumulation_steps")
    for steps in range(6, 13):
        press(slider, "ArrowRight")
        until(lambda steps=steps: state(view)["steps"] == str(steps))
    seen = page.evaluate("window.gradlabSeen")
    answers = [
        next(at for at, k in seen["views"] if k == str(6 + i)) - key
        for i, key in enumerate(seen["keys"][-7:])
    ]
    print(f"from key to the drawn view: median of 7, {statistics.median(answers):.0f} ms")
    until(lambda: said(view) == toy.describe(toy.descend(12)), lambda: said(view))
    until(lambda: "now: k = 12" in small.words("losses"))  # the kernel has heard it too


def test_step_play_and_keys(page, small, view):
    step, play, canvas = (
        view.locator(name) for name in (".gradlab-toy-step", ".gradlab-toy-play", "canvas")
    )
    press(step, "Enter")
    until(lambda: view.locator(".gradlab-added").inner_text() == "applied")
    press(step, "Enter")
    until(lambda: view.locator(".gradlab-added").inner_text() == "1 of 5 added")
    until(
        lambda: (state(view)["updates"], state(view)["added"]) == ("3", "1"),
        lambda: str(state(view)),
    )
    page.screenshot(path=SCREENSHOTS / "one_update_step.png")
    press(play, "Enter")
    until(lambda: int(state(view)["updates"]) > 3)
    press(play, "Enter")
    until(lambda: play.inner_text() == "Play")

    assert state(view)["start"] == "-4.00,2.20"
    for key, start in (("ArrowUp", "-4.00,2.45"), ("ArrowRight", "-3.75,2.45")):
        press(canvas, key)
        until(lambda start=start: state(view)["start"] == start, lambda: str(state(view)))
    assert canvas.evaluate(FOCUSED)
    words = said(view)
    small.press("reset")
    until(
        lambda: state(view)["start"] == "-4.00,2.20" and state(view)["added"] == "5",
        lambda: str(state(view)),
    )
    until(lambda: said(view) == toy.describe(toy.descend(5)) != words)


def test_a_race_and_another_rate(small, view):
    press(view.locator(".gradlab-toy-race"), "Enter")
    until(lambda: state(view).get("race") == "finished")
    assert "k = 1, rate ÷ 5" in view.locator(".gradlab-key").first.inner_text()
    words = said(view)
    assert words.startswith("Race: ") and "k = 5: loss" in words and "300 updates" in words
    press(view.locator(".gradlab-toy-rate"), "Home")  # the smallest: the race begins again
    until(lambda: "0.01" in view.locator(".gradlab-toy-more").inner_text() and said(view) != words)
    until(lambda: state(view)["race"] == "finished")
    press(view.locator(".gradlab-toy-race"), "Enter")
    until(lambda: said(view) == toy.describe(toy.descend(5, learning_rate=0.01)))
    assert "race" not in state(view)
    small.press("reset")  # brings back the rate
    until(lambda: said(view) == toy.describe(toy.descend(5)))


def test_the_starting_point_is_dragged(page, view):
    canvas = view.locator("canvas")
    canvas.scroll_into_view_if_needed()
    frame = canvas.bounding_box()
    place = """(canvas, point) => {
        const scale = Math.min(canvas.clientWidth / 12, 0.74 * canvas.clientHeight / 7);
        return [canvas.clientWidth / 2 + (point[0] + 0.5) * scale, 0.37 * canvas.clientHeight - point[1] * scale];
    }"""
    [x, y], [to_x, to_y] = (
        canvas.evaluate(place, point) for point in (toy.START.tolist(), [2.0, -1.0])
    )
    page.mouse.move(frame["x"] + to_x, frame["y"] + to_y)
    page.mouse.down()  # not at the ring
    page.mouse.move(frame["x"] + x, frame["y"] + y)
    page.mouse.up()
    assert state(view)["start"] == "-4.00,2.20"
    page.mouse.down()
    page.mouse.move(frame["x"] + to_x, frame["y"] + to_y, steps=4)
    page.mouse.up()

    def start() -> list[float]:
        return [float(weight) for weight in state(view)["start"].split(",")]

    until(lambda: start() == pytest.approx([2, -1], abs=0.1), lambda: str(start()))
    until(lambda: said(view) != toy.describe(toy.descend(5)))

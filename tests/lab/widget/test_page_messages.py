"""What the lab answers a page: the numbers it does not have yet, from the thread that was asked,
and nothing else."""

import threading

import ipywidgets
import numpy as np
import pytest
from events import LIMIT, wait_until
from lab_widgets import Page, run_to_the_end, updates_made, widget

from gradlab.lab.experiments.jobs import run as run_module
from gradlab.lab.figures.curves import Point
from gradlab.lab.widget import page_messages
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows
from gradlab.lab.widget.live_run import State


@pytest.fixture
def permits(monkeypatch):
    """A semaphore of which each update of a run takes one."""
    permits, updates_of = threading.Semaphore(0), run_module.updates_of

    def held(job, stop):
        for updates in updates_of(job, stop):
            assert permits.acquire(timeout=LIMIT)
            yield updates

    monkeypatch.setattr(run_module, "updates_of", held)
    yield permits
    permits.release(10**6)


def test_a_page_that_asks_during_a_run_has_its_result_at_the_end(make, permits):
    lab = make(updates=60, hide=())
    page = Page(lab)
    # Nothing to ask for until there is news
    assert page.ask()["runs"] == [] and page.ask()["again"] is None
    news = widget(lab, "charts").news
    lab.run()
    assert widget(lab, "charts").news > news
    assert page.ask()["again"] == page_messages.SOON
    for made, first in ((5, 0), (20, 5), (21, 20)):
        permits.release(made - updates_made(lab))
        wait_until(lambda made=made: updates_made(lab) == made)
        lab._controller._page_messages._point = None  # else a point is kept for half a second
        [run] = page.ask()["runs"]
        assert (run["counts"], run["first"]) == ([made, made], first)  # increments
        # Too few updates say nothing about the noise
        assert (page.last["point"]["window"] is None) == (made < 8)
    assert page.last["again"] == page_messages.ASK_AGAIN[State.RUNNING]
    permits.release(39)
    lab.wait()
    name = "now: k = 5, b = 20"
    np.testing.assert_array_equal(page.rows[name], ChartRows.of(lab.result).rows(0))
    assert page.ask()["runs"][0]["first"] == 60 and page.last["again"] is None


def test_a_page_asks_until_the_run_is_over_and_not_only_until_its_last_update(make, monkeypatch):
    over, updates_of = threading.Event(), run_module.updates_of

    def held(job, stop):
        yield from updates_of(job, stop)
        assert over.wait(LIMIT)

    monkeypatch.setattr(run_module, "updates_of", held)
    lab = make(updates=5, hide=())
    page = Page(lab)
    lab.run()
    wait_until(lambda: updates_made(lab) == 5)
    again = page.ask()["again"]
    over.set()
    assert again is not None
    lab.wait()
    assert page.ask()["again"] is None


def test_nothing_is_sent_from_another_thread(make, monkeypatch):
    """Some hosts drop such messages. The page must get everything without them."""
    send, dropped = ipywidgets.Widget._send, []

    def drops(self, *arguments, **keywords):
        if threading.current_thread() is not threading.main_thread():
            dropped.append(arguments)
            return
        send(self, *arguments, **keywords)

    monkeypatch.setattr(ipywidgets.Widget, "_send", drops)
    lab = make(updates=30, hide=())
    page = Page(lab)
    page.say(seen=True)  # trains by itself
    wait_until(lambda: page.ask()["again"] is None)
    assert page.rows["now: k = 5, b = 20"].shape == (30, len(COLUMNS))
    assert "finished" in widget(lab, "status").value and widget(lab, "progress").value == 1
    lab.run(updates=20)
    lab.wait()
    [rows] = page.rows.values()
    assert rows.shape == (20, len(COLUMNS))  # a page is told while a cell waits
    assert not dropped


def test_a_lab_trains_when_it_is_first_seen_and_only_then(make):
    lab = make()
    page = Page(lab)
    page.ask()
    assert lab.state is State.IDLE  # nothing trains without a page that shows it
    page.say(seen=True)
    assert lab.wait() is State.FINISHED
    result = lab.result
    page.say(seen=True)  # another page
    assert lab.state is State.FINISHED and lab.result == result
    for other in (make(rerun=False), make()):
        if other.to_dict()["rerun"]:
            other.run()  # what the user has done comes first
            other.stop()
        before = other._controller.runner.current
        Page(other).say(seen=True)
        assert other._controller.runner.current is before


def test_two_pages_of_one_lab_get_what_each_of_them_lacks(make):
    lab = make(updates=10)
    first = Page(lab, "first")
    lab.run()
    lab.wait()
    first.ask()
    second = Page(lab, "second")
    assert first.ask()["runs"][0]["first"] == 10 and second.ask()["runs"][0]["first"] == 0
    np.testing.assert_array_equal(*[page.rows["now: k = 5, b = 20"] for page in (first, second)])


def test_pinned_runs_are_renamed_and_removed_from_the_page(make):
    lab = make()
    page = Page(lab)
    for steps in (1, 5):
        run_to_the_end(lab, accumulation_steps=steps)
        lab.pin()
    names = ["now: k = 5, b = 20", "k = 1, b = 20", "k = 5, b = 20"]
    assert [run["name"] for run in page.ask()["runs"]] == names
    assert (
        page.last["runs"][1]["cells"][0] == "1 × 20 = 20"
        and "±" in page.last["runs"][1]["cells"][3]
    )
    np.testing.assert_array_equal(page.rows[names[0]], page.rows[names[2]])
    page.say(rename=page.number("k = 1, b = 20"), name=" k = 5, b = 20 ")
    page.say(rename=page.number("k = 5, b = 20"), name=" ")
    page.say(rename=10**9, name="nobody")
    assert [name for name, _ in lab.pinned] == ["k = 5, b = 20 (2)", "k = 5, b = 20"]
    page.ask()
    page.say(remove=page.number("k = 5, b = 20"))
    page.say(remove=10**9)
    page.say(anything="else")
    assert [name for name, _ in lab.pinned] == ["k = 5, b = 20 (2)"]
    widget(lab, "rerun").value = False
    lab.reset()
    assert [run["name"] for run in page.ask()["runs"]] == ["k = 5, b = 20 (2)"]
    assert not page.last["now"]


def test_the_points_of_whole_runs_stay(make):
    lab = make(updates=12)
    page = Page(lab)
    for steps in (2, 5):
        run_to_the_end(lab, accumulation_steps=steps)
    lab.run(accumulation_steps=7, updates=100_000)
    wait_until(lambda: updates_made(lab) > 12)
    run_to_the_end(lab, accumulation_steps=10, updates=12)  # cuts the run with k = 7 short
    answer = page.ask()
    assert [point["k"] for point in page.points] == [2, 5] and answer["point"]["k"] == 10
    assert page.ask()["points"] is None  # sent once
    assert answer["point"]["window"] == pytest.approx(Point.of(lab.result).window)
    lab.reset()
    page.ask()
    assert page.points == []


def test_a_window_is_shown_one_loss_after_the_other(make):
    lab = make(accumulation_steps=3)
    page = Page(lab)
    lab.step()
    wait_until(
        lambda: (
            len(page.ask()["window"]) == 1
            and page.last["again"] == page_messages.ASK_AGAIN[State.PAUSED]
        )
    )
    assert lab.state is State.PAUSED
    lab.step()
    wait_until(lambda: len(page.ask()["window"]) == 2)
    lab.step(update=True)
    wait_until(lambda: page.ask()["runs"][0]["counts"] == [1, 1] and page.last["window"] == [])
    lab.stop()


def test_losses_that_are_not_finite_reach_the_page_as_none(make):
    lab = make(optimizer="sgd", learning_rate=1e30, accumulation_steps=2)
    page = Page(lab)
    lab.step(update=True)  # to weights with which the next loss is not finite
    wait_until(lambda: lab.state is State.PAUSED)
    lab.step()
    wait_until(lambda: "diverged" in lab.status)
    page.ask()  # Page refuses an answer that JSON cannot say
    assert page.last["window"] == [None]
    lab.stop()


def test_a_closed_lab_trains_no_more_and_is_let_go(make):
    lab = make(hide=())
    page, charts = Page(lab), widget(lab, "charts")
    lab.close()
    page.say(seen=True)
    assert lab.state is State.IDLE
    for part in (charts, widget(lab, "accumulation_steps"), widget(lab, "toy"), lab.view):
        assert part.comm is None


def test_a_fault_in_an_answer_is_shown_and_stops_the_run(make, monkeypatch):
    def breaks(self, first):
        raise ZeroDivisionError("no rows")

    lab = make(updates=100_000)
    page = Page(lab)
    lab.run()
    monkeypatch.setattr(ChartRows, "rows", breaks)
    assert page.ask()["fault"] == "ZeroDivisionError: no rows"
    assert lab.wait() is State.FINISHED
    assert lab.status == "not shown: ZeroDivisionError: no rows"
    assert "Traceback" in widget(lab, "status").value

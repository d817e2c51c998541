"""The threads of the lab: an old run is never shown over a new one, faults are shown, and
everything ends."""

import pathlib

import numpy as np
import pytest
from events import wait_until
from lab_widgets import Page, lab_threads, run_to_the_end, updates_made, widget

from gradlab.lab.experiments import models
from gradlab.lab.experiments.jobs import run as run_module
from gradlab.lab.widget.chart_rows import ChartRows
from gradlab.lab.widget.live_run import State


def test_an_answer_is_of_the_current_run_alone(make):
    """While the old run still ends, the page gets nothing of it any more."""
    lab = make(updates=100_000)
    page = Page(lab)
    lab.run()
    wait_until(lambda: page.ask()["runs"] and page.last["runs"][0]["counts"][0] > 3)
    old = page.last["runs"][0]["number"]
    widget(lab, "accumulation_steps").value = 2
    [run] = page.ask()["runs"]
    assert run["number"] != old and run["name"] == "now: k = 2, b = 20" and run["k"] == 2
    wait_until(lambda: page.ask()["runs"][0]["counts"][0] > 3)
    lab.stop()
    lab.wait()
    np.testing.assert_array_equal(page.rows["now: k = 2, b = 20"], ChartRows.of(lab.result).rows(0))


def test_a_fault_in_the_worker_is_shown(make, monkeypatch):
    def breaks(job, stop):
        raise OSError("the disk <is> gone")
        yield

    lab = make()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "updates_of", breaks)
        lab.run()
        assert lab.wait() is State.FAILED
    assert lab.status == "failed: OSError: the disk <is> gone"
    line = widget(lab, "status")
    assert "<b>failed</b>: OSError: the disk &lt;is&gt; gone" in line.value
    assert "<details>" in line.value and "Traceback" in line.value
    run_to_the_end(lab)
    assert "Traceback" not in line.value


def test_a_run_that_diverges_says_what_to_try(make):
    lab = make(optimizer="sgd", learning_rate=1e30, updates=50)
    lab.run()
    lab.wait()
    assert (
        lab.status.startswith("diverged: seeds 0, 1 of 2: ")
        and "try a smaller learning rate" in lab.status
    )


def test_closing_stops_the_run_and_waits_for_its_thread(make):
    lab = make(updates=100_000, hide=())
    lab.run()
    wait_until(lambda: updates_made(lab) > 3)
    assert lab_threads()
    lab.close()
    assert not lab_threads()
    assert lab.result.endings == ("stopped", "stopped")


def test_two_labs_do_not_disturb_each_other(make):
    one, two = make(updates=30, seed=1, hide=()), make(updates=30, seed=2, hide=())
    one.run()
    two.run()
    assert one.wait() is State.FINISHED and two.wait() is State.FINISHED
    alone = make(updates=30, seed=1)
    run_to_the_end(alone)
    assert one.result == alone.result


def test_changing_k_and_b_compiles_nothing(make, monkeypatch):
    traced, losses = [], models.Model.losses

    def record(model, *arguments):
        traced.append(model.name)
        return losses(model, *arguments)

    # Python runs it only while TensorFlow traces
    monkeypatch.setattr(models.Model, "losses", record)
    lab = make(seeds=4, optimizer="momentum")
    run_to_the_end(lab)
    assert traced  # no other test trains just this, so the first run compiles
    traced.clear()
    for steps, size in ((2, 20), (7, 5), (20, 3)):
        run_to_the_end(lab, accumulation_steps=steps, microbatch_size=size, learning_rate=0.01)
    assert not traced


@pytest.mark.slow
def test_a_hundred_runs_do_not_grow_the_process(make):
    def held() -> float:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024

    lab = make(updates=10, eval_every=10, hide=("scale", "cost", "noise"))
    for number in range(160):
        run_to_the_end(lab, accumulation_steps=2 + number % 20)
        if number == 59:  # until then the process grows by some 2 %, while memory pools fill
            before = held()
    print(f"after 60 runs {before:.0f} MiB, after 160 {held():.0f} MiB")
    assert held() < 1.05 * before

"""The threads of the lab: an old run is never shown over a new one, faults are shown, and everything ends."""

import pathlib
import threading

import ipywidgets
import pytest
from events import LIMIT, wait_until
from lab_widgets import lab_threads, run_to_the_end, updates_made, widget

from gradlab.lab.experiments import models
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.widget import live_run, views
from gradlab.lab.widget.controls import Controls
from gradlab.lab.widget.live_run import Run, State
from gradlab.lab.widget.panel import Panel
from gradlab.lab.widget.publisher import Publisher
from gradlab.lab.widget.runner import Runner
from gradlab.lab.widget.views import Shown


def test_a_view_of_an_old_run_that_is_still_being_drawn_is_not_shown(make, monkeypatch):
    """The publisher is held while it draws the old run, and let go when the new run is the current one."""
    drawing, changed, old, picture = threading.Event(), threading.Event(), [], views.picture

    def slow_picture(name, shown):
        png, description = picture(name, shown)
        if name == "losses" and shown.result is not None and shown.experiment.accumulation_steps == 5 and not old:
            old.append(description)
            drawing.set()
            assert changed.wait(LIMIT)
        return png, description

    lab = make(updates=100_000)
    monkeypatch.setattr(views, "picture", slow_picture)
    lab.run()
    assert drawing.wait(LIMIT)
    shown = []
    widget(lab, "words-losses").observe(lambda change: shown.append(change["new"]), names="value")
    widget(lab, "accumulation_steps").value = 2
    changed.set()
    wait_until(lambda: "now: k = 2" in lab.views["losses"].description)
    lab.stop()
    lab.wait()
    assert shown and not any("now: k = 5" in description for description in shown)


def test_the_publisher_shows_the_current_run_alone():
    panel = Panel(Controls({}, [], []), ipywidgets.HBox(), rerun=True, against="updates", hide=())
    runner = Runner()
    publisher = Publisher(panel, runner, lambda run: Shown(run.experiment, "now"))
    old, new = (Run(Experiment(accumulation_steps=k)) for k in (1, 2))
    for run in (old, new):
        run.over.set()  # nothing to train: the worker ends at once
        runner.start(run)
    before = panel.status, panel.views, panel.progress.value
    publisher.show_counters(old)
    publisher.paint(Shown(old.experiment, "old"), "losses", old)
    assert (panel.status, panel.views, panel.progress.value) == before
    publisher.show_counters(new)
    publisher.paint(Shown(new.experiment, "new"), "losses", new)
    assert panel.status == new.status() and panel.views["losses"] != before[1]["losses"]
    runner.join(LIMIT)


def test_a_fault_in_the_worker_is_shown(make, monkeypatch):
    def breaks(job, stop):
        raise OSError("the disk <is> gone")
        yield

    lab = make()
    with monkeypatch.context() as patch:
        patch.setattr(live_run, "updates_of", breaks)
        lab.run()
        assert lab.wait() is State.FAILED
    assert lab.status == "failed: OSError: the disk <is> gone"
    line = widget(lab, "status")
    assert "<b>failed</b>: OSError: the disk &lt;is&gt; gone" in line.value
    assert "<details>" in line.value and "Traceback" in line.value
    run_to_the_end(lab)
    assert "Traceback" not in line.value


def test_a_fault_in_the_drawing_is_shown(make, monkeypatch):
    picture = views.picture

    def breaks(name, shown):
        if name == "losses":
            raise ZeroDivisionError("no axes")
        return picture(name, shown)

    lab = make()
    monkeypatch.setattr(views, "picture", breaks)
    lab.run()
    lab.wait()
    assert lab.status == "not shown: ZeroDivisionError: no axes"
    assert "Traceback" in widget(lab, "status").value


def test_a_run_that_diverges_says_what_to_try(make):
    lab = make(optimizer="sgd", learning_rate=1e30, updates=50)
    lab.run()
    lab.wait()
    assert lab.status.startswith("diverged: seeds 0, 1 of 2: ") and "try a smaller learning rate" in lab.status


def test_closing_waits_for_the_threads_and_draws_no_further_view(make, monkeypatch):
    """The publisher is held in the middle of drawing a view until the lab is being closed."""
    drawing, closing, drawn, picture = threading.Event(), threading.Event(), [], views.picture

    def held_picture(name, shown):
        drawn.append(name)
        drawing.set()
        assert closing.wait(LIMIT)
        return picture(name, shown)

    lab = make(updates=100_000, hide=())
    lab.run()
    wait_until(lambda: updates_made(lab) > 3)
    monkeypatch.setattr(views, "picture", held_picture)
    assert drawing.wait(LIMIT)
    closer = threading.Thread(target=lab.close)
    closer.start()
    wait_until(lambda: lab.state in (State.STOPPING, State.FINISHED))
    closing.set()
    closer.join()
    assert len(drawn) == 1 < len(lab.views) - 1  # the view that was being drawn, not every view but the toy
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

    monkeypatch.setattr(models.Model, "losses", record)  # Python runs it only while TensorFlow traces
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

"""The lab without a browser: its states, its threads, and that nothing old is shown over something new."""

import threading
import time

import pytest

import gradlab
from gradlab.lab import training_run, widget
from gradlab.lab.training_run import State

QUICK = dict(updates=5, eval_every=5)


@pytest.fixture
def make():
    labs = []

    def make(**preset):
        labs.append(gradlab.AccumulationLab(**QUICK | preset))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gradlab")]


def status(lab):
    return lab._status.value


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_waits_for_its_user(make):
    lab = make()
    assert "ready" in status(lab) and "press Run" in status(lab)
    assert lab.updates == [] and lab._stop_button.disabled
    assert bytes(lab._image.value).startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match=r"needs a run: call run\(\) first"):
        lab.wait()


def test_run_trains_to_the_end(make):
    lab = make()
    before = lab._image.value
    lab._run_button.click()
    assert lab.wait() is State.FINISHED
    assert len(lab.updates) == 5 and lab._progress.value == 5
    assert "finished" in status(lab) and "update 5 of 5" in status(lab)
    assert lab._image.value != before
    assert "Training after 5 of 5 updates" in lab._words.value


@pytest.mark.parametrize(
    ("control", "value"),
    [("accumulation_steps", 2), ("microbatch_size", 3), ("learning_rate", 0.01), ("method", "variables")],
)
def test_a_moved_control_reruns(make, control, value):
    lab = make()
    lab.run()
    lab.wait()
    first = lab._current
    lab._controls[control].value = value
    assert lab._current is not first
    assert getattr(lab.experiment, control) == value
    assert lab.wait() is State.FINISHED
    assert lab._current.experiment == lab.experiment


def test_towers_are_for_the_static_graphs(make):
    lab = make()
    assert lab._controls["towers"].disabled and lab._controls["towers"].max == 3
    lab._controls["method"].value = "towers"
    assert not lab._controls["towers"].disabled
    lab._controls["towers"].value = 3
    assert lab.wait() is State.FINISHED
    assert lab.experiment.effective_batch == 300 and "3 × 5 × 20 = <b>300</b>" in lab._batch.value
    lab._controls["method"].value = "microbatched"
    assert lab.experiment.towers == 1 and lab.wait() is State.FINISHED


def test_stop_ends_a_run_and_keeps_what_it_has(make):
    lab = make(updates=100_000, accumulation_steps=1)
    lab.run()
    until(lambda: len(lab.updates) > 5)
    lab._stop_button.click()
    assert lab.wait(10) is State.STOPPED
    assert 5 < len(lab.updates) < 100_000
    assert "stopped" in status(lab) and lab._stop_button.disabled


def test_of_many_quick_moves_the_last_one_s_run_survives(make):
    lab = make(updates=50)
    for steps in range(1, 21):
        lab._controls["accumulation_steps"].value = steps
    assert lab.wait() is State.FINISHED
    assert len(lab.updates) == 50 and all(len(update.losses) == 20 for update in lab.updates)
    assert "20 × 20" in lab._batch.value


def test_an_old_run_is_never_shown_over_a_new_one(make):
    lab = make(updates=100_000)
    lab.run()
    until(lambda: len(lab.updates) > 1)
    old = lab._current
    lab._controls["accumulation_steps"].value = 2
    lab.stop()
    lab.wait()
    image, words, progress = lab._image.value, status(lab), lab._progress.value
    lab._show_counters(old)
    lab._show_plot(old)
    assert (lab._image.value, status(lab), lab._progress.value) == (image, words, progress)


def test_a_fault_in_the_worker_is_shown(make, monkeypatch):
    def breaks(experiment, seed):
        raise OSError("the disk <is> gone")
        yield

    monkeypatch.setattr(training_run, "train", breaks)
    lab = make()
    lab.run()
    assert lab.wait() is State.FAILED
    assert "<b>failed</b>: OSError: the disk &lt;is&gt; gone" in status(lab)
    assert "<details>" in status(lab) and "Traceback" in status(lab)
    monkeypatch.undo()
    lab.run()
    assert lab.wait() is State.FINISHED and "Traceback" not in status(lab)


def test_a_fault_in_the_drawing_is_shown(make, monkeypatch):
    lab = make()

    def breaks(*arguments, **more):
        raise ZeroDivisionError("no axes")

    monkeypatch.setattr(widget.live_plot, "training_figure", breaks)
    lab.run()
    lab.wait()
    assert "not shown</b>: ZeroDivisionError: no axes" in status(lab)


def test_a_run_that_diverges_says_what_to_try(make):
    lab = make(optimizer="sgd", learning_rate=1e30, updates=50)
    lab.run()
    lab.wait()
    assert "diverged" in status(lab) and "try a smaller learning rate" in status(lab)


def test_what_cannot_be_run_is_said_and_not_run(make):
    lab = make(microbatch_size=5000)
    lab._controls["accumulation_steps"].value = 12
    assert "not run" in status(lab) and "at most the 55000 training examples" in status(lab)
    assert lab._current is None
    assert "12" not in lab._batch.value


def test_what_cannot_be_run_ends_the_run_before_and_is_not_talked_over(make):
    lab = make(microbatch_size=5000, accumulation_steps=1, updates=100_000)
    lab.run()
    until(lambda: len(lab.updates) > 1)
    lab._controls["accumulation_steps"].value = 12
    assert lab.wait(20) is State.STOPPED
    assert "not run" in status(lab)
    lab._controls["accumulation_steps"].value = 2
    until(lambda: "update" in status(lab))
    lab.stop()
    assert lab.wait(20) is State.STOPPED and "stopped" in status(lab)


def test_the_seed_chooses_the_run(make):
    first, same, other = make(seed=4), make(seed=4), make(seed=5)
    losses = []
    for lab in (first, same, other):
        lab.run()
        lab.wait()
        losses.append([update.loss for update in lab.updates])
    assert losses[0] == losses[1] != losses[2]


def test_two_labs_do_not_fight(make):
    one, two = make(updates=30, seed=1), make(updates=30, seed=2)
    one.run()
    two.run()
    assert one.wait() is State.FINISHED and two.wait() is State.FINISHED
    alone = make(updates=30, seed=1)
    alone.run()
    alone.wait()
    assert [u.loss for u in one.updates] == [u.loss for u in alone.updates]


def test_its_text_form_is_short_and_always_the_same(make):
    lab = make(method="towers", towers=2)
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == "AccumulationLab: towers, dense on mnist, effective batch 2 x 5 x 20 = 200"
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        (dict(k=5), r"AccumulationLab takes seed, dataset, model, .* Received: k"),
        (dict(accumulation_steps=0), "accumulation_steps must be a positive integer. Received: 0"),
        (dict(seed=-1), "seed must be an integer of 0 or more. Received: -1"),
        (dict(method="towers", towers=9), "towers must be at most 3, .* Received: 9"),
    ],
)
def test_bad_presets_get_one_sentence(preset, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradlab.AccumulationLab(**preset)

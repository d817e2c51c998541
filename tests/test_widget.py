"""The lab without a browser: its states, its threads, and that nothing old is shown over something new."""

import threading
import time

import pytest

import gradlab
from gradlab.lab import sweep, views
from gradlab.lab.live_run import State

QUICK = dict(updates=5, eval_every=5, seeds=2)


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
    return lab._panel._status.value


def control(lab, name):
    return lab._controls.widgets[name]


def button(lab, name):
    return lab._panel.buttons[name]


def view(lab, name="losses"):
    return bytes(lab._panel._images[name].value)


def words(lab, name="losses"):
    return lab._panel._words[name].value


def made(lab):
    """How many updates the first seed has."""
    return 0 if lab.result is None else int(lab.result.updates[0])


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_waits_for_its_user(make):
    lab = make()
    assert "idle" in status(lab) and "press Run" in status(lab)
    assert lab.result is None and lab.state is State.IDLE
    assert all(view(lab, name).startswith(b"\x89PNG") for name in views.VIEWS)
    with pytest.raises(RuntimeError, match=r"needs a run: call run\(\) first"):
        lab.wait()


def test_run_trains_to_the_end(make):
    lab = make()
    before = view(lab)
    button(lab, "run").click()
    assert lab.wait() is State.FINISHED
    assert made(lab) == 5 and lab._panel.progress.value == 1
    assert lab.result.seeds == (0, 1) and lab.result.endings == ("finished", "finished")
    assert "finished" in status(lab) and "2 seeds, update 5 of 5" in status(lab)
    assert view(lab) != before
    assert "training loss" in words(lab) and "nats" in words(lab)
    assert lab.result == sweep.run(lab.experiment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulation_steps", 2),
        ("microbatch_size", 3),
        ("learning_rate", 0.01),
        ("method", "variables"),
        ("optimizer", "sgd"),
        ("model", "lenet"),
        ("budget", 7.0),
    ],
)
def test_a_moved_control_reruns(make, name, value):
    lab = make()
    lab.run()
    lab.wait()
    first = lab._current
    control(lab, name).value = value
    assert lab._current is not first
    assert getattr(lab.experiment, "updates" if name == "budget" else name) == value
    assert lab.wait() is State.FINISHED
    assert lab._current.experiment == lab.experiment


def test_towers_are_for_the_static_graphs(make):
    lab = make()
    assert control(lab, "towers").disabled and control(lab, "towers").max == 3
    control(lab, "method").value = "towers"
    assert not control(lab, "towers").disabled
    control(lab, "towers").value = 3
    assert lab.wait() is State.FINISHED
    assert lab.experiment.effective_batch == 300 and "3 × 5 × 20 = <b>300</b>" in lab._panel.batch.value
    control(lab, "method").value = "microbatched"
    assert lab.experiment.towers == 1 and lab.wait() is State.FINISHED


def test_stop_ends_a_run_and_keeps_what_it_has(make):
    lab = make(updates=100_000, accumulation_steps=1)
    lab.run()
    until(lambda: made(lab) > 5)
    button(lab, "stop").click()
    assert lab.wait(10) is State.FINISHED
    assert 5 < made(lab) < 100_000
    assert "stopped" in status(lab) and set(lab.result.endings) == {"stopped"}


def test_of_many_quick_moves_the_last_one_s_run_survives(make):
    lab = make(updates=50)
    for steps in range(1, 21):
        control(lab, "accumulation_steps").value = steps
    assert lab.wait() is State.FINISHED
    assert lab.result.losses.shape == (2, 50, 20)
    assert "20 × 20" in lab._panel.batch.value


def test_an_old_run_is_never_shown_over_a_new_one(make):
    lab = make(updates=100_000)
    lab.run()
    until(lambda: made(lab) > 1)
    old = lab._current
    control(lab, "accumulation_steps").value = 2
    lab.stop()
    lab.wait()
    before = view(lab), status(lab), lab._panel.progress.value
    lab._publisher.show_counters(old)
    lab._publisher.paint(lab._shown(old), "losses", old)
    assert (view(lab), status(lab), lab._panel.progress.value) == before


def test_a_fault_in_the_worker_is_shown(make, monkeypatch):
    def breaks(part, stop):
        raise OSError("the disk <is> gone")
        yield

    monkeypatch.setattr(sweep, "updates_of", breaks)
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

    monkeypatch.setitem(views.VIEWS, "losses", breaks)
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
    control(lab, "accumulation_steps").value = 12
    assert "not run" in status(lab) and "at most the 55000 training examples" in status(lab)
    assert lab._current is None
    assert "12" not in lab._panel.batch.value


def test_what_cannot_be_run_ends_the_run_before_and_is_not_talked_over(make):
    lab = make(microbatch_size=5000, accumulation_steps=1, updates=100_000)
    lab.run()
    until(lambda: made(lab) > 1)
    control(lab, "accumulation_steps").value = 12
    assert lab.wait(20) is State.FINISHED
    assert "not run" in status(lab)
    control(lab, "accumulation_steps").value = 2
    until(lambda: "update" in status(lab))
    lab.stop()
    assert lab.wait(20) is State.FINISHED and "stopped" in status(lab)


def test_the_seed_chooses_the_run(make):
    first, same, other = make(seed=4), make(seed=4), make(seed=5)
    losses = []
    for lab in (first, same, other):
        lab.run()
        lab.wait()
        losses.append(lab.result.losses[:, :3].tolist())
    assert losses[0] == losses[1] != losses[2]


def test_two_labs_do_not_fight(make):
    one, two = make(updates=30, seed=1), make(updates=30, seed=2)
    one.run()
    two.run()
    assert one.wait() is State.FINISHED and two.wait() is State.FINISHED
    alone = make(updates=30, seed=1)
    alone.run()
    alone.wait()
    assert one.result == alone.result


def test_its_text_form_is_short_and_always_the_same(make):
    lab = make(method="towers", towers=2)
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == "AccumulationLab: towers, dense on mnist, effective batch 2 x 5 x 20 = 200"
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        (dict(k=5), r"AccumulationLab takes seed, hide, lock, rerun, against, dataset, .* Received: k"),
        (dict(accumulation_steps=0), "accumulation_steps must be a positive integer. Received: 0"),
        (dict(seed=-1), "seed must be an integer of 0 or more. Received: -1"),
        (dict(seeds=(1, 2)), r"seeds must be a positive integer. Received: \(1, 2\)"),
        (dict(hide=("optimiser",)), "a name in hide must be one of accumulation_steps, .* Received: 'optimiser'"),
        (dict(lock="run"), "a name in lock must be one of accumulation_steps, .* Received: 'run'"),
        (dict(against="days"), "against must be one of updates, examples, seconds. Received: 'days'"),
        (dict(updates=3, seconds=2.0), "one budget: updates, examples or seconds. Received: updates=3, seconds=2.0"),
        (dict(method="towers", towers=9), "towers must be at most 3, .* Received: 9"),
    ],
)
def test_bad_presets_get_one_sentence(preset, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradlab.AccumulationLab(**preset)

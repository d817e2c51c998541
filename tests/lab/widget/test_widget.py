"""The lab without a browser: its states, its threads, and that nothing old is shown over something new."""

import threading
import time

import numpy as np
import pytest

import gradlab
from gradlab.lab.experiments import sweep
from gradlab.lab.widget import views
from gradlab.lab.widget.live_run import State

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

    monkeypatch.setitem(views._FIGURES, "losses", breaks)
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


def test_closing_waits_for_the_threads_and_does_not_draw_what_is_left(make, monkeypatch):
    lab = make(updates=10_000)
    lab.run()
    until(lambda: made(lab) > 3)
    drawn, picture = [], views.picture
    monkeypatch.setattr(views, "picture", lambda name, shown: drawn.append(name) or picture(name, shown))
    lab.close()
    assert len(drawn) <= 1 < len(lab._panel.shown) - 1  # at most what was under way, not every view but the toy
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gradlab")]
    assert lab.result.endings == ("stopped", "stopped")


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


def test_steps_show_one_micro_batch_after_the_other(make):
    lab = make(accumulation_steps=3)
    button(lab, "step_microbatch").click()  # begins a run, paused
    until(lambda: "micro-batch 1 of 3: loss" in lab._panel._narration.value)
    until(lambda: lab.state is State.PAUSED)
    assert made(lab) == 0 and lab._panel.switches["pause"].value  # nothing of the window is a result yet
    losses = lab._current.updates[0][0].losses
    assert f"{losses[0]:.3f}" in lab._panel._narration.value and "20 examples in it" in lab._panel._narration.value
    button(lab, "step_microbatch").click()
    until(lambda: "micro-batch 2 of 3" in lab._panel._narration.value)
    assert lab._current.window().tolist() == losses[:2].tolist()
    button(lab, "step_update").click()  # the rest of the window
    until(lambda: "applied once: this was update 1" in lab._panel._narration.value)
    until(lambda: lab.state is State.PAUSED)
    assert made(lab) == 1
    button(lab, "step_update").click()
    until(lambda: "this was update 2" in lab._panel._narration.value and lab.state is State.PAUSED)
    time.sleep(0.3)
    assert made(lab) == 2
    lab.pause(False)
    assert lab.wait() is State.FINISHED and made(lab) == 5
    assert lab.result == sweep.run(lab.experiment)  # watched or not, it is the same training


def test_pause_holds_a_run_and_lets_it_go_on(make):
    lab = make(updates=3000)
    lab.run()
    until(lambda: made(lab) > 5)
    lab.pause()
    until(lambda: lab.state is State.PAUSED)
    count = made(lab)
    time.sleep(0.3)
    assert made(lab) - count <= 1
    until(lambda: "paused" in status(lab))
    lab.pause(False)
    until(lambda: made(lab) > count + 5)
    lab.pause()
    lab.stop()  # a paused run can be stopped
    assert lab.wait(10) is State.FINISHED and "stopped" in status(lab)


def test_slow_motion_names_what_happens(make, monkeypatch):
    monkeypatch.setattr("gradlab.lab.widget.live_run.SLOW_SECONDS", 0.4)  # longer than a plot takes on a busy machine
    lab = make(accumulation_steps=2, updates=2)
    lab._panel.switches["slow"].value = True
    said = []
    lab._panel._narration.observe(lambda change: said.append(change["new"]), names="value")
    lab.run()
    assert lab.wait() is State.FINISHED
    text = " ".join(said)
    for words in ("micro-batch 1 of 2", "micro-batch 2 of 2", "added to the accumulator: 40 examples", "2 gradients"):
        assert words in text


def test_every_state_has_its_word(make):
    lab = make(updates=100_000)
    states = [lab.state]
    lab.run()
    states.append(lab.state)
    until(lambda: lab.state is State.RUNNING)
    lab.pause()
    until(lambda: lab.state is State.PAUSED)
    lab.stop()
    states.append(lab.state)
    lab.wait(10)
    states.append(lab.state)
    assert states[:2] == [State.IDLE, State.STARTING] and states[-1] is State.FINISHED
    assert states[2] in (State.STOPPING, State.FINISHED)  # it may be quick
    words = {state.value for state in State}
    assert words == {"idle", "starting", "running", "paused", "stopping", "finished", "failed"}


def test_pins_are_named_compared_and_removed(make):
    lab = make()
    button(lab, "pin").click()
    assert "no run to pin yet" in status(lab)
    for steps in (1, 5):
        lab.run(accumulation_steps=steps)
        lab.wait()
        button(lab, "pin").click()
    lab.pin()
    assert [name for name, _ in lab.pinned] == ["k = 1, b = 20", "k = 5, b = 20", "k = 5, b = 20 (2)"]
    assert "k = 1, b = 20: from" in words(lab) and "now: k = 5" in words(lab)
    name = lab._pins._rows[0][0]
    name.value = "no accumulation"
    assert "no accumulation: from" in words(lab)
    row = lab._pins.view.children[1].children
    assert "1 × 20 = 20" in row[1].value and "±" in row[1].value
    row[2].click()
    assert [name for name, _ in lab.pinned] == ["k = 5, b = 20", "k = 5, b = 20 (2)"]
    assert "no accumulation" not in words(lab)


def test_accuracies_are_drawn_against_what_is_chosen(make):
    lab = make()
    lab.run()
    lab.wait()
    lab._panel.against.value = "examples"
    assert "after 500 examples" in words(lab, "accuracy")
    lab._panel.against.value = "seconds"
    assert "seconds" in words(lab, "accuracy")
    assert lab.state is State.FINISHED  # the same run


def test_the_noise_view_fills_in_as_runs_are_made(make):
    lab = make(updates=12)
    for steps in (2, 5, 10):
        lab.run(accumulation_steps=steps)
        lab.wait()
    assert [point.experiment.accumulation_steps for point in lab._points] == [2, 5]
    assert "k = 10" in words(lab, "noise") and "the law says" in words(lab, "noise")


def test_what_is_exported(make, tmp_path):
    import pandas as pd

    lab = make()
    with pytest.raises(ValueError, match="there is nothing to write yet: press Run"):
        lab.to_csv(tmp_path)
    lab.run()
    lab.wait()
    lab.pin("kept")
    frame = pd.read_csv(lab.to_csv(tmp_path))
    assert set(frame.run) == {"this run", "kept"} and len(frame) == 2 * 2 * 5 * 5
    assert lab.to_csv(tmp_path).name == "gradlab-runs-2.csv"  # nothing is overwritten
    assert lab.to_png(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert "not written" in (lab._written(lambda: lab.to_csv(tmp_path / "none")) or status(lab))


def test_the_code_repeats_the_run(make):
    lab = make(accumulation_steps=4, learning_rate=0.01)
    lab.run()
    lab.wait()
    lab._panel.switches["code"].value = True
    assert "gradlab.Experiment(" in lab._panel.code.value
    found = {}
    exec(lab.code(), found)  # setup says that it was called with just these arguments
    assert found["result"] == lab.result


def test_a_preset_is_a_line_and_back(make):
    lab = make(
        accumulation_steps=20, hide=("optimizer", "toy", "csv"), lock=("microbatch_size",), seed=3, against="seconds"
    )
    assert control(lab, "microbatch_size").disabled and not control(lab, "learning_rate").disabled
    assert "toy" not in lab._panel.shown
    shown = []

    def walk(widget):
        shown.append(widget)
        for child in getattr(widget, "children", ()):
            walk(child)

    walk(lab.view)
    assert control(lab, "optimizer") not in shown and control(lab, "method") in shown
    assert button(lab, "csv") not in shown and button(lab, "png") in shown
    import json

    again = gradlab.AccumulationLab(**json.loads(json.dumps(lab.to_dict())))
    assert again.to_dict() == lab.to_dict() and again.experiment == lab.experiment
    assert again.experiment.seed_numbers == (3, 4)
    again.close()


def test_reset_brings_back_the_preset(make):
    lab = make(accumulation_steps=4)
    lab.run(accumulation_steps=60, model="lenet", method="variables", seeds=1)
    assert control(lab, "accumulation_steps").value == 60
    until(lambda: made(lab) > 0)
    lab.pin("kept")
    button(lab, "reset").click()
    assert lab.state is State.IDLE and control(lab, "accumulation_steps").value == 4
    assert lab.result is None and "idle" in status(lab) and [name for name, _ in lab.pinned] == ["kept"]


def test_without_rerun_a_moved_control_waits_for_run(make):
    lab = make(rerun=False)
    control(lab, "accumulation_steps").value = 7
    assert lab.state is State.IDLE and "press Run" in status(lab) and "7 × 20" in lab._panel.batch.value
    lab.run()
    assert lab.wait() is State.FINISHED and lab.result.losses.shape == (2, 5, 7)


def test_other_kinds_of_budget(make):
    lab = make(updates=None, examples=250)
    assert lab.experiment.examples == 250 and lab.experiment.updates is None
    lab.run()
    lab.wait()
    assert lab.result.examples[0, -1] == 250
    control(lab, "budget_kind").value = "seconds"
    assert lab.experiment.seconds == 1.0
    lab.run(updates=4)
    assert lab.wait() is State.FINISHED and made(lab) == 4 and control(lab, "budget_kind").value == "updates"
    lab.run(seconds=0.2)
    assert lab.wait() is State.FINISHED and np.nansum(lab.result.update_seconds[0]) >= 0.2


def test_without_a_front_end_it_shows_a_picture_and_a_table(make):
    lab = make()
    lab.run()
    lab.wait()
    bundle = lab._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "this run" in bundle["text/plain"] and "5 × 20 = 100" in bundle["text/plain"]


def test_views_have_words_for_those_who_do_not_see_them(make):
    lab = make(updates=10)
    before = {name: words(lab, name) for name in views.VIEWS}
    lab.run()
    lab.wait()
    for name in views.VIEWS:
        assert words(lab, name) != before[name] or name == "toy"


def test_changing_k_and_b_compiles_nothing(make, monkeypatch):
    import collections

    from gradlab.lab.experiments import training

    monkeypatch.setattr(training, "_idle", collections.defaultdict(list))
    lab = make()
    lab.run()
    lab.wait()
    kind = ("together", 2, "dense", "mnist", "adam")
    [trainer] = training._idle[kind]
    compiled = trainer._compiled
    assert not hasattr(compiled, "get_concrete_function")  # it is one: nothing can trace it again
    for steps, size in ((2, 20), (7, 5), (20, 3)):
        lab.run(accumulation_steps=steps, microbatch_size=size, learning_rate=0.01)
        lab.wait()
    assert training._idle[kind] == [trainer]
    assert trainer._compiled is compiled


@pytest.mark.slow
def test_a_hundred_runs_do_not_grow_the_process(make):
    import pathlib

    def held() -> float:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024

    lab = make(updates=10, hide=("scale", "cost", "noise"))
    for number in range(120):
        lab.run(accumulation_steps=2 + number % 20)
        lab.wait()
        if number == 19:
            before = held()
    print(f"after 20 runs {before:.0f} MiB, after 120 {held():.0f} MiB")
    assert held() < 1.05 * before

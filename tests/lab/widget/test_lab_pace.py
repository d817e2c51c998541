"""The pace of a run: states, steps, pause and slow motion."""

import threading

import pytest
from events import LIMIT, wait_until
from lab_widgets import click, run_to_the_end, updates_made, wait_for_pause, widget

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import run as run_module
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.widget import live_run
from gradlab.lab.widget.live_run import Pace, Run, State

SHORT = Experiment(model="dense", method="microbatched", accumulation_steps=3, updates=2, seeds=2)


class Recorded(Run):
    """A run that notes its sentences."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "narration" and value:
            vars(self).setdefault("said", []).append(value)


@pytest.fixture
def gate(monkeypatch):
    """An event that each update of a run waits for. The event `held` is set while one waits."""
    gate, updates_of = threading.Event(), run_module.updates_of
    gate.held = threading.Event()

    def gated(job, stop):
        for updates in updates_of(job, stop):
            gate.held.set()
            assert gate.wait(LIMIT)
            gate.held.clear()
            yield updates

    monkeypatch.setattr(run_module, "updates_of", gated)
    yield gate
    gate.set()


def test_every_state_has_its_word(make, gate):
    lab = make(updates=100_000)
    assert lab.state is State.IDLE
    lab.run()
    assert lab.state is State.STARTING
    gate.set()
    wait_until(lambda: lab.state is State.RUNNING)
    lab.pause()
    wait_until(lambda: lab.state is State.PAUSED)
    gate.clear()
    lab.pause(False)
    wait_until(lambda: gate.held.is_set() and lab.state is State.RUNNING)
    lab.stop()
    assert lab.state is State.STOPPING
    gate.set()
    assert lab.wait() is State.FINISHED
    words = {state.value for state in State}
    assert words == {"idle", "starting", "running", "paused", "stopping", "finished", "failed"}


def test_steps_show_one_micro_batch_after_the_other(make):
    lab = make(accumulation_steps=3)
    click(lab, "step_microbatch")  # starts a run, paused
    wait_for_pause(lab, "micro-batch 1 of 3: loss")
    first = lab.narration
    assert first in widget(lab, "narration").value
    assert updates_made(lab) == 0 and widget(lab, "pause").value  # no window is complete yet
    click(lab, "step_microbatch")
    wait_for_pause(lab, "micro-batch 2 of 3")
    assert updates_made(lab) == 0
    click(lab, "step_update")  # the rest of the window
    wait_for_pause(lab, "applied once, as update 1")
    assert updates_made(lab) == 1
    assert f"{lab.result.losses[0, 0, 0]:.3f}" in first and "now holds 20 examples" in first
    click(lab, "step_update")
    wait_for_pause(lab, "as update 2")
    run_to_the_end(make())  # time in which a run that is not held would go on
    assert updates_made(lab) == 2
    lab.pause(False)
    assert lab.wait() is State.FINISHED and updates_made(lab) == 5
    assert lab.result == run(lab.experiment)  # watched or not, it is the same training


def test_a_window_is_revealed_one_loss_after_the_other():
    paused = Run(SHORT, Pace(paused=True))
    worker = threading.Thread(target=paused.work)
    worker.start()
    shown = []
    for number in (1, 2, 3):
        paused.pace.step(update=False)
        wait_until(
            lambda number=number: (
                f"micro-batch {number} of 3" in paused.narration and paused.waiting
            )
        )
        shown.append(paused.window().tolist())
        assert paused.result() is None
    losses = paused.updates[0][0].losses.tolist()
    assert shown == [losses[:1], losses[:2], losses]
    paused.pace.step(update=False)
    wait_until(lambda: "3 gradients averaged" in paused.narration and paused.waiting)
    assert paused.window().tolist() == [] and paused.result().losses[0, 0].tolist() == losses
    paused.stop.set()
    worker.join()


def test_pause_holds_a_run_and_resumes_it(make):
    lab = make(updates=100_000)
    lab.run()
    wait_until(lambda: updates_made(lab) > 5)
    lab.pause()
    wait_until(lambda: lab.state is State.PAUSED)
    count = updates_made(lab)
    run_to_the_end(make())  # time in which a run that is not held would go on
    assert updates_made(lab) - count <= 1
    wait_until(lambda: lab.status.startswith("paused: "))
    lab.pause(False)
    wait_until(lambda: updates_made(lab) > count + 5)
    lab.pause()
    lab.stop()  # a paused run can be stopped
    assert lab.wait() is State.FINISHED and lab.status.startswith("stopped: ")


def test_slow_motion_names_every_micro_batch_and_update(monkeypatch):
    monkeypatch.setattr(live_run, "SLOW_SECONDS", 0.01)
    slow = Recorded(SHORT, Pace(slow=True))
    slow.work()
    said = slow.said
    assert len(said) == 2 * (3 + 1)
    for update, window in enumerate((said[:4], said[4:]), 1):
        for number, sentence in enumerate(window[:3], 1):
            assert f"micro-batch {number} of 3: loss" in sentence
            assert f"added to the accumulator, which now holds {20 * number} examples" in sentence
        assert (
            "3 gradients averaged" in window[3] and f"applied once, as update {update}" in window[3]
        )


def test_the_slow_switch_narrates_a_run(make, monkeypatch):
    monkeypatch.setattr(live_run, "SLOW_SECONDS", 0.01)
    lab = make(accumulation_steps=2, updates=2)
    widget(lab, "slow").value = True
    run_to_the_end(lab)
    assert (
        "2 gradients averaged" in lab.narration and "as update 2" in widget(lab, "narration").value
    )
    widget(lab, "slow").value = False
    run_to_the_end(lab)
    assert lab.narration == ""

"""What one visitor, or a local process, may try against the hub of a classroom: nobody else waits
for it for long."""

import contextlib
import socket

import pytest
from events import wait_until
from lab_widgets import click, lab_threads, run_to_the_end, updates_made, wait_for_pause, widget

import gradlab
from gradlab.lab.classroom.hub import Hub
from gradlab.lab.classroom.limits import Limits
from gradlab.lab.classroom.trainer import LostTrainer
from gradlab.lab.classroom.visitor import Visitor
from gradlab.lab.experiments import door, stream
from gradlab.lab.experiments.run import run
from gradlab.lab.experiments.stream import train_and_send
from gradlab.lab.widget.live_run import State

ENDLESS = dict(updates=10**6, microbatches=10**9, examples=10**9)


class TrainerHere:
    """Trains in a thread of the hub."""

    def train(self, work):
        train_and_send(*work)

    def close(self):
        pass


class LostAtFirst(TrainerHere):
    """Is lost after the first update of its first run."""

    def __init__(self):
        self.is_new = True

    def train(self, work):
        if not self.is_new:
            super().train(work)
            return
        self.is_new = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "_train", send_one_update)
            super().train(work)
        raise LostTrainer


def send_one_update(line, experiment, stop, more):
    line.send(("about", {}))
    line.send(("updates", ([next(iter(stream.Here(experiment, stop)))], 0.0)))
    door._hang_up(line)
    raise OSError


@pytest.fixture
def classroom():
    """A function that opens a classroom with one trainer and these limits, and gives a function
    that makes labs."""
    with contextlib.ExitStack() as stack:

        def open_hub(trainer=None, **limits):
            hub = Hub([trainer or TrainerHere()], Limits(**limits))
            stack.callback(hub.close)

            def make(**preset):
                visitor = Visitor(hub.address, hub.key)
                stack.callback(visitor.shutdown)
                lab = gradlab.AccumulationLab(executor=visitor, **preset)
                stack.callback(lab.close)
                return lab

            return hub, make

        yield open_hub
    wait_until(lambda: not {"gradlab-visitor", "gradlab-ahead"} & set(lab_threads()))


def test_a_lab_that_is_paused_holds_no_trainer(classroom):
    """One press of "micro-batch" used to hold the trainer until the next one."""
    _, make = classroom()
    one, other = make(updates=400, seeds=1), make(updates=5, seeds=1)
    click(one, "step_microbatch")
    wait_for_pause(one, "micro-batch 1 of 5")
    run_to_the_end(other)
    assert one.state is State.PAUSED
    one.pause(False)
    assert one.wait() is State.FINISHED and one.result == run(one.experiment)


def test_a_lab_in_slow_motion_holds_no_trainer(classroom):
    _, make = classroom()
    one, other = make(updates=400, seeds=1), make(updates=5, seeds=1)
    widget(one, "slow").value = True
    one.run()
    wait_until(lambda: "micro-batch 1 of 5" in one.narration)
    run_to_the_end(other)
    assert one.state is State.RUNNING and one.narration


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_long_run_ends_when_others_wait(classroom, is_paused):
    limits = ENDLESS.copy()
    updates = limits.pop("updates")
    hub, make = classroom(turn=0.5, **limits)
    one, other = make(updates=updates, seeds=1), make(updates=5, seeds=1)
    one.run()
    wait_until(lambda: updates_made(one) > 5)
    one.pause(is_paused)
    run_to_the_end(other)
    sentence = "ended after 0.5 seconds, because others wait for a trainer. Press Run to wait for another turn"
    if is_paused:
        wait_until(lambda: sentence in one.status)
        one.pause(False)
    assert one.wait() is State.FAILED and one.status.startswith(f"failed: {sentence}")
    assert updates_made(one) > 5 and hub.waiting == 0
    one.run(updates=5)  # it has a turn again
    assert one.wait() is State.FINISHED


def test_a_paused_lab_whose_trainer_was_lost_does_not_hold_the_next_one(classroom):
    limits = ENDLESS.copy()
    updates = limits.pop("updates")
    _, make = classroom(LostAtFirst(), turn=0.5, **limits)
    one, other = make(updates=updates, seeds=1), make(updates=5, seeds=1)
    click(one, "step_microbatch")
    wait_for_pause(one, "micro-batch 1 of 5")
    run_to_the_end(other)
    assert one.state is State.PAUSED
    one.pause(False)
    assert one.wait() is State.FAILED and "because others wait" in one.status


def test_a_long_run_goes_on_when_nobody_waits(classroom):
    limits = ENDLESS.copy()
    updates = limits.pop("updates")
    _, make = classroom(turn=0.01, **limits)
    one = make(updates=updates, seeds=1)
    one.run()
    wait_until(lambda: updates_made(one) > 500)
    assert one.state is State.RUNNING
    one.stop()


def test_callers_who_say_nothing_keep_nobody_out(classroom, monkeypatch):
    hub, make = classroom()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(hub.address)) for _ in range(100)]
        run_to_the_end(make(updates=5, seeds=1))
        for line in silent:
            assert line.recv(1)  # the challenge, which it does not answer


def test_a_caller_who_says_nothing_is_hung_up(monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.1)
    opened = door.Door("127.0.0.1", lambda line: line.close(), "gradlab-door")
    with socket.create_connection(opened.address) as silent:
        while silent.recv(1000):
            pass
    opened.close()

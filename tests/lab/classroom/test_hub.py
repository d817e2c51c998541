"""The queue of a classroom: turns, places, limits, lost trainers and visitors who leave."""

import concurrent.futures
import queue
import threading

import pytest
from events import LIMIT, wait_until

from gradlab.lab.classroom.hub import Hub
from gradlab.lab.classroom.limits import BATCH, Limits
from gradlab.lab.classroom.trainer import LostTrainer
from gradlab.lab.classroom.visitor import Visitor
from gradlab.lab.experiments.experiment import Experiment

SMALL = Experiment(model="dense", updates=10, seeds=1)


class HeldTrainer:
    """Begins each run with its name in `begun`, and ends it when the test puts a word into `go`."""

    def __init__(self):
        self.begun, self.go = queue.Queue(), queue.Queue()
        self.is_closed = threading.Event()

    def train(self, work):
        self.begun.put(work[0])
        word = self.go.get(timeout=LIMIT)
        if word == "lost":
            raise LostTrainer
        if word == "fails":
            raise ConnectionError("no cluster")

    def close(self):
        self.is_closed.set()


@pytest.fixture
def classroom():
    """A function that opens a classroom with one held trainer and these limits, and gives the
    trainer and the hub."""
    hubs = []

    def open_hub(**limits):
        trainer = HeldTrainer()
        hubs.append((Hub([trainer], Limits(**limits)), trainer))
        return trainer, hubs[-1][0]

    yield open_hub
    for hub, trainer in hubs:
        hub.close()
        trainer.go.put("over")  # only now: it must not begin with what waits
        assert trainer.is_closed.wait(LIMIT)


def visitor(hub):
    return Visitor(hub.address, hub.key)


def ask(someone, name, experiment=SMALL):
    """Ask for a run, and wait until the hub has answered."""
    job = someone.submit(None, name, b"", experiment.to_json(), None)
    wait_until(lambda: job.place is not None or job.done())
    return job


def begin(someone, name):
    """Ask for a run, and wait until the trainer has it."""
    job = ask(someone, name)
    wait_until(lambda: job.place == 0)
    return job


def test_the_trainer_goes_round_among_the_visitors(classroom):
    trainer, hub = classroom()
    one, two, three = (visitor(hub) for _ in range(3))
    first = begin(one, "one")
    second, third = ask(two, "two"), ask(three, "three")
    wait_until(lambda: (second.place, third.place) == (1, 2))
    trainer.go.put("over")
    first.result(timeout=LIMIT)
    again = ask(one, "one again")  # who was served comes after those who were not
    wait_until(lambda: third.place == 1 and again.place == 2)
    for _ in range(3):
        trainer.go.put("over")
    assert [trainer.begun.get(timeout=LIMIT) for _ in range(4)] == [
        "one",
        "two",
        "three",
        "one again",
    ]
    concurrent.futures.wait([second, third, again], timeout=LIMIT)
    assert second.result() is third.result() is again.result() is None and hub.waiting == 0


def test_a_new_visitor_goes_to_the_end_of_the_queue(classroom):
    trainer, hub = classroom()
    one, two, three = (visitor(hub) for _ in range(3))
    for someone in (one, two):
        trainer.go.put("over")
        ask(someone, "first").result(timeout=LIMIT)
    begin(one, "one")
    second = ask(two, "two")
    third = ask(three, "three")
    assert (second.place, third.place) == (1, 2)
    three.shutdown()
    wait_until(lambda: hub.waiting == 1)
    assert ask(visitor(hub), "three, after a reload").place == 2


def test_a_visitor_has_one_run_at_a_time(classroom):
    _, hub = classroom()
    one, other = visitor(hub), visitor(hub)
    begin(other, "busy")
    for number in range(20):
        ask(one, f"change {number}")
    assert hub.waiting == 1
    one.submit(None, "last", b"", SMALL.to_json(), None).cancel()
    wait_until(lambda: hub.waiting == 0)


def test_a_run_whose_trainer_is_lost_comes_next_and_only_once(classroom):
    trainer, hub = classroom()
    one, two = visitor(hub), visitor(hub)
    first = begin(one, "one")
    ask(two, "two")
    for word in ("lost", "lost", "over"):
        trainer.go.put(word)
    assert [trainer.begun.get(timeout=LIMIT) for _ in range(3)] == ["one", "one", "two"]
    with pytest.raises(
        RuntimeError, match="^two trainers were lost, one after the other: press Run to try again$"
    ):
        first.result(timeout=LIMIT)


def test_visitors_who_leave_take_their_runs_with_them(classroom):
    _, hub = classroom(visitors=2)
    one, two = visitor(hub), visitor(hub)
    begin(one, "one")
    ask(two, "two")
    full = ask(visitor(hub), "three")
    with pytest.raises(
        ValueError, match="^the classroom is full: it has 2 visitors. Try again later$"
    ):
        full.result(timeout=LIMIT)
    assert hub.visitors == 2 and hub.waiting == 1
    two.shutdown()
    wait_until(lambda: hub.visitors == 1 and hub.waiting == 0)
    assert ask(visitor(hub), "three").place == 1


def test_idle_visitors_are_released(classroom):
    trainer, hub = classroom(idle=0.2)
    idle, busy, waits = visitor(hub), visitor(hub), visitor(hub)
    released = queue.Queue()
    for name, someone in (("idle", idle), ("busy", busy), ("waits", waits)):
        someone.on_idle = lambda seconds, name=name: released.put((name, seconds))
    trainer.go.put("over")
    ask(idle, "idle").result(timeout=LIMIT)
    job = begin(busy, "busy")
    queued = ask(waits, "waits")
    assert {released.get(timeout=LIMIT) for _ in range(5)} == {("idle", 0.2)}
    trainer.go.put("over")
    trainer.go.put("over")
    concurrent.futures.wait([job, queued], timeout=LIMIT)
    wait_until(lambda: released.get(timeout=LIMIT) == ("busy", 0.2))  # from the end of its run on
    wait_until(lambda: released.get(timeout=LIMIT) == ("waits", 0.2))


def test_a_long_turn_ends_when_others_wait_and_only_then(classroom):
    trainer, hub = classroom(turn=0.05)
    one, two = visitor(hub), visitor(hub)
    first = begin(one, "one")
    assert not concurrent.futures.wait([first], timeout=1).done  # nobody waits
    second = ask(two, "two")
    with pytest.raises(
        ValueError, match="^ended after 0.05 seconds, because others wait for a trainer. Press Run"
    ):
        first.result(timeout=LIMIT)
    trainer.go.put("lost")  # a run that has ended is not tried again
    wait_until(lambda: second.place == 0)
    trainer.go.put("over")
    assert second.result(timeout=LIMIT) is None
    assert [trainer.begun.get(timeout=LIMIT) for _ in range(2)] == [
        "one",
        "two",
    ] and trainer.begun.empty()


def test_a_run_without_a_trainer_fails_and_the_next_one_does_not(classroom):
    trainer, hub = classroom()
    someone = visitor(hub)
    job = begin(someone, "one")
    trainer.go.put("fails")
    with pytest.raises(ConnectionError, match="^no cluster$"):
        job.result(timeout=LIMIT)
    job = begin(someone, "two")
    trainer.go.put("over")
    assert job.result(timeout=LIMIT) is None


def test_a_hub_that_ends_fails_what_waits(classroom):
    trainer, hub = classroom()
    one, two = visitor(hub), visitor(hub)
    begin(one, "one")
    waiting = ask(two, "two")
    hub.close()
    trainer.go.put("over")
    with pytest.raises(
        ConnectionError, match="^the classroom's server is gone: reload the page when it is back$"
    ):
        waiting.result(timeout=LIMIT)
    with pytest.raises(ConnectionError):
        two.submit(None, "late", b"", SMALL.to_json(), None).result(timeout=LIMIT)


TOO_MUCH = {
    "batch": (
        dict(microbatch_size=100, accumulation_steps=50, seeds=3),
        f"seeds * towers * accumulation_steps * microbatch_size must be at most {BATCH} in this "
        "classroom. Received: 3 * 5000 = 15000",
    ),
    "updates": (
        dict(updates=10**9),
        "a run may use at most 10000000 examples in this classroom, over all its seeds. Received: "
        "1 * 100000000000 = 100000000000",
    ),
    "examples": (
        dict(updates=None, examples=10**7, seeds=20),
        "a run may use at most 10000000 examples in this classroom, over all its seeds. Received: "
        "20 * 10000000 = 200000000",
    ),
    "micro-batches": (
        dict(updates=10**7, microbatch_size=1, accumulation_steps=1),
        "a run may use at most 250000 micro-batches in this classroom, over all its seeds. "
        "Received: 1 * 10000000 = 10000000",
    ),
    "seconds": (
        dict(updates=None, seconds=61),
        "a run may train for at most 60 seconds in this classroom, over all its seeds. Received: "
        "1 * 61",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_takes_too_much_is_refused_before_it_waits(name, classroom):
    trainer, hub = classroom()
    fields, sentence = TOO_MUCH[name]
    job = ask(visitor(hub), name, Experiment(**dict(model="dense", updates=10, seeds=1) | fields))
    with pytest.raises(ValueError) as error:
        job.result(timeout=LIMIT)
    assert str(error.value) == sentence and hub.visitors == 0 and trainer.begun.empty()
    assert ask(visitor(hub), "as proposed").place is not None  # the hub goes on


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": "dense", "updates": NaN}', '{"k": 5}', '{"seeds": 1e400}']
)
def test_texts_that_are_no_experiment(text, classroom):
    trainer, hub = classroom()
    someone = visitor(hub)
    with pytest.raises(ValueError):
        someone.submit(None, "", b"", text, None).result(timeout=LIMIT)
    assert trainer.begun.empty() and ask(someone, "as proposed").place is not None


def test_limits_are_checked():
    with pytest.raises(ValueError, match="^visitors must be a positive integer. Received: 0$"):
        Limits(visitors=0)
    with pytest.raises(ValueError, match="^seconds must be a finite number above 0. Received: -1$"):
        Limits(seconds=-1)

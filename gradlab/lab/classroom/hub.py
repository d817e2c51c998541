"""The hub of a classroom: trainers that all visitors share, and the queue in which their runs wait.

A visitor is a process with a lab. It asks for a run; when its turn comes, a trainer calls the lab
back and sends it the updates (gradlab.lab.experiments.stream). A visitor has one run at a time, and
the trainers go round among the visitors:

    next = waiting run of the visitor that was served least recently

A new visitor, or one who reloads the page, goes to the end of the queue.

A trainer that is lost is replaced, and its run is the next one to be trained, once. A run whose
turn takes too long is ended when others wait.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from gradlab.lab.classroom.limits import Limits
from gradlab.lab.classroom.trainer import LostTrainer, RunTrainer
from gradlab.lab.experiments.door import Door

TRIES = 2  # of a run whose trainers are lost


@dataclass(eq=False)
class _Visitor:
    """A visitor.

    Attributes:
        line: the connection.
        has_asked: whether it has asked for a run.
        is_served: whether a trainer has a run of it.
        used: when it last asked for a run, or a run ended.
        turn: the number of its last turn, or of the last one of all when it first asked.
    """

    line: Connection
    has_asked: bool = False
    is_served: bool = False
    used: float = field(default_factory=time.monotonic)
    turn: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, *message: Any) -> None:
        """Sends a message; if the visitor is gone, nothing."""
        with self.lock, contextlib.suppress(OSError):
            self.line.send(message)


@dataclass(eq=False)
class _Job:
    """A run that a visitor asked for.

    Attributes:
        visitor: who asked.
        number: its number there.
        work: the arguments of `train_and_send`.
        tries: how many trainers have begun it.
        began: when the present trainer began it.
        is_ended: whether its turn was too long.
    """

    visitor: _Visitor
    number: int
    work: tuple
    tries: int = 0
    began: float = 0.0
    is_ended: bool = False


class Hub:
    """Has the runs of all visitors trained.

    Args:
        trainers: those that train, each one run at a time.
        limits: what a visitor may ask for, and how many visitors there may be.

    Attributes:
        address: (host, port), where visitors call.
        key: the bytes that they must know.
    """

    def __init__(self, trainers: Sequence[RunTrainer], limits: Limits):
        self._limits = limits
        self._trainers = len(trainers)
        self._changed = threading.Condition()
        self._visitors: set[_Visitor] = set()
        self._waiting: list[_Job] = []
        self._trained: list[_Job] = []  # those that trainers have, from the one that began first
        self._turns = 0
        self._is_closed = False
        self._door = Door("127.0.0.1", self._listen, "gradlab-hub")
        self.address = self._door.address
        self.key = self._door.key
        self._start(self._release_idle)
        self._start(self._end_long_turns)
        for trainer in trainers:
            self._start(self._train, trainer)

    def close(self) -> None:
        """Ends the trainers and all lines."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for visitor in self._visitors:
                visitor.tell("closed", 0, None)
        self._door.close()

    @property
    def visitors(self) -> int:
        """The number of visitors who have asked for a run."""
        return sum(visitor.has_asked for visitor in self._visitors)

    @property
    def waiting(self) -> int:
        """The number of runs that wait."""
        return len(self._waiting)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="gradlab-hub", daemon=True).start()

    def _listen(self, line: Connection) -> None:
        """Hears one visitor, until its line ends."""
        visitor = _Visitor(line)
        with self._changed:
            self._visitors.add(visitor)
        with line:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    kind, number, work = line.recv()
                    if kind == "leave":
                        break
                    if kind == "run":
                        self._take(_Job(visitor, number, work))
                    else:
                        self._forget(visitor)
            self._forget(visitor)
        with self._changed:
            self._visitors.discard(visitor)

    def _take(self, job: _Job) -> None:
        """Puts a run into the queue in place of the visitor's earlier one, or refuses it."""
        with self._changed:
            self._forget(job.visitor)
            is_full = not job.visitor.has_asked and self.visitors >= self._limits.visitors
            try:
                if is_full:
                    raise ValueError(
                        f"the classroom is full: it has {self._limits.visitors} visitors. Try "
                        "again later"
                    )
                self._limits.check(job.work[2])
            except ValueError as error:
                job.visitor.tell("over", job.number, error)
                return
            if not job.visitor.has_asked:
                job.visitor.has_asked = True
                job.visitor.turn = self._turns
            job.visitor.used = time.monotonic()
            self._waiting.append(job)
            self._tell_places()
            self._changed.notify_all()

    def _forget(self, visitor: _Visitor) -> None:
        """Takes a visitor's run out of the queue. One that is trained ends by itself when nobody
        listens to it."""
        with self._changed:
            self._waiting = [job for job in self._waiting if job.visitor is not visitor]
            self._tell_places()

    def _tell_places(self) -> None:
        # Stable: who asked first comes first
        self._waiting.sort(key=lambda job: (-job.tries, job.visitor.turn))
        for place, job in enumerate(self._waiting, 1):
            job.visitor.tell("place", job.number, place)

    def _next(self) -> _Job | None:
        """The next run, when there is one; None if the hub is closed."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            job = self._waiting.pop(0)
            self._turns += 1
            job.visitor.turn = self._turns
            job.visitor.is_served = True
            job.tries = job.tries + 1
            job.began = time.monotonic()
            self._trained.append(job)
            self._tell_places()
            return job

    def _train(self, trainer: RunTrainer) -> None:
        """Gives a trainer one run after another."""
        while (job := self._next()) is not None:
            job.visitor.tell("place", job.number, 0)
            failed: Exception | None = None
            try:
                trainer.train(job.work)
            except LostTrainer:
                if self._tries_again(job):
                    continue
                failed = RuntimeError(
                    "two trainers were lost, one after the other: press Run to try again"
                )
            except Exception as error:  # the trainer continues with the next run
                failed = error
            with self._changed:
                self._trained.remove(job)
            job.visitor.is_served = False
            job.visitor.used = time.monotonic()
            job.visitor.tell("over", job.number, failed)
        trainer.close()

    def _tries_again(self, job: _Job) -> bool:
        """Puts a run whose trainer was lost into the queue again, unless that was its last try."""
        with self._changed:
            if job.tries >= TRIES or job.is_ended or job.visitor not in self._visitors:
                return False
            self._trained.remove(job)
            self._waiting.append(job)
            self._tell_places()
            self._changed.notify_all()
            return True

    def _end_long_turns(self) -> None:
        """Ends the run that has had its trainer for longest, if that is long and others wait.

        Its lab closes the connection to the trainer, which takes the next run then.
        """
        with self._changed:
            while not self._is_closed:
                self._changed.wait(min(1.0, self._limits.turn))
                if not self._waiting or len(self._trained) < self._trainers:
                    continue
                job = next((each for each in self._trained if not each.is_ended), None)
                if job is not None and time.monotonic() - job.began > self._limits.turn:
                    job.is_ended = True
                    job.visitor.tell("over", job.number, ValueError(self._why_ended()))

    def _why_ended(self) -> str:
        return (
            f"ended after {self._limits.turn:g} seconds, because others wait for a trainer. Press "
            "Run to wait for another turn, or choose a shorter run"
        )

    def _release_idle(self) -> None:
        """Tells visitors who have not used their lab for long that they are released. Their
        processes end then."""
        with self._changed:
            while not self._is_closed:
                self._changed.wait(min(10.0, self._limits.idle))
                last = time.monotonic() - self._limits.idle
                waiting = {job.visitor for job in self._waiting}
                for visitor in self._visitors - waiting:
                    if visitor.has_asked and not visitor.is_served and visitor.used < last:
                        visitor.tell("idle", 0, self._limits.idle)

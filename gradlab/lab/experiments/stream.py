"""The updates of an experiment while it is trained: in this process, or in a worker of an executor.

A worker opens a connection to the process of the lab, and sends the updates as it makes them:

    lab -> executor   train_and_send(address, key, experiment)
    worker -> lab     what it computes on; then updates, several in a message where they are quick; then the end
    lab -> worker     "more" for each message that it has shown, or "stop"

If either side is gone, the connection ends, and with it the training. Importing this module does
not import TensorFlow.
"""

import concurrent.futures
import contextlib
import multiprocessing.connection
import queue
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from gradlab import runtime
from gradlab.lab.experiments import environment, worker
from gradlab.lab.experiments.door import Door
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Stop, Update
from gradlab.lab.experiments.seed_jobs import check_experiment, jobs_of
from gradlab.measure.memory import PeakMemory

Made = list[tuple[int, Update]]  # an update of each seed in training

MESSAGE_SECONDS = 0.03  # quick updates wait for each other so long
AHEAD = 4  # messages that a worker sends before the first of them is shown
POLL_SECONDS = 0.02  # between two looks at whether the run was stopped
QUEUE_SECONDS = 0.25  # between two looks at a run that waits: many may wait on one machine
GOODBYE_SECONDS = 10  # in which a lab closes the connection after the last message


class Failed(Exception):
    """A training failed in a worker. The message is its error's; `details` is its traceback."""

    def __init__(self, sentence: str, details: str):
        super().__init__(sentence)
        self.details = details


class Stream(Protocol):
    """Trains an experiment when it is iterated over.

    Attributes:
        about: the environment of the training, as `environment.describe` gives it.
        peak_bytes: the peak of its memory so far.
        sentence: what there is to know about the way it is trained, or "".
        place: its place in a queue, or 0.
    """

    sentence: str
    place: int

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def peak_bytes(self) -> float: ...

    def __iter__(self) -> Iterator[Made]: ...


class Here:
    """Trains in this process."""

    sentence = ""
    place = 0

    def __init__(self, experiment: Experiment, stop: Stop):
        self._experiment = experiment
        self._stop = stop
        self._memory = PeakMemory()

    @property
    def about(self) -> dict[str, Any]:
        return environment.describe()

    @property
    def peak_bytes(self) -> float:
        return self._memory.bytes()

    def __iter__(self) -> Iterator[Made]:
        from gradlab.lab.experiments.run import updates_of

        for job in [] if self._stop.is_set() else jobs_of(self._experiment):
            for made in updates_of(job, self._stop):
                yield made
                if self._stop.is_set():
                    return


class There:
    """Trains in a worker of an executor. If the worker is lost, the training begins again, once, on
    another.

    The second worker computes the same updates again, and those that have been seen are not
    repeated.

    Args:
        experiment: what to train.
        stop: ends the training when it is set.
        executor: as for `gradlab.sweep`, or a Dask client. If it has a true attribute
            `reads_ahead`, the updates are received as they come, whether or not the lab is paused.
    """

    def __init__(self, experiment: Experiment, stop: Stop, executor: Any):
        self._experiment = experiment
        self._stop = stop
        self._executor = executor
        self._seen = 0
        self.about: dict[str, Any] = {}
        self.peak_bytes = float("nan")
        self.sentence = "waiting for a worker"
        self.place = 0

    def __iter__(self) -> Iterator[Made]:
        calls = _Calls(host_for(self._executor))
        with calls, self._stop.calling(lambda: calls.accepted.put(None)):
            work = calls.address, calls.key, self._experiment.to_json(), runtime.arguments()
            try:
                future = worker.checked_executor(self._executor).submit(train_and_send, *work)
            except ConnectionError as error:
                raise Failed(str(error), "") from error
            if getattr(self._executor, "reads_ahead", False):
                future.add_done_callback(calls.refuse)
            try:
                for attempt in range(2):
                    answered = self._answered(calls, future)
                    self.place = 0
                    if answered is None:
                        return
                    self.sentence = (
                        "a worker was lost: another repeats the run, and goes on" if attempt else ""
                    )
                    ended = yield from self._received(self._ahead(answered, future, calls.address))
                    if ended:
                        return
                raise Failed(
                    "RuntimeError: two workers were lost, one after the other: press Run to try "
                    "again",
                    "",
                )
            finally:
                future.cancel()

    def _answered(self, calls: "_Calls", future: Any) -> Connection | None:
        """The connection of a worker, as soon as one has the job; None if the run is stopped
        before."""
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                return calls.accepted.get(timeout=QUEUE_SECONDS)
            if place := getattr(future, "place", None) or 0:
                self.sentence = f"waiting for a trainer: place {place} in the queue"
            self.place = place
            if future.done():
                with contextlib.suppress(queue.Empty):
                    # A short training is over before its call is accepted
                    return calls.accepted.get(timeout=1)
                if future.cancelled():
                    why = "the executor has cancelled it, as Dask does when it loses its scheduler: press Run again"
                    raise Failed(why, "")
                raise Failed(_why(future.exception(), calls.address), "")
        return None

    def _ahead(self, line: Connection, future: Any, address: Any) -> "Connection | _Ahead":
        """The connection; for an executor that wants it so, one that is read ahead of the lab."""
        if getattr(self._executor, "reads_ahead", False):
            return _Ahead(line, future, partial(self._refused, address))
        return line

    def _refused(self, address: Any, error: BaseException) -> "Failed":
        """What to raise for the error of a job. The lab says it at once, also while it is
        paused."""
        self.sentence = _why(error, address)
        return Failed(self.sentence, "")

    def _received(self, line: "Connection | _Ahead") -> Generator[Made, None, bool]:
        """The updates that come over a connection. Returns whether that was all, or the worker is
        lost."""
        number = 0
        with line, contextlib.suppress(EOFError, OSError):
            while True:
                while not line.poll(POLL_SECONDS):
                    if self._stop.is_set():
                        line.send("stop")
                        return True
                kind, content = line.recv()
                if kind == "about":
                    self.about = content
                elif kind == "failed":
                    raise Failed(*content)
                elif kind == "end":
                    return True
                else:
                    several, self.peak_bytes = content
                    for made in several:
                        number += 1
                        if number > self._seen:
                            self._seen = number
                            yield made
                        if self._stop.is_set():
                            line.send("stop")
                            return True
                    line.send("more")
        return False


def stream(experiment: Experiment, stop: Stop, executor: Any = None) -> Stream:
    """The updates of an experiment, from this process or from a worker of an executor."""
    return Here(experiment, stop) if executor is None else There(experiment, stop, executor)


class _Calls:
    """Accepts the connections of workers that know the key.

    Attributes:
        address: (host, port), where workers call.
        key: what they must know.
        accepted: the connections of those who do. None wakes up who waits for them.
    """

    def __init__(self, host: str):
        self.accepted = queue.Queue[Connection | None]()
        self._door = Door(host, self.accepted.put, "gradlab-calls")
        self.address = self._door.address
        self.key = self._door.key

    def __enter__(self) -> "_Calls":
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()

    def refuse(self, future: Any) -> None:
        """Closes the connections that nobody has taken, if the job has failed: a paused lab takes
        none."""
        if future.exception() is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                line = self.accepted.get_nowait()
                if line is not None:
                    line.close()


class _Ahead:
    """A connection that is read ahead of the lab, so that a lab that is paused or slow holds no
    trainer.

    It has those methods of a connection that `There` uses. What is read is kept, so only an
    executor that limits what a run may hold asks for this.

    Args:
        line: the connection.
        future: the job. Its error ends the stream: the hub of a classroom may end a run.
        refused: called with that error; returns what to raise.
    """

    def __init__(
        self, line: Connection, future: Any, refused: Callable[[BaseException], Exception]
    ):
        self._line = line
        self._future = future
        self._refused = refused
        self._read = queue.SimpleQueue[Any]()
        self._next: Any = None
        self._sending = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._work, name="gradlab-ahead", daemon=True).start()

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True  # the thread closes the connection, from which it reads

    def poll(self, seconds: float) -> bool:
        """Whether there is something to receive within this time."""
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._read.get(timeout=seconds)
        return self._next is not None

    def recv(self) -> Any:
        """The next message, or the error that ends them."""
        message = self._next
        self._next = None
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, word: str) -> None:
        """Sends a word; not "more", which was sent when the message came."""
        if word != "more":
            self._tell(word)

    def _tell(self, word: str) -> None:
        with self._sending:
            self._line.send(word)

    def _work(self) -> None:
        with self._line:
            try:
                is_over = False  # then the connection is closed, for which the trainer waits
                while not is_over and not self._is_closed:
                    if self._line.poll(POLL_SECONDS):
                        is_over = self._take(self._line.recv())
                    elif self._future.done() and (error := self._future.exception()) is not None:
                        raise self._refused(error)
            except Exception as error:
                self._read.put(error)

    def _take(self, message: Any) -> bool:
        """Keeps a message. Returns whether it is the last one."""
        self._read.put(message)
        if message[0] == "updates":
            self._tell("more")
        return message[0] in ("end", "failed")


def _why(error: BaseException | None, address: Any) -> str:
    """Why a job ended without a call."""
    if error is None:
        return f"RuntimeError: a worker could not reach this process at {address[0]}, port {address[1]}"
    if isinstance(error, ValueError):
        return str(error)  # a refusal
    lost = isinstance(error, concurrent.futures.BrokenExecutor)
    advice = (
        "the executor has lost a worker and takes no more jobs: make a new one. " if lost else ""
    )
    return f"{type(error).__name__}: {advice}{error}"


def host_for(executor: Any) -> str:
    """This machine's address as the workers see it. An executor whose workers are elsewhere has it
    in `listen`."""
    if not hasattr(executor, "scheduler_info"):
        return getattr(executor, "listen", "127.0.0.1")
    from distributed.comm import get_address_host
    from distributed.utils import get_ip

    return get_ip(get_address_host(executor.scheduler.address))


def train_and_send(
    address: tuple[str, int], key: bytes, experiment: str, setup: dict[str, Any] | None
) -> None:
    """Trains an experiment in a worker, and sends its updates to the process that asked for it.

    Args:
        address: where that process listens.
        key: what it must be told.
        experiment: `Experiment.to_json()`.
        setup: as for `worker.prepare`.
    """
    try:
        line = multiprocessing.connection.Client(address, authkey=key)
    except (OSError, EOFError, multiprocessing.AuthenticationError):
        return  # the run was stopped before it began, and perhaps another one listens there now
    stop = Stop()
    more = threading.Semaphore(AHEAD)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while line.recv() == "more":
                more.release()
        stop.set()

    listening = threading.Thread(target=listen, name="gradlab-listen", daemon=True)
    listening.start()
    with line:
        with contextlib.suppress(OSError):  # nobody listens any more
            try:
                worker.prepare(setup)
                _train(line, Experiment.from_json(experiment), stop, more)
                line.send(("end", None))
            except OSError:
                raise
            except Exception as error:
                line.send(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        listening.join(GOODBYE_SECONDS)


def _train(line: Connection, experiment: Experiment, stop: Stop, more: threading.Semaphore) -> None:
    check_experiment(experiment)
    source = Here(experiment, stop)
    line.send(("about", source.about))
    waiting: list[Made] = []
    sent = -float("inf")

    def send() -> None:
        nonlocal waiting, sent
        while waiting and not more.acquire(timeout=POLL_SECONDS):
            if stop.is_set():
                return
        if waiting:
            line.send(("updates", (waiting, source.peak_bytes)))
        waiting = []
        sent = time.monotonic()

    for made in source:
        waiting.append(made)
        # An update is sent at once unless the next one is expected soon.
        if time.monotonic() + made[0][1].seconds - sent > MESSAGE_SECONDS:
            send()
    send()

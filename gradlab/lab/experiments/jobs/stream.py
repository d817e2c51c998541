"""The updates of an experiment while it is trained: in this process, or in a worker of a Dask
cluster.

The worker sends them through a queue of the cluster, as it makes them:

    lab -> cluster    train_and_send(name, experiment), a job
    worker -> lab     what it computes on; then updates, several in a message where they are quick; then the end

A lab takes each message at once, so one that is paused or slow holds no worker. When it cancels the
job, or its process ends, Dask tells the worker, which ends the training. Importing this module
imports neither Dask nor TensorFlow.
"""

import contextlib
import pickle
import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gradlab import runtime
from gradlab.lab.experiments import environment
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import worker
from gradlab.lab.experiments.jobs.cluster import Cluster
from gradlab.lab.experiments.jobs.seed_jobs import check_experiment, jobs_of
from gradlab.lab.experiments.progress import Stop, Update
from gradlab.measure.memory import PeakMemory

SeedUpdates = list[tuple[int, Update]]  # an update of each seed in training
Message = tuple[str, Any]  # its kind and its content

MESSAGE_SECONDS = 0.03  # quick updates wait for each other so long
LOOK_SECONDS = 0.05  # between two looks at whether a job is still wanted
GOODBYE_SECONDS = 1  # for which a run that ends waits for a scheduler that may be gone
GONE = "the cluster has no scheduler any more, and with it the run: press Run when it is back"
LOST = "each worker that began this run was lost: press Run to try again"
REPEATED = "a worker was lost: another repeats the run, and goes on"
LATE = "ended after {seconds:g} seconds, the longest run here: choose a shorter one"


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
        is_waiting: whether no worker has begun yet.
    """

    sentence: str
    is_waiting: bool

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def peak_bytes(self) -> float: ...

    def __iter__(self) -> Iterator[SeedUpdates]: ...


class LocalStream:
    """Trains in this process."""

    sentence = ""
    is_waiting = False

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

    def __iter__(self) -> Iterator[SeedUpdates]:
        from gradlab.lab.experiments.jobs.run import updates_of

        for job in [] if self._stop.is_set() else jobs_of(self._experiment):
            for made in updates_of(job, self._stop):
                yield made
                if self._stop.is_set():
                    return


class ClusterStream:
    """Trains in a worker of a Dask cluster. If the worker is lost, Dask has another one begin again.

    That one computes the same updates, and those that have been seen are not repeated.

    Args:
        experiment: what to train.
        stop: ends the training when it is set.
        cluster: the cluster.
    """

    def __init__(self, experiment: Experiment, stop: Stop, cluster: Cluster):
        self._experiment = experiment
        self._stop = stop
        self._cluster = cluster
        self.about: dict[str, Any] = {}
        self.peak_bytes = float("nan")
        self.sentence = "waiting for a worker"
        self.is_waiting = True

    def __iter__(self) -> Iterator[SeedUpdates]:
        heard = queue.SimpleQueue[Message]()
        with self._stop.calling(lambda: heard.put(("stop", None))):
            try:
                job = _Job(self._cluster, self._experiment, heard)
            except (ConnectionError, ValueError) as error:
                raise Failed(str(error), "") from error
            try:
                yield from self._updates(heard)
            finally:
                self.is_waiting = False
                job.end()

    def _updates(self, heard: "queue.SimpleQueue[Message]") -> Iterator[SeedUpdates]:
        seen = 0
        repeated = 0  # how many of the next updates have been seen
        while not self._stop.is_set():
            kind, content = heard.get()
            if kind == "end":
                return
            if kind == "failed":
                raise Failed(*content)
            if kind == "begin":
                self.sentence = "" if self.is_waiting else REPEATED
                self.is_waiting = False
                self.about = content
                repeated = seen
            elif kind == "updates":
                several, self.peak_bytes = content
                for made in several[repeated:]:
                    seen += 1
                    yield made
                    if self._stop.is_set():
                        return
                repeated = max(0, repeated - len(several))


def stream(experiment: Experiment, stop: Stop, cluster: Cluster | None = None) -> Stream:
    """The updates of an experiment, from this process or from a worker of a cluster."""
    return (
        LocalStream(experiment, stop)
        if cluster is None
        else ClusterStream(experiment, stop, cluster)
    )


class _Job:
    """A training in a worker, whose messages are heard here.

    Args:
        cluster: the cluster.
        experiment: what to train.
        heard: gets the messages of the worker, and ("failed", (sentence, details)).

    Raises:
        ConnectionError: the cluster does not answer.
        ValueError: the cluster's limits do not allow the experiment.
    """

    def __init__(
        self, cluster: Cluster, experiment: Experiment, heard: "queue.SimpleQueue[Message]"
    ):
        from distributed import Queue
        from distributed.client import ClosedClientError

        longest = cluster.check(experiment)
        client = cluster.client()
        name = f"gradlab-{uuid.uuid4().hex}"
        self._no_scheduler = (OSError, RuntimeError, ClosedClientError)
        self._heard = heard
        self._cluster = cluster
        self._messages = Queue(name, client)
        work = name, experiment.to_json(), runtime.arguments(), longest
        # Dask would take runs that are sent within 100 ms in any order
        self._future = client.submit(train_and_send, *work, key=name, fifo_timeout="0 ms")
        cluster.begin()
        self._future.add_done_callback(self._is_over)
        self._hearing = _start(self._hear)

    def end(self) -> None:
        """Ends it, if it has not ended."""
        _start(self._end).join(GOODBYE_SECONDS)
        self._hearing.join(GOODBYE_SECONDS)

    def _hear(self) -> None:
        with contextlib.suppress(*self._no_scheduler):
            while (message := pickle.loads(self._messages.get())) is not None:
                self._heard.put(message)
            self._messages.close()

    def _end(self) -> None:
        with contextlib.suppress(*self._no_scheduler):
            self._future.cancel()
            self._messages.put(pickle.dumps(None))

    def _is_over(self, future: Any) -> None:
        self._cluster.end()
        if future.status == "error":
            self._heard.put(("failed", (_why(future.exception()), "")))
        elif future.status != "finished":
            self._heard.put(("failed", (GONE, "")))


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="gradlab-job", daemon=True)
    thread.start()
    return thread


def _why(error: BaseException) -> str:
    """Why a job ended without a last message."""
    from distributed import KilledWorker

    return LOST if isinstance(error, KilledWorker) else f"{type(error).__name__}: {error}"


def train_and_send(
    name: str, experiment: str, setup: dict[str, Any] | None, longest: float | None
) -> None:
    """Trains an experiment in a worker, and sends its updates to the lab that asked for it.

    Args:
        name: the name of the queue and of the job.
        experiment: `Experiment.to_json()`.
        setup: as for `worker.prepare`.
        longest: the seconds after which the training ends, or None.
    """
    from distributed import Queue, get_client, get_worker

    messages = Queue(name, get_client())
    jobs = get_worker().state.tasks
    stop = Stop()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            # Otherwise Dask calls it "cancelled", or has forgotten it.
            if name not in jobs or jobs[name].state != "executing":
                stop.set()

    def send(kind: str, content: Any) -> None:
        if not stop.is_set():
            messages.put(pickle.dumps((kind, content)))

    looking = _start(look)
    try:
        worker.prepare(setup)
        _train(send, Experiment.from_json(experiment), stop, longest)
        send("end", None)
    except Exception as error:
        send("failed", (f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        is_over.set()
        looking.join()
        messages.close()


def _train(
    send: Callable[[str, Any], None], experiment: Experiment, stop: Stop, longest: float | None
) -> None:
    check_experiment(experiment)
    source = LocalStream(experiment, stop)
    send("begin", source.about)
    began = time.monotonic()
    waiting: list[SeedUpdates] = []
    sent = -float("inf")
    for made in source:
        now = time.monotonic()
        if longest is not None and now - began > longest:
            raise ValueError(LATE.format(seconds=longest))
        waiting.append(made)
        # An update is sent at once unless the next one is expected soon.
        if now + made[0][1].seconds - sent > MESSAGE_SECONDS:
            send("updates", (waiting, source.peak_bytes))
            waiting = []
            sent = time.monotonic()
    if waiting:
        send("updates", (waiting, source.peak_bytes))

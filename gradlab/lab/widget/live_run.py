"""One run of the lab: its updates, which the worker thread writes and others read, and its pace."""

import enum
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.cluster import Cluster
from gradlab.lab.experiments.jobs.seed_jobs import ending
from gradlab.lab.experiments.jobs.stream import Failed, Stream, stream
from gradlab.lab.experiments.progress import Stop, Update
from gradlab.lab.experiments.result import Result

SLOW_SECONDS = 0.7  # pause after each sentence of slow motion


class State(enum.Enum):
    """The state of a run, or of a lab without one (IDLE)."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


class Status(NamedTuple):
    """The contents of the lab's status line.

    Attributes:
        state: one or two words, such as "running", "stopped", "diverged" or "not run".
        sentence: what the state means here.
        details: a traceback, shown folded, or "".
    """

    state: str
    sentence: str
    details: str = ""


class Pace:
    """The speed of a run: full speed, slow motion, or paused with single steps.

    Args:
        paused: whether the run waits for steps from its beginning.
        slow: whether the run is in slow motion from its beginning.
    """

    def __init__(self, paused: bool = False, slow: bool = False):
        self._changed = threading.Condition()
        self._paused = paused
        self._slow = slow
        self._microbatches = self._updates = 0  # requested steps that the worker has not made yet

    @property
    def paused(self) -> bool:
        """Whether the run is paused, or will be after the step under way."""
        return self._paused

    @property
    def watched(self) -> bool:
        """Whether micro-batches are shown one by one."""
        return self._paused or self._slow

    def set(self, paused: bool | None = None, slow: bool | None = None) -> None:
        """Change the pace, effective at once. Requested steps are dropped.

        Args:
            paused: whether the run waits for steps. None: unchanged.
            slow: whether the run is in slow motion. None: unchanged.
        """
        with self._changed:
            self._paused = self._paused if paused is None else paused
            self._slow = self._slow if slow is None else slow
            self._microbatches = self._updates = 0
            self._changed.notify_all()

    def step(self, update: bool) -> None:
        """Allow a paused run one more micro-batch, or the rest of its window if `update` is
        true."""
        with self._changed:
            if update:
                self._updates += 1
            else:
                self._microbatches += 1
            self._changed.notify_all()

    def wait(self, stop: Stop) -> None:
        """Block the worker until the pace allows its next action, or until `stop` is set."""
        with self._changed:
            if self._slow and not self._paused:
                end = time.monotonic() + SLOW_SECONDS
                while (
                    self._slow and not self._paused and not stop.is_set() and time.monotonic() < end
                ):
                    self._changed.wait(0.05)
            while (
                self._paused and not self._updates and not self._microbatches and not stop.is_set()
            ):
                self._changed.wait(0.05)
            if self._paused and not self._updates and self._microbatches:
                self._microbatches -= 1

    def window_done(self) -> None:
        """End a step of one update. The worker calls this at the end of each window."""
        with self._changed:
            self._updates = max(0, self._updates - 1)


@dataclass(eq=False)
class Run:
    """The training of one experiment with all its seeds.

    Attributes:
        experiment: what to train.
        pace: the speed.
        stop: ends the training when set.
        over: set when the training has ended for any reason.
        begun: set when there is a first update, or when there will be none.
        updates: the updates so far, by seed. The lists only grow; the updates in them never change.
        delay: seconds to wait before training starts. A run that is replaced within this time
            computes nothing.
        cluster: trains the experiment in a worker; or None, to train in this process.
        waiting: whether the run is paused and waits for a step.
        hidden: the number of micro-batches of the last window that are computed but not shown yet.
        narration: the current sentence of slow motion, or "".
        error: why the run failed, or "".
        details: the traceback of the error, or "".
    """

    experiment: Experiment
    pace: Pace = field(default_factory=Pace)
    stop: Stop = field(default_factory=Stop)
    over: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    updates: dict[int, list[Update]] = field(default_factory=dict)
    delay: float = 0.0
    cluster: Cluster | None = None
    waiting: bool = False
    hidden: int = 0
    narration: str = ""
    error: str = ""
    details: str = ""
    _stream: Stream = field(init=False)
    _asked: float = field(default_factory=time.monotonic)
    _latest: list[int] = field(default_factory=list)  # the seeds of the last update

    def __post_init__(self) -> None:
        self._stream = stream(self.experiment, self.stop, self.cluster)

    def work(self) -> None:
        """Train until the budget is used up or the run is stopped. Errors are stored in `error`,
        not raised."""
        try:
            time.sleep(self.delay)
            self._keep_pace()
            for updates in self._stream:
                self._add(updates)
                if self.stop.is_set():
                    return
        except Failed as failure:
            self.error = str(failure)
            self.details = failure.details
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.details = traceback.format_exc()
        finally:
            self.hidden = 0
            self.over.set()
            self.begun.set()

    @property
    def state(self) -> State:
        """The state of the run."""
        if self.over.is_set():
            return State.FAILED if self.error else State.FINISHED
        if self.stop.is_set():
            return State.STOPPING
        if self.waiting:
            return State.PAUSED
        return State.RUNNING if self.updates else State.STARTING

    @property
    def young(self) -> bool:
        """Whether there are fewer than three updates per seed, too few for most views."""
        return sum(map(len, list(self.updates.values()))) < 3 * max(1, len(self._latest))

    @property
    def queued_seconds(self) -> float:
        """The seconds for which the run has waited for a worker; 0 once one has begun."""
        return time.monotonic() - self._asked if self._stream.is_waiting else 0.0

    @property
    def progress(self) -> float:
        """The share of the budget that is used up, over all seeds: 0 to 1."""
        done = sum(
            made[-1].progress if not made[-1].diverged else 1.0
            for made in list(self.updates.values())
        )
        return done / len(self.experiment.seed_numbers)

    def shown_updates(self) -> dict[int, list[Update]]:
        """The updates so far, by seed, without those of a window that is shown in part."""
        hidden = self._latest if self.hidden else ()
        return {
            seed: made[: len(made) - (seed in hidden)] for seed, made in list(self.updates.items())
        }

    def result(self) -> Result | None:
        """The `Result` of the windows shown so far, or None before the first."""
        about = self._stream.about | {"seeds_together": len(self._latest)}
        results = [
            Result.of_updates(
                self.experiment, seed, made, ending(made), self._stream.peak_bytes, about
            )
            for seed, made in self.shown_updates().items()
            if made
        ]
        return Result.join(self.experiment, results) if results else None

    def window(self) -> np.ndarray:
        """The losses of the micro-batches shown so far of a window that is shown in part; otherwise
        empty."""
        hidden = self.hidden
        made = self.updates.get(self._latest[0]) if self._latest else None
        if not hidden or not made:
            return np.zeros(0)
        losses = made[-1].losses
        return losses[: len(losses) + 1 - hidden]

    @property
    def window_at(self) -> int:
        """The number of updates before the window that is shown in part."""
        return len(self.updates[self._latest[0]]) - 1 if len(self.window()) else 0

    def status(self) -> Status:
        """The status line of the run."""
        if self.state is State.FAILED:
            return Status("failed", self.error, self.details)
        runs = list(self.updates.items())
        if not runs and self.over.is_set():
            return Status("stopped", "before the first update")
        if not runs:
            preparing = f"preparing the method {self.experiment.method} and the data"
            return Status(self.state.value, self._stream.sentence or preparing)
        diverged = [str(seed) for seed, made in runs if made[-1].diverged]
        if diverged:
            seeds = f"seed{'s' * (len(diverged) > 1)} {', '.join(diverged)} of {len(runs)}"
            return Status(
                "diverged",
                f"{seeds}: loss or gradient no longer finite; try a smaller learning rate",
            )
        seed, made = runs[-1]
        last = made[-1]
        seconds = [update.seconds for update in made[-50:]]
        together = [made[last.number - 1].loss for _, made in runs if len(made) >= last.number]
        loss = np.mean(together) if len(self._latest) > 1 else last.loss
        state = "stopped" if self.over.is_set() and self.progress < 1 else self.state.value
        goal = f" of {self.experiment.updates}" if self.experiment.updates else ""
        note = f"; {self._stream.sentence}" if self._stream.sentence else ""
        which = f"{len(runs)} seeds" if len(self._latest) > 1 else f"seed {seed}"
        return Status(
            state,
            f"{which}, update {last.number}{goal}, window loss {loss:.3f} nats, "
            f"{len(seconds) / sum(seconds):.0f} updates per second{note}",
        )

    def _add(self, updates: list[tuple[int, Update]]) -> None:
        """Store one update of each seed. If the run is watched, reveal its micro-batches one by
        one."""
        watched = self.pace.watched
        first = updates[0][1]
        self._latest = [seed for seed, _ in updates]
        if watched:
            self.hidden = len(first.losses)
        for seed, update in updates:
            self.updates.setdefault(seed, []).append(update)
        self.begun.set()
        if watched:
            self._narrate_window(first)
            return
        self.narration = ""

    def _narrate_window(self, update: Update) -> None:
        k = len(update.losses)
        for number in range(1, k + 1):
            loss = update.losses[number - 1]
            norm = update.gradient_norms[number - 1]
            self._narrate(
                f"micro-batch {number} of {k}: loss {loss:.3f}, gradient norm {norm:.2f}; its "
                "gradient is added to the accumulator, which now holds "
                f"{update.weights[:number].sum():g} examples",
                hidden=k + 1 - number,
            )
            self._keep_pace()
        norm = update.window_gradient_norm
        self._narrate(
            f"{k} gradients averaged: norm {norm:.2f}; applied once, as update {update.number}",
            hidden=0,
        )
        self.pace.window_done()
        self._keep_pace()

    def _narrate(self, sentence: str, hidden: int) -> None:
        self.narration = sentence
        self.hidden = hidden

    def _keep_pace(self) -> None:
        self.waiting = self.pace.paused
        self.pace.wait(self.stop)
        self.waiting = False

"""One run of the lab: what the worker thread writes and the publisher thread reads, and the pace at which it goes."""

import enum
import threading
import time
import traceback
from dataclasses import dataclass, field

import numpy as np

from gradlab.lab.experiments import environment, sweep
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.experiments.training import Stop, Update

SLOW_SECONDS = 0.7  # for each thing that slow motion names


class State(enum.Enum):
    """Where the lab is."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


class Pace:
    """How fast a run goes on: at once, in slow motion, or a step at a time while it is paused."""

    def __init__(self, paused: bool = False, slow: bool = False):
        self._changed = threading.Condition()
        self._paused, self._slow = paused, slow
        self._microbatches = self._updates = 0  # steps that were asked for and not made yet

    @property
    def paused(self) -> bool:
        """Whether the run waits, or will after the step it makes."""
        return self._paused

    @property
    def watched(self) -> bool:
        """Whether each micro-batch is to be shown by itself."""
        return self._paused or self._slow

    def set(self, paused: bool | None = None, slow: bool | None = None) -> None:
        """Changes the pace, at once."""
        with self._changed:
            self._paused = self._paused if paused is None else paused
            self._slow = self._slow if slow is None else slow
            self._microbatches = self._updates = 0
            self._changed.notify_all()

    def step(self, update: bool) -> None:
        """Allows a paused run one more micro-batch, or the rest of its window."""
        with self._changed:
            if update:
                self._updates += 1
            else:
                self._microbatches += 1
            self._changed.notify_all()

    def wait(self, stop: Stop) -> None:
        """The worker asks here before each thing it does; a stop lets it through."""
        with self._changed:
            if self._slow and not self._paused:
                end = time.monotonic() + SLOW_SECONDS
                while self._slow and not self._paused and not stop.is_set() and time.monotonic() < end:
                    self._changed.wait(0.05)
            while self._paused and not self._updates and not self._microbatches and not stop.is_set():
                self._changed.wait(0.05)
            if self._paused and not self._updates and self._microbatches:
                self._microbatches -= 1

    def window_done(self) -> None:
        """The worker says that a window is over: a step of one update ends with it."""
        with self._changed:
            self._updates = max(0, self._updates - 1)


@dataclass(eq=False)
class Run:
    """One experiment with all its seeds, as it is trained."""

    experiment: Experiment
    pace: Pace = field(default_factory=Pace)
    stop: Stop = field(default_factory=Stop)
    over: threading.Event = field(default_factory=threading.Event)
    news: threading.Event = field(default_factory=threading.Event)  # the publisher need not wait any longer
    updates: dict[int, list[Update]] = field(default_factory=dict)  # by seed; appended to, never changed
    patience: float = 0.0  # seconds to wait before it begins, for a stop that may come at once
    waiting: bool = False  # for a step
    hidden: int = 0  # micro-batches of the last window that are computed but not shown yet
    narration: str = ""
    error: str = ""
    details: str = ""
    _memory: environment.PeakMemory = field(default_factory=environment.PeakMemory)
    _latest: list[int] = field(default_factory=list)  # the seeds of the last update

    def work(self) -> None:
        """Trains until the end, or until stopped. Raises nothing: what goes wrong is kept to be shown."""
        try:
            time.sleep(self.patience)
            for part in [] if self.stop.is_set() else sweep.parts(self.experiment):
                self._ask()
                for made in sweep.updates_of(part, self.stop):
                    self._take(made)
                    if self.stop.is_set():
                        return
        except Exception as error:
            self.error, self.details = f"{type(error).__name__}: {error}", traceback.format_exc()
        finally:
            self.hidden = 0
            self.over.set()
            self.news.set()

    @property
    def state(self) -> State:
        """Where the run is."""
        if self.over.is_set():
            return State.FAILED if self.error else State.FINISHED
        if self.stop.is_set():
            return State.STOPPING
        if self.waiting:
            return State.PAUSED
        return State.RUNNING if self.updates else State.STARTING

    @property
    def young(self) -> bool:
        """Whether there are hardly any updates to show yet."""
        return sum(map(len, list(self.updates.values()))) < 3 * max(1, len(self._latest))

    @property
    def progress(self) -> float:
        """The share of all seeds' budget that is used up."""
        done = sum(made[-1].progress if not made[-1].diverged else 1.0 for made in list(self.updates.values()))
        return done / len(self.experiment.seed_numbers)

    def result(self) -> Result | None:
        """What there is so far, and may be shown, as a `Result`; None before the first update."""
        about, parts = environment.describe() | {"seeds_together": len(self._latest)}, []
        hidden = self._latest if self.hidden else ()
        for seed, made in list(self.updates.items()):
            made = made[: len(made) - (seed in hidden)]
            if not made:
                continue
            ending = "finished" if made and made[-1].progress >= 1 else "stopped"
            ending = "diverged" if made and made[-1].diverged else ending
            parts.append(Result.of_updates(self.experiment, seed, made, ending, self._memory.bytes(), about))
        return Result.join(self.experiment, parts) if parts else None

    def window(self) -> np.ndarray:
        """The losses of the micro-batches shown so far of a window that is not shown whole; else nothing."""
        if not self.hidden:
            return np.zeros(0)
        losses = self.updates[self._latest[0]][-1].losses
        return losses[: len(losses) + 1 - self.hidden]

    def words(self) -> tuple[str, str, str]:
        """The state, a sentence, and details to fold away."""
        if self.state is State.FAILED:
            return "failed", self.error, self.details
        runs = list(self.updates.items())
        if not runs and self.over.is_set():
            return "stopped", "before the first update", ""
        if not runs:
            return self.state.value, f"building {self.experiment.method}, reading the data", ""
        diverged = [seed for seed, made in runs if made[-1].diverged]
        if diverged:
            seeds = f"seed{'s' * (len(diverged) > 1)} {', '.join(map(str, diverged))} of {len(runs)}"
            return "diverged", f"{seeds}: the loss is no longer a number; try a smaller learning rate", ""
        seed, made = runs[-1]
        last, seconds = made[-1], [update.seconds for update in made[-50:]]
        state = "stopped" if self.over.is_set() and self.progress < 1 else self.state.value
        goal = f" of {self.experiment.updates}" if self.experiment.updates else ""
        which = f"{len(runs)} seeds, " if len(self._latest) > 1 else f"seed {seed}, "
        return (
            state,
            f"{which}update {last.number}{goal}, window loss {last.loss:.3f} nats, "
            f"{len(seconds) / sum(seconds):.0f} updates a second",
            "",
        )

    def _take(self, made: list[tuple[int, Update]]) -> None:
        """Keeps the seeds' updates; while it is watched, shows them one micro-batch after the other."""
        watched = self.pace.watched
        first, self._latest = made[0][1], [seed for seed, _ in made]
        if watched:
            self.hidden = len(first.losses)
        for seed, update in made:
            self.updates.setdefault(seed, []).append(update)
        if not watched:
            self.narration = ""
            if first.number == 1:
                self.news.set()
            return
        k = len(first.losses)
        for number in range(1, k + 1):
            loss, norm = first.losses[number - 1], first.gradient_norms[number - 1]
            self._say(
                f"micro-batch {number} of {k}: loss {loss:.3f}, gradient of norm {norm:.2f} computed, and added to the "
                f"accumulator: {first.weights[:number].sum():g} examples in it",
                hidden=k + 1 - number,
            )
            self._ask()
        norm = first.window_gradient_norm
        self._say(f"{k} gradients averaged: norm {norm:.2f}; applied once: this was update {first.number}", hidden=0)
        self.pace.window_done()
        self._ask()

    def _say(self, narration: str, hidden: int) -> None:
        self.narration, self.hidden = narration, hidden
        self.news.set()

    def _ask(self) -> None:
        """Waits as long as the pace wants."""
        self.waiting = self.pace.paused
        self.news.set()
        self.pace.wait(self.stop)
        self.waiting = False

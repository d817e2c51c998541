"""One run of a training in a thread of its own: what the worker writes and the publisher reads."""

import enum
import math
import threading
import traceback
from dataclasses import dataclass, field

from gradlab.lab.experiment import Experiment
from gradlab.lab.training import Update, train


class State(enum.Enum):
    """Where a run is."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(eq=False)
class Run:
    """One training: written by the worker, read by the publisher."""

    experiment: Experiment
    seed: int
    cancel: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    state: State = State.STARTING
    updates: list[Update] = field(default_factory=list)  # appended to, never changed: safe to read at any time
    error: str = ""
    details: str = ""

    def work(self) -> None:
        """Trains until the end, or until cancelled. Raises nothing: what goes wrong is kept to be shown."""
        try:
            for update in train(self.experiment, self.seed):
                if self.cancel.is_set():
                    break
                self.updates.append(update)
                self.state = State.RUNNING
            self.state = State.STOPPED if self.cancel.is_set() else State.FINISHED
        except Exception as error:
            self.error, self.details = f"{type(error).__name__}: {error}", traceback.format_exc()
            self.state = State.FAILED
        finally:
            self.over.set()

    def words(self) -> tuple[str, str, str]:
        """The state, a sentence, and details to fold away."""
        if self.state is State.FAILED:
            return "failed", self.error, self.details
        state = "stopping" if self.cancel.is_set() and not self.over.is_set() else self.state.value
        if not self.updates:
            ended = "before the first update"
            return state, ended if self.over.is_set() else f"building {self.experiment.method}, reading the data", ""
        last = self.updates[-1]
        if not math.isfinite(last.loss):
            return "diverged", f"the loss of update {last.number} is {last.loss}; try a smaller learning rate", ""
        speed = len(self.updates) / sum(update.seconds for update in self.updates)
        sentence = (
            f"update {last.number} of {self.experiment.updates}, window loss {last.loss:.3f} nats, "
            f"{speed:.0f} updates a second"
        )
        return state, sentence, ""

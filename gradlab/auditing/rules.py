"""The rules of a training loop, and the weights that a loop with such rules gets: right ones and
wrong ones alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from gradlab.auditing.models import Weights, pair_slopes
from gradlab.auditing.problem import BETAS, EPSILON, MOMENTUM, Problem


@dataclass(frozen=True)
class LoopRules:
    """What a training loop does. The defaults are right: each update is that of the large batch.

    Attributes:
        alike: count all micro-batches of a window alike, whatever their number of examples or
            tokens.
        divisor: divide the sum of a window by what was "seen"; by what the whole "window" has,
            known beforehand; by the number of its "microbatches"; by "k" full micro-batches; by
            "none"; or by what was seen, and multiply by the "share" of k micro-batches that were
            there, or by their "count".
        twice: divide by k once more.
        keep: "all" micro-batches of a window, or only the gradient of the "first" or the "last".
            "first of all" and "last of all" still divide by all of them.
        reset: after an update, set to zero "all", "none", or only the "sum" or the "divisor"; or
            add the gradient that was applied to the next one ("kept").
        window: how many micro-batches more than k a window has; "early": an update follows
            micro-batches 0, k, 2k, ..., counted from 0; "late": the same without micro-batch 0.
        tail: the rest of an epoch makes an update of its own ("updates"), is "dropped", is
            "carried" into the next epoch, or is "added" to the first window of the next epoch,
            whose counting starts at 0.
        short_epochs: whether an epoch shorter than a window ends with an update, beside those after
            every k-th micro-batch of the whole training.
        stops: training ends after as many updates as whole windows fit into each epoch.
        step: an update for each "window" or "each" micro-batch, "each by k" if divided by k, or
            "running" if nothing is set to zero before the window ends.
        recorded: whether the weights are recorded after every update, or after each window.
        clip: the gradient of the "window", "each" mean gradient of a micro-batch, its part of the
            mean ("part"), or the "running" mean after each micro-batch.
        schedule: the rate is that of the update, or of another number: a function (updates,
            micro-batches, k).
        schedule_of: the numbers of the schedule are those of the "training", or of the "epoch".
        correction: Adam's number of steps, likewise.
        decay: once for each "update"; for each micro-batch as it comes ("microbatch"), or k times
            at the update.
        precision: the type of the sum, "float16" or "bfloat16"; None: exact.
        replicas: the mean over all examples ("all"), or the "mean" or the "sum" of the replicas'
            means.
        nonfinite: a NaN "spreads"; its "window" or its "microbatch" is left out; or it "stays" in
            the sum, so that windows are left out from then on.
        recorded_skips: whether the weights are recorded after a window that was left out.
        negatives: of the model "pairs", those of the "window", or of the "microbatch".
        labels: of "pairs", the own number in the "window", or that in the "microbatch" although
            the logits are those of the window.
        scale_gradient: of "pairs", each micro-batch's "share"; "none"; or "whole", all of it with
            every micro-batch.
    """

    alike: bool = False
    divisor: str = "seen"
    twice: bool = False
    keep: str = "all"
    reset: str = "all"
    window: int | str = 0
    tail: str = "updates"
    short_epochs: bool = False
    stops: bool = False
    step: str = "window"
    recorded: str = "updates"
    clip: str = "window"
    schedule: Callable[[int, int, int], int] = lambda updates, microbatches, k: updates
    schedule_of: str = "training"
    correction: Callable[[int, int, int], int] = lambda updates, microbatches, k: updates + 1
    decay: str = "update"
    precision: str | None = None
    replicas: str = "all"
    nonfinite: str = "spreads"
    recorded_skips: bool = True
    negatives: str = "window"
    labels: str = "window"
    scale_gradient: str = "share"


def trajectory(
    problem: Problem, rules: LoopRules, gradients: Callable | None = None
) -> Iterator[np.ndarray]:
    """The weights after each update of a loop with these rules, each as one vector.

    Args:
        problem: the training.
        rules: the rules.
        gradients: a function (weights as a vector, micro-batch) -> the mean gradient as a vector.
            None: the problem's. "pairs" always has its own.

    Raises:
        ValueError: "pairs" with several epochs, whose windows could go on in the next one.
    """
    if problem.model == "pairs" and len(problem.epochs) > 1:
        raise ValueError(f'epochs of "pairs" must be one. Received: {len(problem.epochs)} epochs')
    run = _Run(problem, rules, gradients or gradients_of(problem))
    with np.errstate(invalid="ignore", over="ignore"):
        updates = chain.from_iterable(run.epoch(epoch) for epoch in problem.epochs)
        size = problem.k * problem.replicas
        most = sum(max(1, len(epoch) // size) for epoch in problem.epochs) if rules.stops else None
        yield from islice(updates, most)


def as_vector(problem: Problem, weights: Weights) -> np.ndarray:
    """The weights of a problem's model one after the other, in the order of its initial weights."""
    return np.concatenate([np.ravel(weights[name]) for name in problem.weights]).astype(float)


def as_weights(problem: Problem, vector: np.ndarray) -> Weights:
    """The weights of a problem's model from one vector, the inverse of `as_vector`."""
    shapes = {name: np.shape(weight) for name, weight in problem.weights.items()}
    cuts = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])[:-1]
    parts = np.split(vector, cuts)
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}


def gradients_of(problem: Problem) -> Callable[[np.ndarray, tuple], np.ndarray]:
    """A function (weights as a vector, micro-batch) -> the mean gradient as a vector, which
    remembers its results."""
    known: dict[tuple, np.ndarray] = {}

    def gradients(vector, microbatch):
        key = id(microbatch), vector.tobytes()
        if key not in known:
            found = problem.gradients(as_weights(problem, vector), microbatch)[1]
            known[key] = as_vector(problem, found)
        return known[key]

    return gradients


class _Run:
    """The state of a loop."""

    def __init__(self, problem: Problem, rules: LoopRules, gradients: Callable):
        self._problem = problem
        self._rules = rules
        self._gradients = gradients
        self._weights = as_vector(problem, problem.weights)
        self._moments = np.zeros((2, self._weights.size))
        self._updates = self._microbatches = self._position = 0
        self._schedule_begins = 0, 0
        self._kept = np.zeros(self._weights.size)
        self._window: list[tuple] = []
        self._ahead = 1.0
        self._full = max(map(problem.size, chain(*problem.epochs)), default=0.0)
        self._zero()

    def _zero(self) -> None:
        replicas = self._problem.replicas
        self._sums = np.zeros((replicas, self._weights.size))
        self._sizes = np.zeros(replicas)
        self._counts = np.zeros(replicas)

    def epoch(self, microbatches: list[tuple]) -> Iterator[np.ndarray]:
        """The weights after each update of an epoch."""
        rules = self._rules
        is_short = (
            rules.short_epochs and len(microbatches) < self._problem.k * self._problem.replicas
        )
        if rules.tail == "added":
            self._position = 0
        if rules.schedule_of == "epoch":
            self._schedule_begins = self._updates, self._microbatches
        for number, microbatch in enumerate(microbatches):
            if self._position == 0:
                window = microbatches[number : number + self._problem.k * self._problem.replicas]
                self._window = self._window_from(microbatches, number)
                self._ahead = (
                    float(len(window)) if rules.alike else sum(map(self._problem.size, window))
                )
            self._add(microbatch)
            is_last = number == len(microbatches) - 1
            ends = self._ends(number) or (is_last and (rules.tail == "updates" or is_short))
            if rules.step != "window" or ends:
                applied = self._update(ends)
                if (rules.recorded == "updates" or ends) and (applied or rules.recorded_skips):
                    yield self._weights
            if ends:
                self._position = 0
        if rules.tail == "dropped":
            self._zero()
            self._position = 0

    def _ends(self, number: int) -> bool:
        """Whether a window ends after this micro-batch of an epoch."""
        k = self._problem.k * self._problem.replicas
        window = self._rules.window
        if self._rules.short_epochs:
            return self._microbatches % k == 0
        if isinstance(window, int):
            return self._position == max(1, k + window)
        number = self._microbatches - 1 if self._rules.tail == "carried" else number
        return number % k == 0 and (number > 0 or window == "early")

    def _window_from(self, microbatches: list[tuple], first: int) -> list[tuple]:
        """The window that begins with this micro-batch of an epoch, as far as the epoch goes."""
        k = self._problem.k * self._problem.replicas
        window = self._rules.window
        if isinstance(window, int):
            return microbatches[first : first + max(1, k + window)]
        last = -(-max(first, window == "late") // k) * k
        return microbatches[first : last + 1]

    def _add(self, microbatch: tuple) -> None:
        rules = self._rules
        problem = self._problem
        gradient = self._gradient_of(microbatch)
        size = 1.0 if rules.alike else problem.size(microbatch)
        replica = self._position % problem.replicas
        first = self._position < problem.replicas
        self._position += 1
        self._microbatches += 1
        if rules.decay == "microbatch" and problem.weight_decay:
            self._decay(1)
        if rules.nonfinite == "microbatch" and not np.isfinite(gradient).all():
            return
        limit = problem.clip_norm
        if limit and rules.clip in ("each", "part"):
            gradient = _clipped(gradient, limit * (1 if rules.clip == "each" else problem.k))
        kept = first or not rules.keep.startswith("first")
        if rules.keep.startswith("last"):
            self._sums[replica] = 0
            if rules.keep == "last":
                self._sizes[replica] = self._counts[replica] = 0
        if kept:
            self._sums[replica] = _rounded(self._sums[replica] + size * gradient, rules.precision)
        if kept or rules.keep == "first of all":
            self._sizes[replica] += size
            self._counts[replica] += 1
        if limit and rules.clip == "running":
            full = (1.0 if rules.alike else self._full) * (
                1 if rules.divisor in ("none", "count") else problem.k
            )
            self._sums[replica] = _clipped(self._sums[replica], limit * full)

    def _gradient_of(self, microbatch: tuple) -> np.ndarray:
        """The mean gradient of a micro-batch. Of "pairs", what it contributes to the window's,
        multiplied so that the mean over the examples of the window adds these parts up."""
        rules = self._rules
        if self._problem.model != "pairs":
            return self._gradients(self._weights, microbatch)
        window = self._window if rules.negatives == "window" else [microbatch]
        ends = np.cumsum([len(x) for x, _ in window])
        number = next(i for i, one in enumerate(window) if one is microbatch)
        rows = slice(ends[number] - len(microbatch[0]), ends[number])
        x, y = (np.concatenate(each) for each in zip(*window))
        labels = np.arange(len(x))
        if rules.labels == "microbatch":
            labels = np.concatenate([np.arange(len(x)) for x, _ in window])
        weights = as_weights(self._problem, self._weights)
        slopes = pair_slopes(weights, x, y, np.full(len(x), 1 / len(x)), labels)
        part = slopes.rows(rows).through(x[rows], y[rows])
        if rules.scale_gradient == "none":
            part["log_scale"] = np.zeros(1)
        if rules.scale_gradient == "whole":
            part["log_scale"] = slopes.by_scale.sum(keepdims=True)
        return as_vector(self._problem, part) * len(x) / len(microbatch[0])

    def _mean(self) -> np.ndarray:
        """The gradient of the window."""
        k = self._problem.k
        replicas = self._problem.replicas
        if self._rules.replicas == "all":
            return self._divided(
                self._sums.sum(0), self._sizes.sum(), self._counts.sum(), k * replicas
            )
        parts = [self._divided(*part, k) for part in zip(self._sums, self._sizes, self._counts)]
        return np.sum(parts, axis=0) / (replicas if self._rules.replicas == "mean" else 1)

    def _divided(self, total: np.ndarray, size: float, count: float, k: int) -> np.ndarray:
        rules = self._rules
        mean = total / max(size, 1e-300)
        by = {
            "seen": lambda: mean,
            "window": lambda: total / self._ahead,
            "microbatches": lambda: total / max(count, 1.0),
            "k": lambda: total / (k * (1.0 if rules.alike else self._full)),
            "none": lambda: total,
            "share": lambda: mean * count / k,
            "count": lambda: mean * count,
        }
        divided = by[rules.divisor]()
        return divided / self._problem.k if rules.twice or rules.step == "each by k" else divided

    def _update(self, ends: bool) -> bool:
        """Makes an update. Returns False for one that was left out."""
        rules = self._rules
        problem = self._problem
        gradient = self._kept + self._mean()
        if rules.nonfinite in ("window", "stays") and not np.isfinite(gradient).all():
            if rules.nonfinite == "window":
                self._zero()
            return False
        if problem.clip_norm and rules.clip == "window":
            gradient = _clipped(gradient, problem.clip_norm)
        if problem.weight_decay and rules.decay != "microbatch":
            self._decay(1 if rules.decay == "update" else problem.k)
        self._weights = self._weights - self._rate() * self._direction(gradient)
        self._updates += 1
        if rules.step != "running" or ends:
            if rules.reset in ("all", "kept", "sum"):
                self._sums = np.zeros_like(self._sums)
            if rules.reset in ("all", "kept", "divisor"):
                self._sizes = np.zeros_like(self._sizes)
                self._counts = np.zeros_like(self._counts)
            if rules.reset == "kept":
                self._kept = gradient
        return True

    def _rate(self) -> float:
        updates, microbatches = self._schedule_begins
        number = self._rules.schedule(
            self._updates - updates, self._microbatches - microbatches, self._problem.k
        )
        return float(self._problem.learning_rate(max(0, number)))

    def _decay(self, times: int) -> None:
        self._weights = self._weights * (1 - self._rate() * self._problem.weight_decay) ** times

    def _direction(self, gradient: np.ndarray) -> np.ndarray:
        """What the optimizer subtracts, divided by the learning rate."""
        optimizer = self._problem.optimizer
        if optimizer == "sgd":
            return gradient
        if optimizer == "momentum":
            self._moments[0] = MOMENTUM * self._moments[0] + gradient
            return self._moments[0].copy()
        number = self._rules.correction(self._updates, self._microbatches, self._problem.k)
        for moment, beta, value in zip(self._moments, BETAS, (gradient, gradient**2)):
            moment[:] = beta * moment + (1 - beta) * value
        first, second = (moment / (1 - beta**number) for moment, beta in zip(self._moments, BETAS))
        return first / (np.sqrt(second) + EPSILON)


def _clipped(gradient: np.ndarray, limit: float) -> np.ndarray:
    norm: Any = np.linalg.norm(gradient)
    return gradient * (limit / norm) if norm > limit else gradient


def _rounded(total: np.ndarray, precision: str | None) -> np.ndarray:
    """The numbers that are left of a sum in half precision."""
    if precision is None:
        return total
    if precision == "float16":
        return total.astype(np.float16).astype(float)
    # Bfloat16 is the upper half of float32, rounded to even
    bits = total.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(float)

"""A training: one seed of an experiment, update by update."""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment


@dataclass(frozen=True)
class Update:
    """One update of a training.

    Attributes:
        number: 1 for the first.
        losses: the mean loss of each micro-batch, in nats, before the update; shape (micro-batches,).
        weights: the examples of each micro-batch.
        gradient_norms: the norm of each micro-batch's gradient over all weights.
        window_gradient_norm: the norm of their mean, which the optimizer got.
        accuracy: the share of test images recognised after the update, or None when it was not measured.
        seconds: what the update took, without the measuring.
        progress: the share of the budget that is used up, 1 after the last update.
    """

    number: int
    losses: np.ndarray
    weights: np.ndarray
    gradient_norms: np.ndarray
    window_gradient_norm: float
    accuracy: float | None
    seconds: float
    progress: float

    @property
    def loss(self) -> float:
        """The window's mean loss: the large batch's."""
        return float(np.average(self.losses, weights=self.weights))

    @property
    def diverged(self) -> bool:
        """Whether a loss or a gradient is no longer a finite number."""
        return not np.isfinite([*self.losses, *self.gradient_norms]).all()


class Stop:
    """Asks a training to end, from any thread. It does so within a micro-batch; the update under way is dropped.

    >>> stop = Stop()
    >>> stop.set()
    >>> list(train(Experiment(), stop=stop))
    []
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._set = False
        self._cancels: list[Callable] = []

    def set(self) -> None:
        """Asks."""
        with self._lock:
            self._set = True
            for cancel in self._cancels:
                cancel()

    def is_set(self) -> bool:
        """Whether it was asked."""
        return self._set

    @contextmanager
    def calling(self, cancel: Callable):
        """While this lasts, `set` calls cancel; at once when it was set before."""
        with self._lock:
            self._cancels.append(cancel)
            if self._set:
                cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancels.remove(cancel)


def train(experiment: Experiment, seed: int = 0, stop: Stop | None = None) -> Iterator[Update]:
    """Trains, and yields each update when it is made. Ends early when the loss is no longer finite.

    The seed chooses the first weights, the order of the examples and the dropout masks: two experiments that differ
    only in the method see the same of each.

    Args:
        experiment: what to do; its own seeds do not matter here.
        seed: an integer of 0 or more.
        stop: ends the training when it is set.
    """
    _checks.natural_number("seed", seed)
    data = datasets.load(experiment.dataset)
    model = models.build(experiment.model, data.train_images.shape[1:])
    test_accuracy = accuracy_measure(experiment.dataset, experiment.model)
    budget = Budget(experiment)
    with borrowed(_kind(experiment), lambda: _build(experiment, model)) as method:
        method.reset(model.initial_weights(seed))
        with (stop or Stop()).calling(method.cancel):
            seen = 0  # micro-batches so far: their number chooses the dropout masks
            for rows in windows(experiment, seed):
                began = time.perf_counter()
                try:
                    result = method.update(
                        data.train_images[rows],
                        data.train_labels[rows],
                        experiment.microbatch_size,
                        experiment.learning_rate,
                        dropout_seed=(seed, seen),
                    )
                except methods.Cancelled:
                    return
                seen += len(result.losses)
                update = budget.update(result, time.perf_counter() - began, lambda: test_accuracy(method.weights()))
                yield update
                if update.diverged or budget.used_up:
                    return


class Budget:
    """Counts what a training has used, and knows when the accuracy is due."""

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._updates = self._examples = 0
        self._seconds = 0.0

    @property
    def progress(self) -> float:
        """The share that is used up, at most 1."""
        e = self._experiment
        if e.updates is not None:
            return self._updates / e.updates
        if e.examples is not None:
            return self._examples / e.examples
        return min(1.0, self._seconds / e.seconds)

    @property
    def used_up(self) -> bool:
        """Whether the last update was the last one."""
        return self.progress >= 1

    def update(self, result: methods.Microbatches, seconds: float, test_accuracy: Callable) -> Update:
        """Takes an update into account, and tells of it; test_accuracy() is called when it is due."""
        self._updates += 1
        self._examples += round(result.weights.sum())
        self._seconds += seconds
        norms = np.sqrt(np.asarray(result.squared_norms, np.float64))
        norm = float(np.sqrt(result.window_squared_norm))
        made = functools.partial(Update, self._updates, result.losses, result.weights, norms, norm)
        due = self._updates % self._experiment.eval_every == 0 or self.used_up
        due = due or made(None, seconds, self.progress).diverged
        return made(float(test_accuracy()) if due else None, seconds, self.progress)


def windows(experiment: Experiment, seed: int) -> Iterator[np.ndarray]:
    """The rows of each window: shuffled epochs, each cut into windows of which the last may be smaller.

    They end with the budget of updates or examples; with one of seconds they do not.
    """
    there = datasets.TRAINING_EXAMPLES[experiment.dataset]
    generator = np.random.default_rng([seed, 1])
    updates = float("inf") if experiment.updates is None else experiment.updates
    examples = float("inf") if experiment.examples is None else experiment.examples
    while True:
        order = generator.permutation(there)
        for start in range(0, there, experiment.effective_batch):
            if not updates or not examples:
                return
            rows = order[start : start + int(min(experiment.effective_batch, examples))]
            updates, examples = updates - 1, examples - len(rows)
            yield rows


# Building a graph or tracing a function takes longer than a short run. A method that a run is done with waits here for
# the next run of its kind; two runs at once never share one.
_idle: dict[tuple, list] = defaultdict(list)
_idle_lock = threading.Lock()


@contextmanager
def borrowed(kind: tuple, build: Callable) -> Iterator:
    """Something of this kind for a while: one that waits, or a new one."""
    with _idle_lock:
        waiting = _idle[kind]
        one = waiting.pop() if waiting else None
    if one is None:
        one = build()
    try:
        yield one
    finally:
        with _idle_lock:
            waiting.append(one)


def _kind(experiment: Experiment) -> tuple:
    return experiment.method, experiment.model, experiment.dataset, experiment.optimizer, experiment.towers


def _build(experiment: Experiment, model: models.Model) -> methods.Method:
    optimizer = optimizers.OptimizerConfig(experiment.optimizer)
    method = methods.build(experiment.method, model, optimizer, towers=experiment.towers)
    # The first update traces and plans; a training's seconds are to tell of updates alone.
    method.reset(model.initial_weights(0))
    method.update(np.zeros([1, *model.input_shape]), np.zeros(1, int), 1, 0.0)
    return method


@functools.lru_cache(maxsize=8)
def accuracy_measure(dataset: str, model: str):
    """A compiled function from weights to the share of the test images that the model recognises without dropout."""
    data = datasets.load(dataset)
    network = models.build(model, data.test_images.shape[1:])
    # Ten parts, several at once: each part's operations are then of the size that one core handles well.
    images = tf.constant(data.test_images.reshape(10, -1, *network.input_shape))
    labels = tf.constant(data.test_labels.reshape(10, -1))

    @tf.function(autograph=False)
    def measure(weights):
        def share(part):
            guesses = tf.argmax(network.logits(weights, part[0], None), axis=1, output_type=tf.int32)
            return tf.reduce_mean(tf.cast(guesses == part[1], tf.float32))

        return tf.reduce_mean(tf.map_fn(share, (images, labels), fn_output_signature=tf.float32))

    return measure

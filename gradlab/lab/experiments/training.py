"""The training of one seed of an experiment, update by update."""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Stop, Update


def train(experiment: Experiment, seed: int = 0, stop: Stop | None = None) -> Iterator[Update]:
    """Trains one seed and yields each update when it is complete.

    The training ends early if a loss or a gradient is no longer finite. The seed determines the
    initial weights, the order of the examples and the dropout masks, so two experiments that differ
    only in the method use the same ones.

    Args:
        experiment: what to train; its own seeds are ignored.
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
            made = 0  # the micro-batches of all updates so far, which select the dropout masks
            for rows in window_rows(experiment, seed):
                began = time.perf_counter()
                try:
                    record = method.update(
                        data.train_images[rows],
                        data.train_labels[rows],
                        experiment.microbatch_size,
                        experiment.learning_rate,
                        dropout_seed=(seed, made),
                    )
                except methods.Cancelled:
                    return
                made += len(record.losses)
                update = budget.update(
                    record, time.perf_counter() - began, lambda: test_accuracy(method.weights())
                )
                yield update
                if update.diverged or budget.used_up:
                    return


class Budget:
    """Counts how much of its budget a training has used, and determines when the accuracy is
    measured.

    The accuracy is measured after every `Experiment.eval_every` updates, or each time another tenth
    of the budget is used up if `eval_every` is None; and always after the last update.

    Args:
        experiment: the experiment with the budget: updates, examples or seconds.
    """

    def __init__(self, experiment: Experiment):
        budgets = {name: getattr(experiment, name) for name in ("updates", "examples", "seconds")}
        [(self._kind, self._total)] = [
            (name, total) for name, total in budgets.items() if total is not None
        ]
        self._eval_every = experiment.eval_every
        self._used: dict[str, float] = dict.fromkeys(budgets, 0)

    @property
    def progress(self) -> float:
        """The share of the budget that is used up, at most 1."""
        return min(1.0, self._used[self._kind] / self._total)

    @property
    def used_up(self) -> bool:
        """Whether the last update has been made."""
        return self.progress >= 1

    def update(
        self, record: WindowRecord, seconds: float, test_accuracy: Callable[[], Any]
    ) -> Update:
        """Counts an update.

        Args:
            record: the losses and norms of the update.
            seconds: the time that the update took.
            test_accuracy: a function that measures the test accuracy; it is called only when a
                measurement is due.

        Returns:
            The complete record of the update.
        """
        tenths = self._tenths
        self._used["updates"] += 1
        self._used["examples"] += round(record.weights.sum())
        self._used["seconds"] += seconds
        number = int(self._used["updates"])
        made = Update(
            **vars(record), number=number, accuracy=None, seconds=seconds, progress=self.progress
        )
        due = self._tenths > tenths if self._eval_every is None else number % self._eval_every == 0
        if due or self.used_up or made.diverged:
            made = replace(made, accuracy=float(test_accuracy()))
        return made

    @property
    def _tenths(self) -> int:
        """The number of tenths of the budget that are used up. For updates and examples this is
        integer arithmetic."""
        return int(10 * self._used[self._kind] // self._total)


def window_rows(experiment: Experiment, seed: int) -> Iterator[np.ndarray]:
    """The rows of the training data in each window.

    Each epoch is shuffled and cut into windows, of which the last may be smaller.

    Args:
        experiment: the data set, the effective batch and the budget.
        seed: the seed that determines the order.

    Yields:
        The row numbers of a window, shape (examples,). The windows end with a budget of updates or
        examples; with a budget of seconds they do not end.
    """
    available = datasets.TRAINING_EXAMPLES[experiment.dataset]
    generator = np.random.default_rng([seed, 1])
    updates = float("inf") if experiment.updates is None else experiment.updates
    examples = float("inf") if experiment.examples is None else experiment.examples
    while True:
        order = generator.permutation(available)
        for start in range(0, available, experiment.effective_batch):
            if not updates or not examples:
                return
            rows = order[start : start + int(min(experiment.effective_batch, examples))]
            updates = updates - 1
            examples = examples - len(rows)
            yield rows


# Building a graph or tracing a function takes longer than a short run. The methods that no training
# is using are kept here by kind, for the next training of that kind. Two concurrent trainings never
# share a method.
idle_methods: dict[tuple, list] = defaultdict(list)
_idle_lock = threading.Lock()


@contextmanager
def borrowed(kind: tuple, build: Callable[[], Any]) -> Iterator[Any]:
    """A context with a method for one training: an idle one of this kind, or else a new one.

    Args:
        kind: what distinguishes the method from others, such as its name and its model.
        build: builds a new one.
    """
    with _idle_lock:
        idle = idle_methods[kind]
        method = idle.pop() if idle else None
    if method is None:
        method = build()
    try:
        yield method
    finally:
        with _idle_lock:
            idle.append(method)


def _kind(experiment: Experiment) -> tuple:
    return (
        experiment.method,
        experiment.model,
        experiment.dataset,
        experiment.optimizer,
        experiment.towers,
    )


def _build(experiment: Experiment, model: models.Model) -> methods.Method:
    optimizer = optimizers.OptimizerConfig(experiment.optimizer)
    method = methods.build(experiment.method, model, optimizer, towers=experiment.towers)
    # The first update also plans the execution. Making it here keeps that time out of the
    # training's seconds.
    method.reset(model.initial_weights(0))
    method.update(np.zeros([1, *model.input_shape]), np.zeros(1, int), 1, 0.0)
    return method


@functools.lru_cache(maxsize=8)
def accuracy_measure(dataset: str, model: str) -> Callable[[Mapping[str, np.ndarray]], tf.Tensor]:
    """Compiles a function that measures the test accuracy.

    Args:
        dataset: the name of the data set.
        model: the name of the model.

    Returns:
        A function from weights to the share of the test images that the model classifies correctly
        without dropout: a scalar.
    """
    data = datasets.load(dataset)
    network = models.build(model, data.test_images.shape[1:])
    # Ten blocks, several of them at once: one core handles the operations of a block efficiently.
    images = tf.constant(data.test_images.reshape(10, -1, *network.input_shape))
    labels = tf.constant(data.test_labels.reshape(10, -1))

    @tf.function(autograph=False)
    def measure(weights):
        def share(block):
            images, labels = block
            guesses = tf.argmax(network.logits(weights, images, None), axis=1, output_type=tf.int32)
            return tf.reduce_mean(tf.cast(guesses == labels, tf.float32))

        return tf.reduce_mean(tf.map_fn(share, (images, labels), fn_output_signature=tf.float32))

    return measure

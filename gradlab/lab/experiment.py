"""An experiment: what to train, how, and the updates that come of it."""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gradlab import checks
from gradlab.lab import datasets, methods, models, optimizers


@dataclass(frozen=True)
class Experiment:
    """What to train and how. Checked as a whole when it is made.

    Attributes:
        dataset: "mnist", "fashion_mnist" or "cifar10".
        model: "lenet", "dense" or "vgg".
        method: how an update is made: "large_batch", "towers", "placeholders", "variables" or "microbatched".
        microbatch_size: b, the examples of one forward and backward pass.
        accumulation_steps: k, the micro-batches of one update (on each tower).
        towers: T, copies of the computation; more than 1 only for "towers", "placeholders" and "variables".
        updates: how many optimizer steps.
        optimizer: "sgd", "momentum", "adam" or "adamw".
        learning_rate: of every update.
        eval_every: the test accuracy is measured after every so many updates, and after the last.

    Example:
        >>> Experiment(microbatch_size=20, accumulation_steps=5).effective_batch
        100
        >>> Experiment(microbatch_size=0)
        Traceback (most recent call last):
        ValueError: microbatch_size must be a positive integer. Received: 0
    """

    dataset: str = "mnist"
    model: str = "lenet"
    method: str = "variables"
    microbatch_size: int = 20
    accumulation_steps: int = 5
    towers: int = 1
    updates: int = 1000
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    eval_every: int = 100

    def __post_init__(self):
        checks.one_of("dataset", self.dataset, datasets.TRAINING_EXAMPLES)
        checks.one_of("model", self.model, models.MODELS)
        checks.one_of("method", self.method, methods.METHODS)
        checks.one_of("optimizer", self.optimizer, optimizers.OPTIMIZERS)
        for name in ("microbatch_size", "accumulation_steps", "towers", "updates", "eval_every"):
            checks.positive_integer(name, getattr(self, name))
        checks.positive_number("learning_rate", self.learning_rate)
        methods.check_towers(self.method, self.towers)
        examples = datasets.TRAINING_EXAMPLES[self.dataset]
        if self.effective_batch > examples:
            raise ValueError(
                f"towers * accumulation_steps * microbatch_size must be at most the {examples} training examples of "
                f"{self.dataset}. Received: {self.towers} * {self.accumulation_steps} * {self.microbatch_size} = "
                f"{self.effective_batch}"
            )

    @property
    def effective_batch(self) -> int:
        """B = T * k * b, the examples behind one update."""
        return self.towers * self.accumulation_steps * self.microbatch_size


@dataclass(frozen=True)
class Update:
    """One update of a training.

    Attributes:
        number: 1 for the first.
        losses: the mean loss of each micro-batch, in nats, before the update; shape (micro-batches,).
        weights: the examples of each micro-batch.
        accuracy: the share of test images recognised after the update, or None when it was not measured.
        seconds: what the update took, without the measuring.
    """

    number: int
    losses: np.ndarray
    weights: np.ndarray
    accuracy: float | None
    seconds: float

    @property
    def loss(self) -> float:
        """The window's mean loss: the large batch's."""
        return float(np.average(self.losses, weights=self.weights))


def train(experiment: Experiment, seed: int = 0) -> Iterator[Update]:
    """Trains, and yields each update when it is made. Ends early when the loss is no longer finite.

    The seed chooses the first weights, the order of the examples and the dropout masks: two experiments that differ
    only in the method see the same of each.

    Args:
        experiment: what to do.
        seed: an integer of 0 or more.
    """
    checks.natural_number("seed", seed)
    data = datasets.load(experiment.dataset)
    model = models.build(experiment.model, data.train_images.shape[1:])
    method = _take(experiment, model)
    test_accuracy = _accuracy_measure(experiment.dataset, experiment.model)
    try:
        method.reset(model.initial_weights(seed))
        seen = 0  # micro-batches so far: their number chooses the dropout masks
        for number, rows in enumerate(_windows(len(data.train_labels), experiment, seed), 1):
            began = time.perf_counter()
            result = method.update(
                data.train_images[rows],
                data.train_labels[rows],
                experiment.microbatch_size,
                experiment.learning_rate,
                dropout_seed=(seed, seen),
            )
            seconds = time.perf_counter() - began
            seen += len(result.losses)
            finite = np.isfinite(result.losses).all()
            measured = number % experiment.eval_every == 0 or number == experiment.updates or not finite
            accuracy = float(test_accuracy(method.weights())) if measured else None
            yield Update(number, result.losses, result.weights, accuracy, seconds)
            if not finite:
                return
    finally:
        _give_back(experiment, method)


def _windows(examples: int, experiment: Experiment, seed: int) -> Iterator[np.ndarray]:
    """The rows of each update: shuffled epochs, each cut into windows of which the last may be smaller."""
    generator = np.random.default_rng([seed, 1])
    left = experiment.updates
    while True:
        order = generator.permutation(examples)
        for start in range(0, examples, experiment.effective_batch):
            if left == 0:
                return
            left -= 1
            yield order[start : start + experiment.effective_batch]


# Building a graph or tracing a function takes longer than a short run. A method that a run is done with waits here for
# the next run of its kind; two runs at once never share one.
_idle: dict[tuple, list] = defaultdict(list)
_idle_lock = threading.Lock()


def _kind(experiment: Experiment) -> tuple:
    return experiment.method, experiment.model, experiment.dataset, experiment.optimizer, experiment.towers


def _take(experiment: Experiment, model: models.Model) -> methods.Method:
    with _idle_lock:
        if _idle[_kind(experiment)]:
            return _idle[_kind(experiment)].pop()
    optimizer = optimizers.OptimizerConfig(experiment.optimizer)
    return methods.build(experiment.method, model, optimizer, towers=experiment.towers)


def _give_back(experiment: Experiment, method: methods.Method) -> None:
    with _idle_lock:
        _idle[_kind(experiment)].append(method)


@functools.lru_cache(maxsize=8)
def _accuracy_measure(dataset: str, model: str):
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

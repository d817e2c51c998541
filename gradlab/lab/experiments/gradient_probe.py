"""The probe: how losses and gradients of micro-batches scatter around those of the full data, at
fixed weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.training import window_rows
from gradlab.measure import noise


@dataclass(frozen=True)
class Probe:
    """Losses and gradients of micro-batches and windows at the same weights.

    Attributes:
        losses: the mean loss of each micro-batch in nats, shape (windows, k).
        variance: the mean squared distance between a micro-batch's gradient and the full data's.
        window_variance: the mean squared distance between a window's mean gradient and the full
            data's.
        cosines: the cosine of the angle between each micro-batch's gradient and the full data's,
            shape (windows, k).
        window_cosines: the cosine of the angle between each window's mean gradient and the full
            data's, shape (windows,).
        full_norm: the norm of the full data's gradient.
    """

    losses: np.ndarray
    variance: float
    window_variance: float
    cosines: np.ndarray
    window_cosines: np.ndarray
    full_norm: float

    @property
    def noise(self) -> noise.LossNoise:
        """The standard deviations of the losses, compared with the law of noise."""
        return noise.loss_noise(self.losses)


def probe(experiment: Experiment, seed: int = 0, after: int = 0, count: int = 32) -> Probe:
    """Measures the noise of random micro-batches at the weights that a training has after some
    updates.

    The weights stay fixed during the measurement. With dropout each micro-batch draws its own
    masks, and the full data's gradient is the mean over masks too.

    Args:
        experiment: the model, the data, the micro-batch size and the accumulation steps, and how
            the updates before the measurement are made.
        seed: the seed of the training and of the measured micro-batches.
        after: the number of updates to train before the measurement.
        count: the number of windows to measure, 4 or more.

    Example:
        >>> look = probe(Experiment(model="dense", method="microbatched", accumulation_steps=16), count=8)
        >>> bool(look.window_variance < look.variance / 8)     # about a sixteenth
        True
    """
    _checks.natural_number("after", after)
    if isinstance(count, bool) or not isinstance(count, int) or count < 4:
        raise ValueError(f"count must be an integer of 4 or more. Received: {count!r}")
    data = datasets.load(experiment.dataset)
    model = models.build(experiment.model, data.train_images.shape[1:])
    gradient = _gradient_function(model, _weights_after(experiment, model, data, seed, after))
    generator = np.random.default_rng([seed, 2])

    def look(rows, number):
        return gradient(
            data.train_images[rows],
            data.train_labels[rows],
            np.array([seed + 1_000_003, number], np.int32),
        )

    full = _full_gradient(look, len(data.train_labels))
    steps = experiment.towers * experiment.accumulation_steps
    size = experiment.microbatch_size
    losses = []
    cosines = []
    window_cosines = []
    variances = []
    window_variances = []
    for window in range(count):
        # Drawn independently, because the law of noise is about independent micro-batches.
        rows = generator.integers(len(data.train_labels), size=[steps, size])
        looks = [
            look(microbatch, 10_000 + window * steps + number)
            for number, microbatch in enumerate(rows)
        ]
        gradients = np.array([each for _, each in looks])
        mean = gradients.mean(axis=0, keepdims=True)
        losses.append([loss for loss, _ in looks])
        cosines.append(noise.cosines(gradients, full))
        window_cosines.append(noise.cosines(mean, full)[0])
        variances.append(noise.gradient_variance(gradients, full))
        window_variances.append(noise.gradient_variance(mean, full))
    return Probe(
        np.array(losses),
        float(np.mean(variances)),
        float(np.mean(window_variances)),
        np.array(cosines),
        np.array(window_cosines),
        float(np.linalg.norm(full)),
    )


def _weights_after(
    experiment: Experiment, model: models.Model, data: datasets.Dataset, seed: int, after: int
) -> dict:
    """The weights that the experiment's training of this seed has after this number of updates."""
    optimizer = optimizers.OptimizerConfig(experiment.optimizer)
    method = methods.build(experiment.method, model, optimizer, towers=experiment.towers)
    method.reset(model.initial_weights(seed))
    made = 0
    budget = replace(experiment, updates=max(after, 1), examples=None, seconds=None)
    for _, rows in zip(range(after), window_rows(budget, seed)):
        batch = data.train_images[rows], data.train_labels[rows]
        record = method.update(
            *batch, experiment.microbatch_size, experiment.learning_rate, dropout_seed=(seed, made)
        )
        made += len(record.losses)
    return method.weights()


def _gradient_function(model: models.Model, weights: dict) -> Callable:
    """A function (images, labels, dropout seed) -> (mean loss, its gradient as one float64
    vector)."""
    fixed = {name: tf.constant(value) for name, value in weights.items()}

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None, *model.input_shape]),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([2], tf.int32),
        ],
    )
    def compiled(images, labels, dropout_seed):
        with tf.GradientTape() as tape:
            tape.watch(fixed)
            loss = tf.reduce_mean(model.losses(fixed, images, labels, dropout_seed))
        gradients = tape.gradient(loss, fixed)
        return loss, tf.concat([tf.reshape(gradients[name], [-1]) for name in model.shapes], axis=0)

    def gradient(images, labels, dropout_seed):
        loss, vector = compiled(images, labels, dropout_seed)
        return float(loss), vector.numpy().astype(np.float64)

    return gradient


def _full_gradient(look: Callable, examples: int) -> np.ndarray:
    """The gradient of the mean loss over the whole training set, computed in blocks."""
    total = np.zeros([])
    block = 500
    for number, start in enumerate(range(0, examples, block)):
        rows = np.arange(start, min(start + block, examples))
        total = total + len(rows) * look(rows, number)[1]
    return total / examples

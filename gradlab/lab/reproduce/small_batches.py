"""Masters and Luschi 2018: small batches against large ones at equal cost.

The paper trains image classifiers with plain SGD for a fixed number of epochs, so that every batch
size m costs the same number of gradients of examples. The learning rate is a base rate times m: the
same average change of the weights per example. It finds the best test accuracy at m = 2 to 32, and
that larger batches work for fewer base rates.

The paper's networks for CIFAR and ImageNet are too large to be trained here, so this study tests
the direction only, on a small problem: a network with one hidden layer of 32 units, the first
10,000 training images of MNIST, four passes, and three seeds. Twelve base rates are tried for every
m from 2 to 1,024. All networks of one m are trained together.

The rules were decided before the first run. Accuracies are those of the 10,000 test images after
the last update, and a network whose weights are not finite counts as guessing (10 %). A base rate
works if its mean accuracy over the seeds is at most 2 percentage points below the best mean of all.
"""

import math
import time
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES
from gradlab.lab.reproduce.study import Claim, Study

PAPER = "D. Masters and C. Luschi 2018, Revisiting Small Batch Training for Deep Neural Networks, arXiv:1804.07612"
BATCHES = tuple(2**power for power in range(1, 11))
BASE_RATES = tuple(2.0**power for power in range(-14, -2))
HIDDEN = 32
IMAGES = 10_000
EPOCHS = 4
SEEDS = 3
SMALL = (2, 32)  # the batches among which the paper found the best accuracy
WORKS = 2.0  # percentage points below the best mean at which a base rate still works


def study(quick: bool = False) -> Study:
    """Train all networks.

    Args:
        quick: whether to train on 512 images, once, instead.
    """
    began = time.monotonic()
    images, epochs = (512, 1) if quick else (IMAGES, EPOCHS)
    networks = Networks(images, epochs)
    rows = [row for batch in BATCHES for row in networks.train(batch)]
    return Study(
        "small-batches", PAPER, judge(rows), rows, figure(rows), quick, time.monotonic() - began
    )


class Networks:
    """One network for each base rate and seed, all trained together.

    Args:
        images: how many training images are used.
        epochs: the number of passes over them.
    """

    def __init__(self, images: int, epochs: int):
        self._data = datasets.load("mnist")
        self._images = images
        self._epochs = epochs
        self._x = tf.constant(self._data.train_images[:images].reshape(images, -1))
        self._y = tf.one_hot(self._data.train_labels[:images], 10)
        shapes = [[len(BASE_RATES), *start.shape] for start in starts()]
        self._weights = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    def train(self, batch: int) -> list[dict[str, Any]]:
        """Train from the start.

        Args:
            batch: the number of examples of an update; a ragged tail of an epoch is left out.

        Returns:
            For each base rate and seed a row with the test accuracy in percent.
        """
        for each, start in zip(self._weights, starts()):
            each.assign(np.broadcast_to(start, each.shape))
        updates = self._images // batch
        for epoch in range(self._epochs):
            orders = [
                np.random.default_rng([seed, epoch]).permutation(self._images)
                for seed in range(SEEDS)
            ]
            cut = np.array(
                [order[: updates * batch].reshape(updates, batch) for order in orders], "int32"
            )
            self._epoch(tf.constant(cut.transpose(1, 0, 2)), tf.constant(BASE_RATES) * batch)
        data = self._data
        accuracies = _accuracies(
            self._weights, data.test_images.reshape(len(data.test_images), -1), data.test_labels
        )
        return [
            {
                "batch": batch,
                "base_rate": rate,
                "seed": seed,
                "accuracy": round(float(accuracies[i, seed]), 2),
            }
            for i, rate in enumerate(BASE_RATES)
            for seed in range(SEEDS)
        ]

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, SEEDS, None], tf.int32),
            tf.TensorSpec([len(BASE_RATES)], tf.float32),
        ]
    )
    def _epoch(self, order: tf.Tensor, rates: tf.Tensor) -> None:
        """Make the updates of one epoch from the rows in `order`, shape (updates, seeds, batch)."""
        per_rate = [tf.reshape(rates, [-1] + [1] * (len(each.shape) - 1)) for each in self._weights]
        for rows in order:
            with tf.GradientTape() as tape:
                found = logits(self._weights, tf.gather(self._x, rows))
                losses = -tf.reduce_sum(
                    tf.gather(self._y, rows) * tf.nn.log_softmax(found), axis=-1
                )
                # Each network has its own term
                loss = tf.reduce_sum(tf.reduce_mean(losses, axis=-1))
            for each, rate, gradient in zip(
                self._weights, per_rate, tape.gradient(loss, self._weights)
            ):
                each.assign_sub(rate * gradient)


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    accuracies = _table(rows)
    means = accuracies.mean(axis=2)
    best = means.max(axis=1)
    winner = BATCHES[int(best.argmax())]
    working = (means >= means.max() - WORKS).sum(axis=1)
    chosen = [accuracies[i, means[i].argmax()] for i in (int(best.argmax()), -1)]
    gap = chosen[0].mean() - chosen[1].mean()
    error = math.sqrt(sum(each.var(ddof=1) / SEEDS for each in chosen))
    counts = ", ".join(f"{batch}: {count}" for batch, count in zip(BATCHES, working))
    falls = working[2:]  # from a batch of 8 on
    return [
        Claim(
            "The best test accuracy is reached with batches of 2 to 32.",
            f"the batch with the best mean accuracy, at its own best base rate, is {SMALL[0]} to "
            f"{SMALL[1]}",
            f"{winner} ({best.max():.2f} %)",
            SMALL[0] <= winner <= SMALL[1],
        ),
        Claim(
            "At equal cost, a large batch ends with a lower accuracy.",
            f"the best mean accuracy of {BATCHES[-1]:,} is lower by more than 2 standard errors",
            f"lower by {gap:.2f} ± {error:.2f} percentage points",
            gap > 2 * error,
        ),
        Claim(
            "The larger the batch, the fewer base rates work.",
            f"from a batch of 8 to {BATCHES[-1]:,} their number never rises, and falls by at "
            "least 2",
            counts,
            bool((np.diff(falls) <= 0).all() and falls[0] - falls[-1] >= 2),
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the accuracy against the base rate for some batches, and the best one against the
    batch."""
    drawn, (left, right) = picture.figure(2, size=(8.5, 3.4))
    accuracies = _table(rows)
    means = accuracies.mean(axis=2)
    shown = (2, 8, 32, 128, 1024)
    for batch, style in zip(shown, STYLES):
        left.plot(BASE_RATES, means[BATCHES.index(batch)], label=f"m = {batch:,}", **style)
    left.set(
        xscale="log",
        xlabel="base rate (learning rate / m)",
        ylabel="test accuracy (%)",
        ylim=(70, 100),
    )
    left.set_xscale("log", base=2)
    left.legend(frameon=False, fontsize=8)
    best = means.argmax(axis=1)
    chosen = np.array([accuracies[i, place] for i, place in enumerate(best)])
    right.errorbar(
        BATCHES, chosen.mean(axis=1), yerr=chosen.std(axis=1, ddof=1), capsize=3, **STYLES[0]
    )
    right.set(xlabel="batch size m", ylabel="best test accuracy (%)")
    right.set_xscale("log", base=2)
    right.set_xticks(BATCHES, labels=[str(batch) for batch in BATCHES], fontsize=7)
    words = ", ".join(f"m = {b:,}: {mean:.1f} %" for b, mean in zip(BATCHES, chosen.mean(axis=1)))
    drawn.set_label(
        f"Left: test accuracy against the base rate for m = {', '.join(map(str, shown))}. Right: "
        f"the best mean accuracy of each batch size, ± 1 standard deviation of {SEEDS} seeds: "
        f"{words}."
    )
    return drawn


def starts(seeds: int = SEEDS) -> list[np.ndarray]:
    """The first weights of the networks of seeds, with the seed as the first axis: two kernels (Glorot uniform)
    and two biases."""
    found = []
    for i, o in ((784, HIDDEN), (HIDDEN, 10)):
        limit = math.sqrt(6 / (i + o))
        kernels = [
            np.random.default_rng([seed, i]).uniform(-limit, limit, [i, o]) for seed in range(seeds)
        ]
        found += [np.array(kernels, "float32"), np.zeros([seeds, 1, o], "float32")]
    return found


def logits(weights: list, x: tf.Tensor) -> tf.Tensor:
    """The logits of all networks, shape (rates, seeds, examples, 10), from x, shape (seeds,
    examples, 784). Without an axis of rates in the weights, the logits have none."""
    kernel, bias, top, top_bias = weights
    return tf.nn.relu(x @ kernel + bias) @ top + top_bias


def _accuracies(weights: list, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The test accuracy of each network in percent, shape (rates, seeds)."""
    right = np.zeros([len(BASE_RATES), SEEDS])
    for start in range(0, len(images), 1000):
        part = slice(start, start + 1000)
        x = tf.broadcast_to(images[part], [SEEDS, *images[part].shape])
        right += (logits(weights, x).numpy().argmax(axis=-1) == labels[part]).sum(axis=-1)
    finite = np.all([np.isfinite(each.numpy()).all(axis=(-2, -1)) for each in weights], axis=0)
    return np.where(finite, 100 * right / len(images), 10.0)


def _table(rows: list[dict[str, Any]]) -> np.ndarray:
    """The accuracies in percent, shape (batches, base rates, seeds)."""
    return np.array([row["accuracy"] for row in rows]).reshape(len(BATCHES), len(BASE_RATES), SEEDS)

"""Malladi et al. 2022: the square-root rule for Adam, with its betas and epsilon.

The paper says: where gradient noise dominates, a batch that is k times as large has the same loss
after the same examples if the rate is multiplied by sqrt(k), 1 - beta_1 and 1 - beta_2 by k, and
epsilon is divided by sqrt(k). The usual rule for SGD, the rate times k, does not hold.

Eight networks 784-32-10, one for each seed, learn 20,000 images of MNIST. All of them first make
16,000 updates of 2 images. From there on, Adam begins anew in each of five ways, for 40,960 images:
with the same batch; again, with other images; with batches of 32 by the rule; with the rate of the
rule only; and with the rate times 16 and the rest of the rule. After every 4,096 images the mean loss
of all 20,000 is taken.
Both batches are far below the noise scale that `noise_scale` finds, some hundred images.

A distance between two ways is the root mean square, over seeds and looks, of the logarithm of the
ratio of their losses. The tolerance is that of the same batch with other images. The rules were
decided before the first whole run. A small version with batches of 16 and 256, from weights after 100
updates, had been seen by then: batches of 2 and 32 and more updates came of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce.small_batches import logits, starts
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "S. Malladi, K. Lyu, A. Panigrahi and S. Arora 2022, On the SDEs and Scaling Rules for Adaptive "
    "Gradient Algorithms, arXiv:2205.10287"
)
IMAGES = 20_000
SEEDS = 8
FIRST = 16_000  # updates
LOOKS = 10
BETWEEN = 4_096  # images between two looks
TIMES = 16  # a batch of the rule, in small ones
TOLERANCE = 2  # times the distance of two runs that differ in their images only


@dataclass(frozen=True)
class AdamSettings:
    """A batch with Adam's hyperparameters; order tells the images' order from that of others."""

    name: str
    order: int
    batch: int
    rate: float
    beta_1: float
    beta_2: float
    epsilon: float


def by_rule(small: AdamSettings, name: str, order: int, times: int) -> AdamSettings:
    """The settings for a batch so many times as large, by the paper's rule."""
    return AdamSettings(
        name,
        order,
        times * small.batch,
        times**0.5 * small.rate,
        1 - times * (1 - small.beta_1),
        1 - times * (1 - small.beta_2),
        small.epsilon / times**0.5,
    )


SMALL = AdamSettings("batch 2", 0, 2, 2e-4, 0.99, 0.999, 1e-6)
AGAIN = replace(SMALL, name="batch 2, other images", order=1)
RULE = by_rule(SMALL, "batch 32, the rule", 2, TIMES)
RATE_ONLY = replace(
    SMALL, name="batch 32, rate x 4 only", order=3, batch=TIMES * SMALL.batch, rate=4 * SMALL.rate
)
LINEAR = replace(RULE, name="batch 32, rate x 16", order=4, rate=TIMES * SMALL.rate)
WAYS = (SMALL, AGAIN, RULE, RATE_ONLY, LINEAR)


def study(quick: bool = False) -> Study:
    """Train all networks in all ways.

    Args:
        quick: whether to make 100 updates first, and two looks.
    """
    began = time.monotonic()
    first, looks = (100, 2) if quick else (FIRST, LOOKS)
    networks = AdamNetworks()
    networks.updates_of(SMALL)(images_of(SMALL, 0, first))
    reached = networks.weights()
    rows = [row for way in WAYS for row in losses_of(networks, reached, way, looks)]
    claims = judge(rows)
    seconds = time.monotonic() - began
    return Study("adam-rule", PAPER, claims, rows, figure(rows), quick, seconds)


class AdamNetworks:
    """One network for each seed, trained together: each weight has the seeds as its first axis."""

    def __init__(self) -> None:
        data = datasets.load("mnist")
        self._x = tf.constant(data.train_images[:IMAGES].reshape(IMAGES, -1))
        self._y = tf.constant(data.train_labels[:IMAGES].astype("int32"))
        self._weights = [tf.Variable(start) for start in starts(SEEDS)]

    def weights(self) -> list[np.ndarray]:
        """The present weights."""
        return [each.numpy() for each in self._weights]

    def assign(self, weights: list[np.ndarray]) -> None:
        """Set the weights."""
        for each, value in zip(self._weights, weights):
            each.assign(value)

    def losses(self) -> np.ndarray:
        """The mean loss of each network over all images, shape (SEEDS,)."""
        parts = [
            self._losses(rows)
            for rows in np.broadcast_to(np.arange(IMAGES, dtype="int32"), [SEEDS, IMAGES])
            .reshape(SEEDS, 10, -1)
            .swapaxes(0, 1)
        ]
        return np.mean([part.numpy().mean(axis=1) for part in parts], axis=0)

    def updates_of(self, way: AdamSettings) -> Callable[[tf.Tensor], None]:
        """A function that makes updates with a new optimizer, from the numbers of their images, shape
        (updates, SEEDS, batch)."""
        adam = keras.optimizers.Adam(way.rate, way.beta_1, way.beta_2, way.epsilon)
        adam.build(self._weights)

        @tf.function(input_signature=[tf.TensorSpec([None, SEEDS, way.batch], tf.int32)])
        def make_updates(numbers: tf.Tensor) -> None:
            for of_update in numbers:
                with tf.GradientTape() as tape:
                    # Each network has its own term
                    loss = tf.reduce_sum(tf.reduce_mean(self._losses(of_update), axis=1))
                adam.apply(tape.gradient(loss, self._weights), self._weights)

        return make_updates.get_concrete_function()

    def _losses(self, rows: Any) -> tf.Tensor:
        """The losses of images, one row of numbers for each network."""
        found = logits(self._weights, tf.gather(self._x, rows))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(self._y, rows), found)


def losses_of(
    networks: AdamNetworks, reached: list[np.ndarray], way: AdamSettings, looks: int
) -> list[dict[str, Any]]:
    """Train in one way from the weights that were reached: a row for each look and seed."""
    networks.assign(reached)
    make_updates = networks.updates_of(way)
    rows = []
    for look in range(looks):
        make_updates(images_of(way, look + 1, BETWEEN // way.batch))
        rows += [
            {
                "way": way.name,
                "images": (look + 1) * BETWEEN,
                "seed": seed,
                "loss": float(f"{loss:.6g}"),
            }
            for seed, loss in enumerate(networks.losses())
        ]
    return rows


def images_of(way: AdamSettings, part: int, updates: int) -> tf.Tensor:
    """The numbers of the images that a way draws for the updates of a part of a run, shape (updates,
    SEEDS, batch)."""
    shape = [updates, way.batch]
    drawn = [
        np.random.default_rng([seed, way.order, part]).integers(IMAGES, size=shape, dtype="int32")
        for seed in range(SEEDS)
    ]
    return tf.constant(np.stack(drawn, axis=1))


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    again, rule, rate_only, linear = (
        _distance(rows, way, SMALL) for way in (AGAIN, RULE, RATE_ONLY, LINEAR)
    )
    limit = TOLERANCE * again
    found = f"{{:.1%}}, and {again:.1%} between two runs with other images"
    return [
        Claim(
            "By the rule, the loss is that of the small batch after the same examples.",
            f"their distance is at most {TOLERANCE} times that of two runs of the small batch",
            found.format(rule),
            rule <= limit,
        ),
        Claim(
            "The rate times 16 does not have the same loss.",
            f"the distance is more than {TOLERANCE} times that of two runs of the small batch",
            found.format(linear),
            linear > limit,
        ),
        Claim(
            "The betas and epsilon belong to the rule.",
            "with the rate of the rule alone, the distance is larger than with the rule",
            f"{rate_only:.1%} and {rule:.1%}",
            rate_only > rule,
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the mean loss of each way against the images, and how far it is from the small batch."""
    drawn, (left, right) = picture.figure(2, size=(8.5, 3.6))
    ends = []
    for way, style in zip(WAYS, STYLES):
        images = sorted({row["images"] for row in rows})
        losses = _losses(rows, way).mean(axis=1)
        left.plot(images, losses, label=way.name, **style)
        apart = _losses(rows, way) / _losses(rows, SMALL) - 1
        right.plot(images, 100 * apart.mean(axis=1), **style)
        ends.append(f"{way.name}: {losses[-1]:.3g}")
    left.set(yscale="log", xlabel="images since Adam began anew", ylabel="loss (nats)")
    right.set(xlabel="images since Adam began anew", ylabel="above batch 2 (%)")
    plain_numbers(left)
    for axes in (left, right):
        ticks = [0, 10_000, 20_000, 30_000, 40_000]
        axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    drawn.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    drawn.set_label(
        "The mean loss of eight networks against the images, and how far it is above that of "
        f"batches of 2. At the end: {'; '.join(ends)}."
    )
    return drawn


def _losses(rows: list[dict[str, Any]], way: AdamSettings) -> np.ndarray:
    """The losses of a way, shape (looks, SEEDS)."""
    return np.array([row["loss"] for row in rows if row["way"] == way.name]).reshape(-1, SEEDS)


def _distance(rows: list[dict[str, Any]], one: AdamSettings, other: AdamSettings) -> float:
    """The root mean square of the logarithm of the ratio of their losses."""
    ratios = np.log(_losses(rows, one) / _losses(rows, other))
    return float(np.sqrt(np.mean(ratios**2)))

"""McCandlish et al. 2018: the gradient noise scale of MNIST.

The paper's simple noise scale is the trace of the covariance of the gradients of single examples,
divided by the squared norm of the true gradient. It is estimated from gradient norms at two batch
sizes, where both parts are averaged before they are divided. The paper reports about 900 examples
for MNIST, averaged over training, for a small convolutional network of which it does not list every
setting, and finds that the noise scale grows as the loss falls.

The protocol and the first two rules were decided before the first run. A network with two
convolutions (16 and 32 filters of 5x5, stride 2) and one dense layer is trained with SGD at the
learning rate 0.05, with windows of 20 micro-batches of 20, for five passes over the 55,000 training
images, from three seeds. The noise scale is estimated in each tenth of the training; the average
over training is the mean of these ten. Since the paper's network is not known exactly and the noise
scale depends on how far training goes, a factor of two in either direction is allowed.

That run missed the published average: it found 319. The third rule asks whether its length explains
this, and was decided before any longer run. The same training goes on to twenty passes. If the noise
scale goes on growing, the average from the start reaches the published one on the way. If it stays
where the five passes end, at 500 to 600 examples, the average stays below that, and length is no
explanation.
"""

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure

from gradlab.fit.records import UpdateRecord
from gradlab.fit.trainer import Trainer
from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce.study import Claim, Study
from gradlab.measure.noise_scale import gradient_noise_scale

PAPER = (
    "S. McCandlish, J. Kaplan, D. Amodei and the OpenAI Dota Team 2018, An Empirical Model of "
    "Large-Batch Training, arXiv:1812.06162"
)
PUBLISHED = 900  # examples, averaged over training
FACTOR = 2  # the average may be this many times larger or smaller
GROWTH = 3  # the noise scale of the last tenth, divided by that of the first, is at least this
MICROBATCH = 20
WINDOW = 400
LEARNING_RATE = 0.05
EPOCHS = 20
FIRST_EPOCHS = 5  # the length of the first run
SEEDS = 3
PARTS = 40  # of the training: a tenth of the first run each
FIRST_PARTS = PARTS * FIRST_EPOCHS // EPOCHS


def study(quick: bool = False) -> Study:
    """Train the network and estimate the noise scale in each part of the training.

    Args:
        quick: whether to train for 120 updates from one seed instead.
    """
    began = time.monotonic()
    updates, seeds = (120, 1) if quick else (EPOCHS * 55_000 // WINDOW, SEEDS)
    rows = [row for seed in range(seeds) for row in _parts(seed, updates)]
    return Study(
        "noise-scale", PAPER, judge(rows), rows, figure(rows), quick, time.monotonic() - began
    )


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    scales = _scales(rows)
    first = scales[:, :FIRST_PARTS]
    mean = first.mean()
    growth = first[:, -1] / first[:, 0]
    averages = ", ".join(f"{each:.0f}" for each in first.mean(axis=1))
    passes = [passes_until(each) for each in scales]
    return [
        Claim(
            f"Averaged over training, the simple noise scale of MNIST is about {PUBLISHED} "
            "examples.",
            f"between {PUBLISHED / FACTOR:.0f} and {PUBLISHED * FACTOR}",
            f"{mean:.0f} (each seed: {averages})",
            bool(PUBLISHED / FACTOR <= mean <= PUBLISHED * FACTOR),
        ),
        Claim(
            "The noise scale grows while the loss falls.",
            f"in the last tenth of the training at least {GROWTH} times as large as in the first, "
            "in each seed",
            ", ".join(f"{each:.1f} times" for each in growth),
            bool((growth >= GROWTH).all()),
        ),
        Claim(
            f"The noise scale goes on growing, so that a longer training has an average of "
            f"{PUBLISHED}.",
            f"the average from the start reaches {PUBLISHED} within {EPOCHS} passes, in each seed",
            ", ".join("never" if each is None else f"after {each:g} passes" for each in passes),
            None not in passes,
        ),
    ]


def passes_until(scales: np.ndarray) -> float | None:
    """How many passes a training run takes until its average noise scale is the published one.

    Args:
        scales: the noise scale in each part of the training, shape (PARTS,).

    Returns:
        The passes at the end of the part, or None if the average stays below.

    Example:
        >>> passes_until(np.full(PARTS, 450.0)) is None
        True
        >>> passes_until(np.array([600.0, 1200.0] * 20))
        1.0
    """
    averages = np.cumsum(scales) / np.arange(1, len(scales) + 1)
    reached = np.flatnonzero(averages >= PUBLISHED)
    return float(reached[0] + 1) * EPOCHS / PARTS if len(reached) else None


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the noise scale along the training, and its average from the start."""
    drawn, axes = picture.figure()
    scales = _scales(rows)
    updates = [row["updates"] for row in rows if row["seed"] == 0]
    for seed, (values, style) in enumerate(zip(scales, STYLES)):
        axes.plot(updates, values, label=f"seed {seed}", **style | {"linewidth": 1})
    averages = np.cumsum(scales.mean(axis=0)) / np.arange(1, PARTS + 1)
    axes.plot(updates, averages, color="black", linewidth=2.5, label="average from the start")
    axes.axhline(PUBLISHED, color="black", linestyle=":", label="published average")
    axes.axvline(updates[FIRST_PARTS - 1], color="gray", linewidth=1)
    axes.annotate(
        f"{FIRST_EPOCHS} passes",
        (updates[FIRST_PARTS - 1], 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color="gray",
    )
    axes.set(yscale="log", xlabel="updates", ylabel="noise scale (examples)")
    plain_numbers(axes)
    axes.legend(frameon=False)
    first, last = scales.mean(axis=0)[[0, -1]]
    drawn.set_label(
        f"The noise scale of MNIST along training: it grows from {first:.0f} to {last:.0f} "
        f"examples, the mean of {len(scales)} seeds. Averaged from the start, it is "
        f"{averages[FIRST_PARTS - 1]:.0f} after {FIRST_EPOCHS} passes and {averages[-1]:.0f} after "
        f"{EPOCHS}. The published average is {PUBLISHED}."
    )
    return drawn


def _scales(rows: list[dict[str, Any]]) -> np.ndarray:
    """The noise scale by seed and part of the training, shape (seeds, PARTS)."""
    return np.array([row["noise_scale"] for row in rows]).reshape(-1, PARTS)


def _parts(seed: int, updates: int) -> list[dict[str, Any]]:
    """Train from a seed, and return a row for each part of the training."""
    data = datasets.load("mnist")
    trainer = Trainer(_network(seed), keras.optimizers.SGD(LEARNING_RATE), _loss(), MICROBATCH)

    def windows(epoch: int) -> Iterator[tuple]:
        order = np.random.default_rng([seed, epoch]).permutation(len(data.train_images))
        for start in range(0, len(order) - WINDOW + 1, WINDOW):
            rows = order[start : start + WINDOW]
            yield data.train_images[rows], data.train_labels[rows]

    steps = trainer.fit(windows, updates, verbose=False)
    accuracy = _accuracy(trainer.model, data.test_images, data.test_labels)
    parts = [
        _row(seed, steps[i * updates // PARTS : (i + 1) * updates // PARTS]) for i in range(PARTS)
    ]
    return [part | {"final_test_accuracy": accuracy} for part in parts]


def _row(seed: int, steps: list[UpdateRecord]) -> dict[str, Any]:
    norms = np.array([step.gradient_norms for step in steps])
    scale = gradient_noise_scale(
        norms,
        np.array([step.window_gradient_norm for step in steps]),
        np.array([step.weights for step in steps]),
    )
    loss = float(np.mean([step.loss for step in steps]))
    return {
        "seed": seed,
        "updates": steps[-1].update,
        "loss": round(loss, 4),
        "noise_scale": round(scale.value, 1),
        "low": round(scale.interval[0], 1),
        "high": round(scale.interval[1], 1),
    }


def _network(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    convolutions = [
        keras.layers.Conv2D(filters, 5, strides=2, activation="relu") for filters in (16, 32)
    ]
    return keras.Sequential(
        [keras.Input([28, 28, 1]), *convolutions, keras.layers.Flatten(), keras.layers.Dense(10)]
    )


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    return round(
        float(np.mean(model.predict(images, batch_size=1000, verbose=0).argmax(axis=1) == labels)),
        4,
    )

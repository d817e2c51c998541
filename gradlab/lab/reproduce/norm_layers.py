"""Gray et al. 2024: the gradient noise scale, from the normalization layers alone.

The paper says: in transformers, the noise scale of the weights of the normalization layers follows
that of all weights closely, so the norms of these few gradients, which are cheap to get for each
example, are enough to track it.

A transformer of two blocks, with 32 features and four heads, reads the 28 rows of an image of MNIST
as a sequence. It is trained with Adam at 0.001, for 600 updates of 256 images, from three seeds. Each
gradient is that of a single example, so all norms are exact. In each of twelve parts of 50 updates,
`gradlab.gradient_noise_scale` estimates both noise scales.

The rules were decided before the first whole run; a small version had shown that it works.
"""

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES
from gradlab.lab.reproduce.study import Claim, Study
from gradlab.measure.noise_scale import gradient_noise_scale

PAPER = (
    "G. Gray, A. Tiwari, S. Bergsma and J. Hestness 2024, Normalization Layer Per-Example Gradients "
    "are Sufficient to Predict Gradient Noise Scale in Transformers, arXiv:2411.00999"
)
FEATURES = 32
BATCH = 256
UPDATES = 600
PARTS = 12
SEEDS = 3
RATE = 1e-3
CORRELATION = 0.9  # at least, between the logarithms of both noise scales
NEAR = 0.25  # how far the predicted noise scale may be from the measured one
MOST = 0.9  # of the parts


def study(quick: bool = False) -> Study:
    """Train the transformers, and estimate both noise scales in each part.

    Args:
        quick: whether to make 24 updates from one seed instead.
    """
    began = time.monotonic()
    updates, seeds = (24, 1) if quick else (UPDATES, SEEDS)
    rows = [row for seed in range(seeds) for row in train(seed, updates)]
    claims = judge(rows)
    seconds = time.monotonic() - began
    return Study("norm-layers", PAPER, claims, rows, figure(rows), quick, seconds)


def transformer(seed: int) -> keras.Model:
    """The network: from rows of pixels with their places (`sequences`) to logits."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    rows = keras.Input([28, 2 * 28])
    x = layers.Dense(FEATURES)(rows)
    for _ in range(2):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, FEATURES // 4)(normalized, normalized)
        wide = layers.Dense(2 * FEATURES, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(FEATURES)(wide)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(rows, layers.Dense(10)(x))


def sequences(images: np.ndarray) -> np.ndarray:
    """Images as sequences of their rows, each with its place in one-hot form, shape (images, 28, 56)."""
    pixels = images.reshape(-1, 28, 28)
    places = np.broadcast_to(np.eye(28, dtype="float32"), pixels.shape)
    return np.concatenate([pixels, places], axis=2)


class ExampleNorms:
    """Trains a model by Adam with the mean of the gradients of single examples, and returns their
    squared norms."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._variables = [variable.value for variable in model.trainable_variables]
        self._adam = keras.optimizers.Adam(RATE)
        self._adam.build(model.trainable_variables)
        of_norms = {
            id(variable.value)
            for layer in model.layers
            if isinstance(layer, keras.layers.LayerNormalization)
            for variable in layer.trainable_variables
        }
        # 1 for the weights of normalization layers
        self._chosen = tf.constant([float(id(each) in of_norms) for each in self._variables])

    # Compiled by XLA: on processors with AVX512-VNNI, TensorFlow 2.21 itself reads beyond the matrix
    # when it multiplies an array of shape (examples, 1, ...) by one (tensorflow#117700)
    @tf.function(jit_compile=True)
    def update(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Make an update.

        Returns:
            The squared norms of the gradients of the examples, shape (2, examples): of all weights,
            and of the normalization layers. The same of their mean, shape (2,). The mean loss.
        """
        losses, each = tf.vectorized_map(self._of_example, (x, y))
        squares = tf.stack([_squared(gradient, 1) for gradient in each])
        means = [tf.reduce_mean(gradient, axis=0) for gradient in each]
        of_means = tf.stack([_squared(mean, 0) for mean in means])
        self._adam.apply(means, self._model.trainable_variables)
        parts = tf.stack([tf.ones_like(self._chosen), self._chosen])
        return parts @ squares, tf.linalg.matvec(parts, of_means), tf.reduce_mean(losses)

    def _of_example(self, example: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, list]:
        image, label = example
        with tf.GradientTape() as tape:
            logits = self._model(image[tf.newaxis], training=True)[0]
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        return loss, tape.gradient(loss, self._variables)


def train(seed: int, updates: int) -> list[dict[str, Any]]:
    """Train from a seed: for each part, a row with the mean loss and both noise scales."""
    data = datasets.load("mnist")
    x, y = sequences(data.train_images), data.train_labels.astype("int32")
    norms = ExampleNorms(transformer(seed))
    random = np.random.default_rng(seed)
    drawn = [random.integers(len(x), size=BATCH) for _ in range(updates)]
    found = [norms.update(x[numbers], y[numbers]) for numbers in drawn]
    squares, of_means, losses = (np.array([np.array(each[i]) for each in found]) for i in range(3))
    rows = []
    for part in np.array_split(np.arange(updates), PARTS):
        scales = [
            gradient_noise_scale(squares[part, i] ** 0.5, of_means[part, i] ** 0.5, 1).value
            for i in range(2)
        ]
        rows.append(
            {
                "seed": seed,
                "updates": int(part[-1]) + 1,
                "loss": round(float(losses[part].mean()), 4),
                "noise_scale": round(scales[0], 1),
                "of_norm_layers": round(scales[1], 1),
            }
        )
    return rows


def judge(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by the rows of `study`."""
    total, of_norms = _scales(rows, "noise_scale"), _scales(rows, "of_norm_layers")
    correlations = [
        np.corrcoef(np.log(one), np.log(other))[0, 1] for one, other in zip(total, of_norms)
    ]
    ratios = total / of_norms
    factors = np.median(ratios, axis=1, keepdims=True)
    near = np.abs(of_norms * factors / total - 1) <= NEAR
    return [
        Claim(
            "The noise scale of the normalization layers follows that of all weights.",
            f"the logarithms of both correlate with {CORRELATION} or more along each training run",
            ", ".join(f"{each:.3f}" for each in correlations),
            min(correlations) >= CORRELATION,
        ),
        Claim(
            "So they are enough to track it.",
            f"times the median ratio of its run, it is within {NEAR:.0%} in {MOST:.0%} of the parts",
            f"{near.mean():.0%} of the parts; the ratios are "
            + ", ".join(f"{factor:.2f}" for factor in factors[:, 0]),
            bool(near.mean() >= MOST),
        ),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw both noise scales along the training, and one against the other."""
    drawn, (left, right) = picture.figure(2, size=(8.5, 3.6))
    total, of_norms = _scales(rows, "noise_scale"), _scales(rows, "of_norm_layers")
    updates = [row["updates"] for row in rows if row["seed"] == 0]
    left.plot(updates, total.mean(axis=0), label="all weights", **STYLES[0])
    left.plot(updates, of_norms.mean(axis=0), label="normalization layers", **STYLES[1])
    left.legend(frameon=False, fontsize=8)
    left.set(yscale="log", xlabel="updates", ylabel="noise scale (examples)")
    for seed, style in zip(range(len(total)), STYLES):
        right.plot(of_norms[seed], total[seed], label=f"seed {seed}", **style | {"linestyle": ""})
    right.set(
        xscale="log",
        yscale="log",
        xlabel="noise scale of the normalization layers",
        ylabel="noise scale of all weights",
    )
    right.legend(frameon=False, fontsize=8)
    ticks = [100, 200, 400, 800]
    right.set(xlim=(70, 900), ylim=(70, 900))
    right.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    right.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    left.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    left.set_ylim(70, 450)
    for axes in (left, right):
        axes.minorticks_off()
    ends = [f"{each.mean(axis=0)[-1]:.0f}" for each in (total, of_norms)]
    drawn.set_label(
        "The noise scales of all weights and of the normalization layers along training, means of "
        f"{len(total)} seeds, and one against the other in each part. At the end: {ends[0]} and "
        f"{ends[1]} examples."
    )
    return drawn


def _scales(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """A noise scale by seed and part, shape (seeds, PARTS)."""
    return np.array([row[name] for row in rows]).reshape(-1, PARTS)


def _squared(values: tf.Tensor, first: int) -> tf.Tensor:
    """The sum of the squares over all axes from one on."""
    return tf.reduce_sum(values**2, axis=list(range(first, values.shape.rank)))

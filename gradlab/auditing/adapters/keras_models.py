"""The models of the audit in Keras, for the adapters of Keras and TensorFlow."""

from typing import Any

import keras
import numpy as np

from gradlab.auditing.models import SHAPES, Weights
from gradlab.auditing.problem import EPSILON, MOMENTUM, Problem

layers = keras.layers
losses = keras.losses
optimizers = keras.optimizers


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rates of a problem, of which there are no more than micro-batches."""

    def __init__(self, problem: Problem):
        count = 2 + sum(map(len, problem.epochs))
        self._rates = np.array(
            [problem.learning_rate(update) for update in range(count)], "float32"
        )

    def __call__(self, step: Any) -> Any:
        return keras.ops.take(self._rates, keras.ops.cast(step, "int32"))


def build(problem: Problem) -> keras.Model:
    """The model with the initial weights."""
    shapes = SHAPES[problem.model]
    made: list = {
        "linear": lambda: [keras.Input([4]), layers.Dense(1)],
        "two_layers": lambda: [keras.Input([4]), layers.Dense(5, "tanh"), layers.Dense(3)],
        "tokens": lambda: [keras.Input([None], dtype="int32"), layers.Embedding(7, 4), layers.Dense(7)],
        "embedding": lambda: [
            keras.Input([5], dtype="int32"), layers.Embedding(9, 3), layers.GlobalAveragePooling1D(), layers.Dense(1)
        ],
        "pairs": lambda: [keras.Input([2, 4]), PairEmbeddings(problem)],
    }[problem.model]()  # fmt: skip
    model = keras.Sequential(made)
    model.set_weights([problem.weights[name] for name in shapes])
    return model


class PairEmbeddings(keras.layers.Layer):
    """The model "pairs": both embeddings of each pair, side by side; those of x are scaled."""

    def __init__(self, problem: Problem):
        super().__init__()
        shapes = SHAPES["pairs"].values()
        self._kernels = [self.add_weight(shape=shape, initializer="zeros") for shape in shapes]
        self._masks = problem.masks
        self._seeds = keras.random.SeedGenerator(0)

    def call(self, pairs: Any) -> Any:
        """pairs: (examples, 2, 4)."""
        if self._masks is not None:
            is_first = keras.random.uniform([], seed=self._seeds) < 0.5
            pairs = pairs * keras.ops.where(is_first, *self._masks.astype("float32"))
        kernel_x, kernel_y, log_scale = self._kernels
        points = keras.ops.exp(log_scale) * (pairs[:, 0] @ kernel_x), pairs[:, 1] @ kernel_y
        return keras.ops.concatenate(points, axis=1)


def contrastive_loss(unused: Any, points: Any) -> Any:
    """Which y belongs to each x?"""
    x, y = keras.ops.split(points, 2, axis=1)
    own = keras.ops.arange(keras.ops.shape(x)[0])
    return losses.sparse_categorical_crossentropy(own, x @ keras.ops.transpose(y), from_logits=True)


class MeanOverTokens(keras.losses.Loss):
    """The mean of the tokens, for releases of Keras without the reduction
    "mean_with_sample_weight"."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        each = losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        counted = keras.ops.cast(sample_weight, each.dtype)
        return keras.ops.sum(each * counted) / keras.ops.sum(counted)


def loss(problem: Problem) -> keras.losses.Loss:
    """The loss; the weights of tokens are passed as sample_weight."""
    if problem.model in ("linear", "embedding"):
        return losses.MeanSquaredError()
    if problem.average_over == "examples":
        return losses.SparseCategoricalCrossentropy(from_logits=True)
    try:
        return losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
    except ValueError:
        return MeanOverTokens()


def optimizer(problem: Problem, **more: Any) -> keras.optimizers.Optimizer:
    """The optimizer; more arguments are passed on."""
    more |= {"learning_rate": Rates(problem), "global_clipnorm": problem.clip_norm}
    if problem.optimizer in ("sgd", "momentum"):
        return optimizers.SGD(momentum=MOMENTUM if problem.optimizer == "momentum" else 0.0, **more)
    if problem.optimizer == "adam":
        return optimizers.Adam(epsilon=EPSILON, **more)
    return optimizers.AdamW(epsilon=EPSILON, weight_decay=problem.weight_decay, **more)


def read(problem: Problem, model: keras.Model) -> Weights:
    """A copy of the weights."""
    return dict(zip(SHAPES[problem.model], model.get_weights()))

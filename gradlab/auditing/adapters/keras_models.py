"""The models of the audit in Keras, for the adapters of Keras and TensorFlow."""

from typing import Any

import keras
import numpy as np

from gradlab.auditing.models import SHAPES, Weights
from gradlab.auditing.problem import EPSILON, MOMENTUM, Problem

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rates of a problem, of which there are no more than micro-batches."""

    def __init__(self, problem: Problem):
        count = 2 + sum(map(len, problem.epochs))
        self._rates = np.array([problem.learning_rate(update) for update in range(count)], "float32")

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
    }[problem.model]()  # fmt: skip
    model = keras.Sequential(made)
    model.set_weights([problem.weights[name] for name in shapes])
    return model


def loss(problem: Problem) -> keras.losses.Loss:
    """The loss; the weights of tokens are passed as sample_weight."""
    if problem.model in ("linear", "embedding"):
        return losses.MeanSquaredError()
    reduction = "mean_with_sample_weight" if problem.average_over == "tokens" else "sum_over_batch_size"
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


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

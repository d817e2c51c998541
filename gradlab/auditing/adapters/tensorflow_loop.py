"""A loop in TensorFlow, written by hand: gradients are summed by their examples or tokens, and
divided once."""

import tensorflow as tf

from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = small.build(problem)
    loss = small.loss(problem)
    optimizer = small.optimizer(problem)
    history = []
    for epoch in problem.epochs:
        for start in range(0, len(epoch), problem.k):
            total = [tf.zeros_like(variable) for variable in model.trainable_variables]
            weight = 0.0
            for x, y, *mask in epoch[start : start + problem.k]:
                with tf.GradientTape() as tape:
                    mean = loss(y, model(x, training=True), *mask)
                gradients = tape.gradient(mean, model.trainable_variables)
                size = float(mask[0].sum()) if mask else len(x)
                total = [
                    one + size * tf.convert_to_tensor(each) for one, each in zip(total, gradients)
                ]
                weight += size
            optimizer.apply([each / weight for each in total], model.trainable_variables)
            history.append(small.read(problem, model))
    return history

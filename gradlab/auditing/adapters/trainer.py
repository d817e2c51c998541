"""gradlab.Trainer: each window is one call of step. What is not finite is left out, and replicas
divide a window."""

import tensorflow as tf

import gradlab
from gradlab import runtime
from gradlab.auditing.adapters import keras_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw", "replicas", "nonfinite")
if runtime.current() is None:
    gradlab.setup(towers=2)  # before TensorFlow starts: the replicas are logical devices


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    strategy = tf.distribute.get_strategy()
    size = len(problem.epochs[0][0][0])
    if problem.replicas > 1:
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
        if len(devices) < problem.replicas:
            raise NotImplementedError("replicas need logical devices: gradlab.setup(towers=2)")
        strategy = tf.distribute.MirroredStrategy(devices[: problem.replicas])
    with strategy.scope():
        model = small.build(problem)
        optimizer = small.optimizer(problem)
    trainer = gradlab.Trainer(
        model, optimizer, small.loss(problem), size, strategy, skip_nonfinite=True
    )
    history = []
    for window in windows(problem):
        trainer.step(*window)
        history.append(small.read(problem, model))
    return history

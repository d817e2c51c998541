"""DeepSpeed's pipeline engine, with one stage: train_batch takes the micro-batches of a window."""

import contextlib
import sys

import deepspeed
from deepspeed.pipe import PipelineModule

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.adapters.deepspeed import settings
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("clip_norm", "schedule", "momentum", "adam", "adamw")


class Loss(small.Small):
    """The model as a layer of a pipeline, which passes on one value: the loss."""

    def forward(self, inputs):
        return super().forward(*inputs)


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    if any(len(epoch) % problem.k for epoch in problem.epochs):
        raise NotImplementedError("train_batch takes full windows only")
    config = settings(problem)
    model = Loss(problem)
    optimizer = small.optimizer(problem, model)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its layers
        pipeline = PipelineModule([model], num_stages=1, loss_fn=lambda loss, unused: loss)
    engine, *_ = deepspeed.initialize(
        model=pipeline,
        optimizer=optimizer,
        lr_scheduler=small.schedule(problem, optimizer),
        config=config,
    )
    history = []
    for epoch in problem.epochs:
        tensors = [small.tensors(microbatch) for microbatch in epoch]
        inputs = iter([(microbatch, microbatch[1]) for microbatch in tensors])
        for _ in range(len(epoch) // problem.k):
            engine.train_batch(inputs)
            history.append(model.read())
    return history

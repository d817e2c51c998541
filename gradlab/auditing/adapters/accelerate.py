"""Hugging Face Accelerate: a prepared loop with `accelerator.accumulate`, as its guide shows it."""

from accelerate import Accelerator
from torch.utils.data import DataLoader

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=problem.k)
    model = small.Small(problem)
    optimizer = small.optimizer(problem, model)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, small.schedule(problem, optimizer)
    )
    history = []
    for epoch in problem.epochs:
        for microbatch in accelerator.prepare(
            DataLoader(epoch, batch_size=None, collate_fn=small.tensors)
        ):
            with accelerator.accumulate(model):
                accelerator.backward(model(*microbatch))
                if accelerator.sync_gradients and problem.clip_norm:
                    accelerator.clip_grad_norm_(model.parameters(), problem.clip_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                history.append(accelerator.unwrap_model(model).read())
    return history

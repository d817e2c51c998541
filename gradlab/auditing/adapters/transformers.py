"""Hugging Face Trainer with gradient_accumulation_steps, around a model that computes its loss as
the library's do."""

import tempfile
from typing import Any

import transformers as hf

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = small.Labeled(problem)
    history = []
    optimizer = small.optimizer(problem, model)

    class Trainer(hf.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(small.Epochs(problem, small.labeled).loader())

    class Record(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            history.append(model.small.read())

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        settings |= {
            "num_train_epochs": len(problem.epochs),
            "max_grad_norm": problem.clip_norm or 0.0,
        }
        arguments = hf.TrainingArguments(folder, gradient_accumulation_steps=problem.k, **settings)
        made = optimizer, small.schedule(problem, optimizer)
        trainer = Trainer(
            model, arguments, train_dataset=[0], optimizers=made, callbacks=[Record()]
        )
        trainer.remove_callback(hf.PrinterCallback)
        trainer.train()
    return history

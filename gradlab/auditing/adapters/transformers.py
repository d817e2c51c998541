"""Hugging Face Trainer with gradient_accumulation_steps and a model that computes its loss as the library's do."""

import tempfile
from typing import Any

import torch
import transformers as hf

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


class Model(torch.nn.Module):
    """Divides the sum of the losses by num_items_in_batch, the number of labels in a window, if Trainer passes it."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.small = small.Small(problem)

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None, **more: Any) -> dict:
        counted = labels != -100
        loss = self.small(x, torch.where(counted, labels, 0), counted if self.small.kind == "tokens" else None)
        return {"loss": loss if num_items_in_batch is None else loss * counted.sum() / num_items_in_batch}


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model, history = Model(problem), []
    optimizer = small.optimizer(problem, model)

    class Trainer(hf.Trainer):
        def get_train_dataloader(self) -> Any:
            def named(x: Any, y: Any, mask: Any = None) -> dict:
                return {"x": x, "labels": y if mask is None else torch.where(mask > 0, y, -100)}

            return torch.utils.data.DataLoader(small.Epochs(problem), batch_size=None, collate_fn=lambda m: named(*m))

    class Record(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            history.append(model.small.read())

    with tempfile.TemporaryDirectory() as folder:
        settings = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        settings |= {"num_train_epochs": len(problem.epochs), "max_grad_norm": problem.clip_norm or 0.0}
        arguments = hf.TrainingArguments(folder, gradient_accumulation_steps=problem.k, use_cpu=True, **settings)
        schedule = small.schedule(problem, optimizer)
        made = Trainer(model, arguments, train_dataset=[0], optimizers=(optimizer, schedule), callbacks=[Record()])
        made.remove_callback(hf.PrinterCallback)
        made.train()
    return history

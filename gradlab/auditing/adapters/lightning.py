"""Lightning with accumulate_grad_batches."""

import logging
import warnings
from typing import Any

import lightning as pl

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")
QUIET = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    model = small.Small(problem)
    history = list[Weights]()

    class Module(pl.LightningModule):
        def training_step(self, batch: list, number: int) -> Any:
            return self.model(*batch)

        def configure_optimizers(self) -> tuple:
            optimizer = small.optimizer(problem, model)
            return [optimizer], [
                {"scheduler": small.schedule(problem, optimizer), "interval": "step"}
            ]

        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step > len(history):
                history.append(model.read())

    module = Module()
    settings = dict.fromkeys(QUIET, False) | {
        "accelerator": "cpu",
        "max_epochs": len(problem.epochs),
    }
    module.model = model
    settings |= {"accumulate_grad_batches": problem.k, "gradient_clip_val": problem.clip_norm}
    with warnings.catch_warnings(action="ignore"):
        pl.Trainer(**settings).fit(module, small.Epochs(problem).loader())
    return history

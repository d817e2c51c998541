"""Lightning with accumulate_grad_batches."""

import logging
import warnings
from typing import Any

import lightning as pl

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem

supports = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """A model of the audit that remembers its weights after each update."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.problem, self.small = problem, small.Small(problem)
        self.history: list[Weights] = []

    def training_step(self, batch: list, number: int) -> Any:
        return self.small(*batch)

    def configure_optimizers(self) -> dict:
        optimizer = small.optimizer(self.problem, self.small)
        schedule = small.schedule(self.problem, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.history):
            self.history.append(self.small.read())


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    module, off = Module(problem), ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings: dict = {"accumulate_grad_batches": problem.k, "gradient_clip_val": problem.clip_norm}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer("cpu", max_epochs=len(problem.epochs), **settings, **dict.fromkeys(off, False))
        trainer.fit(module, small.Epochs(problem).loader())
    return module.history

"""CachedMultipleNegativesRankingLoss of sentence-transformers, with a prompt that isn't pooled: a
contrastive loss in two passes."""

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, losses, models, util

from gradlab.auditing.adapters import torch_models as small
from gradlab.auditing.models import Weights
from gradlab.auditing.problem import Problem, windows

supports = ("contrastive", "dropout", "schedule", "momentum", "adam", "adamw", "clip_norm")


class Tokens(torch.nn.Module):
    """Embeds each view as a prompt and two tokens of text. As in a transformer, what a token
    becomes depends on those that the attention mask shows: here it is the point of the view, times
    the share of tokens that are shown."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.small = small.Small(problem)
        self.masks = None if problem.masks is None else torch.tensor(problem.masks).float()

    def forward(self, features: dict, **more) -> dict:
        weights, inputs = self.small.weights, features["inputs"]
        if self.masks is not None:
            inputs = inputs * self.masks[int(torch.rand(()) >= 0.5)]
        of_x = torch.exp(weights["log_scale"]) * (inputs @ weights["kernel_x"])
        points = torch.where(features["is_x"][:, None], of_x, inputs @ weights["kernel_y"])
        attended = features["attention_mask"].float().mean(1, keepdim=True)
        texts = points * attended
        features["token_embeddings"] = torch.stack([torch.zeros_like(texts), texts, texts], dim=1)
        return features


def view(inputs: np.ndarray, is_x: bool) -> dict[str, torch.Tensor]:
    """One view of the pairs of a window, as the features of texts."""
    rows = len(inputs)
    return {
        "inputs": torch.tensor(inputs).float(),
        "is_x": torch.full([rows], is_x),
        "attention_mask": torch.ones(rows, 3, dtype=torch.int64),
        "prompt_length": torch.ones(rows, dtype=torch.int64),
    }


def train(problem: Problem) -> list[Weights]:
    """The weights after each update."""
    if problem.model != "pairs":
        raise NotImplementedError("it is for contrastive losses")
    tokens = Tokens(problem)
    width = problem.weights["kernel_x"].shape[1]
    pooling = models.Pooling(width, pooling_mode="mean", include_prompt=False)
    model = SentenceTransformer(modules=[tokens, pooling], device="cpu")
    loss = losses.CachedMultipleNegativesRankingLoss(
        model,
        scale=1.0,
        similarity_fct=util.dot_score,
        mini_batch_size=len(problem.epochs[0][0][0]),
    )
    optimizer = small.optimizer(problem, model)
    schedule = small.schedule(problem, optimizer)
    history = []
    for x, y in windows(problem):
        optimizer.zero_grad()
        loss([view(x, True), view(y, False)], torch.zeros(len(x))).backward()
        if problem.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), problem.clip_norm)
        optimizer.step()
        schedule.step()
        history.append(tokens.small.read())
    return history

"""Results with known numbers, for tests that need a result but no training."""

import dataclasses

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result

EXPERIMENT = Experiment(model="dense", method="microbatched", updates=40, seeds=3, eval_every=10)


def synthetic(k=4, b=20, seeds=3, updates=40, endings=None, **fields) -> Result:
    """A result in which the loss falls from 2 to 1, with a noise of 0.4 in each micro-batch."""
    rng = np.random.default_rng(k)
    fall = np.linspace(2, 1, updates)[:, None]
    losses = fall + rng.normal(0, 0.4, [seeds, updates, k])
    accuracies = np.full([seeds, updates], np.nan)
    accuracies[:, 9::10] = np.linspace(0.5, 0.9, updates // 10) + rng.normal(0, 0.01, [seeds, 1])
    experiment = dataclasses.replace(
        EXPERIMENT, updates=updates, seeds=seeds, accumulation_steps=k, microbatch_size=b, **fields
    )
    return Result(
        experiment=experiment,
        seeds=tuple(range(seeds)),
        endings=endings or ("finished",) * seeds,
        losses=losses,
        weights=np.full(losses.shape, float(b)),
        gradient_norms=rng.uniform(2, 2.1, losses.shape),
        window_gradient_norms=rng.uniform(1.4, 1.5, losses.shape[:2]),
        accuracies=accuracies,
        update_seconds=rng.uniform(0.9, 1.1, losses.shape[:2]) * k / 1000,
        peak_memory_bytes=np.full(seeds, 500.0 * 2**20),
        environments=({"seeds_together": 1},) * seeds,
    )

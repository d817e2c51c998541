"""Records of one update, as NumPy arrays."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WindowRecord:
    """Losses and gradient norms of one window, all computed before its update.

    These are the names and conventions of all records in gradlab: `gradlab.UpdateRecord`, the updates of an
    experiment, and `gradlab.Result`, which stacks them over updates and seeds.

    Attributes:
        losses: the mean loss of each micro-batch, shape (micro-batches,).
        weights: the weight of each micro-batch in the window's mean, usually its number of
            examples, and 0 if it was left out; shape (micro-batches,).
        gradient_norms: the norm of each micro-batch's mean gradient over all variables, shape
            (micro-batches,). NaN with a `gradlab.WholeBatch` loss, of which no micro-batch has a
            gradient of its own.
        window_gradient_norm: the norm of the window's mean gradient, before any clipping.
    """

    losses: np.ndarray
    weights: np.ndarray
    gradient_norms: np.ndarray
    window_gradient_norm: float


@dataclass(frozen=True)
class UpdateRecord(WindowRecord):
    """The record of one update that `gradlab.Trainer` made, or left out.

    Losses, weights and gradient norms are those of this process's micro-batches; everything else is
    over all replicas. `gradlab.gradient_noise_scale` takes the gradient norms, the window gradient
    norms and the weights of several steps. With several workers it needs those of all workers: one
    worker's micro-batches are only a part of the window.

    Attributes:
        update: the number of updates made so far, this one included: the optimizer's `iterations`.
        loss: the loss of the large batch before the update, regularization included.
        applied: whether the weights were updated. False if no micro-batch was finite.
        skipped: the number of micro-batches left out because of NaN or inf.
    """

    update: int
    loss: float
    applied: bool
    skipped: int

"""The protocol of a method, and the check of the batch that it is given."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gradlab import _checks
from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments.models import Model


class Cancelled(Exception):
    """Raised by an update that was cancelled. The method's weights are undefined until the next
    reset."""


class Method(Protocol):
    """A way to make one update from a batch that does not fit in memory at once."""

    def reset(self, weights: Mapping[str, np.ndarray]) -> None:
        """Sets the model's weights, and the optimizer to its initial state."""

    def update(
        self,
        features: Any,
        labels: Any,
        microbatch_size: int,
        learning_rate: float,
        weights: Any = None,
        dropout_seed: Sequence[int] = (0, 0),
    ) -> WindowRecord:
        """Makes one update with the mean gradient over all examples of the batch.

        Args:
            features: the inputs, shape (examples, ...).
            labels: the classes, integers, shape (examples,).
            microbatch_size: the largest number of examples in one forward and backward pass on one
                tower.
            learning_rate: the learning rate of this update.
            weights: the weights of the examples, shape (examples,), or None for a weight of 1 each.
            dropout_seed: two integers; micro-batch m of the window draws its masks from (first,
                second + m).

        Returns:
            The losses, weights and gradient norms of the micro-batches, computed before the update.
            The weight of a micro-batch is the sum of the weights of its examples.

        Raises:
            ValueError: the batch does not fit the model, or an argument is out of range.
            Cancelled: `cancel` was called since the last reset.
        """

    def cancel(self) -> None:
        """Ends the running update, and every later one until the next reset, after its current
        micro-batch.

        It may be called from any thread.
        """

    def weights(self) -> dict[str, np.ndarray]:
        """The model's current weights."""


def checked_batch(
    model: Model, features: Any, labels: Any, microbatch_size: int, weights: Any, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Converts a batch to arrays of the right types.

    Args:
        model: the model that the batch is for.
        features, labels, microbatch_size, weights: as for `Method.update`.
        dtype: the type of features and weights.

    Returns:
        (features, labels, weights), with weights of 1 if none are given.

    Raises:
        ValueError: the batch does not fit the model, or an argument is out of range.
    """
    _checks.positive_integer("microbatch_size", microbatch_size)
    features = np.asarray(features, dtype)
    labels = np.asarray(labels)
    weights = np.ones(len(labels), dtype) if weights is None else np.asarray(weights, dtype)
    if features.shape[1:] != model.input_shape:
        wanted = ", ".join(map(str, ("examples", *model.input_shape)))
        raise ValueError(f"features must have the shape ({wanted}). Received: {features.shape}")
    if not len(features) == len(labels) == len(weights) or not len(labels):
        raise ValueError(
            "features, labels and weights must have the same number of examples, at least one. "
            f"Received: {len(features)}, {len(labels)}, {len(weights)}"
        )
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers. Received: {labels.dtype}")
    if labels.min() < 0 or labels.max() >= model.classes:
        wrong = labels[(labels < 0) | (labels >= model.classes)][0]
        raise ValueError(f"labels must be classes from 0 to {model.classes - 1}. Received: {wrong}")
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights must be finite, 0 or more, and not all 0. Received: {weights}")
    return features, labels.astype(np.int32), weights

"""Every private part of Keras that gradlab uses. The tests run with the oldest and the newest Keras that are supported.

Each function says why the public API is not enough. Checked with Keras 3.14 and 3.15.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper


class CountingScope(keras.StatelessScope):
    """A stateless scope that counts the assignments to each variable.

    `keras.StatelessScope` is public, but it does not tell which variables were assigned. Each assignment inside the
    scope calls `add_update`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.assigned: dict[int, int] = {}  # by id(variable)

    def add_update(self, update: tuple) -> None:
        self.assigned[id(update[0])] = self.assigned.get(id(update[0]), 0) + 1
        super().add_update(update)


def loss_of_function(function: Callable, name: str) -> keras.losses.Loss:
    """The `Loss` that `compile` makes of a function. Keras exports no public wrapper."""
    return LossFunctionWrapper(function, name=name)


def function_of_loss(loss: keras.losses.Loss) -> tuple[Callable | None, dict]:
    """The function behind a built-in loss and its arguments: tells what kind of labels the loss expects."""
    return getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})


def same_rank(one: Any, other: Any) -> tuple:
    """Both tensors with the same rank, by the rule with which Keras aligns masks, weights and losses."""
    return squeeze_or_expand_to_same_rank(one, other)


def mask_of(tensor: Any) -> Any:
    """The mask that a layer attached to its output, or None. Losses read it from the tensor."""
    return getattr(tensor, "_keras_mask", None)


def layers_of(model: keras.Model) -> list:
    """All layers of a model, nested ones included. `model.layers` lists only the outermost ones."""
    return list(model._flatten_layers())


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`, which only its name shows."""
    return variable.name == "seed_generator_state"


def take_gradients_as_summed(optimizer: Any) -> None:
    """Tells a Keras optimizer that gradients are already summed over the replicas.

    Otherwise it sums them once more, and only after it has clipped them on each replica.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise ValueError(
            f"Several replicas need a Keras optimizer, such as keras.optimizers.Adam. Received: {optimizer!r}"
        )
    optimizer._all_reduce_sum_gradients = list


def loss_tracker(model: keras.Model) -> keras.Metric:
    """The metric "loss" of a compiled model, which `fit` shows."""
    return model._loss_tracker


def term_trackers(model: keras.Model) -> list:
    """The metrics of each output's own loss, in the order of the loss' terms; empty for a single output."""
    return model._compile_loss.metrics if model._compile_loss is not None else []


def build_from_batch(model: keras.Model, data: Any) -> None:
    """Builds the model, its metrics and its optimizer from a batch, as the train step of Keras does."""
    model._symbolic_build(data_batch=data)

"""Checks of the arguments of `Trainer` alone, before any work starts."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab import _checks
from gradlab.fit.keras_private import has_own
from gradlab.fit.program.input_checks import check_no_accumulation, check_no_loss_scale
from gradlab.fit.program.precut import GIVEN


def check_model(
    model: Any, optimizer: Any, strategy: tf.distribute.Strategy, skip_nonfinite: bool
) -> None:
    """Raises ValueError unless the model and the optimizer can be trained with the strategy."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model must be a keras.Model. Received: {model!r}")
    if not model.built:
        raise ValueError(
            "model must be built, so that its weights are there: give it an Input, or call it on "
            f"a batch once. Received: {model.name}, which is not built"
        )
    if not model.trainable_weights:
        raise ValueError(
            f"A model must have trainable variables to be trained. Received: {model.name}, with "
            f"none among its {len(model.variables)} variables"
        )
    for name in ("train_step", "compute_loss"):
        if has_own(model, name):
            raise ValueError(
                f"model must not have a {name} of its own, which a Trainer does not call: give the "
                "Trainer a loss, or use gradlab.microbatched or gradlab.value_and_gradients. "
                f"Received: {type(model).__name__}.{name}"
            )
    check_no_accumulation(optimizer)
    for kind, owner, variable in (
        ("model", model, model.trainable_weights[0]),
        ("optimizer", optimizer, optimizer.iterations),
    ):
        if strategy.extended.variable_created_in_scope(variable.value):
            continue
        if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
            raise ValueError(
                f"{kind} must be trained with the strategy in whose scope it was made. Received: "
                "strategy=None"
            )
        raise ValueError(
            f"{kind} must be made in the strategy's scope: `with strategy.scope():`. Received: "
            f"{owner.name}, made outside of {type(strategy).__name__}'s"
        )
    if skip_nonfinite:
        check_no_loss_scale(optimizer)


def check_options(
    loss_weights: Any, skip_nonfinite: Any, accumulator_dtype: Any, jit_compile: Any
) -> None:
    """Raises ValueError for options of a `Trainer` that are out of range."""
    _checks.finite_numbers("loss_weights", loss_weights)
    _checks.boolean("skip_nonfinite", skip_nonfinite)
    _checks.floating_dtype("accumulator_dtype", accumulator_dtype)
    _checks.boolean("jit_compile", jit_compile)


def check_objects(strategy: Any, loss: Any, accumulation: Any) -> None:
    """Raises ValueError for what is no strategy, no loss and no function."""
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise ValueError(
            f"strategy must be a tf.distribute.Strategy or None. Received: {strategy!r}"
        )
    if accumulation is not None:
        _checks.function("accumulation", accumulation, otherwise="None or ")
    leaves = tf.nest.flatten(loss) if isinstance(loss, (list, tuple, dict)) else [loss]
    if not leaves or not all(
        one is None or callable(one) or _is_name_of_loss(one) for one in leaves
    ):
        raise ValueError(
            "loss must be a loss of Keras, its name, a function, or a nest of these. Received: "
            f"{loss!r}"
        )


def check_accumulation(accumulation: Any, microbatch_size: Any) -> None:
    """Raises ValueError for windows of a number of micro-batches unless their size is a number."""
    if accumulation is not None and microbatch_size == GIVEN:
        raise ValueError(
            'accumulation must be None with microbatch_size="given": each batch of the dataset is '
            f"a window then. Received: {accumulation!r}"
        )
    if accumulation is not None and microbatch_size == "auto":
        raise ValueError(
            'accumulation must be None with microbatch_size="auto": windows of a number of '
            f"micro-batches would change with the size. Received: {accumulation!r}"
        )


def _is_name_of_loss(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    if name in ("crossentropy", "ce"):  # which of them shows the model's output
        return True
    try:
        return bool(name) and callable(keras.losses.get(name))
    except ValueError:
        return False


def optimizer_of(optimizer: Any) -> keras.optimizers.Optimizer:
    """The optimizer with a name, or itself.

    Raises:
        ValueError: it is neither.
    """
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError, KeyError):
        found = None
    if found is None:
        raise ValueError(
            f"optimizer must be an optimizer of Keras or its name. Received: {optimizer!r}"
        )
    return found


def check_fit_options(on_update: Any, verbose: Any, allow_changes: Any) -> None:
    """Raises ValueError for arguments of `Trainer.fit` that are no function and no switches."""
    if on_update is not None:
        _checks.function("on_update", on_update, otherwise="None or ")
    if type(verbose) is not int or verbose not in (0, 1, 2):  # the numbers of Keras' own `fit`
        _checks.boolean("verbose", verbose)
    _checks.boolean("allow_changes", allow_changes)


def check_dataset(dataset: Any) -> None:
    """Raises ValueError unless `Trainer.fit` can iterate over the dataset once per epoch."""
    rule = (
        "dataset must be a tf.data.Dataset, a function (epoch) -> an iterable of batches, or "
        "another object that can be iterated again for each epoch"
    )
    if callable(dataset) or isinstance(dataset, tf.data.Dataset):
        return
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"{rule}. Received: a {type(dataset).__name__}, which yields its batches only once"
        )
    if isinstance(dataset, (str, bytes, dict)) or not (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        raise ValueError(f"{rule}. Received: {dataset!r}")


def checked_weights(weight_fn: Callable) -> Callable:
    """The function (x, y) -> weights, which checks these before they are used.

    Raises:
        ValueError: weight_fn is not a function. When it is called eagerly: some weight is negative
            or not finite.
        tf.errors.InvalidArgumentError: the same, in a compiled function.
    """
    if not callable(weight_fn):
        raise ValueError(
            f"weight_fn must be a function (x, y) -> weights, or None. Received: {weight_fn!r}"
        )
    rule = "weight_fn must return weights that are finite and 0 or more. Received:"

    def checked(x, y):
        weights = tf.convert_to_tensor(weight_fn(x, y))
        if not (weights.dtype.is_floating or weights.dtype.is_integer or weights.dtype.is_bool):
            raise ValueError(f"{rule} weights of type {weights.dtype.name}")
        if not weights.dtype.is_floating:
            weights = tf.cast(weights, keras.config.floatx())
        wrong = tf.boolean_mask(weights, ~(tf.math.is_finite(weights) & (weights >= 0)))[:1]
        if tf.executing_eagerly() and len(wrong):
            raise ValueError(f"{rule} {float(wrong[0])}")
        check = tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [rule, wrong])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(weights)

    return checked

"""Checks of what is passed in: model and optimizer, the lengths of a window and its labels, before
they are used."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab._batches import length_of, map_tensors, tensors_of
from gradlab.fit import keras_private as internals
from gradlab.fit.keras_private import has_own
from gradlab.fit.losses.term import Term


def check_no_accumulation(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that accumulates by itself."""
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            "gradient_accumulation_steps must be None: microbatch_size does its work. Received: "
            f"{steps}"
        )


def check_no_loss_scale(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that needs what `skip_nonfinite` leaves out."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "skip_nonfinite must be False with a LossScaleOptimizer, which learns its scale from "
            "what is not finite. Received: True"
        )


def check_one_replica(model: keras.Model, option: str) -> None:
    """Raises ValueError for a model on several replicas, which `fit` cannot train with an
    option."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"{option} must be False on several replicas, where gradlab.Trainer offers the same. "
            f"Received: True, on {replicas} replicas"
        )


def check_skips(model: keras.Model) -> None:
    """Raises ValueError for a compiled model whose batches cannot do without a micro-batch."""
    check_no_loss_scale(model.optimizer)
    check_one_replica(model, "skip_nonfinite")
    if has_own(model, "compute_metrics"):
        raise ValueError(
            "skip_nonfinite must be False for a model with a compute_metrics of its own, whose "
            f"results count every micro-batch. Received: {type(model).__name__}.compute_metrics"
        )


def check_windows(asked: Mapping[str, Any], microbatch_size: Any) -> None:
    """Raises ValueError for arguments of `fit` with which each batch is a single micro-batch, as far
    as they tell."""
    batch_size = asked.get("batch_size") or 32  # the default of Keras
    is_known = isinstance(asked.get("x"), np.ndarray) and isinstance(microbatch_size, int)
    if is_known and batch_size <= microbatch_size:
        raise ValueError(
            "batch_size must be above microbatch_size, for noise_scale: a single micro-batch does "
            f"not show its noise. Received: {batch_size}"
        )


def check_fit(model: keras.Model, asked: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of `fit` that it does not allow, as far as it shows before
    the first batch."""
    x: Any = asked.get("x")
    class_weight = asked.get("class_weight")
    sample_weight = asked.get("sample_weight")
    specs = tf.nest.flatten(x.element_spec) if isinstance(x, tf.data.Dataset) else []
    is_cut = any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs)
    replicas = model.distribute_strategy.num_replicas_in_sync
    if is_cut and replicas > 1:
        raise ValueError(
            "Keras' fit cannot divide windows that are cut already among replicas: train with "
            f"gradlab.Trainer. Received: {replicas} replicas"
        )
    if is_cut and class_weight is not None:
        raise ValueError(
            "class_weight must be None with windows that are cut already: Keras makes weights of "
            "it only for dense targets. Give the dataset a sample_weight instead. Received: "
            f"{class_weight!r}"
        )
    if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "Keras' fit works on one machine: train on several workers with gradlab.Trainer. "
            f"Received: a model made in the scope of {type(model.distribute_strategy).__name__}"
        )
    if asked.get("y") is None and sample_weight is not None:
        raise ValueError(
            "sample_weight must be None without targets, because Keras drops it then. Give "
            "targets too, such as zeros, if the loss reads none. Received: a sample_weight of "
            f"shape {tuple(np.shape(sample_weight))}"
        )
    check_stateless(model)
    size = (
        x.cardinality()
        if isinstance(x, tf.data.Dataset)
        else x.shape[0]
        if hasattr(x, "shape")
        else None
    )
    if size is not None and int(size) == 0:
        raise ValueError("x must hold at least one example. Received: 0")


def check_in_flight(in_flight: Any) -> None:
    """Raises ValueError unless it is "auto" or a number of micro-batches."""
    if not (isinstance(in_flight, str) and in_flight == "auto"):
        _checks.positive_integer("in_flight", in_flight, otherwise='"auto" or ')


def check_batch_losses(batch_losses: Any) -> None:
    """Raises ValueError unless it is "mean", "sum", a dict from names to these, or None."""
    said = batch_losses.values() if isinstance(batch_losses, Mapping) else [batch_losses]
    if batch_losses is not None and not all(
        isinstance(one, str) and one in ("mean", "sum") for one in said
    ):
        raise ValueError(
            'batch_losses must be "mean", "sum", or a dict from names to one of these. Received: '
            f"{batch_losses!r}"
        )


def check_preparable(model: Any) -> None:
    """Raises ValueError unless `gradlab.microbatched` can prepare the model."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model must be a keras.Model. Received: {model!r}")
    if has_own(model, "train_step"):
        raise ValueError(
            "model must not have a train_step of its own, which gradlab's would replace. Three "
            "lines of it change: `with tf.GradientTape() as tape:` becomes `def loss(*data):`, "
            "which returns the loss; and `tape.gradient(...)` becomes `loss, gradients = "
            "gradlab.value_and_gradients(loss, variables, data, microbatch_size)`. Received: "
            f"{type(model).__name__}.train_step"
        )


def check_stateless(model: keras.Model) -> None:
    """Raises ValueError for a layer that keeps a state for each example of a batch."""
    for layer in internals.layers_of(model):
        if getattr(layer, "stateful", False) is True:
            raise ValueError(
                f"{layer.name} must not be stateful: it keeps a state for each example of a batch, "
                "and the micro-batches of a batch are different examples. Received: stateful=True"
            )


def check_lengths(window: Any) -> None:
    """Raises ValueError if a window is empty or its tensors differ in length, as far as the shapes
    are known."""
    lengths = [0 if tensor.shape.rank == 0 else tensor.shape[0] for tensor in tensors_of(window)]
    known = [length for length in lengths if length is not None]
    if known and not any(known):
        raise ValueError("A window must hold at least one example. Received: 0")
    if len(set(known)) > 1:
        raise ValueError(
            "x, y and sample_weight must have the same number of examples. Received: "
            f"{' '.join(map(str, known))}"
        )


def label_rules(y: Any, terms: list[Term]) -> list[tuple]:
    """Which targets are class numbers.

    Returns:
        For each of them (its position in y flattened, the number of classes, one more label that is
        allowed or None).
    """
    return [
        (i, *term.labels[1:])
        for term in terms
        if term.labels
        for i, target in enumerate(tf.nest.flatten(y))
        if target is term.labels[0]
    ]


def wrong_labels(y: Any, rules: list[tuple]) -> list[tuple]:
    """Looks for labels that break a rule.

    Returns:
        For each rule (its sentence, the first label that breaks it: shape (1,), or (0,) if there is
        none).
    """
    found = []
    for i, classes, also in rules:
        labels = tf.cast(tf.nest.flatten(y)[i], tf.int64)
        right = (labels >= 0) & (labels < classes)
        if also is not None:
            right |= labels == also
        rule = f"labels must be classes from 0 to {classes - 1}. Received:"
        found.append((rule, tf.boolean_mask(labels, ~right)[:1]))
    return found


def check_labels(y: Any, rules: list[tuple]) -> None:
    """Raises ValueError if one of the targets of all batches breaks one of the `label_rules`."""
    for rule, wrong in wrong_labels(y, rules):
        if len(wrong):
            raise ValueError(f"{rule} {int(wrong[0])}")


def checked_batch(batch: tuple, rules: list[tuple]) -> tuple:
    """The batch (x, y, sample_weight), with checks of lengths and labels that run before it is
    used."""
    lengths = tf.stack([length_of(tensor) for tensor in tensors_of(batch)])
    rule = "x, y and sample_weight must have the same number of examples. Received:"
    checks = [
        tf.debugging.Assert(tf.reduce_all(lengths == lengths[0]), [rule, lengths], summarize=-1)
    ]
    for rule, wrong in wrong_labels(batch[1], rules):
        checks.append(tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [rule, wrong]))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return map_tensors(tf.identity, batch)


@contextlib.contextmanager
def graph_errors(model: keras.Model) -> Iterator[None]:
    """Says of a model that runs eagerly that its code must not need numbers, if it fails because it
    does."""
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError) as error:
        is_of_graph = isinstance(
            error, (NotImplementedError, tf.errors.OperatorNotAllowedInGraphError)
        )
        if not model.run_eagerly or not (is_of_graph or "SymbolicTensor" in str(error)):
            raise
        raise ValueError(
            "A model with run_eagerly=True must not need the numbers of a batch, such as those of "
            "`numpy()`: gradlab computes micro-batches in a graph. Received: "
            f"{type(error).__name__} in {model.name}"
        ) from error


@contextlib.contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turns TensorFlow's long report of a check that failed in `checked_batch` into a ValueError
    with its sentence."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        said = re.search(r"\[([^\[\]]*Received:)\] \[([^\[\]]*)\]", error.message)
        if said is None:
            raise
        sentence = " ".join(said.groups())
        # TensorFlow puts a backslash before a quotation mark
        raise ValueError(re.sub(r"\\(['\"])", r"\1", sentence)) from None

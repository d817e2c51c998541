"""The metrics of a window that is computed in micro-batches.

Keras updates metrics once for each batch. Here every micro-batch updates them. For metrics that sum
over examples this is the same. A metric that gets one number for each batch, such as a function
that returns a scalar, would count every micro-batch like a batch: its sums count by the
micro-batch's share of the window's examples instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import map_tensors, rows_of
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.chunked_head import ChunkedAccuracy
from gradlab.fit.losses.loss_terms import Objective

CALLS_WARNING = (
    "{name} counts the batches it is given, in a way that gradlab cannot turn into examples: it "
    "counts each micro-batch as a batch."
)

OWN_WARNING = (
    "{name} is a metric of a class of its own, which each micro-batch updates like a batch: its "
    "result is the batch's if it sums over examples, and not if it keeps a last value, a maximum "
    "or a mean of batches."
)
READS_WARNING = (
    "{name} reads variables, which Keras updates before it computes a metric; for micro-batches "
    "they have the values from before the update."
)


@dataclass(frozen=True)
class MetricsPlan:
    """What tracing `compute_metrics` once showed.

    Attributes:
        by_share: the ids of variables whose increments count by the micro-batch's share of the
            window.
        in_loss: the ids of those that the model's own `compute_loss` updates.
        counting: for metrics that count batches in a way that cannot be divided into shares, their
            variables: {id: the metric's name}. They are assigned by every micro-batch.
        after: metrics that are functions whose values do not depend on the examples, such as a
            learning rate: they are updated once, after the optimizer, as in Keras.
        warnings: what a user should know of some metrics.
        logs: for each entry that a model's own `compute_metrics` returns: (name, shape, type,
            whether it is a result of metrics). Other entries are averaged over the examples.
        losses: the names of entries for the losses, which are known at the end of the window.
    """

    by_share: set = field(default_factory=set)
    in_loss: set = field(default_factory=set)
    counting: dict = field(default_factory=dict)
    after: list = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    logs: list[tuple] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def no_logs(self) -> list:
        """The logs to begin a window with."""
        return [tf.zeros(shape, dtype) for _, shape, dtype, _ in self.logs]

    def add_logs(self, logs: list, found: dict, share: tf.Tensor) -> list:
        """The logs after one more micro-batch, which is a share of the window."""
        return [
            found[name] if is_result else kept + tf.cast(found[name], dtype) * tf.cast(share, dtype)
            for (name, _, dtype, is_result), kept in zip(self.logs, logs)
        ]

    def weigh(
        self, scope: keras.StatelessScope, before: dict, share: tf.Tensor, of_loss: tf.Tensor
    ) -> None:
        """Lets increments count by a micro-batch's share of the window.

        Args:
            scope: the scope of the micro-batch, which is changed.
            before: the values at its beginning, by id(variable).
            share: the share.
            of_loss: the same for what the model's own `compute_loss` adds: 1 if its result is a sum
                over the examples.
        """
        for key in (id(variable) for metric in self.after for variable in metric.variables):
            scope.state_mapping.pop(key, None)
            if key in before:
                scope.state_mapping[key] = before[key]
        for key in self.by_share:
            old = before[key]
            new = scope.state_mapping[key]
            scope.state_mapping[key] = old + (new - old) * tf.cast(
                of_loss if key in self.in_loss else share, old.dtype
            )


def update_after(model: keras.Model, metrics: list, batch: tuple, predictions: Any) -> None:
    """Updates metrics that do not depend on the examples: with one example and predictions of 0.

    Args:
        metrics: these metrics.
        batch: (x, y, sample_weight).
        predictions: what the model's outputs look like, traced for any number of examples.
    """

    def nothing(tensor):
        return tf.zeros([1 if size is None else size for size in tensor.shape], tensor.dtype)

    x, y = map_tensors(lambda tensor: rows_of(tensor, slice(0, 1)), batch[:2])
    with internals.frozen_metrics(model, but=metrics):
        model.compute_metrics(x, y, map_tensors(nothing, predictions), None)


def logs_of(model: keras.Model, objective: Objective, outcome: Any, examples: tf.Tensor) -> dict:
    """Updates the metrics of the losses, and returns what a step of Keras returns.

    Args:
        objective: the losses; a `compute_loss` of the model's own updates their metrics itself.
        outcome: the loss, the losses of the outputs and the logs, of an update or of an evaluation.
        examples: the number of examples.
    """
    internals.loss_tracker(model).update_state(outcome.loss, sample_weight=examples)
    if objective.own is None:
        for metric, loss in zip(internals.term_trackers(model), outcome.term_losses):
            metric.update_state(loss, sample_weight=examples)
    results = model.get_metrics_result()
    if not internals.has_own(model, "compute_metrics"):
        return results
    return {name: results[name] if value is None else value for name, value in outcome.logs.items()}


def plan_metrics(
    model: keras.Model,
    scope: keras.StatelessScope,
    before: dict,
    in_loss: set,
    logs: dict,
    of_data: Callable,
    of_metrics: Callable,
    reads: Callable | None,
) -> MetricsPlan:
    """The plan, from one traced call of `compute_metrics`.

    Args:
        model: the model.
        scope: the scope of the call, after it.
        before: the values of the metrics' variables before it, by id(variable).
        in_loss: the ids of the variables that the model's own `compute_loss` assigned.
        logs: what it returned.
        reads: a function (tensor) -> whether it depends on other variables, other than through the
            forward pass; None in an evaluation, which has no update.
        of_data, of_metrics: functions (tensor) -> whether it depends on the batch, or on the
            metrics' variables.
    """
    by_share: set = set()
    counting: dict = {}
    after: list = []
    warnings: list[str] = []
    has_own_metrics = internals.has_own(model, "compute_metrics")
    for metric in internals.metrics_of(model):
        assigned = [v for v in metric.variables if id(v) in scope.assigned]
        values = {id(v): scope.get_current_value(v) for v in assigned}
        if values and not internals.is_metric_of_keras(metric):
            warnings.append(OWN_WARNING.format(name=metric.name))
        is_constant = values and not any(of_data(value) for value in values.values())
        if reads and is_constant and internals.is_function_metric(metric) and not has_own_metrics:
            after.append(metric)
            continue
        # The weights of a chunked head belong to the forward pass
        in_forward = isinstance(metric, ChunkedAccuracy)
        if reads and not in_forward and any(map(reads, values.values())):
            warnings.append(READS_WARNING.format(name=metric.name))
        if all(of_data(value) for value in values.values()):
            continue  # nothing in it counts calls
        # What counts calls is assigned once per window; what is added to it at each call gets a
        # share.
        sums = [key for key, value in values.items() if of_data(value)]
        if all(_is_increment(values[key], before[key]) for key in sums):
            by_share.update(sums)
        elif sums:
            counting.update(dict.fromkeys(values, metric.name))
    if not has_own_metrics:
        return MetricsPlan(by_share, in_loss, counting, after, warnings)
    losses = internals.loss_names(model)
    others = {
        name: tf.convert_to_tensor(value) for name, value in logs.items() if name not in losses
    }
    own = [(name, value.shape, value.dtype, of_metrics(value)) for name, value in others.items()]
    return MetricsPlan(
        by_share, in_loss, counting, after, warnings, own, [name for name in logs if name in losses]
    )


def _is_increment(value: Any, before: Any) -> bool:
    """Whether a traced value of floating point is `before` plus something."""
    while value.op.type in ("Identity", "StopGradient"):
        value = value.op.inputs[0]
    names = [tensor.name for tensor in value.op.inputs]
    return (
        value.dtype.is_floating and value.op.type in ("AddV2", "AssignAdd") and before.name in names
    )

"""What tracing a model's forward pass once, aside of the training, shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import examples_of
from gradlab.training import _keras_internals as internals
from gradlab.training import batch_norm
from gradlab.training.metrics import MetricsPlan, plan_metrics
from gradlab.training.objective import Objective
from gradlab.training.term import Term


@dataclass(frozen=True)
class Traced:
    """What one forward pass showed.

    Attributes:
        divisors: a function (x, y, sample_weight) -> the divisors of the loss' terms.
        terms: the terms of the loss.
        y: the targets, with which the terms are found again.
        assigned: for each id(variable): (the variable, how often a forward pass assigns it).
        of_data: for each id of these, whether the assigned value depends on the examples.
        metrics: how metrics are updated.
        numbers, unknown: the names of losses, as in `gradlab.training.objective.Objective`.
        adding: the names of the layers that add losses; empty if the model's own loss takes care of them.
        adds: whether layers add losses.
        graph: the traced graph. Its tensors have None where the number of examples belongs.
    """

    divisors: Callable
    terms: list[Term]
    y: Any
    assigned: dict[int, tuple]
    of_data: dict[int, bool]
    metrics: MetricsPlan
    numbers: list[str]
    unknown: list[str]
    adding: list[str]
    adds: bool
    graph: tf.Graph


def trace_forward(
    model: keras.Model, objective: Objective, specs: tuple, *, training: bool = True, with_metrics: bool = False
) -> Traced:
    """Traces the forward pass of a micro-batch, its loss and its metrics.

    Args:
        model: the model.
        objective: its loss.
        specs: the types of (x, y, sample_weight), for any number of examples.
        training: whether to train the model or to evaluate it.
        with_metrics: whether to update the model's metrics.

    Raises:
        ValueError: the model or its losses cannot be computed in micro-batches.
    """
    batch_norm.check(model, tf.distribute.get_strategy().num_replicas_in_sync)
    found: dict[str, Any] = {}
    variables = {id(v): v for v in [*model.variables, *(model.metrics_variables if with_metrics else [])]}

    @tf.function(autograph=False)
    def divisors(x, y, sample_weight):
        batch = x, y, sample_weight
        before = {key: tf.identity(v.value) for key, v in variables.items()}
        with internals.RecordingScope([(v, before[key]) for key, v in variables.items()]) as scope:
            before = dict(scope.state_mapping)
            y_pred = model(x, training=training)
            in_call = set(scope.assigned)
            terms = objective(batch, y_pred, scope.losses, examples_of(x))
            in_loss = set(scope.assigned) - in_call
            logs = model.compute_metrics(x, y, y_pred, sample_weight) if with_metrics else {}
        from_data = Dependence(tf.nest.flatten(batch, expand_composites=True))
        of_data = {key: from_data(scope.state_mapping[key]) for key in scope.assigned}
        plan = MetricsPlan()
        if with_metrics:
            metrics = Dependence([before[id(v)] for v in model.metrics_variables if id(v) in before])
            plan = plan_metrics(model, scope, before, in_loss, logs, from_data, metrics)
        adding = [] if objective.own else [internals.layer_that_added(model, loss) for loss in scope.losses]
        found.update(terms=terms, y=y, assigned=scope.assigned, of_data=of_data, metrics=plan, adding=adding)
        found["adds"] = bool(scope.losses)
        return [term.divisor for term in terms]

    graph = divisors.get_concrete_function(*specs).graph
    numbers, unknown = list(objective.numbers), list(objective.unknown)
    return Traced(divisors, **found, numbers=numbers, unknown=unknown, graph=graph)


class Dependence:
    """A function (tensor) -> whether a traced tensor was computed from one of some other tensors of its graph."""

    def __init__(self, sources: list):
        self._sources = {source.name for source in sources if source is not None}

    def __call__(self, tensor: Any) -> bool:
        waiting, seen = [tensor], set()
        while waiting:
            one = waiting.pop()
            if one.name in self._sources:
                return True
            if one.op.name not in seen:
                seen.add(one.op.name)
                waiting.extend(one.op.inputs)
        return False

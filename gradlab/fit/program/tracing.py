"""What tracing a model's forward pass once, aside of the training, shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradlab._batches import examples_of
from gradlab._traced_graphs import Dependence
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.losses.term import Term
from gradlab.fit.metrics.window_metrics import MetricsPlan, plan_metrics
from gradlab.fit.variables import batch_norm
from gradlab.fit.variables.assigned_at_once import Direct, direct_variables


@dataclass(frozen=True)
class Traced:
    """What one forward pass showed.

    Attributes:
        divisors: a function (x, y, sample_weight) -> the divisors of the loss' terms.
        terms: the terms of the loss.
        y, y_pred: the targets, with which the terms are found again, and the predictions.
        assigned: for each id(variable): (the variable, how often a forward pass assigns it).
        of_data: for each id of these, whether the assigned value depends on the examples.
        metrics: how metrics are updated.
        batch_valued, unknown: the names of losses, as in
            `gradlab.fit.losses.loss_terms.Objective`.
        adding_layers: the names of the layers that add losses; empty if the model's own loss takes
            care of them.
        reductions: what these numbers are, "mean" or "sum" over the examples: first those of
            `batch_valued`, then those of `adding_layers`.
        layers_add_losses: whether there are such layers, whoever takes care of their losses.
        direct: the variables that the forward pass assigns at once.
        direct_of_keras: the Keras variables among them.
        graph: the traced graph. Its tensors have None where the number of examples belongs.
    """

    divisors: Callable
    terms: list[Term]
    y: Any
    y_pred: Any
    assigned: dict[int, tuple]
    of_data: dict[int, bool]
    metrics: MetricsPlan
    batch_valued: list[str]
    unknown: list[str]
    adding_layers: list[str]
    reductions: list[str]
    layers_add_losses: bool
    direct: list[Direct]
    direct_of_keras: list
    graph: tf.Graph


def trace_forward(
    model: keras.Model,
    objective: Objective,
    specs: tuple,
    *,
    training: bool = True,
    with_metrics: bool = False,
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
    internals.forget_added_losses(model)

    @tf.function(autograph=False)
    def divisors(x, y, sample_weight):
        batch = x, y, sample_weight
        # Other variables are read as they are: a tf.function inside the model keeps what it has
        # traced here, which must not belong to this graph.
        known = model.metrics_variables if with_metrics else []
        scope = internals.RecordingScope([(v, tf.identity(v.value)) for v in known])
        before = dict(scope.state_mapping)
        with scope:
            y_pred = internals.outputs_of(model, x, training)
        in_call = set(scope.assigned)
        if with_metrics:
            # Keras' cross-entropies read the logits, from which a softmax was computed
            of_forward_pass = [
                tensor
                for operation in tf.compat.v1.get_default_graph().get_operations()
                for tensor in operation.outputs
            ]
            # Some metrics are only created for the first predictions
            internals.build_compiled(model, batch, y_pred, training)
            new = [v for v in model.metrics_variables if id(v) not in before]
            scope.include([(v, tf.identity(v.value)) for v in new])
            before |= {id(v): scope.state_mapping[id(v)] for v in new}
        with scope:
            terms = objective(batch, y_pred, scope.losses, examples_of(x))
            in_loss = set(scope.assigned) - in_call
            logs = model.compute_metrics(x, y, y_pred, sample_weight) if with_metrics else {}
        from_data = Dependence(tf.nest.flatten(batch, expand_composites=True))
        of_data = {
            key: key in scope.direct or from_data(scope.state_mapping[key])
            for key in scope.assigned
        }
        plan = MetricsPlan()
        if with_metrics:
            metric_ids = {id(variable) for variable in model.metrics_variables}
            of_metrics = [before[key] for key in metric_ids if key in before]
            metrics = Dependence(of_metrics)
            until = [*of_forward_pass, *of_metrics]
            reads = Dependence([], until=until, types=("ReadVariableOp",))
            plan = plan_metrics(
                model, scope, before, in_loss, logs, from_data, metrics, reads if training else None
            )
        adding = (
            []
            if objective.own
            else [internals.layer_that_added(model, loss) for loss in scope.losses]
        )
        reductions = reductions_of(objective, adding)
        _check_regularized(model, objective, reductions)
        found.update(
            terms=terms,
            y=y,
            y_pred=y_pred,
            assigned=scope.assigned,
            of_data=of_data,
            metrics=plan,
            adding_layers=[layer.name for layer in adding],
            reductions=reductions,
            layers_add_losses=bool(scope.losses),
            direct_of_keras=list(scope.direct.values()),
        )
        return [term.divisor for term in terms]

    graph = divisors.get_concrete_function(*specs).graph
    given = [tensor for tensor in graph.inputs if tensor.dtype != tf.resource]
    direct = direct_variables(graph, found["direct_of_keras"], Dependence(given))
    return Traced(
        divisors,
        **found,
        batch_valued=list(objective.batch_valued),
        unknown=list(objective.unknown),
        direct=direct,
        graph=graph,
    )


UNKNOWN_RULE = (
    "{names} gives one number for the whole batch, of which gradlab must know what it is: say "
    'batch_losses="mean" (or "sum") if it is a mean (or a sum) over the examples; what is neither '
    "belongs into a loss of compile, which gradlab.WholeBatch computes. Received: "
    "batch_losses=None"
)


def reductions_of(objective: Objective, adding: list) -> list[str]:
    """What the numbers of an objective and of layers that add losses are: means or sums over the
    examples.

    Raises:
        ValueError: nothing is said of one of them.
    """
    known = [(name, objective.said_of(name)) for name in objective.batch_valued]
    known += [
        (one.name, "mean" if internals.adds_means(one) else objective.said_of(one.name))
        for one in adding
    ]
    missing = dict.fromkeys(name for name, reduction in known if reduction is None)
    if missing:
        raise ValueError(UNKNOWN_RULE.format(names=", ".join(missing)))
    return [str(reduction) for _, reduction in known]


def _check_regularized(model: keras.Model, objective: Objective, reductions: list[str]) -> None:
    """Raises ValueError for a sum of the model's own that may contain the weights' regularization,
    which the micro-batches would add once each."""
    if objective.own is None or "sum" not in reductions:
        return
    regularized = [v.path for v in model.trainable_variables if v.regularizer is not None]
    if regularized:
        raise ValueError(
            "A compute_loss must be a mean over the examples in a model with weight regularizers, "
            "whose losses each micro-batch would add to a sum. Received: "
            f'batch_losses="sum", and a regularizer of {regularized[0]}'
        )

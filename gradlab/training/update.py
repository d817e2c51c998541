"""One update of a Keras model from a whole window, on every replica. `microbatched` and `Trainer` are built on it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import examples_of
from gradlab.averaging import accumulation_dtype, divide, mean_norms, squared_norm
from gradlab.training import batch_norm
from gradlab.training.input_checks import checked_batch
from gradlab.training.objective import Objective, common_divisor
from gradlab.training.plan import Plan, make_plan
from gradlab.training.replicas import apply_gradients, sum_over_replicas
from gradlab.window import Loop, Microbatch, Sums, accumulate


class Outcome(NamedTuple):
    """Losses, norms and counts of one update, as tensors, computed before the weights change.

    Attributes:
        loss: the loss of the large batch over all replicas, regularization included, a scalar.
        term_losses: the loss of each output over all replicas, before loss weights.
        skipped: the number of micro-batches left out on all replicas, a scalar.
        losses: the losses of this replica's micro-batches, shape (micro-batches,).
        weights: the weight of each, 0 if it was left out, shape (micro-batches,).
        gradient_norms: the norm of each one's mean gradient, shape (micro-batches,), or None.
        window_gradient_norm: the norm of the window's mean gradient over all replicas, without regularization, before
            any clipping, a scalar.
    """

    loss: tf.Tensor
    term_losses: list
    skipped: tf.Tensor
    losses: tf.Tensor
    weights: tf.Tensor
    gradient_norms: tf.Tensor | None
    window_gradient_norm: tf.Tensor


class WindowUpdate:
    """Computes one update from a window and applies it. It is called on each replica.

    In words::

        for each micro-batch:
            run the model as a function: values that its layers would assign (seeds, moving averages) are carried along
            sum = sum + weight * gradient of the loss
        sum over the replicas, once
        mean = sum / total weight, plus the gradient of the regularization
        let the optimizer clip, decay, step and average, once

    Args:
        model: the Keras model.
        optimizer: a Keras optimizer. With several replicas it is changed for good: it no longer sums gradients itself.
        objective: the loss.
        microbatch_size: the examples of a micro-batch.
        in_flight, accumulator_dtype, skip_nonfinite: as in `gradlab.window.Loop`.
        clip: a function (mean gradients, variables, scale=loss scale) -> gradients, or None.
        jit: whether to compile each micro-batch's forward and backward pass with XLA.
        norms: whether to compute the norms of the micro-batches' gradients.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any,
        objective: Objective,
        microbatch_size: int,
        *,
        in_flight: int = 1,
        accumulator_dtype: Any = None,
        skip_nonfinite: bool = False,
        clip: Callable[..., list] | None = None,
        jit: bool = False,
        norms: bool = True,
    ):
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._microbatch_size, self._clip, self._jit, self._norms = microbatch_size, clip, jit, norms
        self._loop = Loop(in_flight=in_flight, dtype=accumulator_dtype, skip_nonfinite=skip_nonfinite)
        self._accumulators: list[tf.Variable] = []
        self._warned = False

    def build(self) -> None:
        """Creates an accumulator for each variable and replica; with several, call it in the strategy's scope."""
        if self._loop.in_flight > 1:
            return  # adding in place would run the micro-batches one after the other
        variables = self._model.trainable_variables
        if self._accumulators and [v.shape for v in variables] == [a.shape for a in self._accumulators]:
            return
        with tf.init_scope():
            self._accumulators = [
                tf.Variable(
                    tf.zeros(variable.shape, self._loop.dtype or accumulation_dtype(variable.dtype)),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,  # each replica has its own
                    aggregation=tf.VariableAggregation.SUM,
                    name=f"{variable.path.replace('/', '_')}_accumulator",
                )
                for variable in variables
            ]

    def __call__(
        self, x: Any, y: Any, sample_weight: Any = None, observe: Callable | None = None, observed: Sequence = ()
    ) -> Outcome:
        """Processes the window and updates the model.

        Args:
            x, y, sample_weight: this replica's part of the effective batch, any nests; it may have no examples.
            observe: a function (y, y_pred, sample_weight) that is called with each micro-batch, for metrics.
            observed: the Keras variables that it assigns.
        """
        variables = self._model.trainable_variables
        if not variables:
            raise ValueError(
                "A model must have trainable variables to be trained. "
                f"Received: {self._model.name}, with none among its {len(self._model.variables)} variables"
            )
        self.build()
        batch, dtype = (x, y, sample_weight), accumulation_dtype(keras.config.floatx())
        plan = make_plan(self._model, self._objective, batch, self._microbatch_size, self._loop.skip_nonfinite)
        self._warn(plan)
        carried = [*plan.carried, *observed]
        scale = self._optimizer.scale_loss(tf.ones([], dtype))
        unit, is_mean = self._unit(plan, tf.cast(examples_of(x), dtype))
        no_terms = [(tf.zeros([], dtype), tf.zeros([], dtype)) for _ in plan.kinds]
        sums = accumulate(
            self._forward(plan, carried, scale, unit, observe),
            [variable.value for variable in variables],
            checked_batch(batch, plan.labels),
            self._microbatch_size,
            (plan.begin(carried), plan.averages.zeros(dtype), no_terms),
            record=(lambda loss, gradients: squared_norm(gradients, dtype)) if self._norms else None,
            accumulators=self._accumulators,
            loop=replace(self._loop, weight_dtype=dtype),
        )
        return self._finish(plan, carried, sums, variables, scale, unit, is_mean)

    def _warn(self, plan: Plan) -> None:
        """Warns once if batch normalization makes the update differ from the large batch's."""
        if plan.normalizing and not self._warned:
            warnings.warn(batch_norm.WARNING.format(layers=", ".join(plan.normalizing)), stacklevel=3)
            self._warned = True

    def _unit(self, plan: Plan, examples: tf.Tensor) -> tuple:
        """The number by which weights are divided while gradients are summed, and whether that makes sums means.

        If the window's weight is known beforehand, gradients are summed as shares of the mean. Nothing is left to
        divide, which would take a copy of them. Otherwise weights are divided by that of a full micro-batch, which
        keeps float16 gradients in range.
        """
        if plan.is_sum:
            return 1.0, True
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        if plan.kinds[0] == "examples" and replicas == 1 and not self._loop.skip_nonfinite:
            return examples, True
        return float(self._microbatch_size), False

    def _forward(self, plan: Plan, carried: list, scale: tf.Tensor, unit: Any, observe: Callable | None) -> Callable:
        """The forward pass of a micro-batch, as `accumulate` calls it."""
        dtype = scale.dtype

        def forward(microbatch, number, state):
            values, statistics, term_sums = state
            x, y, sample_weight = microbatch
            examples = examples_of(x)
            mapping = [*zip(carried, values), *((v, tf.zeros_like(v.value)) for v in plan.averages.variables)]
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                y_pred = self._model(x, training=True)
                loss, terms = self._objective(y, y_pred, sample_weight, scope.losses, examples, plan.divisors)
                if observe is not None:
                    observe(y, y_pred, sample_weight)
            weight = _weight(plan, terms, tf.cast(examples, dtype))
            sums = [
                (total + tf.cast(term.total, dtype), divisor + tf.cast(term.divisor, dtype))
                for term, (total, divisor) in zip(terms, term_sums)
            ]
            state = [scope.get_current_value(v) for v in carried], plan.averages.add(statistics, scope, examples), sums
            return Microbatch(loss * tf.cast(scale, loss.dtype), weight, state, tf.cast(weight, dtype) / unit)

        return tf.function(forward, jit_compile=True, autograph=False) if self._jit else forward

    def _finish(
        self, plan: Plan, carried: list, sums: Sums, variables: list, scale: tf.Tensor, unit: Any, is_mean: bool
    ) -> Outcome:
        """Sums over the replicas, applies the mean gradient, and assigns what the forward passes carried along."""
        dtype = scale.dtype
        values, statistics, term_sums = sums.state
        seen = tf.where(sums.weights > 0, sums.losses * sums.weights, tf.zeros_like(sums.losses)) / scale
        gradients, weight, loss_sum, skipped, steps, statistics, term_sums = sum_over_replicas(
            (sums.gradients, sums.weight, tf.reduce_sum(seen), sums.skipped, tf.size(seen), statistics, term_sums)
        )
        divisor = tf.ones_like(weight) if plan.is_sum else weight
        gradients = divide(gradients, None if is_mean else divisor / unit, variables)
        window_gradient_norm = tf.sqrt(squared_norm(gradients, dtype)) / scale
        regularization, gradients = _with_regularization(gradients, variables, scale)
        if self._clip is not None:
            gradients = self._clip(gradients, variables, scale=scale)
        # Keras requests one batch too many from a dataset of unknown size. Waiting for the window keeps that call from
        # counting in `iterations` and from decaying weights.
        with tf.control_dependencies([weight]):
            apply_gradients(self._optimizer, gradients, variables, weight > 0 if self._loop.skip_nonfinite else None)

        for variable, value in zip(carried, plan.end(carried, values, steps)):
            variable.assign(value)
        plan.averages.assign(statistics)
        return Outcome(
            loss=tf.math.divide_no_nan(loss_sum, divisor) + tf.cast(regularization, dtype),
            term_losses=[
                total if kind == "sum" else tf.math.divide_no_nan(total, count)
                for (total, count), kind in zip(term_sums, plan.kinds)
            ],
            skipped=skipped,
            losses=sums.losses / scale,
            weights=sums.weights,
            gradient_norms=None if sums.records is None else mean_norms(sums.records, sums.weights / unit) / scale,
            window_gradient_norm=window_gradient_norm,
        )


def _weight(plan: Plan, terms: list, examples: tf.Tensor) -> tf.Tensor:
    """The weight of a micro-batch's loss: 1 if losses are sums or shares, else the number it was divided by."""
    if plan.is_sum:
        return tf.ones_like(examples)
    return examples if plan.kinds[0] == "examples" else common_divisor(terms)


def _with_regularization(gradients: list, variables: list, scale: tf.Tensor) -> tuple[tf.Tensor, list]:
    """The regularization loss, and the gradients plus its own: once per update, however many micro-batches."""
    regularized = [i for i, variable in enumerate(variables) if variable.regularizer is not None]
    if not regularized:
        return tf.zeros([]), gradients
    with tf.GradientTape() as tape:
        loss = tf.add_n([variables[i].regularizer(variables[i]) for i in regularized])
        scaled = loss * tf.cast(scale, loss.dtype)
    own = tape.gradient(scaled, [variables[i].value for i in regularized])
    gradients = list(gradients)
    for i, gradient in zip(regularized, own):
        gradients[i] = gradient if gradients[i] is None else gradients[i] + gradient
    return loss, gradients

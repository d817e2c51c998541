"""A Keras model over a window, micro-batch by micro-batch: what training and evaluation share."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import Cut, equal_nests, examples_of, map_tensors, spec_of, steps_of
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_check import Halves, LossCheck
from gradlab.fit.losses.loss_terms import Objective, total_loss
from gradlab.fit.losses.term import Term
from gradlab.fit.losses.whole_batch import (
    BatchLossGradients,
    BatchLossInputs,
    Collector,
    batch_loss_gradients,
    with_own,
)
from gradlab.fit.metrics.padded_metrics import means_over_tokens
from gradlab.fit.program.in_flight import AS_ASKED, InFlight, choose
from gradlab.fit.program.input_checks import check_stateless, checked_batch, label_rules
from gradlab.fit.program.plan import Plan, make_plan
from gradlab.fit.program.tracing import Traced, trace_forward
from gradlab.fit.program.window_accumulators import (
    Accumulator,
    AssignedVariables,
    BatchStatistics,
    Examples,
    ForwardPass,
    Logs,
    LossSums,
)
from gradlab.fit.variables.sparse_tables import check_still_rows
from gradlab.window import Loop, Microbatch, Sums, accumulate


class WindowSums(NamedTuple):
    """The result of a window: nothing of it is applied or assigned yet.

    Attributes:
        plan: what the forward passes have in common.
        sums: the sums of gradients and weights, and what was kept of each micro-batch.
        variables: the values of the variables that the forward passes assign, after the window.
        statistics: those for the moving averages of batch normalization.
        losses: for each term of the loss: (the sum of its totals, the sum of its divisors).
        examples: the number of examples, without those of micro-batches that are left out.
        logs: what the model's own `compute_metrics` returned, by name; None for the losses.
        weight_scale: the number by which weights were divided while gradients were summed.
        is_mean: whether that makes the sums of gradients means already.
        remember: a function () that keeps what the window shows of its losses, to be called if the
            window counts.
    """

    plan: Plan
    sums: Sums
    variables: list
    statistics: list
    losses: list
    examples: tf.Tensor
    logs: dict
    weight_scale: Any
    is_mean: bool
    remember: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class _WindowConstants:
    """What is the same for all micro-batches of one window.

    Attributes:
        plan: what the forward passes have in common.
        examples: the number of examples of this replica's part.
        size: the examples of a micro-batch, or a `Cut`.
        in_flight: the number of micro-batches that are computed at once.
        kept: the values, before the window, of the variables that are assigned at once.
        scale: the factor of the loss while it is differentiated.
        weight_scale: the number by which weights are divided.
    """

    plan: Plan
    examples: tf.Tensor
    size: Any
    in_flight: int
    kept: list
    scale: tf.Tensor
    weight_scale: Any


class WindowProgram:
    """Runs a model over windows, micro-batch by micro-batch, as a pure function of a window.

    Args:
        model: the Keras model.
        objective: the loss.
        microbatch_size: the examples of a micro-batch: an integer, a variable with one, or "given".
        in_flight: the number of micro-batches to compute at once, or "auto".
        loop: the other settings of the loop.
        training: whether to train the model or to evaluate it.
        jit: whether to compile each micro-batch's forward and backward pass with XLA.
        with_metrics: whether to update the model's metrics.

    Attributes:
        microbatch_size: the argument.
        in_flight: the number of micro-batches that are computed at once, with its reason; None
            before it is chosen.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        microbatch_size: int | str | tf.Variable,
        in_flight: int | str,
        loop: Loop,
        *,
        training: bool = True,
        jit: bool = False,
        with_metrics: bool = False,
    ):
        self._model = model
        self._objective = objective
        self.microbatch_size = microbatch_size
        self._is_automatic = isinstance(microbatch_size, tf.Variable)
        self._loop = loop
        self._training = training
        self._jit = jit
        self._with_metrics = with_metrics
        self.in_flight = None if in_flight == "auto" else InFlight(int(in_flight), AS_ASKED)
        self._loss_check = LossCheck()
        # Handed from `choose` to the next window of these types
        self._traced: tuple[Any, Traced] | None = None

    def build(self) -> None:
        """Creates the variables of the program; with several replicas, call it in the strategy's
        scope."""
        self._loss_check.build()
        # Replicas run in threads of their own, each of which has another one
        if not tf.distribute.has_strategy():
            internals.create_global_seed()

    def choose(self, batch: tuple, accumulators: int) -> InFlight:
        """How many micro-batches to compute at once: chosen now, unless that is settled.

        Args:
            batch: (x, y, sample_weight): tensors or their types.
            accumulators: the bytes of the summed gradients.
        """

        def trace():
            specs = map_tensors(spec_of, batch)
            self._traced = specs, self._trace(specs)
            return self._traced[1].graph

        if self.in_flight is None:
            self.in_flight = choose(trace, self.microbatch_size, accumulators)
        return self.in_flight

    def label_rules(self, specs: tuple) -> list[tuple]:
        """The rules for targets like these, as `gradlab.fit.program.input_checks.label_rules` gives
        them."""
        specs = map_tensors(spec_of, specs)
        traced = self._trace(specs)
        self._traced = specs, traced  # the update needs it next
        return label_rules(traced.y, traced.terms)

    def _trace(self, specs: tuple) -> Traced:
        """What one forward pass shows. A trace serves once: what it shows may change, as when a
        layer is frozen."""
        kept = self._traced
        self._traced = None
        if kept is not None and equal_nests(specs, kept[0]):
            return kept[1]
        return trace_forward(
            self._model,
            self._objective,
            specs,
            training=self._training,
            with_metrics=self._with_metrics,
        )

    def warnings(self) -> list[str]:
        """What a user should know of losses that gradlab cannot compare, after a window."""
        return self._loss_check.warnings()

    def __call__(
        self,
        batch: tuple,
        variables: list,
        cut: Cut | None = None,
        *,
        scale: tf.Tensor | float = 1.0,
        record: Callable | None = None,
        accumulators: list | None = None,
        sparse: Collection[int] = (),
    ) -> WindowSums:
        """Computes one window, and applies nothing of it, so it can be computed again. It assigns
        the sums of gradients in `accumulators`; and a model that assigns variables at once does so.

        Args:
            batch: (x, y, sample_weight), this replica's part of the window, which may have no
                examples.
            variables: the variables to differentiate with respect to.
            cut: where the window is cut, if microbatch_size is "given".
            scale: the factor of the loss while it is differentiated.
            record, accumulators, sparse: as for `gradlab.window.accumulate`.
        """
        check_stateless(self._model)
        self.build()
        # An update has chosen before; an evaluation has no accumulators
        in_flight = self.choose(batch, 0)
        dtype = self._loop.weight_dtype
        size = self.microbatch_size if cut is None else cut
        plan = make_plan(
            self._model,
            self._trace(map_tensors(spec_of, batch)),
            batch,
            size,
            training=self._training,
            skip_nonfinite=self._loop.skip_nonfinite,
            jit=self._jit and self._training,
            may_repeat=self._is_automatic,
        )
        kept = [one.value() for one in plan.traced.direct]
        batch, remember = self._compared(plan, batch, size, kept)
        batch = checked_batch(batch, plan.labels)
        examples = examples_of(batch[0])
        weight_scale, is_mean = self._weight_scale(plan, tf.cast(examples, dtype), size)
        count = 1 if plan.traced.direct else in_flight.count
        window = _WindowConstants(
            plan, examples, size, count, kept, tf.cast(scale, dtype), weight_scale
        )
        between = self._between_passes(window, batch, variables)
        collector = Collector([] if self._training else list(plan.whole.values()))
        beside: dict[str, Accumulator] = {
            "variables": AssignedVariables(plan.state),
            "statistics": BatchStatistics(plan.state.averages, dtype),
            "losses": LossSums(len(plan.divisor_kinds), dtype),
            "examples": Examples(dtype),
            "logs": Logs(plan.traced.metrics),
        }
        forward = self._forward(window, beside, between.losses)

        def collect(microbatch, number, state):
            result, seen = forward(microbatch, state[0])
            after = result.state, collector.add(state[1], number, seen)
            return Microbatch(result.loss, result.weight, after, result.share, result.examples)

        begin = {name: one.init() for name, one in beside.items()}
        sums = accumulate(
            collect,
            variables,
            (*batch, between.prediction_gradients),
            size,
            (begin, collector.begin(steps_of(examples, size))),
            record=record,
            accumulators=accumulators,
            sparse=sparse,
            loop=dataclasses.replace(self._loop, in_flight=count),
        )
        carry, arrays = sums.state
        results = {name: one.finish(carry[name]) for name, one in beside.items()}
        losses = between.losses if self._training else self._after_pass(window, collector, arrays)
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        for i, loss in zip(plan.whole, losses):
            results["losses"][i] = tf.cast(loss, dtype) / replicas, tf.ones([], dtype)
        weights = [plan.loss_weights[i] for i in plan.whole]
        for own in between.own_gradients:
            check_still_rows(sums.gradients, own, variables, "a loss over the whole batch")
        gradients = with_own(sums.gradients, between.own_gradients, weights)
        sums = Sums(gradients, *sums[1:])
        return WindowSums(
            plan=plan,
            sums=sums,
            **results,
            weight_scale=weight_scale,
            is_mean=is_mean,
            remember=remember,
        )

    def _compared(self, plan: Plan, batch: tuple, size: Any, kept: list) -> tuple:
        """The batch, after a comparison of losses with what they are said to be in the first
        windows; and the function that keeps what it showed."""
        smallest = tf.reduce_min(size.sizes) if isinstance(size, Cut) else size
        seen = self._compare(plan, batch, smallest)
        if seen is None:
            return batch, lambda: None
        plan.give_back(kept)
        # A loss that is refused must not leave an update behind
        with tf.control_dependencies([seen]):
            batch = map_tensors(tf.identity, batch)
        return batch, lambda: self._loss_check.remember(seen)

    def _between_passes(
        self, window: _WindowConstants, batch: tuple, variables: list
    ) -> BatchLossGradients:
        """The losses over the whole batch and their gradients, of which the next pass makes those
        of the variables; nothing if there are none, or in an
        evaluation."""
        plan = window.plan
        if not (self._training and plan.whole):
            return BatchLossGradients()
        inputs = self._first_pass(window, batch)
        plan.give_back(window.kept)
        between = batch_loss_gradients(inputs, window.scale, window.examples, variables)
        plan.give_back(window.kept)
        return between

    def _after_pass(self, window: _WindowConstants, collector: Collector, arrays: list) -> list:
        """The values of losses over the whole batch in an evaluation, which needs one pass only."""
        plan = window.plan
        after = [one.value() for one in plan.traced.direct]
        plan.give_back(window.kept)
        losses = [inputs.value() for inputs in collector.end(arrays)]
        plan.give_back(after)
        return losses

    def _weight_scale(self, plan: Plan, examples: tf.Tensor, size: Any) -> tuple:
        """The number by which weights are divided while gradients are summed, and whether that
        makes sums means.

        If the window's weight is known beforehand, gradients are summed as shares of the mean.
        Nothing is left to divide, which would take a copy of them. Otherwise weights are divided by
        that of a full micro-batch, which keeps float16 gradients in range; if each has its own, by
        a number that is the same on all replicas.
        """
        if plan.is_sum:
            return 1.0, True
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        if plan.divisor_kinds[0] == "examples" and replicas == 1 and not self._loop.skip_nonfinite:
            return examples, True
        return tf.cast(64 if isinstance(size, Cut) else size, self._loop.weight_dtype), False

    def _first_pass(self, window: _WindowConstants, batch: tuple) -> list[BatchLossInputs]:
        """What losses over the whole batch see of it."""
        plan = window.plan
        collector = Collector(list(plan.whole.values()))

        @self._compiled
        def forward(microbatch, values):
            plan.give_back(window.kept, only_counters=True)
            examples = examples_of(microbatch[0])
            with plan.state.scope(values) as scope:
                y_pred = internals.outputs_of(self._model, microbatch[0], self._training)
                terms = self._objective(microbatch, y_pred, scope.losses, examples)
            return plan.state.values(scope), _seen(terms, plan)

        def collect(microbatch, number, state):
            values, seen = forward(microbatch, state[0])
            arrays = collector.add(state[1], number, seen)
            return Microbatch(tf.zeros([]), tf.ones([]), (values, arrays))

        begin = plan.state.begin(), collector.begin(steps_of(window.examples, window.size))
        loop = Loop(window.in_flight)
        return collector.end(accumulate(collect, [], batch, window.size, begin, loop=loop).state[1])

    def _forward(
        self, window: _WindowConstants, beside: dict[str, Accumulator], whole_losses: Sequence
    ) -> Callable:
        """The forward pass of a micro-batch: a function (micro-batch, carry of each accumulator) ->
        its `Microbatch`, and what losses over the whole batch see of it."""
        plan = window.plan
        dtype = self._loop.weight_dtype

        @self._compiled
        def forward(microbatch, carry):
            plan.give_back(window.kept, only_counters=True)
            *microbatch, prediction_gradients = microbatch
            result = self._forward_pass(
                window, microbatch, carry["variables"], prediction_gradients
            )
            terms = result.terms
            divisors = plan.window_divisors(terms, result.examples)
            weight = plan.weight(terms, tf.cast(result.examples, dtype))
            share = weight / window.weight_scale
            loss = tf.cast(total_loss(terms, divisors), dtype) * window.scale
            after = {name: one.update(carry[name], result) for name, one in beside.items()}
            seen = _seen(terms, plan)
            if not whole_losses:
                return Microbatch(loss, weight, after, share), seen
            # What is differentiated is not the loss
            totals = dict(zip(plan.whole, whole_losses))
            shown = tf.cast(total_loss(terms, divisors, totals), dtype) * window.scale
            return Microbatch(shown, weight, after, share, (loss, share)), seen

        return forward

    def _forward_pass(
        self,
        window: _WindowConstants,
        microbatch: list,
        values: list,
        prediction_gradients: list | None,
    ) -> ForwardPass:
        """One micro-batch's forward pass, with its losses and metrics."""
        plan = window.plan
        dtype = self._loop.weight_dtype
        x, y, sample_weight = microbatch
        examples = examples_of(x)
        share = tf.math.divide_no_nan(tf.cast(examples, dtype), tf.cast(window.examples, dtype))
        mean_factors = plan.mean_factors(examples, dtype)
        logs = None
        with internals.undivided_losses(), plan.state.scope(values) as scope:
            before = dict(scope.state_mapping)
            y_pred = internals.outputs_of(self._model, x, self._training)
            terms = self._objective(
                (x, y, sample_weight),
                y_pred,
                scope.losses,
                examples,
                mean_factors,
                prediction_gradients,
            )
            if self._with_metrics:
                with means_over_tokens(self._model, plan.is_padded):
                    self._model.compute_metrics(x, y, y_pred, sample_weight)
                of_loss = mean_factors[0] * share if plan.traced.batch_valued else share
                plan.traced.metrics.weigh(scope, before, share, of_loss)
            if plan.traced.metrics.logs:
                # Its logs, now that the increments are weighed
                with internals.frozen_metrics(self._model):
                    logs = self._model.compute_metrics(x, y, y_pred, sample_weight)
        return ForwardPass(examples, share, scope, terms, logs)

    def _compiled(self, function: Callable) -> Callable:
        return tf.function(function, jit_compile=True, autograph=False) if self._jit else function

    def _compare(self, plan: Plan, batch: tuple, size: Any) -> tf.Tensor | None:
        """Compares losses with what they are said to be, in the first windows: what to remember, or
        None."""
        traced = plan.traced
        names = traced.batch_valued + traced.adding_layers + traced.unknown
        if not names:
            return None
        values = plan.state.begin()
        noisy = bool(plan.state.draws or plan.state.normalizing)
        training = self._training and not (noisy and self._adds_as_much(plan, batch))

        def scope(shift):
            return plan.state.scope(plan.state.shifted(values, shift))

        losses = Halves(
            self._model,
            self._objective,
            scope,
            training,
            traced.layers_add_losses,
            self._loop.weight_dtype,
        )
        said = traced.reductions + ["rows"] * len(traced.unknown)
        return self._loss_check.check(names, said, losses, batch, size)

    def _adds_as_much(self, plan: Plan, batch: tuple) -> bool:
        """Whether the layers add as many losses without training, when dropout and the like draw
        nothing."""
        added = []

        @tf.function(autograph=False)
        def evaluate(x):
            with plan.state.scope([v.value for v in plan.state.carried]) as scope:
                internals.outputs_of(self._model, x, False)
                added.extend(scope.losses)

        evaluate.get_concrete_function(map_tensors(spec_of, batch[0]))
        return len(added) == len(plan.traced.adding_layers)


def _seen(terms: list[Term], plan: Plan) -> list:
    """What losses over the whole batch see of a micro-batch with these terms."""
    inputs = [terms[i].whole for i in plan.whole]
    return [one.seen for one in inputs if one is not None]

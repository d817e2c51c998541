"""One pass of a Keras model over a window, micro-batch by micro-batch: the part that training and
evaluation share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import Cut, equal_nests, examples_of, map_tensors, spec_of, steps_of
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_check import Additivity, Halves
from gradlab.fit.losses.loss_terms import Objective, total_loss
from gradlab.fit.losses.whole_batch import Between, Collected, Whole, losses_and_slopes, with_own
from gradlab.fit.metrics.padded_metrics import means_over_tokens
from gradlab.fit.program.in_flight import AS_ASKED, InFlight, choose
from gradlab.fit.program.input_checks import check_stateless, checked_batch, label_rules
from gradlab.fit.program.plan import Plan, make_plan
from gradlab.fit.program.tracing import Traced, trace_forward
from gradlab.window import Loop, Microbatch, Sums, accumulate


class Passed(NamedTuple):
    """The result of a pass.

    Attributes:
        plan: what the forward passes have in common.
        sums: the result of the loop.
        values: the values of the state's variables after the window.
        statistics: the sums for the moving averages of batch normalization.
        term_sums: for each term of the loss: (the sum of its totals, the sum of its divisors).
        logs: what the model's own `compute_metrics` returned, as in the plan of the metrics.
        unit: the number by which weights were divided while gradients were summed.
        is_mean: whether that makes the sums of gradients means already.
        remember: a function () that keeps what the window shows of its losses, to be called if the
            window counts.
    """

    plan: Plan
    sums: Sums
    values: list
    statistics: list
    term_sums: list
    logs: list
    unit: Any
    is_mean: bool
    remember: Callable[[], None]

    def named_logs(self) -> dict:
        """The logs by name; None for those of the losses."""
        found = dict(zip((name for name, *_ in self.plan.metrics.logs), self.logs))
        return found | dict.fromkeys(self.plan.metrics.losses)


class WindowPass:
    """Runs a model over windows.

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
        self._loop = loop
        self._training = training
        self._jit = jit
        self._with_metrics = with_metrics
        self.in_flight = None if in_flight == "auto" else InFlight(int(in_flight), AS_ASKED)
        self._additivity = Additivity()
        # Handed from `choose` to the next window of these types
        self._traced: tuple[Any, Traced] | None = None
        # Names of losses, and what each is said to be
        self._compared: tuple[list[str], list[str]] = [], []

    def build(self) -> None:
        """Creates the variables of the pass; with several replicas, call it in the strategy's
        scope."""
        self._additivity.build()
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
        """What one forward pass shows."""
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
        """What a user should know of losses that gradlab cannot add up or check, once, after the
        first window."""
        return self._additivity.warnings(*self._compared)

    def __call__(
        self,
        batch: tuple,
        variables: list,
        cut: Cut | None = None,
        *,
        scale: tf.Tensor | float = 1.0,
        record: Callable | None = None,
        accumulators: list | None = None,
    ) -> Passed:
        """Processes one window.

        Args:
            batch: (x, y, sample_weight), this replica's part of the window, which may have no
                examples.
            variables: the variables to differentiate with respect to.
            cut: where the window is cut, if microbatch_size is "given".
            scale: the factor of the loss while it is differentiated.
            record, accumulators: as for `gradlab.window.accumulate`.
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
        )
        first = plan.state.begin()
        examples = examples_of(batch[0])
        kept = [one.value() for one in plan.direct]
        count = 1 if plan.direct else in_flight.count
        seen = self._compare(plan, first, batch, size if cut is None else tf.reduce_min(cut.sizes))
        remember = lambda: None if seen is None else self._additivity.remember(seen)  # noqa: E731
        if seen is not None:
            plan.give_back(kept)
            # A loss that is refused must not leave an update behind
            with tf.control_dependencies([seen]):
                batch = map_tensors(tf.identity, batch)
        unit, is_mean = self._unit(plan, tf.cast(examples, dtype), size)
        scale = tf.cast(scale, dtype)
        between = Between()
        batch = checked_batch(batch, plan.labels)
        collected = Collected(list(plan.whole.values()))
        if self._training and plan.whole:
            wholes = self._first_pass(plan, collected, batch, size, count, kept)
            plan.give_back(kept)
            between = losses_and_slopes(wholes, scale, examples, variables)
            collected = Collected([])
            plan.give_back(kept)
        forward = self._forward(plan, scale, unit, examples, between.losses, kept)

        def collect(microbatch, number, state):
            result, seen = forward(microbatch, state[:-1])
            after = (*result.state, collected.add(state[-1], number, seen))
            return Microbatch(result.loss, result.weight, after, result.share, result.examples)

        steps = steps_of(examples, size)
        no_terms = [(tf.zeros([], dtype), tf.zeros([], dtype)) for _ in plan.kinds]
        sums = accumulate(
            collect,
            variables,
            (*batch, between.slopes),
            size,
            (
                first,
                plan.state.averages.zeros(dtype),
                no_terms,
                plan.metrics.no_logs(),
                collected.begin(steps),
            ),
            record=record,
            accumulators=accumulators,
            loop=dataclasses.replace(self._loop, in_flight=count),
        )
        values, statistics, term_sums, logs, arrays = sums.state
        losses = between.losses
        if not self._training:
            after = [one.value() for one in plan.direct]
            plan.give_back(kept)
            losses = [whole.value() for whole in collected.end(arrays)]
            plan.give_back(after)
        for i, loss in zip(plan.whole, losses):
            replicas = tf.distribute.get_replica_context().num_replicas_in_sync
            term_sums[i] = tf.cast(loss, dtype) / replicas, tf.ones([], dtype)
        weights = [plan.loss_weights[i] for i in plan.whole]
        sums = Sums(with_own(sums.gradients, between.own_gradients, weights), *sums[1:])
        return Passed(plan, sums, values, statistics, term_sums, logs, unit, is_mean, remember)

    def _unit(self, plan: Plan, examples: tf.Tensor, size: Any) -> tuple:
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
        if plan.kinds[0] == "examples" and replicas == 1 and not self._loop.skip_nonfinite:
            return examples, True
        return tf.cast(64 if isinstance(size, Cut) else size, self._loop.weight_dtype), False

    def _first_pass(
        self, plan: Plan, collected: Collected, batch: tuple, size: Any, in_flight: int, kept: list
    ) -> list[Whole]:
        """What losses over the whole batch see of it."""

        @self._compiled
        def forward(microbatch, values):
            plan.give_back(kept, counters=True)
            with plan.state.scope(values) as scope:
                y_pred = internals.outputs_of(self._model, microbatch[0], self._training)
                terms = self._objective(
                    microbatch, y_pred, scope.losses, examples_of(microbatch[0])
                )
            return plan.state.values(scope), [terms[i].whole.seen for i in plan.whole]

        def collect(microbatch, number, state):
            values, seen = forward(microbatch, state[0])
            return Microbatch(
                tf.zeros([]), tf.ones([]), (values, collected.add(state[1], number, seen))
            )

        begin = plan.state.begin(), collected.begin(steps_of(examples_of(batch[0]), size))
        return collected.end(
            accumulate(collect, [], batch, size, begin, loop=Loop(in_flight)).state[1]
        )

    def _forward(
        self,
        plan: Plan,
        scale: tf.Tensor,
        unit: Any,
        window: tf.Tensor,
        whole_losses: Sequence,
        kept: list,
    ) -> Callable:
        """The forward pass of a micro-batch: a function (micro-batch, state) -> its `Microbatch`,
        and what losses over the whole batch see of it."""
        dtype = self._loop.weight_dtype

        @self._compiled
        def forward(microbatch, state):
            plan.give_back(kept, counters=True)
            (*microbatch, slopes) = microbatch
            (values, statistics, term_sums, logs) = state
            examples = examples_of(microbatch[0])
            share = tf.math.divide_no_nan(tf.cast(examples, dtype), tf.cast(window, dtype))
            with internals.undivided_losses(), plan.state.scope(values) as scope:
                before = dict(scope.state_mapping)
                y_pred = internals.outputs_of(self._model, microbatch[0], self._training)
                as_means = plan.factors(examples, dtype)
                terms = self._objective(
                    microbatch, y_pred, scope.losses, examples, as_means, slopes
                )
                if self._with_metrics:
                    with means_over_tokens(self._model, plan.is_padded):
                        self._model.compute_metrics(*microbatch[:2], y_pred, microbatch[2])
                    plan.metrics.weigh(
                        scope, before, share, as_means[0] * share if plan.numbers else share
                    )
                if plan.metrics.logs:
                    # Its logs, now that the increments are weighed
                    with internals.frozen_metrics(self._model):
                        found = self._model.compute_metrics(*microbatch[:2], y_pred, microbatch[2])
                    logs = plan.metrics.add_logs(logs, found, share)
            divisors = plan.window_divisors(terms, examples)
            weight = plan.weight(terms, tf.cast(examples, dtype))
            loss = tf.cast(total_loss(terms, divisors), dtype) * scale
            sums = [
                (total + tf.cast(term.total, dtype), divisor + tf.cast(term.divisor, dtype))
                for term, (total, divisor) in zip(terms, term_sums)
            ]
            state = (
                plan.state.values(scope),
                plan.state.averages.add(statistics, scope, examples),
                sums,
                logs,
            )
            shown = loss
            examples = None
            if whole_losses:  # what is differentiated is not the loss
                shown = (
                    tf.cast(total_loss(terms, divisors, dict(zip(plan.whole, whole_losses))), dtype)
                    * scale
                )
                examples = loss, weight / unit
            result = Microbatch(shown, weight, state, weight / unit, examples)
            return result, [terms[i].whole.seen for i in plan.whole]

        return forward

    def _compiled(self, function: Callable) -> Callable:
        return tf.function(function, jit_compile=True, autograph=False) if self._jit else function

    def _compare(self, plan: Plan, values: list, batch: tuple, size: Any) -> tf.Tensor | None:
        """Compares losses with what they are said to be, in the first windows: what to remember, or
        None."""
        names = plan.numbers + plan.adding + plan.unknown
        self._compared = names, plan.reductions + ["rows"] * len(plan.unknown)
        if not names:
            return None
        noisy = bool(plan.state.draws or plan.state.normalizing)
        training = self._training and not (noisy and self._adds_as_much(plan, values, batch))

        scope = lambda shift: plan.state.scope(plan.state.shifted(values, shift))  # noqa: E731
        losses = Halves(
            self._model, self._objective, scope, training, plan.adds, self._loop.weight_dtype
        )
        return self._additivity.check(*self._compared, losses, batch, size)

    def _adds_as_much(self, plan: Plan, values: list, batch: tuple) -> bool:
        """Whether the layers add as many losses without training, when dropout and the like draw
        nothing."""
        added = []

        @tf.function(autograph=False)
        def evaluate(x):
            with plan.state.scope([v.value for v in plan.state.carried]) as scope:
                internals.outputs_of(self._model, x, False)
                added.extend(scope.losses)

        evaluate.get_concrete_function(map_tensors(spec_of, batch[0]))
        return len(added) == len(plan.adding)

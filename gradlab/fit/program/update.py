"""One update of a Keras model from a whole window, on every replica. `microbatched` and `Trainer`
are built on it."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import Cut, map_tensors, tensors_of
from gradlab.averaging import accumulation_dtype, divide, mean_norms, squared_norm
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.metrics.window_metrics import CALLS_WARNING, update_after
from gradlab.fit.program.in_flight import AS_ASKED, InFlight
from gradlab.fit.program.plan import ASSIGNED_WARNING, Plan
from gradlab.fit.program.window_program import WindowProgram, WindowSums
from gradlab.fit.replicas import apply_gradients, sum_over_replicas
from gradlab.fit.variables import batch_norm
from gradlab.fit.variables.sparse_tables import check_still_rows, positions_of_tables
from gradlab.window import Loop


class Outcome(NamedTuple):
    """Losses, norms and counts of one update, as tensors, computed before the weights change.

    Attributes:
        loss: the loss of the large batch over all replicas, regularization included, a scalar.
        term_losses: the loss of each output over all replicas, before loss weights.
        logs: what the model's own `compute_metrics` returned, by name; None for the losses.
        examples: the number of examples of this replica, without those of micro-batches that are
            left out, a scalar.
        skipped: the number of micro-batches left out on all replicas, a scalar.
        losses: the losses of this replica's micro-batches, shape (micro-batches,). A loss over the
            whole batch counts with its value for the whole batch.
        weights: the weight of each, 0 if it was left out, shape (micro-batches,).
        gradient_norms: the norm of each one's mean gradient, shape (micro-batches,), or None. NaN
            with a loss over the whole batch, of which no micro-batch has a gradient of its own.
        window_gradient_norm: the norm of the window's mean gradient over all replicas, without
            regularization, before any clipping, a scalar.
        before, updates: the optimizer's `iterations` before and after the update, scalars.
    """

    loss: tf.Tensor
    term_losses: list
    logs: dict
    examples: tf.Tensor
    skipped: tf.Tensor
    losses: tf.Tensor
    weights: tf.Tensor
    gradient_norms: tf.Tensor | None
    window_gradient_norm: tf.Tensor
    before: tf.Tensor
    updates: tf.Tensor


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
        optimizer: a Keras optimizer. With several replicas it is changed for good: it no longer
            sums gradients itself.
        objective: the loss.
        microbatch_size: the examples of a micro-batch: an integer, a variable with one, or "given".
        in_flight: as in `gradlab.window.Loop`, or "auto": then `prepare` chooses it.
        accumulator_dtype, skip_nonfinite: as in `gradlab.window.Loop`.
        jit: whether to compile each micro-batch's forward and backward pass with XLA.
        norms: whether to compute the norms of the micro-batches' gradients.
        with_metrics: whether to update the model's metrics.
        sparse: the embeddings whose gradients are kept as rows, not summed in an accumulator.
        updates_started: a variable to which 1 is added before anything is applied or assigned, or None.
        check_plan: a function that raises ValueError for a `Plan` that must not be, or None.

    Attributes:
        model, optimizer, objective: the arguments.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any,
        objective: Objective,
        microbatch_size: int | str | tf.Variable,
        *,
        in_flight: int | str = 1,
        accumulator_dtype: Any = None,
        skip_nonfinite: bool = False,
        jit: bool = False,
        norms: bool = True,
        with_metrics: bool = False,
        sparse: Sequence[keras.layers.Embedding] = (),
        updates_started: tf.Variable | None = None,
        check_plan: Callable[[Plan], None] | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self._norms = norms
        self._sparse = sparse
        self._updates_started = updates_started
        self._check_plan = check_plan
        self._dtype = accumulation_dtype(keras.config.floatx())
        self._loop = Loop(
            dtype=accumulator_dtype, weight_dtype=self._dtype, skip_nonfinite=skip_nonfinite
        )
        self._program = WindowProgram(
            model,
            objective,
            microbatch_size,
            in_flight,
            self._loop,
            jit=jit,
            with_metrics=with_metrics,
        )
        self._accumulators: list[tf.Variable] = []
        self._warned: set[str] = set()
        self._variables: list = []

    @property
    def accumulator_dtype(self) -> Any:
        """The type in which gradients are summed; None if it depends on the variable."""
        return self._loop.dtype

    @property
    def in_flight(self) -> InFlight | None:
        """The number of micro-batches that are computed at once, with its reason; None before it is
        chosen."""
        return self._program.in_flight

    def prepare(self, batch: tuple) -> InFlight:
        """Chooses how many micro-batches to compute at once, and creates what has to exist before
        an update is traced.

        With several replicas, call it in the strategy's scope.

        Args:
            batch: (x, y, sample_weight): tensors or their types. With several replicas it does not
                matter.

        Returns:
            The number of micro-batches that are computed at once.
        """
        self._program.build()
        variables = self._trained()
        sparse = positions_of_tables(self.model, self._sparse, variables)
        variables = [variable for i, variable in enumerate(variables) if i not in sparse]
        dtypes = [accumulation_dtype(variable.dtype, self._loop.dtype) for variable in variables]
        shapes = [tf.TensorShape(variable.shape) for variable in variables]
        in_flight = self._program.choose(
            batch, sum(t.size * shape.num_elements() for t, shape in zip(dtypes, shapes))
        )
        # With several in flight, adding in place would run the micro-batches one after the other.
        if in_flight.count > 1 or (
            self._accumulators and shapes == [a.shape for a in self._accumulators]
        ):
            return in_flight
        with tf.init_scope():
            self._accumulators = [
                tf.Variable(
                    tf.zeros(shape, dtype),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,  # each replica has its own
                    aggregation=tf.VariableAggregation.SUM,
                    name=f"{variable.path.replace('/', '_')}_accumulator",
                )
                for variable, shape, dtype in zip(variables, shapes, dtypes)
            ]
        return in_flight

    def label_rules(self, specs: tuple) -> list[tuple]:
        """The rules for targets of these types."""
        return self._program.label_rules(specs)

    @contextlib.contextmanager
    def of_size(self, microbatch_size: int) -> Iterator[None]:
        """What is traced in this context has micro-batches of this size, not of the variable's
        value."""
        given = self._program.microbatch_size
        self._program.microbatch_size = microbatch_size
        try:
            yield
        finally:
            self._program.microbatch_size = given

    def lower_in_flight(self) -> bool:
        """Computes one micro-batch at a time, not several, unless a user asked for those; whether
        that changed."""
        now = self._program.in_flight
        if now is None or now.count == 1 or now.reason == AS_ASKED:
            return False
        self._program.in_flight = InFlight(1, "because memory is short")
        self.prepare(())
        return True

    def __call__(
        self, x: Any, y: Any, sample_weight: Any = None, cut: Cut | None = None
    ) -> Outcome:
        """Processes the window and updates the model.

        Args:
            x, y, sample_weight: this replica's part of the effective batch, any nests; it may have
                no examples.
            cut: where it is cut, if microbatch_size is "given".
        """
        variables = self._trained()
        window, scale = self._run((x, y, sample_weight), variables, cut)
        if self._check_plan is not None:
            self._check_plan(window.plan)
        self._warn(window.plan)
        outcome = self._apply(window, variables, scale)
        after = window.plan.traced.metrics.after
        if after:
            update_after(self.model, after, (x, y, sample_weight), window.plan.traced.y_pred)
        return outcome

    def bytes_of_variables(self) -> int:
        """The bytes of the variables of the model and the optimizer, and of the accumulators."""
        variables = [*self.model.variables, *self.optimizer.variables, *self._accumulators]
        return sum(
            tf.TensorShape(v.shape).num_elements() * tf.as_dtype(v.dtype).size for v in variables
        )

    def _trained(self) -> list:
        """The variables that are trained: those at the first update, whatever becomes trainable
        later, as in Keras."""
        self._variables = self._variables or list(self.model.trainable_weights)
        return self._variables

    def _run(
        self, batch: tuple, variables: list, cut: Cut | None = None
    ) -> tuple[WindowSums, tf.Tensor]:
        """The sums of a window, and the factor of its losses."""
        self.prepare(batch)
        scale = self.optimizer.scale_loss(tf.ones([], self._dtype))

        def record(loss, gradients):
            return squared_norm(gradients, self._dtype)

        window = self._program(
            batch,
            [variable.value for variable in variables],
            cut,
            scale=scale,
            record=record if self._norms else None,
            accumulators=self._accumulators,
            sparse=positions_of_tables(self.model, self._sparse, variables),
        )
        return window, scale

    def warn(self) -> None:
        """Warns of the losses that layers add, if there is reason, once; to be called after an
        update."""
        for sentence in self._program.warnings():
            self._warn_once(sentence)

    def _warn(self, plan: Plan) -> None:
        if plan.state.normalizing:
            self._warn_once(batch_norm.WARNING.format(layers=", ".join(plan.state.normalizing)))
        for path in sorted(plan.of_examples):
            self._warn_once(ASSIGNED_WARNING.format(path=path))
        for sentence in plan.traced.metrics.warnings:
            self._warn_once(sentence)
        for name in sorted(set(plan.traced.metrics.counting.values())):
            self._warn_once(CALLS_WARNING.format(name=name))

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            warnings.warn(sentence, stacklevel=4)
            self._warned.add(sentence)

    def _apply(self, window: WindowSums, variables: list, scale: tf.Tensor) -> Outcome:
        """Sums over the replicas, assigns what the forward passes carried along, and applies the
        mean gradient: the one place where an update assigns anything."""
        plan = window.plan
        sums = window.sums
        dtype = self._dtype
        totals = sum_over_replicas(
            {
                "gradients": sums.gradients,
                "weight": sums.weight,
                "skipped": sums.skipped,
                "steps": tf.size(sums.weights),
                "losses": window.losses,
            }
        )
        statistics = plan.state.averages.over_replicas(window.statistics)
        results = window.variables, totals["gradients"], statistics, totals["weight"]
        values, gradients, statistics, weight = self._begin(results)
        with tf.control_dependencies([weight]):
            window.remember()
        # The order is that of the large batch: its forward pass assigns variables, then the
        # optimizer updates them.
        plan.state.end(values, totals["steps"], statistics)
        divisor = None if window.is_mean else weight / window.weight_scale
        gradients = divide(gradients, divisor, variables)
        window_gradient_norm = tf.sqrt(squared_norm(gradients, dtype)) / scale
        regularization = tf.zeros([], dtype)
        if self.objective.is_regularized:
            regularization, gradients = _with_regularization(gradients, variables, scale)
        # Keras requests one batch too many from a dataset of unknown size. Waiting for the window
        # keeps that call from counting in `iterations` and from decaying weights.
        before = tf.identity(self.optimizer.iterations.value)
        only_if = weight > 0 if self._loop.skip_nonfinite else None
        with tf.control_dependencies([weight]):
            if variables:
                apply_gradients(self.optimizer, gradients, variables, only_if)
        loss, term_losses = plan.loss(totals["losses"])
        return Outcome(
            loss=loss + tf.cast(regularization, dtype),
            term_losses=term_losses,
            logs=window.logs,
            examples=window.examples,
            skipped=totals["skipped"],
            losses=sums.losses / scale,
            weights=sums.weights,
            gradient_norms=self._gradient_norms(window, scale),
            window_gradient_norm=window_gradient_norm,
            before=before,
            updates=tf.identity(self.optimizer.iterations.value),
        )

    def _gradient_norms(self, window: WindowSums, scale: tf.Tensor) -> tf.Tensor | None:
        """The norm of each micro-batch's mean gradient; NaN if it has no loss of its own."""
        records = window.sums.records
        if records is None:
            return None
        if window.plan.whole:
            return tf.fill(tf.shape(records), tf.constant(float("nan"), self._dtype))
        return mean_norms(records, window.sums.weights / window.weight_scale) / scale

    def _begin(self, results: tuple) -> tuple:
        """The results, from which everything is applied and assigned, after the note that this
        begins."""
        if self._updates_started is None:
            return results
        with tf.control_dependencies(tensors_of(results)):
            noted = self._updates_started.assign_add(1, read_value=False)
        with tf.control_dependencies([noted]):
            return map_tensors(tf.identity, results)


def _with_regularization(
    gradients: list, variables: list, scale: tf.Tensor
) -> tuple[tf.Tensor, list]:
    """The regularization loss, and the gradients plus its own: once per update, however many
    micro-batches."""
    with tf.GradientTape() as tape:
        loss = regularization_loss(variables)
        scaled = loss * tf.cast(scale, loss.dtype)
    # A regularizer may read other variables
    own = tape.gradient(scaled, [variable.value for variable in variables])
    check_still_rows(gradients, own, variables, "a regularizer")
    gradients = list(gradients)
    for i, gradient in enumerate(own):
        if gradient is not None:
            gradients[i] = gradient if gradients[i] is None else gradients[i] + gradient
    return loss, gradients


def regularization_loss(variables: list) -> tf.Tensor:
    """The sum of the variables' regularization losses, a scalar."""
    # As in Keras, a regularizer may return an array, whose sum is differentiated.
    losses = [
        tf.reduce_sum(one.regularizer(one)) for one in variables if one.regularizer is not None
    ]
    return tf.add_n(losses) if losses else tf.zeros([])

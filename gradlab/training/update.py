"""One update of a Keras model from a whole window, on every replica: what `microbatched` and `Trainer` share."""

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import keras
import tensorflow as tf

from gradlab.averaging import accumulation_dtype
from gradlab.training import batch_norm
from gradlab.training.objective import Objective, common_divisor, label_rules, wrong_labels
from gradlab.training.replicas import examples_of, sum_over_replicas, take_gradients_as_summed
from gradlab.window import Microbatch, accumulate, divide, squared_norm


class Update(NamedTuple):
    """What an update saw, all at the weights before it.

    Attributes:
        loss: the large batch's loss over all replicas, regularization included, a scalar.
        term_losses: each output's own loss over all replicas, before loss weights.
        skipped: the micro-batches left out on all replicas, a scalar.
        losses: this replica's micro-batches' losses, shape (micro-batches,).
        weights: what each counted for, 0 where it was left out, shape (micro-batches,).
        squared_norms: the squared norms of their gradients, shape (micro-batches,), or None.
        window_squared_norm: that of the window's mean gradient over all replicas, without regularization, not clipped.
    """

    loss: tf.Tensor
    term_losses: list
    skipped: tf.Tensor
    losses: tf.Tensor
    weights: tf.Tensor
    squared_norms: tf.Tensor | None
    window_squared_norm: tf.Tensor


class WindowUpdate:
    """Computes one update from a window and applies it; called on each replica.

    In words::

        for each micro-batch:
            run the model as a function: what its layers would assign (seeds, moving averages) is carried along
            sum = sum + weight * gradient of the loss
        sum over the replicas, once
        mean = sum / weight of what was seen, plus the gradient of the regularization
        clip, decay, step, average: the optimizer's business, once

    Args:
        model: the Keras model.
        optimizer: a Keras optimizer. With several replicas it is told that gradients arrive summed, for good.
        objective: the loss.
        microbatch_size: examples a micro-batch.
        in_flight, accumulator_dtype, skip_nonfinite: as in `gradlab.window.accumulate`.
        clip: a function (mean gradients, variables, loss scale) -> gradients, or None.
        jit: compile each micro-batch's forward and backward pass with XLA.
        norms: whether to compute the micro-batches' squared norms.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer,
        objective: Objective,
        microbatch_size: int,
        *,
        in_flight: int = 1,
        accumulator_dtype=None,
        skip_nonfinite: bool = False,
        clip: Callable | None = None,
        jit: bool = False,
        norms: bool = True,
    ):
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._microbatch_size, self._clip, self._jit, self._warned = microbatch_size, clip, jit, False
        self._loop = dict(in_flight=in_flight, dtype=accumulator_dtype, skip_nonfinite=skip_nonfinite, norms=norms)
        self._skip_nonfinite = skip_nonfinite
        self._accumulators: list[tf.Variable] = []

    def build(self) -> None:
        """Makes the accumulators: one a trainable variable and replica. On several, call it in the strategy's scope."""
        if self._loop["in_flight"] > 1:
            return  # what is added to in place keeps TensorFlow's loop in order, one micro-batch after the other
        variables = self._model.trainable_variables
        if self._accumulators and [v.shape for v in variables] == [a.shape for a in self._accumulators]:
            return
        with tf.init_scope():
            self._accumulators = [
                tf.Variable(
                    tf.zeros(variable.shape, self._loop["dtype"] or accumulation_dtype(variable.dtype)),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,  # each replica has its own
                    aggregation=tf.VariableAggregation.SUM,
                    name=f"{variable.path.replace('/', '_')}_accumulator",
                )
                for variable in variables
            ]

    def __call__(self, x, y, sample_weight=None, observe: Callable | None = None, observed=()) -> Update:
        """Runs the window and updates the model.

        Args:
            x, y, sample_weight: this replica's part of the effective batch, any nests; it may have no examples.
            observe: a function (y, y_pred, sample_weight) called with each micro-batch, for metrics.
            observed: the Keras variables that it assigns to.
        """
        variables = self._model.trainable_variables
        if not variables:
            raise ValueError(
                "A model must have trainable variables to be trained. "
                f"Received: {self._model.name}, with none among its {len(self._model.variables)} variables"
            )
        self.build()
        batch = (x, y, sample_weight)
        dtype = accumulation_dtype(keras.config.floatx())
        plan = self._plan(batch)
        batch = plan.checked(batch)
        carried = [*plan.carried, *observed]
        scale = self._optimizer.scale_loss(tf.ones([], dtype))

        def forward(part, number, state):
            values, statistics, term_sums = state
            x, y, sample_weight = part
            mapping = [*zip(carried, values), *((v, tf.zeros_like(v.value)) for v in plan.averages.variables)]
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                y_pred = self._model(x, training=True)
                loss, terms = self._objective(y, y_pred, sample_weight, scope.losses, examples_of(x), plan.divisors)
                if observe is not None:
                    observe(y, y_pred, sample_weight)
            weight = _weight(plan, terms, tf.cast(examples_of(x), dtype))
            state = (
                [scope.get_current_value(variable) for variable in carried],
                plan.averages.add(statistics, scope, examples_of(x)),
                [(total + tf.cast(term.total, dtype), divisor + tf.cast(term.divisor, dtype))
                 for term, (total, divisor) in zip(terms, term_sums)],
            )  # fmt: skip
            return Microbatch(loss * tf.cast(scale, loss.dtype), weight, state)

        if self._jit:
            forward = tf.function(forward, jit_compile=True, autograph=False)
        steps = -(-examples_of(x) // self._microbatch_size)
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # Where the window's weight is known beforehand, gradients are added up as shares of the mean: nothing is left
        # to divide, which would take a copy of them.
        whole = plan.is_sum or (plan.kinds[0] == "examples" and replicas == 1 and not self._skip_nonfinite)
        unit = 1.0 if plan.is_sum else tf.cast(examples_of(x), dtype) if whole else float(self._microbatch_size)
        state = (
            plan.begin(carried),
            plan.averages.zeros(dtype),
            [(tf.zeros([], dtype), tf.zeros([], dtype)) for _ in plan.kinds],
        )
        sums = accumulate(
            forward, [v.value for v in variables], batch, examples_of(x), self._microbatch_size, state,
            weight_dtype=dtype, unit=unit, accumulators=self._accumulators, **self._loop,
        )  # fmt: skip
        values, statistics, term_sums = sums.state
        weighted = tf.where(sums.weights > 0, sums.losses * sums.weights, tf.zeros_like(sums.losses)) / scale
        loss_sum = tf.reduce_sum(weighted)
        gradients, weight, loss_sum, skipped, steps, statistics, term_sums = sum_over_replicas(
            (sums.gradients, sums.weight, loss_sum, sums.skipped, steps, statistics, term_sums)
        )
        divisor = tf.ones_like(weight) if plan.is_sum else weight
        gradients = divide(gradients, None if whole else divisor / unit, variables)
        squared_norms = None if sums.squared_norms is None else sums.squared_norms / scale**2
        window_squared_norm = squared_norm(gradients, dtype) / scale**2
        regularization, gradients = _with_regularization(gradients, variables, scale)
        if self._clip is not None:
            gradients = self._clip(gradients, variables, scale)
        # Keras asks a dataset of unknown size for one batch too many. Waiting for the window keeps `iterations` from
        # counting, and weights from decaying, in that call.
        with tf.control_dependencies([weight]):
            self._apply(gradients, variables, weight)

        for variable, value in zip(carried, plan.end(carried, values, steps)):
            variable.assign(value)
        plan.averages.assign(statistics)
        return Update(
            tf.math.divide_no_nan(loss_sum, divisor) + tf.cast(regularization, dtype),
            [total if kind == "sum" else tf.math.divide_no_nan(total, count)
             for (total, count), kind in zip(term_sums, plan.kinds)],
            skipped, sums.losses / scale, sums.weights, squared_norms, window_squared_norm,
        )  # fmt: skip

    def _plan(self, batch) -> "_Plan":
        """Traces one micro-batch's forward pass aside, to see what it assigns and what its losses divide by."""
        batch_norm.check(self._model, tf.distribute.get_strategy().num_replicas_in_sync)
        found = {}

        @tf.function(autograph=False)
        def divisors(x, y, sample_weight):
            with _CountingScope([(v, v.value) for v in self._model.variables], collect_losses=True) as scope:
                y_pred = self._model(x, training=True)
                _, terms = self._objective(y, y_pred, sample_weight, scope.losses, examples_of(x))
            found.update(terms=terms, assigned=scope.assigned, y=y)
            return [term.divisor for term in terms]

        specs = tf.nest.map_structure(
            lambda tensor: None if tensor is None else tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), batch
        )
        divisors.get_concrete_function(*specs)
        terms, assigned = found["terms"], found["assigned"]
        layers, calls = batch_norm.normalizing_layers(self._model, assigned)
        if layers and not self._warned:
            names = ", ".join(layer.name for layer in layers)
            warnings.warn(batch_norm.WARNING.format(layers=names), stacklevel=2)
            self._warned = True
        usual = [i for i, layer in enumerate(layers) if not layer.renorm and layer.momentum < 1]
        averages = batch_norm.MovingAverages([layers[i] for i in usual], [calls[i] for i in usual])
        own = {id(variable) for variable in averages.variables}
        carried = [v for v in self._model.variables if id(v) in assigned and id(v) not in own]
        draws = {i: assigned[id(v)] for i, v in enumerate(carried) if v.name == "seed_generator_state"}
        kinds = [term.kind for term in terms]
        labels = label_rules(found["y"], terms)
        if common_divisor(terms) is not None:
            return _Plan(carried, draws, averages, labels, kinds, None, is_sum=kinds[0] == "sum")
        if self._skip_nonfinite:
            raise ValueError(
                "skip_nonfinite needs losses that all divide by the number of examples, or one loss alone. "
                f"Received: losses that divide by {', '.join(kinds)}"
            )
        # Losses that divide by different things must share one gradient: first go through the window and count.
        counts = sum_over_replicas(self._count(divisors, batch, kinds))
        counts = [tf.ones_like(count) if kind == "sum" else count for count, kind in zip(counts, kinds)]
        return _Plan(carried, draws, averages, labels, kinds, counts, is_sum=True)

    def _count(self, divisors: Callable, batch, kinds: list) -> list:
        """The sums of the terms' divisors over this replica's window."""
        examples, size = examples_of(batch[0]), self._microbatch_size

        def body(start, counts):
            rows = slice(start, tf.minimum(start + size, examples))
            part = tf.nest.map_structure(lambda tensor: None if tensor is None else tensor[rows], batch)
            seen = divisors(*part)
            return start + size, [count + tf.cast(more, count.dtype) for count, more in zip(counts, seen)]

        zeros = [tf.zeros([], accumulation_dtype(keras.config.floatx())) for _ in kinds]
        return tf.while_loop(lambda start, _: start < examples, body, (tf.constant(0), zeros), parallel_iterations=1)[1]

    def _apply(self, gradients: list, variables: list, weight) -> None:
        """Hands the gradients to the optimizer; where a window has nothing to give, not even that."""
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        if replicas > 1:
            take_gradients_as_summed(self._optimizer)
        if not self._skip_nonfinite:
            self._optimizer.apply(gradients, variables)
        elif replicas == 1:
            tf.cond(weight > 0, lambda: _done(self._optimizer.apply(gradients, variables)), lambda: 0)
        else:
            # A replica cannot wait for the others inside a branch, so the branch is taken for all of them at once.
            def apply_on_each(strategy, gradients, weight):
                def apply():
                    strategy.extended.call_for_each_replica(self._optimizer.apply, args=(gradients, variables))
                    return 0

                tf.cond(strategy.experimental_local_results(weight)[0] > 0, apply, lambda: 0)

            context.merge_call(apply_on_each, args=(gradients, weight))


@dataclass(frozen=True)
class _Plan:
    """What tracing the model once has shown.

    Attributes:
        carried: the Keras variables that a forward pass assigns to, other than averages.
        draws: for the carried seeds of random numbers, by their place, how often a forward pass draws from them.
        averages: the moving averages of batch normalization.
        labels: which targets are class numbers, as `label_rules` says.
        kinds: for each term of the loss, the kind of its divisor.
        divisors: the whole window's divisors, one a term, where the terms' differ; else None.
        is_sum: whether sums of gradients are the update's gradients as they are.
    """

    carried: list
    draws: dict[int, int]
    averages: batch_norm.MovingAverages
    labels: list
    kinds: list
    divisors: list | None
    is_sum: bool

    def begin(self, carried: list) -> list:
        """The values that a replica's window begins with: each replica draws other random numbers."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return [
            v.value + tf.cast(tf.stack([replica, 0]), v.value.dtype) if i in self.draws else v.value
            for i, v in enumerate(carried)
        ]

    def end(self, carried: list, values: list, microbatches) -> list:
        """The values after the window of so many micro-batches: for seeds the same on all replicas, however uneven."""
        return [
            v.value + tf.cast(tf.stack([0, self.draws[i] * microbatches]), v.value.dtype) if i in self.draws else value
            for i, (v, value) in enumerate(zip(carried, values))
        ]

    def checked(self, batch):
        """The batch, which fails before anything is computed from it when its parts or labels cannot be right."""
        lengths = tf.stack([tf.shape(part)[0] for part in tf.nest.flatten(batch) if part is not None])
        rule = "x, y and sample_weight must have the same number of examples. Received:"
        checks = [tf.debugging.Assert(tf.reduce_all(lengths == lengths[0]), [rule, lengths], summarize=-1)]
        for rule, wrong in wrong_labels(batch[1], self.labels):
            checks.append(tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [rule, wrong]))
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.nest.map_structure(lambda part: None if part is None else tf.identity(part), batch)


class _CountingScope(keras.StatelessScope):
    """A stateless scope that knows how often each variable was assigned."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.assigned: dict[int, int] = {}

    def add_update(self, update):
        self.assigned[id(update[0])] = self.assigned.get(id(update[0]), 0) + 1
        super().add_update(update)


@contextlib.contextmanager
def errors_in_a_sentence():
    """Turns TensorFlow's long report of a failed check, made by `_Plan.check`, into its one sentence."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        said = re.search(r"\[([^\[\]]*Received:)\] \[([^\[\]]*)\]", error.message)
        if said is None:
            raise
        raise ValueError(" ".join(said.groups())) from None


def _weight(plan: "_Plan", terms: list, examples):
    """What a micro-batch's loss counts for: once where losses are sums or shares, else by what it was divided by."""
    if plan.is_sum:
        return tf.ones_like(examples)
    return examples if plan.kinds[0] == "examples" else common_divisor(terms)


def _with_regularization(gradients: list, variables: list, scale) -> tuple:
    """The regularization's loss, and the gradients with its own added: once an update, whatever the micro-batches."""
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


def _done(_) -> int:
    return 0

"""Trainer: a training loop of whole windows, for any tf.distribute strategy, that can be killed and resumed exactly."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab.training.checkpoint import Checkpoints
from gradlab.training.clipping import clip_adaptively
from gradlab.training.dataset_windows import Windows, check_lengths, parts_of
from gradlab.training.objective import Objective
from gradlab.training.replicas import replica_rows
from gradlab.training.update import WindowUpdate, errors_in_a_sentence


@dataclass(frozen=True)
class Step:
    """What one window did.

    Attributes:
        update: updates made so far, this one included: the optimizer's `iterations`.
        loss: the large batch's loss over all replicas, regularization included, before the update.
        applied: whether the weights were updated: False when nothing finite was left to learn from.
        skipped: micro-batches left out for NaN or inf, on all replicas.
        losses: this process' micro-batches' losses, shape (micro-batches,).
        weights: what each counted for, 0 where it was left out.
        squared_norms: the squared norms of their gradients.
        window_squared_norm: that of the window's mean gradient over all replicas, without regularization, before any
            clipping. With squared_norms it is what `gradlab.gradient_noise_scale` asks for.
    """

    update: int
    loss: float
    applied: bool
    skipped: int
    losses: np.ndarray
    weights: np.ndarray
    squared_norms: np.ndarray
    window_squared_norm: float


class Trainer:
    """Trains a Keras model window by window: on one device, several, or several machines.

    A window is cut over the replicas and there into micro-batches; the gradients are summed over the replicas once, and
    divided by the weight of what was really seen. So the update is the large batch's, however uneven the parts. (Losses
    that divide by different things, one by tokens and one by examples, need these counts beforehand: a second sum, of a
    few numbers, and a look through the window without gradients.)

    Args:
        model: a built Keras model, made in the strategy's scope.
        optimizer: a Keras optimizer, made there too.
        loss: as for `keras.Model.compile`.
        microbatch_size: the most examples that a replica computes at once.
        strategy: any of tf.distribute's that keeps the variables equal on all replicas; None: one device.
        loss_weights: as for `keras.Model.compile`.
        accumulation: a function (updates made) -> micro-batches a replica for the next window. `fit` then takes the
            examples it needs from the dataset, whatever its batches. None: each batch of the dataset is a window.
        skip_nonfinite: leave out micro-batches whose loss or gradient holds NaN or inf, and average over the rest.
        accumulator_dtype: the type to add gradients up in. None: float32 for half-precision variables, else their own.
        weight_fn: a function (x, y) -> weights, shape (examples,) or one an element, that the loss is averaged by:
            tokens instead of examples. The loss is then the sum of weight * loss over the sum of the weights.
        adaptive_clipping: the clipping of `gradlab.clipping.clip_adaptively`, applied to the window's mean. None: none.
        in_flight: micro-batches that may be under way at once, as in `gradlab.microbatched`.
        jit_compile: compile each micro-batch's passes with XLA.

    Raises:
        ValueError: an argument out of its range, a model that is not built or not made in the strategy's scope.

    Example:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, keras.optimizers.SGD(0.1), "mse", microbatch_size=4)
        >>> step = trainer.step(np.ones([10, 2]), np.ones([10, 1]))
        >>> step.update, len(step.losses), step.weights
        (1, 3, array([4., 4., 2.], dtype=float32))
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer,
        loss,
        microbatch_size: int,
        strategy: tf.distribute.Strategy | None = None,
        *,
        loss_weights=None,
        accumulation: Callable[[int], int] | None = None,
        skip_nonfinite: bool = False,
        accumulator_dtype=None,
        weight_fn: Callable | None = None,
        adaptive_clipping: float | None = None,
        in_flight: int = 1,
        jit_compile: bool = False,
    ):
        _checks.positive_integer("microbatch_size", microbatch_size)
        _checks.positive_integer("in_flight", in_flight)
        if adaptive_clipping is not None:
            _checks.positive_number("adaptive_clipping", adaptive_clipping)
        self.model, self.optimizer = model, keras.optimizers.get(optimizer)
        self.strategy = strategy or tf.distribute.get_strategy()
        _check_model(model, self.optimizer, self.strategy, skip_nonfinite)
        with self.strategy.scope():
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_variables)
        self._accumulation, self._weight_fn, self._microbatch_size = accumulation, weight_fn, microbatch_size

        def clip(gradients, variables, scale):
            return clip_adaptively(gradients, variables, adaptive_clipping, scale=scale)

        objective = Objective(loss, loss_weights, getattr(model, "output_names", None), by_weight=weight_fn is not None)
        self._update = WindowUpdate(
            model,
            self.optimizer,
            objective,
            microbatch_size,
            in_flight=in_flight,
            accumulator_dtype=accumulator_dtype,
            skip_nonfinite=skip_nonfinite,
            clip=clip if adaptive_clipping is not None else None,
            jit=jit_compile,
        )
        with self.strategy.scope():
            self._update.build()
        self._structure = self._specs = self._compiled = None

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return int(self.optimizer.iterations.numpy())

    def step(self, x, y, sample_weight=None) -> Step:
        """One update from one window.

        Args:
            x, y, sample_weight: the window: nests of arrays with the same first dimension. On several workers each
                brings its own examples, and they need not be equally many; a worker's replicas share them.

        Returns:
            The `Step`.

        Raises:
            ValueError: parts of different lengths, a window without examples, a label out of its range.
        """
        several = self.strategy.num_replicas_in_sync > 1
        here = len(self.strategy.extended.worker_devices) if several else 1
        return self._step((x, y, sample_weight), here)

    def fit(
        self,
        dataset,
        updates: int,
        checkpoint_dir=None,
        checkpoint_every: int = 100,
        on_update: Callable[[Step], None] | None = None,
        verbose: bool = True,
    ) -> list[Step]:
        """Trains on windows from a dataset, and goes on where a killed run stopped.

        With checkpoint_dir the state is saved every so many windows and at the end: the model's and the optimizer's
        variables, and the place in the dataset. A run that finds such a state goes on from there, and ends with the
        same bits as one that was never stopped, when the dataset gives the same examples in the same order again.

        Args:
            dataset: batches (x, y) or (x, y, sample_weight). A tf.data.Dataset, begun anew each epoch, or a function
                (epoch) -> an iterable of batches, which can reach a late epoch without going through those before.
                On several workers each gives the same, and takes its part of each window.
            updates: windows to train on in all, those before a resumption included.
            checkpoint_dir: where to save. None: nowhere.
            checkpoint_every: windows from one checkpoint to the next.
            on_update: called with each `Step`.
            verbose: show a progress bar.

        Returns:
            The `Step`s of this call.

        Raises:
            ValueError: an argument out of its range, a dataset without examples, checkpoints of another model.
        """
        _checks.positive_integer("updates", updates)
        _checks.positive_integer("checkpoint_every", checkpoint_every)
        checkpoints, position = None, (0, 0, 0)
        if checkpoint_dir is not None:
            variables = [*self.model.variables, *self.optimizer.variables]
            checkpoints = Checkpoints(checkpoint_dir, variables, self._is_chief)
            position = checkpoints.restore()
        done, epoch, examples = position
        bar = keras.utils.Progbar(updates, unit_name="update") if verbose and self._is_chief else None
        steps = []
        windows = Windows(dataset, self._window_size, epoch, examples)
        while done < updates:
            step = self._step(next(windows), self.strategy.num_replicas_in_sync)
            done += 1
            steps.append(step)
            if checkpoints is not None and (done % checkpoint_every == 0 or done == updates):
                checkpoints.save(done, windows.epoch, windows.examples)
            if bar is not None:
                bar.update(done, [("loss", step.loss)] if step.applied else [])
            if on_update is not None:
                on_update(step)
        return steps

    def _window_size(self) -> int | None:
        """The examples of the next window, over all replicas; None: as many as the dataset's next batch has."""
        if self._accumulation is None:
            return None
        microbatches = self._accumulation(self.updates)
        _checks.positive_integer("accumulation(update)", microbatches)
        return microbatches * self._microbatch_size * self.strategy.num_replicas_in_sync

    @property
    def _is_chief(self) -> bool:
        cluster = self.strategy.cluster_resolver
        if cluster is None or not cluster.task_type:
            return True
        has_chief = "chief" in cluster.cluster_spec().jobs
        return cluster.task_type == "chief" or (not has_chief and cluster.task_id == 0)

    def _step(self, window, replicas: int) -> Step:
        """One update; the window is shared out over so many replicas: those of this worker, or those of all."""
        window = tf.nest.map_structure(lambda part: None if part is None else tf.convert_to_tensor(part), window)
        check_lengths(window)
        before = self.updates
        with errors_in_a_sentence():
            update = self._function(window)(parts_of(window), tf.constant(replicas))
        local = self.strategy.experimental_local_results
        losses, weights, norms = (
            np.concatenate([part.numpy() for part in local(each)])
            for each in (update.losses, update.weights, update.squared_norms)
        )
        after = self.updates
        skipped = int(local(update.skipped)[0])
        loss, norm = (float(local(each)[0]) for each in (update.loss, update.window_squared_norm))
        return Step(after, loss, after > before, skipped, losses, weights, norms, norm)

    def _function(self, window) -> Callable:
        """The compiled update for windows like this one, of any number of examples; usually there is just one."""
        specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in parts_of(window)]
        structure = tf.nest.map_structure(lambda part: part is None, window)
        if self._structure is None or not _same(structure, self._structure) or not self._fits(specs):
            if self._structure is not None and _same(structure, self._structure):
                # Only sizes inside the examples differ, such as the length of texts: leave those open from now on.
                specs = [spec.most_specific_common_supertype([known]) for spec, known in zip(specs, self._specs)]
            self._structure, self._specs = structure, specs

            def run(parts, replicas):
                parts = iter(parts)
                packed = tf.nest.map_structure(lambda missing: None if missing else next(parts), structure)
                return self.strategy.run(self._on_replica, args=(packed, replicas))

            self._compiled = tf.function(run, input_signature=[specs, tf.TensorSpec([], tf.int32)], autograph=False)
        return self._compiled

    def _fits(self, specs) -> bool:
        return all(known.is_compatible_with(spec) for known, spec in zip(self._specs, specs))

    def _on_replica(self, window, replicas):
        if self.strategy.num_replicas_in_sync > 1:
            window = replica_rows(window, replicas)
        x, y, sample_weight = window
        if self._weight_fn is not None:
            weights = self._weight_fn(x, y)
            sample_weight = weights if sample_weight is None else weights * tf.cast(sample_weight, weights.dtype)
        return self._update(x, y, sample_weight)


def _same(one, other) -> bool:
    try:
        tf.nest.assert_same_structure(one, other)
    except (ValueError, TypeError):
        return False
    return tf.nest.flatten(one) == tf.nest.flatten(other)


def _check_model(model, optimizer, strategy, skip_nonfinite: bool) -> None:
    """Raises ValueError unless the model and the optimizer can be trained under the strategy."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model must be a keras.Model. Received: {model!r}")
    if not model.built:
        raise ValueError(
            "model must be built, so that its weights are there: give it an Input, or call it on a batch once. "
            f"Received: {model.name}, which is not built"
        )
    if not model.trainable_variables:
        raise ValueError(
            "A model must have trainable variables to be trained. "
            f"Received: {model.name}, with none among its {len(model.variables)} variables"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps must be None: microbatch_size does its work. "
            f"Received: {optimizer.gradient_accumulation_steps}"
        )
    for kind, owner, variable in (
        ("model", model, model.trainable_variables[0]),
        ("optimizer", optimizer, optimizer.iterations),
    ):
        if strategy.extended.variable_created_in_scope(variable.value):
            continue
        if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
            raise ValueError(
                f"{kind} must be trained with the strategy in whose scope it was made. Received: strategy=None"
            )
        raise ValueError(
            f"{kind} must be made in the strategy's scope: `with strategy.scope():`. "
            f"Received: {owner.name}, made outside of {type(strategy).__name__}'s"
        )
    if skip_nonfinite and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "skip_nonfinite must be False with a LossScaleOptimizer, which learns its scale from what is not finite. "
            f"Received: {skip_nonfinite!r}"
        )

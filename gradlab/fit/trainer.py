"""Trainer: a training loop over whole windows for any tf.distribute strategy, which resumes exactly
after a kill."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab._batches import (
    as_tensor,
    equal_nests,
    examples_of,
    map_tensors,
    rows_of,
    spec_of,
    tensors_of,
)
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.program.input_checks import (
    check_batch_losses,
    check_in_flight,
    check_lengths,
    one_sentence_errors,
)
from gradlab.fit.program.precut import is_precut, join, specs_of_microbatch, weighted
from gradlab.fit.program.update import Outcome, WindowUpdate
from gradlab.fit.records import UpdateRecord
from gradlab.fit.replicas import is_chief, over_workers, replicas_here, rows_of_replica
from gradlab.fit.run.checkpoint import Checkpoints, Position
from gradlab.fit.run.dataset_windows import DatasetWindows
from gradlab.fit.run.settings import learning_rate_variable, settings_of
from gradlab.fit.run.stopping import StopSignals, sentence
from gradlab.fit.run.trainer_checks import (
    check_accumulation,
    check_dataset,
    check_fit_options,
    check_model,
    check_objects,
    check_options,
    checked_weights,
    optimizer_of,
)
from gradlab.fit.sizes.auto_size import AutoSize, checked_size


class Trainer:
    """Trains a Keras model window by window: on one device, on several, or on several machines.

    Each window is divided among the replicas, and there into micro-batches. The gradients are
    summed over the replicas once, and divided by the total weight of the examples that were
    processed. So the update equals the large batch's, however unevenly the window is divided. If a
    model has losses with different divisors, one by tokens and one by examples, these counts must
    be known beforehand: this takes a forward pass over the window and a second, small sum.

    Args:
        model: a built Keras model, created in the strategy's scope.
        optimizer: a Keras optimizer, created there too.
        loss: as for `keras.Model.compile`.
        microbatch_size: the number of examples of a micro-batch; the last one of a window may be
            smaller. "auto": it is chosen for the first update, as in `gradlab.microbatched`;
            workers agree. "given": the windows are cut already, as those of
            `gradlab.token_batches`; replicas divide the micro-batches.
        strategy: a strategy of tf.distribute that keeps the variables equal on all replicas. None:
            one device.
        loss_weights: as for `keras.Model.compile`.
        accumulation: a function (updates made) -> the number of micro-batches per replica for the
            next window. `fit` then takes the examples it needs from the dataset, whatever the size
            of its batches. None: each batch of the dataset is a window.
        skip_nonfinite: leave out micro-batches whose loss or gradient contains NaN or inf, and
            average over the others.
        accumulator_dtype: the type in which gradients are summed. None: float32 for half-precision
            variables, else the variable's own type.
        weight_fn: a function (x, y) -> weights, shape (examples,) or one weight for each element.
            The loss is then the sum of weight * loss over the sum of the weights: an average over
            tokens instead of examples, for example.
        in_flight: the number of micro-batches that are computed at once, or "auto", as in
            `gradlab.microbatched`.
        jit_compile: compile each micro-batch's forward and backward pass with XLA.
        memory: for "auto", the bytes that the training may take, as in `gradlab.microbatched`.
        batch_losses: what losses are that give one number for a batch, as in
            `gradlab.microbatched`.

    Raises:
        ValueError: an argument out of range, or a model that is not built or not created in the
            strategy's scope.

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
        optimizer: keras.optimizers.Optimizer | str,
        loss: Any,
        microbatch_size: int | str,
        strategy: tf.distribute.Strategy | None = None,
        *,
        loss_weights: Any = None,
        accumulation: Callable[[int], int] | None = None,
        skip_nonfinite: bool = False,
        accumulator_dtype: Any = None,
        weight_fn: Callable[[Any, Any], Any] | None = None,
        in_flight: int | str = "auto",
        jit_compile: bool = False,
        memory: float | None = None,
        batch_losses: str | dict[str, str] | None = None,
    ):
        microbatch_size = checked_size(microbatch_size, memory)
        check_options(loss_weights, skip_nonfinite, accumulator_dtype, jit_compile)
        check_objects(strategy, loss, accumulation)
        check_in_flight(in_flight)
        check_batch_losses(batch_losses)
        check_accumulation(accumulation, microbatch_size)
        self.model = model
        self.optimizer = optimizer_of(optimizer)
        self.strategy = strategy or tf.distribute.get_strategy()
        check_model(model, self.optimizer, self.strategy, skip_nonfinite)
        with self.strategy.scope():
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_weights)
        self._auto = AutoSize(memory) if microbatch_size == "auto" else None
        self._size: Any = microbatch_size if self._auto is None else self._auto.variable
        self._accumulation = accumulation
        self._weight_fn = None if weight_fn is None else checked_weights(weight_fn)
        # What changes the results, for the checkpoints. A size that is chosen may change from run
        # to run.
        self._settings = {
            "loss": loss,
            "loss_weights": loss_weights,
            "batch_losses": batch_losses,
            **({} if self._auto is not None else {"microbatch_size": microbatch_size}),
            "replicas": self.strategy.num_replicas_in_sync,
            "accumulation": accumulation,
            "skip_nonfinite": bool(skip_nonfinite),
            "accumulator_dtype": None
            if accumulator_dtype is None
            else tf.as_dtype(accumulator_dtype),
            "weight_fn": weight_fn,
        }
        objective = Objective(
            loss,
            loss_weights,
            getattr(model, "output_names", None),
            by_weight=weight_fn is not None,
            batch_losses=batch_losses,
        )
        self._update = WindowUpdate(
            model,
            self.optimizer,
            objective,
            self._size,
            in_flight=in_flight,
            accumulator_dtype=accumulator_dtype,
            skip_nonfinite=skip_nonfinite,
            jit=jit_compile,
            updates_started=None if self._auto is None else self._auto.updates_started,
        )
        if self.strategy.num_replicas_in_sync > 1:
            with self.strategy.scope():
                self._update.prepare(())
        # The structure and the specifications of the windows for which the update was compiled.
        self._structure: Any = None
        self._specs: list = []
        self._compiled: Callable | None = None

    @property
    def updates(self) -> int:
        """The number of updates made so far."""
        return int(self.optimizer.iterations.numpy())

    @property
    def in_flight(self) -> int | None:
        """The number of micro-batches that are computed at once; None before it is chosen, in the
        first update."""
        return None if self._update.in_flight is None else self._update.in_flight.count

    @property
    def microbatch_size(self) -> int | None:
        """The number of examples of a micro-batch; None before it is chosen, in the first update,
        or if it is given."""
        if is_precut(self._size):
            return None
        return self._size if self._auto is None else self._auto.chosen

    @property
    def microbatch_choice(self) -> str:
        """For "auto", which size was chosen, and why, in a sentence; empty before that."""
        return "" if self._auto is None else self._auto.choice

    def step(self, x: Any, y: Any, sample_weight: Any = None) -> UpdateRecord:
        """Makes one update from one window.

        Args:
            x, y, sample_weight: the window: nests of arrays with the same first dimension. With
                several workers, each passes its own examples, of which there may be different
                numbers. The replicas of a worker share them.

        Returns:
            The `UpdateRecord`: losses and gradient norms before the update.

        Raises:
            ValueError: arrays of different lengths, a window without examples, or a label out of
                range.
        """
        return self._step((x, y, sample_weight), replicas_here(self.strategy))

    def fit(
        self,
        dataset: Any,
        updates: int,
        *,
        checkpoint_dir: str | os.PathLike | None = None,
        checkpoint_every: int = 100,
        allow_changes: bool = False,
        on_update: Callable[[UpdateRecord], None] | None = None,
        verbose: bool = True,
    ) -> list[UpdateRecord]:
        """Trains on windows from a dataset, and continues where an earlier run was stopped or
        killed.

        With checkpoint_dir, the state is saved before the first update, every checkpoint_every
        windows, and at the end: the variables of the model and the optimizer, and the position in
        the dataset. A run that finds such a state continues from it. It ends with the same bits as
        a run that was never interrupted, provided that the dataset yields the same examples in the
        same order again. With microbatch_size="auto" a run that continues chooses again: give it
        the number that was chosen to get the same bits.

        A checkpoint also contains the settings of the run: the classes and shapes of the model, the
        optimizer with its settings, the loss, the arguments of this class, the seed of
        `gradlab.setup`, and the number of batches of the dataset, as far as they are known. A run
        with other settings does not continue from it.

        With checkpoint_dir, the signals SIGTERM and SIGUSR1, which schedulers send before they take
        a machine, end the process after the current update: a last checkpoint is saved, and
        SystemExit is raised with the status 128 plus the signal's number. This holds in the main
        thread, and unless the program handles the signal itself.

        Args:
            dataset: batches (x, y) or (x, y, sample_weight): a tf.data.Dataset, which is iterated
                once per epoch, or a function (epoch) -> an iterable of batches, which can reach a
                late epoch without the epochs before it. Other objects that can be iterated again
                and again, such as a list, work too; an iterator does not. With several workers,
                each passes the same dataset and takes its share of each window.
            updates: the total number of windows to train on, including those before a resumption.
            checkpoint_dir: the directory of the checkpoints, which only one run may use at a time.
                None: no checkpoints.
            checkpoint_every: the number of windows between checkpoints.
            allow_changes: continue from a checkpoint of a run with other settings. Those of this
                run are used, its learning rate included. The classes of the model and the optimizer
                must be the same.
            on_update: a function that is called with each `UpdateRecord`.
            verbose: whether to show a progress bar.

        Returns:
            The steps of this call: a list of `UpdateRecord`.

        Raises:
            ValueError: an argument out of range, a dataset without examples, checkpoints of a
                different run, or a checkpoint_dir in which no files can be written or that another
                process uses.
            OSError: a later checkpoint cannot be written. The last complete one is still there.
            SystemExit: the process received a signal to end.
        """
        _checks.positive_integer("updates", updates)
        _checks.positive_integer("checkpoint_every", checkpoint_every)
        check_fit_options(on_update, verbose, allow_changes)
        check_dataset(dataset)
        if checkpoint_dir is None:
            return self._train(dataset, updates, Position(), lambda position: 0, on_update, verbose)
        checkpoints = Checkpoints(
            checkpoint_dir,
            [*self.model.variables, *self.optimizer.variables],
            settings_of(self.model, self.optimizer, dataset, **self._settings),
            learning_rate_variable(self.optimizer),
            writes=is_chief(self.strategy),
        )
        with (
            self._opened(checkpoints, allow_changes) as position,
            StopSignals(self.strategy) as signals,
        ):

            def after_window(position):
                stopped_by = signals.received()
                if (
                    stopped_by
                    or position.windows % checkpoint_every == 0
                    or position.windows == updates
                ):
                    checkpoints.save(position)
                if stopped_by:
                    # With several workers, none ends before the checkpoint is written
                    signals.received()
                return stopped_by

            return self._train(dataset, updates, position, after_window, on_update, verbose)

    @contextlib.contextmanager
    def _opened(self, checkpoints: Checkpoints, allow_changes: bool) -> Iterator[Position]:
        """The checkpoints, ready to save, and the position from which to continue. All workers must
        agree on it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(checkpoints)
                position = checkpoints.begin(allow_changes)
            except BaseException:
                over_workers(self.strategy, [-1])  # the other workers wait for an answer
                raise
            found = over_workers(self.strategy, [position.windows])
            if (found != position.windows).any():
                raise ValueError(
                    "checkpoint_dir must be a directory that all workers can use, with the same "
                    f"checkpoints. Received: {checkpoints.directory}, with checkpoints after "
                    f"{sorted(found.ravel().tolist())} windows, where -1 stands for an error"
                )
            yield position

    def _train(
        self,
        dataset: Any,
        updates: int,
        position: Position,
        after_window: Callable[[Position], int],
        on_update: Callable[[UpdateRecord], None] | None,
        verbose: bool,
    ) -> list[UpdateRecord]:
        """Trains from a position on.

        Args:
            after_window: a function that is called with the position after each window, and returns
                the number of the signal that ends the training then, or 0.
        """
        bar = (
            keras.utils.Progbar(updates, unit_name="update")
            if verbose and is_chief(self.strategy)
            else None
        )
        steps = []
        done = position.windows
        windows = DatasetWindows(dataset, self._window_size, position.epoch, position.examples)
        is_said = self.in_flight is not None and (
            self._auto is None or self._auto.chosen is not None
        )
        while done < updates:
            with one_sentence_errors():
                window = next(windows)
            step = self._step(window, self.strategy.num_replicas_in_sync)
            done += 1
            steps.append(step)
            stopped_by = after_window(Position(done, windows.epoch, windows.examples))
            if bar is not None:
                if not is_said:
                    print(self.microbatch_choice or self._update.in_flight)
                    is_said = True
                bar.update(done, [("loss", step.loss)] if step.applied else [])
            if on_update is not None:
                on_update(step)
            if stopped_by:
                if bar is not None:
                    print(sentence(stopped_by, done))
                raise SystemExit(128 + stopped_by)
        return steps

    def _window_size(self) -> int | None:
        """The number of examples of the next window over all replicas. None: that of the dataset's
        next batch."""
        if self._accumulation is None:
            return None
        microbatches = self._accumulation(self.updates)
        _checks.positive_integer("accumulation(update)", microbatches)
        return microbatches * self._size * self.strategy.num_replicas_in_sync

    def _step(self, window: tuple, replicas: int) -> UpdateRecord:
        """Makes one update. The window is divided among a number of replicas: those of this worker,
        or all of them."""
        window = map_tensors(as_tensor, window)
        check_lengths(window)
        with one_sentence_errors():
            outcome = self._outcome(window, replicas)
        self._update.warn()
        local = self.strategy.experimental_local_results
        before, updates, skipped = (
            int(local(each)[0]) for each in (outcome.before, outcome.updates, outcome.skipped)
        )
        losses, weights, gradient_norms = (
            np.concatenate([tensor.numpy() for tensor in local(each)])
            for each in (outcome.losses, outcome.weights, outcome.gradient_norms)
        )
        return UpdateRecord(
            losses=losses,
            weights=weights,
            gradient_norms=gradient_norms,
            window_gradient_norm=float(local(outcome.window_gradient_norm)[0]),
            update=updates,
            loss=float(local(outcome.loss)[0]),
            applied=updates > before,
            skipped=skipped,
        )

    def _outcome(self, window: tuple, replicas: int) -> Outcome:
        """Computes one update."""
        if self._auto is not None and self._auto.wants(window, self.strategy, replicas):
            share = slice(0, -(-int(examples_of(window)) // replicas))
            part = map_tensors(lambda tensor: rows_of(tensor, share), window)
            self._auto.choose(self._update, weighted(self._weight_fn, part)[0], self.strategy)
        run = (lambda compute: compute()) if self._auto is None else self._auto.run
        return run(lambda: self._function(window)(tensors_of(window), tf.constant(replicas)))

    def _function(self, window: tuple) -> Callable:
        """The compiled update for windows like this one, of any number of examples. Usually there
        is only one."""
        specs = [spec_of(tensor) for tensor in tensors_of(window)]
        structure = tf.nest.map_structure(lambda tensor: tensor is None, window)
        if (
            self._compiled is None
            or not equal_nests(structure, self._structure)
            or not self._fits(specs)
        ):
            if self._compiled is not None and equal_nests(structure, self._structure):
                # Only sizes inside the examples differ, such as the length of texts: leave those
                # open from now on. A window that is cut and one that is not have nothing in common.
                pairs = zip(specs, self._specs)
                specs = [
                    spec.most_specific_common_supertype([known]) or spec for spec, known in pairs
                ]

            def packed(tensors):
                rest = iter(tensors)
                return tf.nest.map_structure(
                    lambda missing: None if missing else next(rest), structure
                )

            def run(tensors, replicas):
                return self.strategy.run(self._on_replica, args=(packed(tensors), replicas))

            if self.strategy.num_replicas_in_sync == 1:
                of_microbatch = specs_of_microbatch(packed(specs), self._size)
                of_weighted = tf.function(partial(weighted, self._weight_fn), autograph=False)
                self._update.prepare(
                    of_weighted.get_concrete_function(of_microbatch).structured_outputs[0]
                )
            signature = [specs, tf.TensorSpec([], tf.int32)]
            compiled = tf.function(
                run, input_signature=signature, autograph=False
            ).get_concrete_function()
            # Only now: a window that cannot be compiled must not change anything for those after
            # it.
            self._structure = structure
            self._specs = specs
            self._compiled = compiled
        return self._compiled

    def _fits(self, specs: list) -> bool:
        return all(known.is_compatible_with(spec) for known, spec in zip(self._specs, specs))

    def _on_replica(self, window: tuple, replicas: tf.Tensor) -> Outcome:
        if self.strategy.num_replicas_in_sync > 1:
            window = rows_of_replica(window, replicas)
        window, cut = join(window, self._size)
        (x, y, sample_weight), cut = weighted(self._weight_fn, window, cut)
        return self._update(x, y, sample_weight, cut)

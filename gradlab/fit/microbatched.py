"""microbatched: prepares a Keras model, so that it computes each batch in micro-batches that fit in
memory."""

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab._batches import as_tensor, examples_of, map_tensors
from gradlab.fit import keras_private as internals
from gradlab.fit.evaluation import WindowEvaluation, predict_in_microbatches
from gradlab.fit.keras_private import has_own
from gradlab.fit.losses.chunked_head import check_metrics
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.losses.whole_batch import WholeBatch
from gradlab.fit.metrics.epoch_metrics import EpochNoiseScale, Skipped
from gradlab.fit.metrics.window_metrics import logs_of
from gradlab.fit.program.compiled_step import in_one_call, types_of
from gradlab.fit.program.input_checks import (
    check_batch_losses,
    check_fit,
    check_in_flight,
    check_labels,
    check_lengths,
    check_no_accumulation,
    check_one_replica,
    check_preparable,
    check_skips,
    check_stateless,
    check_windows,
    graph_errors,
    one_sentence_errors,
)
from gradlab.fit.program.plan import check_noise
from gradlab.fit.program.precut import join
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.sizes.auto_size import AutoSize, checked_size
from gradlab.fit.sizes.auto_steps import AutoSteps
from gradlab.fit.variables.sparse_tables import checked_sparse

Model = TypeVar("Model", bound=keras.Model)


def microbatched(
    model: Model,
    microbatch_size: int | str,
    *,
    memory: float | None = None,
    in_flight: int | str = "auto",
    batch_losses: str | dict[str, str] | None = None,
    skip_nonfinite: bool = False,
    noise_scale: bool = False,
    sparse: Sequence[keras.layers.Embedding] = (),
) -> Model:
    """Prepares a model to compute its batches one micro-batch at a time, with the same results.

    `batch_size` keeps its meaning: the number of examples in one update. In `fit` and
    `train_on_batch`, each batch is cut into micro-batches, whose gradients are summed, and the
    optimizer receives the large batch's gradient once. So `iterations`, learning-rate schedules,
    clipping, weight decay and moving averages are those of the large batch. So are losses and
    metrics, including those of the ragged tail of an epoch. `evaluate`, `predict` and validation
    compute micro-batches too, so only the activations of the micro-batches in flight are in memory.

    The model stays what it is: its class, its layers, its files. What it saves loads without
    gradlab, state of the optimizer included. A loaded model, a clone or a copy is not prepared:
    call `microbatched` for it again.

    Limitations, each with a warning or an error where gradlab can notice it:

    - Dropout draws a mask for each micro-batch, and batch normalization uses the statistics of
      each.
    - A loss of `compile` that does not surely give one value for each example is computed over the
      whole batch, as `gradlab.WholeBatch` is: this takes a second forward pass, and the memory of
      the whole batch's predictions.
    - What is one number for a batch by `add_loss`, or by a `compute_loss` of the model's own, is
      refused unless `batch_losses` says what it is. Before the first three updates gradlab compares
      its value for a few examples, at most a micro-batch or two examples, with those for their
      halves; likewise that of functions for each example.
    - A metric that is a function and returns one number for a batch is averaged over the
      micro-batches, weighted by their examples. For a function that is not a mean over examples,
      such as a root mean square, this differs from the batch's number. A metric object that sums
      over examples, such as `keras.metrics.RootMeanSquaredError`, is exact; one that relates the
      examples of a batch to each other, such as `PearsonCorrelation(axis=0)`, is averaged.
    - A `test_step` or `predict_step` of the model's own runs as it is, on whole batches or windows.
    - With an `Embedding`, Keras gives the optimizer the gradient's rows one by one, so that
      optimizers that square gradients (Adam, RMSprop, ...) square the parts of a token that occurs
      twice, not their sum. gradlab uses the gradient itself, as for a dense layer, and so differs
      from Keras' `fit` whatever the size of the micro-batch.

    Args:
        model: any Keras model: functional, sequential or subclassed. It may be compiled later.
        microbatch_size: the number of examples of a micro-batch; the last one of a batch may be
            smaller. "auto": the largest that fits in memory. gradlab plans the memory before the
            first update, and prints the choice unless verbose is 0. If memory runs out all the
            same, the batch is computed again with half the size. It chooses again after `compile`,
            and if an epoch begins with a larger batch than one that fitted whole. Sizes change
            results by rounding, and by dropout's masks. Until it is chosen, `evaluate` and
            `predict` use 32. "given": each batch of the dataset is cut already, as
            `gradlab.token_batches` does; any other batch is one micro-batch.
        memory: for "auto", the bytes that the training may take, without its data. None: half of
            what is available, or all of a GPU.
        in_flight: the number of micro-batches that are computed at once, which does not change a
            bit of the result. 1 needs the least memory. More save time on several cores, and each
            has activations and gradients of its own. "auto": one for each core of a CPU if those of
            all but the first (for an automatic size, of one example) are small: at most 128 MiB or
            twice the accumulators, and a quarter of what is left; one on a GPU. `fit` tells.
        batch_losses: what losses are that give one number for a batch: "mean" or "sum" over them,
            or a dict with that for the names of layers, of losses, or "compute_loss". They come
            from `add_loss` in a layer, from a `compute_loss` of the model's own, or from a function
            that returns a scalar. None: a function is computed over the whole batch, in two passes;
            the others are refused, except for Keras' activity regularizers, which are known.
        skip_nonfinite: leave out micro-batches whose loss or gradient contains NaN or inf: the
            update, losses and metrics are those of the batch without their examples. A batch of
            which nothing is left changes nothing. The logs have one entry more, "skipped": how many
            micro-batches of the epoch were left out. False: the weights become NaN, as in Keras.
        noise_scale: measure the gradient noise scale, as `gradlab.gradient_noise_scale` does. The
            logs have one entry more, "noise_scale": its value over the updates of the epoch so far,
            in examples; inf while the estimate of the true gradient's squared norm is not above 0,
            NaN before the first batch of two micro-batches or more.
        sparse: embeddings whose tables have many more rows than a batch has lookups. Instead of an
            accumulator as large as the table, a row of the gradient is kept for each lookup until
            the update, whose result is the same. The table must only be looked up.

    Returns:
        The same model. Its attributes `microbatch_size` and `in_flight` are the numbers, or None
        before they are chosen, and where the dataset determines the sizes; `microbatch_choice` is
        the sentence that says why.

    Raises:
        ValueError: an argument out of range, or a model with a `train_step` of its own, which
            gradlab's would replace.
        ValueError, MemoryError: in `fit`, not even a micro-batch of one example fits.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model = microbatched(model, 4)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones([100, 2]), np.ones([100, 1]), batch_size=50, verbose=0)
        >>> int(model.optimizer.iterations)
        2
    """
    microbatch_size = checked_size(microbatch_size, memory)
    check_in_flight(in_flight)
    check_batch_losses(batch_losses)
    _checks.boolean("skip_nonfinite", skip_nonfinite)
    _checks.boolean("noise_scale", noise_scale)
    sparse = checked_sparse(sparse, microbatch_size)
    check_preparable(model)
    _Steps(
        model, microbatch_size, memory, in_flight, batch_losses, skip_nonfinite, noise_scale, sparse
    ).install()
    return model


class _Steps:
    """The methods that take the place of a model's own.

    They are set on the instance: its class, which Keras saves, stays the same, and nothing of them
    is saved.
    """

    def __init__(
        self,
        model: keras.Model,
        microbatch_size: int | str,
        memory: float | None,
        in_flight: int | str,
        batch_losses: str | dict[str, str] | None,
        skip_nonfinite: bool,
        noise_scale: bool,
        sparse: Sequence[keras.layers.Embedding],
    ):
        self._model = model
        self._in_flight = in_flight
        # That choice is made for one example, and a size that is chosen later may be a large one.
        is_open = microbatch_size == "auto" and in_flight == "auto"
        self._forward_in_flight = 1 if is_open else in_flight
        self._is_quiet = True
        self._batch_losses = batch_losses
        self._skips = skip_nonfinite
        self._measures_noise = noise_scale
        self._sparse = sparse
        self._of_epoch: list = [Skipped()] if skip_nonfinite else []
        self._of_epoch += [EpochNoiseScale()] if noise_scale else []
        self._targets: Any = None
        self._label_rules: list[tuple] = []
        self._auto = AutoSize(memory, self._show_choice) if microbatch_size == "auto" else None
        self._microbatch_size: Any = microbatch_size if self._auto is None else self._auto.variable

    def install(self) -> None:
        """Prepares what a compiled model needs, and sets the methods."""
        if self._model.compiled:
            self._prepare()
        names = [
            "compile",
            "fit",
            "make_train_function",
            "make_test_function",
            "make_predict_function",
            "train_step",
        ]
        names += [name for name in ("test_step", "predict_step") if not has_own(self._model, name)]
        names += ["reset_metrics"] if self._of_epoch else []
        self._own = {name: self._of_instance(name) for name in names}
        for name in names:
            object.__setattr__(self._model, name, self._method(name))
        self._show_choice(self._microbatch_size, "")
        self._show("in_flight", self._in_flight)

    def _of_instance(self, name: str) -> Callable | None:
        """The method that was set on the model itself instead of its class, before any preparation;
        usually None."""
        found = vars(self._model).get(name)
        return getattr(found, "of_gradlab", found)

    def _method(self, name: str) -> Callable:
        """One of the methods below, with the signature and the docstring of the model's own."""
        function = getattr(self, name)

        @functools.wraps(getattr(type(self._model), name))
        def method(model, *args, **kwargs):
            return function(*args, **kwargs)

        method.of_gradlab = self._own[name]  # type: ignore[attr-defined]
        return types.MethodType(method, self._model)

    def _original(self, name: str) -> Callable:
        return self._own[name] or functools.partial(getattr(type(self._model), name), self._model)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles as the model does. XLA compiles each micro-batch, but not the loop around
        them."""
        self._original("compile")(*args, **kwargs)
        self._prepare()

    def _prepare(self) -> None:
        model = self._model
        size = self._microbatch_size
        jit = self._model.jit_compile
        self._label_rules = []
        if self._auto is not None:
            self._auto.forget()
        check_no_accumulation(model.optimizer)
        if self._skips:
            check_skips(model)
        if self._measures_noise:
            check_one_replica(model, "noise_scale")
        loss, loss_weights = internals.compiled_loss(model)
        check_metrics(loss, internals.compiled_metrics(model))
        if isinstance(loss, WholeBatch):
            internals.never_build_loss(model)
        has_loss = has_own(model, "compute_loss")
        names = getattr(model, "output_names", None)
        training, evaluation = (
            Objective(
                loss,
                loss_weights,
                names,
                own=functools.partial(internals.compute_loss, model, training=training)
                if has_loss
                else None,
                batch_losses=self._batch_losses,
            )
            for training in (True, False)
        )
        self._update = WindowUpdate(
            model,
            model.optimizer,
            training,
            size,
            in_flight=self._in_flight,
            jit=jit,
            skip_nonfinite=self._skips,
            norms=self._measures_noise,
            check_plan=check_noise if self._measures_noise else None,
            with_metrics=True,
            sparse=self._sparse,
            updates_started=None if self._auto is None else self._auto.updates_started,
        )
        self._evaluation = WindowEvaluation(model, evaluation, size, self._forward_in_flight, jit)
        model.train_function = model.test_function = model.predict_function = None

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains as the model does, after checks of the data."""
        asked = dict(zip(inspect.signature(keras.Model.fit).parameters, (None, *args))) | kwargs
        self._is_quiet = not asked.get("verbose", "auto")
        check_fit(self._model, asked)
        if self._measures_noise:
            check_windows(asked, self._microbatch_size)
        y = asked.get("y")
        in_memory = all(isinstance(part, (np.ndarray, tf.Tensor)) for part in tf.nest.flatten(y))
        # The labels of a dataset are checked batch by batch
        self._targets = y if in_memory else None
        self._check_labels()
        try:
            return self._original("fit")(*args, **kwargs)
        finally:
            self._targets = None

    def _check_labels(self) -> None:
        """Checks all targets of `fit`, once it is known which of them are class numbers."""
        if self._targets is not None:
            check_labels(self._targets, self._label_rules)

    def make_train_function(self, force: bool = False) -> Any:
        """Creates the function that `fit` calls, after all variables exist.

        Several devices need the variables to exist before it is traced. Variables created during
        tracing also leave most of a second copy of themselves allocated: 40 MiB for the 57 MiB of
        VGG-16.
        """
        model = self._model
        is_replaced = self._update.optimizer is not model.optimizer
        if force or (model.train_function is None and is_replaced):
            self._prepare()  # what was traced may no longer hold
        with model.distribute_strategy.scope():
            if model.built and model.trainable_weights:
                # Which must not create variables later, not even with one replica
                if tf.distribute.has_strategy():
                    self._prepare_update(())
                if not model.optimizer.built:
                    model.optimizer.build(model.trainable_weights)
        return self._make("train", force, self._prepare_update, self._update.warn)

    def _prepare_update(self, specs: tuple) -> None:
        """Creates what the update needs, and says how many micro-batches are in flight if it was
        chosen here."""
        if specs:
            self._label_rules = self._update.label_rules(specs)
            self._check_labels()
        chosen = self._update.in_flight is None
        in_flight = self._update.prepare(specs)
        self._say(str(in_flight) if chosen and self._auto is None else "")

    def _show(self, name: str, number: Any) -> None:
        """Sets an attribute of the model by which a user can see what was chosen."""
        object.__setattr__(self._model, name, number if isinstance(number, int) else None)

    def _show_choice(self, size: Any, sentence: str) -> None:
        self._show("microbatch_size", size)
        object.__setattr__(self._model, "microbatch_choice", sentence)

    def _say(self, sentence: str) -> None:
        """Shows what was chosen, now that it is."""
        self._show("in_flight", self._update.in_flight and self._update.in_flight.count)
        if sentence:
            object.__setattr__(self._model, "microbatch_choice", sentence)
            if not self._is_quiet:
                print(sentence)

    def make_test_function(self, force: bool = False) -> Any:
        """Creates the function that `evaluate` calls."""
        with self._model.distribute_strategy.scope():
            self._evaluation.build()
        return self._make("test", force, before=lambda specs: None)

    def make_predict_function(self, force: bool = False) -> Any:
        """Creates the function that `predict` calls."""
        return self._make("predict", force)

    def _make(
        self, kind: str, force: bool, before: Callable | None = None, after: Callable = lambda: None
    ) -> Any:
        """Creates one of the functions as Keras does, but with errors in one sentence, and without
        XLA around all.

        Args:
            kind: "train", "test" or "predict".
            force: as in Keras.
            before: called with the types of (x, y, sample_weight), if they are known, after all
                variables were created and before the function is traced. None: it needs none.
            after: called after each call.
        """
        model = self._model
        name = f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return (
                self._original(f"make_{name}")() if self._makes_own(name) else getattr(model, name)
            )
        with internals.without_xla(model):
            self._original(f"make_{name}")(True)
        made = getattr(model, name)
        if not self._makes_own(name):
            made = in_one_call(model, kind, made)
        elif kind == "train" and self._auto is not None:
            raise ValueError(
                f"microbatch_size must be a number for a model with a make_{name} of its own. "
                'Received: "auto"'
            )
        if kind == "train" and self._auto is not None:
            made = AutoSteps(model, getattr(model, name), self._update, self._auto, self._say)

        def function(data):
            nonlocal before
            with one_sentence_errors(), graph_errors(model):
                if before is not None:
                    data = self._build(data, kind == "train", before)
                before = None
                logs = made(data)
            after()
            return logs

        setattr(model, name, function)
        return function

    def _makes_own(self, name: str) -> bool:
        """Whether the model makes this function by itself, which then calls the step in its own
        way."""
        own = self._own[f"make_{name}"] or getattr(type(self._model), f"make_{name}")
        return own is not getattr(keras.Model, f"make_{name}")

    def _build(self, data: Any, training: bool, then: Callable) -> Any:
        """Creates all variables if the types of the data tell enough: TensorFlow traces twice what
        creates some."""
        if self._model.distribute_strategy.num_replicas_in_sync == 1:
            specs, data = types_of(data, self._microbatch_size)
            if specs is not None:
                internals.build_from_batch(self._model, specs, training)
                then(specs)
        return data

    def train_step(self, data: Any) -> dict:
        """Makes one update from one batch."""
        model = self._model
        batch = self._batch(data, training=True)
        if not model.trainable_weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        outcome = self._update(*batch)
        logs = logs_of(model, self._update.objective, outcome, outcome.examples)
        for metric in self._of_epoch:
            if metric.name in logs:
                raise ValueError(
                    "A metric must not have the name of what gradlab adds to the logs. Received: "
                    f"{metric.name}"
                )
            metric.update_state(outcome)
            logs[metric.name] = metric.result()
        return logs

    def reset_metrics(self) -> None:
        """Lets metrics begin anew, as at the beginning of an epoch."""
        self._original("reset_metrics")()
        for metric in self._of_epoch:
            metric.reset_state()

    def test_step(self, data: Any) -> dict:
        """Evaluates one batch."""
        batch = self._batch(data, training=False)
        return logs_of(
            self._model, self._update.objective, self._evaluation(*batch), examples_of(batch[0])
        )

    def predict_step(self, data: Any) -> Any:
        """Predicts the outputs of one batch."""
        check_stateless(self._model)
        x = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(data)[0])
        jit = self._model.compiled and self._model.jit_compile
        return predict_in_microbatches(
            self._model, x, self._microbatch_size, in_flight=self._forward_in_flight, jit=jit
        )

    def _batch(self, data: Any, training: bool) -> tuple:
        """The batch (x, y, sample_weight), and where it is cut if that is given; the variables
        exist afterwards."""
        check_stateless(self._model)
        batch = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(data))
        check_lengths(batch)
        batch, cut = join(batch, self._microbatch_size)
        internals.build_from_batch(self._model, batch, training)
        return *batch, cut

"""microbatched: a Keras model whose fit() computes each batch in micro-batches that fit in memory."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab._batches import examples_of, map_tensors
from gradlab.training import _keras_internals as internals
from gradlab.training.input_checks import check_lengths, label_rules, one_sentence_errors, wrong_labels
from gradlab.training.objective import Objective
from gradlab.training.update import WindowUpdate


def microbatched(model: keras.Model, microbatch_size: int, *, in_flight: int = 1) -> "MicrobatchedModel":
    """Wraps a model so that it trains on its batches one micro-batch at a time, with the same weights.

    `batch_size` keeps its meaning: the number of examples behind one update. Each batch is cut into micro-batches,
    whose gradients are summed, and the optimizer receives the large batch's gradient once. So `iterations`,
    learning-rate schedules, clipping, weight decay and moving averages are those of the large batch. So are the losses
    in `History`, including those of the ragged tail of an epoch.

    When the result is saved, the file includes the state of its optimizer. Loading it needs `gradlab.MicrobatchedModel`
    to be imported. The original model can be saved as before, and loads without gradlab.

    Limitations: dropout draws a mask for each micro-batch, and batch normalization uses the statistics of each
    micro-batch (a warning names the layers), so such models do not get exactly the large batch's update. A loss must be
    a sum or a mean over examples.

    Args:
        model: any Keras model: functional, sequential or subclassed. It is not changed and need not be compiled.
        microbatch_size: the largest number of examples to compute at once.
        in_flight: the number of micro-batches that may be computed at once. 1 needs the least memory. A larger number
            saves time if micro-batches are small. Each of them holds its own activations, and gradients are no longer
            summed in place, which takes more than half a copy of the gradients.

    Returns:
        A `MicrobatchedModel`, to be compiled and fitted.

    Raises:
        ValueError: microbatch_size or in_flight is not a positive integer, or model is not a Keras model, or it has a
            `train_step` or `compute_loss` of its own, which gradlab's would replace.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> small = microbatched(model, 4)
        >>> small.compile("sgd", "mse")
        >>> history = small.fit(np.ones([100, 2]), np.ones([100, 1]), batch_size=50, verbose=0)
        >>> int(small.optimizer.iterations)
        2
    """
    return MicrobatchedModel(model, microbatch_size, in_flight)


@keras.saving.register_keras_serializable(package="gradlab")
class MicrobatchedModel(keras.Model):
    """The result of `microbatched`. Its attribute `model` is the original model."""

    def __init__(self, model: keras.Model, microbatch_size: int, in_flight: int = 1, **kwargs: Any):
        _checks.positive_integer("microbatch_size", microbatch_size)
        _checks.positive_integer("in_flight", in_flight)
        if not isinstance(model, keras.Model):
            raise ValueError(f"model must be a keras.Model. Received: {model!r}")
        for method in ("train_step", "compute_loss"):
            if getattr(type(model), method) is not getattr(keras.Model, method):
                raise ValueError(
                    f"model must not have a {method} of its own, which gradlab's would replace: give the loss to "
                    f"compile, or add it in a layer. Received: {type(model).__name__}.{method}"
                )
        super().__init__(name=kwargs.pop("name", f"microbatched_{model.name}"), dtype=model.dtype_policy, **kwargs)
        self.model = model
        self.microbatch_size, self.in_flight = int(microbatch_size), int(in_flight)
        if hasattr(model, "output_names"):
            self.output_names = model.output_names

    def call(self, inputs: Any) -> Any:
        """Calls the original model."""
        return self.model(inputs)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Configures training, as `keras.Model.compile` does.

        jit_compile compiles the forward and backward pass of each micro-batch with XLA, but not the loop around them.
        """
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )
        if getattr(self.optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "gradient_accumulation_steps must be None: microbatch_size does its work. "
                f"Received: {self.optimizer.gradient_accumulation_steps}"
            )
        jit = self.jit_compile
        self.jit_compile: bool = False
        self._objective = Objective(loss, loss_weights, getattr(self, "output_names", None))
        self._window_update = WindowUpdate(
            self, self.optimizer, self._objective, self.microbatch_size, in_flight=self.in_flight, jit=jit, norms=False
        )

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does."""
        if isinstance(self.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "Keras' fit works on one machine: train on several workers with gradlab.Trainer. "
                f"Received: a model made in the scope of {type(self.distribute_strategy).__name__}"
            )
        size = x.cardinality() if isinstance(x, tf.data.Dataset) else len(x) if hasattr(x, "shape") else None
        if size is not None and int(size) == 0:
            raise ValueError("x must hold at least one example. Received: 0")
        if self.compiled and all(isinstance(part, (np.ndarray, tf.Tensor)) for part in tf.nest.flatten((x, y))):
            self._check_labels(x, y)
        with one_sentence_errors():
            return super().fit(
                x,
                y,
                batch_size=batch_size,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_split=validation_split,
                validation_data=validation_data,
                shuffle=shuffle,
                class_weight=class_weight,
                sample_weight=sample_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
            )

    def _check_labels(self, x: Any, y: Any) -> None:
        """Checks all labels before the first update. Those of a dataset are checked window by window."""
        if not self.model.built:
            return  # Keras builds it from the first batch
        first = map_tensors(lambda array: tf.convert_to_tensor(array[:1]), x)
        target = map_tensors(lambda array: tf.zeros_like(array[:1]), y)
        with keras.StatelessScope():
            _, terms = self._objective(target, self(first, training=False), None, [], 1)
        for rule, wrong in wrong_labels(y, label_rules(target, terms)):
            if len(wrong):
                raise ValueError(f"{rule} {int(wrong[0])}")

    def make_train_function(self, force: bool = False) -> Any:
        """Creates the function that `fit` calls, after all variables exist.

        Several devices need the variables to exist before it is traced. Variables created during tracing also leave
        most of a second copy of themselves allocated: 40 MiB for the 57 MiB of VGG-16.
        """
        if self.model.built and self.trainable_variables:
            with self.distribute_strategy.scope():
                self._window_update.build()
                if not self.optimizer.built:
                    self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, data: Any) -> dict:
        """Makes one update from one batch."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        check_lengths((x, y, sample_weight))
        internals.build_from_batch(self, data)
        tracker, term_trackers = internals.loss_tracker(self), internals.term_trackers(self)
        own = {id(metric) for metric in (tracker, *term_trackers)}
        observed = [v for metric in self.metrics if id(metric) not in own for v in metric.variables]

        def observe(y, y_pred, sample_weight):
            self.compute_metrics(None, y, y_pred, sample_weight)

        outcome = self._window_update(x, y, sample_weight, observe if observed else None, observed)
        examples = examples_of(x)
        tracker.update_state(outcome.loss, sample_weight=examples)
        for metric, loss in zip(term_trackers, outcome.term_losses):
            metric.update_state(loss, sample_weight=examples)
        return self.get_metrics_result()

    def compile_from_config(self, config: dict) -> None:
        """Compiles as saved, so that the state of the optimizer can be loaded."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def get_config(self) -> dict:
        """The configuration: the original model and the sizes."""
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.model),
            "microbatch_size": self.microbatch_size,
            "in_flight": self.in_flight,
        }

    @classmethod
    def from_config(cls, config: dict) -> "MicrobatchedModel":
        """The model that `get_config` describes."""
        return cls(**config | {"model": keras.saving.deserialize_keras_object(config["model"])})

"""microbatched: a Keras model whose fit() computes each batch in micro-batches that fit in memory."""

import keras
import numpy as np
import tensorflow as tf

from gradlab import _checks
from gradlab.training.dataset_windows import check_lengths, map_parts
from gradlab.training.objective import Objective, label_rules, wrong_labels
from gradlab.training.replicas import examples_of
from gradlab.training.update import WindowUpdate, errors_in_a_sentence


def microbatched(model: keras.Model, microbatch_size: int, in_flight: int = 1) -> "MicrobatchedModel":
    """A model that shares model's weights and trains on its batches micro-batch by micro-batch.

    `batch_size` keeps its meaning: the examples behind one update. Each batch is cut into micro-batches, their
    gradients are added up, and the optimizer gets the large batch's gradient once. So `iterations`, learning-rate
    schedules, clipping, weight decay and moving averages are those of the large batch, and so are the losses in
    `History`, the ragged tail of an epoch included.

    Saved, the result keeps its optimizer's state, and loads after `import gradlab.keras_model`. The model given can be
    saved as ever, and loads without gradlab.

    Not equal, because the mathematics is not: dropout draws its masks micro-batch by micro-batch, and batch
    normalization takes its statistics from each (`gradlab.batch_norm`; a warning names the layers). A loss must be a
    sum or mean over examples.

    Args:
        model: any Keras model: functional, sequential or subclassed. It is not changed and needs no compile.
        microbatch_size: the most examples to compute at once.
        in_flight: how many micro-batches may be under way at once. 1 needs the least memory. More save time where
            micro-batches are small; each holds its own activations, and sums are no longer made in place, which takes
            over half a copy of the gradients.

    Returns:
        A `MicrobatchedModel`: compile it and fit it.

    Raises:
        ValueError: microbatch_size or in_flight is not a positive integer, model is not a Keras model or has a
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
    """What `microbatched` returns. Its `model` is the one that it was made from."""

    def __init__(self, model: keras.Model, microbatch_size: int, in_flight: int = 1, **kwargs):
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

    def call(self, inputs):
        return self.model(inputs)

    def compile(self, optimizer="rmsprop", loss=None, loss_weights=None, **kwargs):
        """As `keras.Model.compile`. XLA (jit_compile) compiles each micro-batch's passes, not the loop around them."""
        super().compile(optimizer, loss, loss_weights, **kwargs)
        if getattr(self.optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "gradient_accumulation_steps must be None: microbatch_size does its work. "
                f"Received: {self.optimizer.gradient_accumulation_steps}"
            )
        jit, self.jit_compile = self.jit_compile, False
        self._objective = Objective(loss, loss_weights, getattr(self, "output_names", None))
        self._window_update = WindowUpdate(
            self, self.optimizer, self._objective, self.microbatch_size, in_flight=self.in_flight, jit=jit, norms=False
        )

    def fit(self, x=None, y=None, *args, **kwargs):
        """As `keras.Model.fit`."""
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
        with errors_in_a_sentence():
            return super().fit(x, y, *args, **kwargs)

    def _check_labels(self, x, y):
        """Looks at all labels before the first update; those of a dataset are looked at window by window."""
        if not self.model.built:
            return  # Keras builds it from the first batch
        first = map_parts(lambda part: tf.convert_to_tensor(part[:1]), x)
        target = map_parts(lambda part: tf.zeros_like(part[:1]), y)
        with keras.StatelessScope():
            _, terms = self._objective(target, self(first, training=False), None, [], 1)
        for rule, wrong in wrong_labels(y, label_rules(target, terms)):
            if len(wrong):
                raise ValueError(f"{rule} {int(wrong[0])}")

    def make_train_function(self, force=False):
        """Prepares training. Variables are made before it is traced: several devices need it so, and those made while
        tracing leave most of a copy of theirs behind (measured: 40 MiB of VGG-16's 57)."""
        if self.model.built and self.trainable_variables:
            with self.distribute_strategy.scope():
                self._window_update.build()
                if not self.optimizer.built:
                    self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, data):
        """One update from one batch."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        check_lengths((x, y, sample_weight))
        self._symbolic_build(data_batch=data)
        term_metrics = self._compile_loss.metrics if self._compile_loss is not None else []
        own = {id(metric) for metric in (self._loss_tracker, *term_metrics)}
        observed = [v for metric in self.metrics if id(metric) not in own for v in metric.variables]

        def observe(y, y_pred, sample_weight):
            self.compute_metrics(None, y, y_pred, sample_weight)

        update = self._window_update(x, y, sample_weight, observe if observed else None, observed)
        examples = examples_of(x)
        self._loss_tracker.update_state(update.loss, sample_weight=examples)
        for metric, loss in zip(term_metrics, update.term_losses):
            metric.update_state(loss, sample_weight=examples)
        return self.get_metrics_result()

    def compile_from_config(self, config):
        """Compiles as saved; with the optimizer's state to follow."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def get_config(self):
        """The inner model and the sizes."""
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.model),
            "microbatch_size": self.microbatch_size,
            "in_flight": self.in_flight,
        }

    @classmethod
    def from_config(cls, config):
        """The model that `get_config` describes."""
        return cls(**config | {"model": keras.saving.deserialize_keras_object(config["model"])})

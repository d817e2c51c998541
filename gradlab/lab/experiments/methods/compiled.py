"""The methods that run one compiled TensorFlow 2 function, and the class that all compiled updates
share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab.averaging import squared_norm
from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments import optimizers
from gradlab.lab.experiments.methods.method import Cancelled, checked_batch
from gradlab.lab.experiments.models import Model
from gradlab.window import Window, window_gradients


class CompiledUpdate(ABC):
    """Variables, their optimizer, and an update as one compiled function.

    The function is traced once, when the object is made. TensorFlow does not trace it again when
    the batch or the micro-batches change size. Subclasses define how the gradients are computed, in
    `_window`.

    Args:
        shapes: the shape of each variable, by name.
        optimizer: the optimizer that gets the mean gradient.
        batch: the shapes and types of the tensors that `_window` takes before the micro-batch size.
        dtype: the type of the variables.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        optimizer: optimizers.OptimizerConfig,
        batch: Sequence[tf.TensorSpec],
        dtype: Any,
    ):
        self._dtype = np.dtype(dtype)
        self._variables = {
            name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()
        }
        self._optimizer = optimizers.keras_optimizer(optimizer)
        self._optimizer.build(list(self._variables.values()))
        with tf.device("/CPU:0"):
            # A variable, because the loop must see a change while it runs
            self._cancelled = tf.Variable(False)
        signature = [*batch, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float64)]
        # Calling a concrete function saves the 0.3 ms that matching the arguments with a trace
        # takes.
        self._compiled = tf.function(
            self._update, autograph=False, input_signature=signature
        ).get_concrete_function()

    def cancel(self) -> None:
        """See `Method.cancel`."""
        self._cancelled.assign(True)

    def _reset(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets the variables, and the optimizer to its initial state."""
        self._cancelled.assign(False)
        for name, variable in self._variables.items():
            variable.assign(values[name])
        for variable in self._optimizer.variables:
            variable.assign(np.zeros(variable.shape))

    def _call(
        self, *batch: np.ndarray, microbatch_size: int, learning_rate: float
    ) -> list[np.ndarray]:
        """Makes an update.

        Returns:
            [losses, weights, gradient norms, window gradient norm], as `_window` and `_norm`
            compute them.

        Raises:
            Cancelled: `cancel` was called since the last reset.
        """
        arguments = *batch, np.int32(microbatch_size), np.float64(learning_rate)
        # Converting the arguments here takes less time than the conversion that the call would do.
        *record, cancelled = self._compiled(*map(tf.convert_to_tensor, arguments))
        if cancelled.numpy():
            raise Cancelled
        return [value.numpy() for value in record]

    @abstractmethod
    def _window(self, *batch_and_size: tf.Tensor) -> Window:
        """The losses and gradients of a window, from the tensors of the batch and the micro-batch
        size."""

    def _norm(self, gradients: list) -> tf.Tensor:
        """The norm of the window's mean gradient."""
        return tf.sqrt(squared_norm(gradients, self._dtype))

    def _update(self, *arguments):
        *batch_and_size, learning_rate = arguments
        window = self._window(*batch_and_size)
        self._optimizer.learning_rate = learning_rate
        self._optimizer.apply(window.gradients, list(self._variables.values()))
        norm = self._norm(window.gradients)
        with tf.control_dependencies([norm]):
            # Read here, because reading the variable after the call would take as long as a
            # micro-batch.
            cancelled = self._cancelled.read_value()
        return window.losses, window.weights, window.gradient_norms, norm, cancelled


class CompiledMethod(CompiledUpdate):
    """A `Method` as one compiled function. Subclasses define how the gradients are computed, in
    `_gradients`.

    Args:
        model: the network.
        optimizer: the optimizer that gets the mean gradient.
        dtype: the type of features and weights.
    """

    def __init__(self, model: Model, optimizer: optimizers.OptimizerConfig, dtype: Any = "float32"):
        self._model = model
        features = tf.TensorSpec([None, *model.input_shape], dtype)
        labels = tf.TensorSpec([None], tf.int32)
        weights = tf.TensorSpec([None], dtype)
        super().__init__(
            model.shapes,
            optimizer,
            [features, labels, weights, tf.TensorSpec([2], tf.int32)],
            dtype,
        )

    def reset(self, weights: Mapping[str, np.ndarray]) -> None:
        """See `Method.reset`."""
        self._reset(weights)

    def update(
        self,
        features: Any,
        labels: Any,
        microbatch_size: int,
        learning_rate: float,
        weights: Any = None,
        dropout_seed: Sequence[int] = (0, 0),
    ) -> WindowRecord:
        """See `Method.update`."""
        batch = checked_batch(self._model, features, labels, microbatch_size, weights, self._dtype)
        seed = np.array(dropout_seed, np.int32)
        losses, sums, norms, norm = self._call(
            *batch, seed, microbatch_size=microbatch_size, learning_rate=learning_rate
        )
        return WindowRecord(losses, sums, norms, float(norm))

    def weights(self) -> dict[str, np.ndarray]:
        """See `Method.weights`."""
        return {name: variable.numpy() for name, variable in self._variables.items()}

    @abstractmethod
    def _gradients(
        self, loss: Callable, batch: tuple, weights: tf.Tensor, microbatch_size: tf.Tensor
    ) -> Window:
        """The losses and gradients of a window.

        Args:
            loss: a function (batch, number of the micro-batch) -> the loss of each example.
            batch: (features, labels).
            weights: the weights of the examples.
            microbatch_size: the examples of a micro-batch.
        """

    def _window(self, *batch_and_size):
        *batch, weights, dropout_seed, microbatch_size = batch_and_size

        def loss(microbatch, number):
            features, labels = microbatch
            return self._model.losses(
                self._variables, features, labels, dropout_seed + tf.stack([0, number])
            )

        return self._gradients(loss, tuple(batch), weights, microbatch_size)


class LargeBatch(CompiledMethod):
    """The reference for the other methods: one gradient of the whole batch. It ignores
    microbatch_size."""

    def _gradients(self, loss, batch, weights, microbatch_size):
        with tf.GradientTape() as tape:
            weight = tf.reduce_sum(weights)
            mean = tf.reduce_sum(loss(batch, 0) * weights) / weight
        gradients = tape.gradient(mean, list(self._variables.values()))
        return Window(
            gradients, mean[tf.newaxis], weight[tf.newaxis], self._norm(gradients)[tf.newaxis]
        )


class Microbatched(CompiledMethod):
    """The loop over the micro-batches inside the compiled function: one call makes one update.

    Args:
        model: the network.
        optimizer: the optimizer that gets the mean gradient.
        dtype: the type of features and weights.
        in_flight: the number of micro-batches that may be computed at once, as in
            `gradlab.window.Loop`. The networks of the experiments are small: two micro-batches fit
            in memory and use two cores. The numbers are the same, bit for bit.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optimizers.OptimizerConfig,
        dtype: Any = "float32",
        in_flight: int = 2,
    ):
        self._in_flight = in_flight
        super().__init__(model, optimizer, dtype)

    def _gradients(self, loss, batch, weights, microbatch_size):
        return window_gradients(
            loss,
            list(self._variables.values()),
            batch,
            weights,
            microbatch_size,
            in_flight=self._in_flight,
            stopped=self._cancelled.read_value,
        )

"""The five ways to make an update, behind one protocol, so that they can be compared.

Each really goes its way: "towers", "placeholders" and "variables" run a tf.compat.v1 static graph in a session,
"large_batch" and "microbatched" run one compiled TensorFlow 2 function. All of them give the same update.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from gradlab import _checks, runtime, static_graph
from gradlab.lab.experiments.models import Model
from gradlab.lab.experiments.optimizers import OptimizerConfig, keras_optimizer, static_graph_optimizer
from gradlab.window import Window, squared_norm, window_gradients


@dataclass(frozen=True)
class Microbatches:
    """What an update saw, all at the same weights.

    Attributes:
        losses: the weighted mean loss of each micro-batch, shape (micro-batches,).
        weights: the weight of each: its examples, or the sum of their weights.
        squared_norms: the squared norm of each one's gradient.
        window_squared_norm: the squared norm of the window's mean gradient.
    """

    losses: np.ndarray
    weights: np.ndarray
    squared_norms: np.ndarray
    window_squared_norm: float

    @property
    def loss(self) -> float:
        """The window's loss: the large batch's."""
        return float(np.average(self.losses, weights=self.weights))


class Cancelled(Exception):
    """An update was given up. The method's weights mean nothing until it is reset."""


class Method(Protocol):
    """A way to make an update from a batch that is too big to be computed at once."""

    def reset(self, weights: Mapping[str, np.ndarray]) -> None:
        """Begins anew: the model gets these weights, the optimizer forgets."""

    def update(
        self, features, labels, microbatch_size: int, learning_rate: float, weights=None, dropout_seed=(0, 0)
    ) -> Microbatches:
        """One update, with the mean gradient over all the examples given.

        Args:
            features: shape (examples, ...); labels: the classes, shape (examples,).
            microbatch_size: the most examples of one forward and backward pass on one tower.
            learning_rate: of this update.
            weights: the examples' weights, shape (examples,), or None for 1 each.
            dropout_seed: two integers; micro-batch m of the window draws its masks from (first, second + m).

        Raises:
            Cancelled: `cancel` was called since the last reset.
        """

    def cancel(self) -> None:
        """Makes the update under way, and any later one, end after the micro-batch it is at. From any thread."""

    def weights(self) -> dict[str, np.ndarray]:
        """The model's weights now."""


def build(name: str, model: Model, optimizer: OptimizerConfig, towers: int = 1, dtype="float32") -> Method:
    """Builds the method called name: its graph and session, or its compiled function.

    Args:
        name: "large_batch", "towers", "placeholders", "variables" or "microbatched".
        model: the network.
        optimizer: what to do with the mean gradient.
        towers: for the static graphs: over how many towers each run's examples are split.
        dtype: of features and weights.
    """
    _checks.one_of("method", name, METHODS)
    check_towers(name, towers)
    if takes_towers(name):
        return METHODS[name](model, optimizer, towers, dtype)
    return METHODS[name](model, optimizer, dtype)


def takes_towers(name: str) -> bool:
    """Whether the method called name can split its work over several towers."""
    return issubclass(METHODS[name], _StaticGraphMethod)


def check_towers(name: str, towers: int) -> None:
    """Raises ValueError unless the method called name can use so many towers."""
    _checks.positive_integer("towers", towers)
    if towers > 1 and not takes_towers(name):
        raise ValueError(f'towers must be 1 for method "{name}", which runs on one device. Received: {towers}')


class _CompiledMethod:
    """An update as one compiled function: nothing is traced again when the batch or the micro-batch changes size."""

    def __init__(self, model: Model, optimizer: OptimizerConfig, dtype):
        self._model = model
        self._dtype = np.dtype(dtype)
        self._variables = {name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in model.shapes.items()}
        self._optimizer = keras_optimizer(optimizer)
        self._optimizer.build(list(self._variables.values()))
        with tf.device("/CPU:0"):
            self._cancelled = tf.Variable(False)  # the loop reads it while it runs
        self._compiled = tf.function(
            self._update,
            autograph=False,
            input_signature=[
                tf.TensorSpec([None, *model.input_shape], dtype),
                tf.TensorSpec([None], tf.int32),
                tf.TensorSpec([None], dtype),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([2], tf.int32),
                tf.TensorSpec([], tf.float64),
            ],
        ).get_concrete_function()  # traced now, and called without matching its arguments anew, which takes 0.3 ms

    def reset(self, weights):
        self._cancelled.assign(False)
        for name, variable in self._variables.items():
            variable.assign(weights[name])
        for variable in self._optimizer.variables:
            variable.assign(np.zeros(variable.shape))

    def update(self, features, labels, microbatch_size, learning_rate, weights=None, dropout_seed=(0, 0)):
        features, labels, weights = _checked(self._model, features, labels, microbatch_size, weights, self._dtype)
        sizes = np.int32(microbatch_size), np.int32(dropout_seed), np.float64(learning_rate)
        arguments = map(tf.convert_to_tensor, (features, labels, weights, *sizes))  # quicker than the call's own way
        window, norm, cancelled = self._compiled(*arguments)
        if cancelled.numpy():
            raise Cancelled
        return Microbatches(*(seen.numpy() for seen in window), float(norm))

    def cancel(self):
        self._cancelled.assign(True)

    def weights(self):
        return {name: variable.numpy() for name, variable in self._variables.items()}

    def _update(self, features, labels, weights, microbatch_size, dropout_seed, learning_rate):
        def loss(microbatch, number):
            return self._model.losses(self._variables, *microbatch, dropout_seed + tf.stack([0, number]))

        window = self._window(loss, (features, labels), weights, microbatch_size)
        self._optimizer.learning_rate = learning_rate
        self._optimizer.apply(window.gradients, list(self._variables.values()))
        norm = squared_norm(window.gradients, self._dtype)
        with tf.control_dependencies([norm]):
            cancelled = self._cancelled.read_value()  # asking the variable afterwards takes as long as a micro-batch
        return (window.losses, window.weights, window.squared_norms), norm, cancelled


class LargeBatch(_CompiledMethod):
    """What the others stand in for: one gradient of the whole batch. It ignores microbatch_size."""

    def _window(self, loss, batch, weights, microbatch_size):
        with tf.GradientTape() as tape:
            weight = tf.reduce_sum(weights)
            mean = tf.reduce_sum(loss(batch, 0) * weights) / weight
        gradients = tape.gradient(mean, list(self._variables.values()))
        norm = squared_norm(gradients, weight.dtype)
        return Window(gradients, mean[tf.newaxis], weight[tf.newaxis], norm[tf.newaxis])


class Microbatched(_CompiledMethod):
    """The loop over the micro-batches inside the compiled function: one call an update.

    Args:
        in_flight: micro-batches that may be under way at once, as in `gradlab.window.accumulate`. The networks here are
            small, so that two fit and use two cores; the numbers are the same to the bit.
    """

    def __init__(self, model: Model, optimizer: OptimizerConfig, dtype="float32", in_flight: int = 2):
        self._in_flight = in_flight
        super().__init__(model, optimizer, dtype)

    def _window(self, loss, batch, weights, microbatch_size):
        variables = list(self._variables.values())
        return window_gradients(
            loss,
            variables,
            batch,
            weights,
            microbatch_size,
            in_flight=self._in_flight,
            stopped=self._cancelled.read_value,
        )


class _StaticGraphMethod:
    """A tf.compat.v1 graph and its session; a run feeds each tower up to microbatch_size examples."""

    def __init__(self, model: Model, optimizer: OptimizerConfig, towers: int, dtype):
        def loss(features, labels, dropout_seed):
            weights = {
                name: tf.compat.v1.get_variable(name, shape, dtype, tf.zeros_initializer())
                for name, shape in model.shapes.items()
            }
            return model.losses(weights, features, labels, dropout_seed)

        self._model = model
        self._dtype = np.dtype(dtype)
        self._graph = type(self).build_graph(loss, static_graph_optimizer(optimizer), model.input_shape, towers, dtype)
        with self._graph.graph.as_default():
            self._seen = [(tower.loss, tower.weight, _norm(tower.gradients)) for tower in self._graph.towers]
            self._add_window_norm()
        self._graph.graph.finalize()  # from here on nothing is added: every run is of the same graph
        self._cancelled = threading.Event()
        self._session = runtime.session(self._graph.graph)

    def reset(self, weights):
        self._cancelled.clear()
        # The value that an initializer assigns is its second input, and can be fed.
        first = {variable.initializer.inputs[1]: weights[_name(variable)] for variable in self._graph.variables}
        self._session.run(self._graph.init_op, first)

    def cancel(self):
        self._cancelled.set()

    def weights(self):
        values = self._session.run(self._graph.variables)
        return {_name(variable): value for variable, value in zip(self._graph.variables, values)}

    def update(self, features, labels, microbatch_size, learning_rate, weights=None, dropout_seed=(0, 0)):
        features, labels, weights = _checked(self._model, features, labels, microbatch_size, weights, self._dtype)
        towers = len(self._graph.towers)
        feeds = []
        for run, start in enumerate(range(0, len(labels), towers * microbatch_size)):
            rows = slice(start, start + towers * microbatch_size)
            seed = (dropout_seed[0], dropout_seed[1] + run * towers)
            feeds.append(self._graph.inputs.feed(features[rows], labels[rows], weights[rows], seed))
        seen, norm = self._run(feeds, {self._graph.inputs.learning_rate: learning_rate})
        losses, seen_weights, norms = np.array(seen).reshape(-1, 3).T
        own = seen_weights > 0  # a tower that had no example of its own has nothing to show
        return Microbatches(losses[own], seen_weights[own], norms[own], float(norm))

    def _add_window_norm(self):
        """Adds to the graph what the window's norm needs."""

    def _session_run(self, fetches, feed):
        if self._cancelled.is_set():
            raise Cancelled
        return self._session.run(fetches, feed)


class Variables(_StaticGraphMethod):
    """Gradients are added up in variables beside the model's; a last run applies their mean."""

    build_graph = staticmethod(static_graph.variable_graph)

    def _add_window_norm(self):
        self._norm = squared_norm(self._graph.accumulator.mean(), self._dtype)
        self._norm_of_one_run = _norm(self._graph.average)

    def _run(self, feeds, rate):
        self._session.run(self._graph.zero_ops)
        runs = [self._session_run([self._seen, self._graph.accum_ops], feed)[0] for feed in feeds]
        norm, _ = self._session_run([self._norm, self._graph.train_step], rate)
        return runs, norm


class Towers(Variables):
    """One run is one update, averaged over the towers; a longer window is added up in variables, run by run."""

    def _run(self, feeds, rate):
        if len(feeds) > 1:
            return super()._run(feeds, rate)
        seen, norm, _ = self._session_run([self._seen, self._norm_of_one_run, self._graph.train_op], feeds[0] | rate)
        return seen, norm


class Placeholders(_StaticGraphMethod):
    """Gradients go to the host, are averaged by NumPy, and come back through placeholders."""

    build_graph = staticmethod(static_graph.placeholder_graph)

    def _run(self, feeds, rate):
        runs = [self._session_run([self._seen, self._graph.weight, self._graph.gradients], feed) for feed in feeds]
        means = static_graph.average_on_host([gradients for *_, gradients in runs], [weight for _, weight, _ in runs])
        self._session_run(self._graph.train_op, dict(zip(self._graph.gradient_placeholders, means)) | rate)
        return [seen for seen, *_ in runs], sum(np.vdot(mean, mean) for mean in means)


METHODS = {
    "large_batch": LargeBatch,
    "towers": Towers,
    "placeholders": Placeholders,
    "variables": Variables,
    "microbatched": Microbatched,
}


def _norm(pairs) -> tf.Tensor:
    """The squared norm of the gradients among (gradient, variable) pairs."""
    return squared_norm([gradient for gradient, _ in pairs], pairs[0][1].dtype)


def _name(variable) -> str:
    return variable.name.removesuffix(":0")


def _checked(model: Model, features, labels, microbatch_size, weights, dtype):
    """The batch as arrays of the right types, or a ValueError that says what is wrong with it."""
    _checks.positive_integer("microbatch_size", microbatch_size)
    features, labels = np.asarray(features, dtype), np.asarray(labels)
    weights = np.ones(len(labels), dtype) if weights is None else np.asarray(weights, dtype)
    if features.shape[1:] != model.input_shape:
        wanted = ", ".join(map(str, ("examples", *model.input_shape)))
        raise ValueError(f"features must have the shape ({wanted}). Received: {features.shape}")
    if not len(features) == len(labels) == len(weights) or not len(labels):
        raise ValueError(
            "features, labels and weights must have the same number of examples, at least one. "
            f"Received: {len(features)}, {len(labels)}, {len(weights)}"
        )
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers. Received: {labels.dtype}")
    if labels.min() < 0 or labels.max() >= model.classes:
        wrong = labels[(labels < 0) | (labels >= model.classes)][0]
        raise ValueError(f"labels must be classes from 0 to {model.classes - 1}. Received: {wrong}")
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights must be finite, 0 or more, and not all 0. Received: {weights}")
    return features, labels.astype(np.int32), weights

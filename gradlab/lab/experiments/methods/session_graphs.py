"""The methods that run a tf.compat.v1 static graph in a session."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab import runtime, static_graph
from gradlab.averaging import squared_norm
from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments import optimizers
from gradlab.lab.experiments.methods.method import Cancelled, checked_batch
from gradlab.lab.experiments.models import Model


class StaticGraphMethod(ABC):
    """A static graph and its session. Each run feeds up to microbatch_size examples to each tower.

    Args:
        model: the network.
        optimizer: the optimizer that gets the mean gradient.
        towers: the number of towers over which the examples of each run are split.
        dtype: the type of features and weights.
    """

    build_graph: Callable  # the function of `gradlab.static_graph` that builds the graph

    def __init__(
        self,
        model: Model,
        optimizer: optimizers.OptimizerConfig,
        towers: int = 1,
        dtype: Any = "float32",
    ):
        def loss(features, labels, dropout_seed):
            weights = {
                name: tf.compat.v1.get_variable(name, shape, dtype, tf.zeros_initializer())
                for name, shape in model.shapes.items()
            }
            return model.losses(weights, features, labels, dropout_seed)

        self._model = model
        self._dtype = np.dtype(dtype)
        optimizer_of_rate = optimizers.static_graph_optimizer(optimizer)
        self._graph = type(self).build_graph(
            loss, optimizer_of_rate, model.input_shape, towers, dtype
        )
        with self._graph.graph.as_default():
            self._records = [
                (tower.loss, tower.weight, _norm(tower.gradients)) for tower in self._graph.towers
            ]
            self._complete_graph()
        # Adding an operation later would be an error: all runs are of the same graph
        self._graph.graph.finalize()
        self._cancelled = threading.Event()
        self._session = runtime.session(self._graph.graph)

    def reset(self, weights: Mapping[str, np.ndarray]) -> None:
        """See `Method.reset`."""
        self._cancelled.clear()
        # The value that an initializer assigns is its second input, which can be fed.
        initial = {
            variable.initializer.inputs[1]: weights[_name(variable)]
            for variable in self._graph.variables
        }
        self._session.run(self._graph.init_op, initial)

    def cancel(self) -> None:
        """See `Method.cancel`."""
        self._cancelled.set()

    def weights(self) -> dict[str, np.ndarray]:
        """See `Method.weights`."""
        values = self._session.run(self._graph.variables)
        return {_name(variable): value for variable, value in zip(self._graph.variables, values)}

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
        features, labels, weights = checked_batch(
            self._model, features, labels, microbatch_size, weights, self._dtype
        )
        towers = len(self._graph.towers)
        feeds = []
        for run, start in enumerate(range(0, len(labels), towers * microbatch_size)):
            rows = slice(start, start + towers * microbatch_size)
            seed = (dropout_seed[0], dropout_seed[1] + run * towers)
            feeds.append(self._graph.inputs.feed(features[rows], labels[rows], weights[rows], seed))
        records, norm = self._run(feeds, {self._graph.inputs.learning_rate: learning_rate})
        losses, tower_weights, norms = np.array(records).reshape(-1, 3).T
        # Leaves out the towers that had no example of their own in the last run
        own = tower_weights > 0
        return WindowRecord(losses[own], tower_weights[own], norms[own], float(norm))

    @abstractmethod
    def _run(self, feeds: list[dict], rate: dict) -> tuple[Any, Any]:
        """Runs a window and applies its mean gradient.

        Args:
            feeds: the feed_dict of each run.
            rate: the feed_dict of the learning rate.

        Returns:
            The (loss, weight, gradient norm) of each run's towers, and the norm of the window's
            mean gradient.
        """

    def _complete_graph(self) -> None:  # noqa: B027
        """Adds tensors that only this method needs to the graph. By default there are none."""

    def _session_run(self, fetches: Any, feed: dict) -> Any:
        if self._cancelled.is_set():
            raise Cancelled
        return self._session.run(fetches, feed)


class Variables(StaticGraphMethod):
    """Sums the gradients in variables next to the model's own; the last run applies their mean."""

    build_graph = staticmethod(static_graph.variable_graph)

    def _complete_graph(self):
        self._norm = tf.sqrt(squared_norm(self._graph.accumulator.mean(), self._dtype))
        self._norm_of_one_run = _norm(self._graph.average)

    def _run(self, feeds, rate):
        self._session.run(self._graph.zero_ops)
        runs = [
            self._session_run([self._records, self._graph.accum_ops], feed)[0] for feed in feeds
        ]
        norm, _ = self._session_run([self._norm, self._graph.train_step], rate)
        return runs, norm


class Towers(Variables):
    """Averages over the towers: one run is one update. A longer window is summed in variables, as
    in `Variables`."""

    def _run(self, feeds, rate):
        if len(feeds) > 1:
            return super()._run(feeds, rate)
        fetches = [self._records, self._norm_of_one_run, self._graph.train_op]
        records, norm, _ = self._session_run(fetches, feeds[0] | rate)
        return records, norm


class Placeholders(StaticGraphMethod):
    """Fetches the gradients to the host, averages them with NumPy, and feeds the mean back through
    placeholders."""

    build_graph = staticmethod(static_graph.placeholder_graph)

    def _run(self, feeds, rate):
        runs = [
            self._session_run([self._records, self._graph.weight, self._graph.gradients], feed)
            for feed in feeds
        ]
        means = static_graph.average_on_host(
            [gradients for *_, gradients in runs], [weight for _, weight, _ in runs]
        )
        self._session_run(
            self._graph.train_op, dict(zip(self._graph.gradient_placeholders, means)) | rate
        )
        return [records for records, *_ in runs], np.sqrt(
            sum(np.vdot(mean, mean) for mean in means)
        )


def _norm(pairs: Sequence[tuple]) -> tf.Tensor:
    """The norm of the gradients in (gradient, variable) pairs."""
    return tf.sqrt(squared_norm([gradient for gradient, _ in pairs], pairs[0][1].dtype))


def _name(variable: tf.Variable) -> str:
    return variable.name.removesuffix(":0")

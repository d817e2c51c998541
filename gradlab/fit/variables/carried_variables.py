"""The state that forward passes assign, such as random seeds and moving averages: carried along in
a window."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradlab.fit import keras_private as internals
from gradlab.fit.variables import batch_norm


@dataclass(frozen=True)
class CarriedState:
    """The Keras variables that the forward passes of a window assign.

    A forward pass runs in a scope in which assignments have no effect outside. The values go from
    one micro-batch to the next, and are assigned once, after the window.

    Attributes:
        carried: the variables, other than moving averages of batch normalization.
        once: the positions of those whose new value does not depend on the examples: counters,
            spectral norms. As in the large batch they change once per window, so every micro-batch
            begins with their first value.
        draws: for the random seeds among them, by their position, how often a forward pass draws
            from them.
        averages: the moving averages of batch normalization.
        normalizing: the names of the layers that normalize each micro-batch by its own statistics.
        direct_of_keras: the variables that are assigned at once (`gradlab.fit.variables.assigned_at_once`).
    """

    carried: list
    once: set[int]
    draws: dict[int, int]
    averages: batch_norm.MovingAverages
    normalizing: list[str]
    direct_of_keras: list

    def begin(self) -> list:
        """The values that a replica's window begins with. Each replica draws different random
        numbers."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.shifted([tf.identity(v.value) for v in self.carried], replica)

    def shifted(self, values: list, shift: tf.Tensor) -> list:
        """The values, with seeds that draw other random numbers for each shift, an integer
        scalar."""
        return [
            value + tf.cast(tf.stack([shift, 0]), value.dtype) if i in self.draws else value
            for i, value in enumerate(values)
        ]

    def scope(self, values: list) -> internals.RecordingScope:
        """A scope for the next micro-batch, which begins with these values."""
        carried = [
            (v, value)
            for i, (v, value) in enumerate(zip(self.carried, values))
            if i not in self.once
        ]
        averages = [(v, tf.zeros_like(v.value)) for v in self.averages.variables]
        return internals.RecordingScope([*carried, *averages], direct=self.direct_of_keras)

    def values(self, scope: keras.StatelessScope) -> list:
        """The values of the variables after a micro-batch."""
        return [scope.get_current_value(v) for v in self.carried]

    def end(self, values: list, steps: tf.Tensor, statistics: list) -> None:
        """Assigns the values after a window.

        Args:
            values: those of the variables.
            steps: the number of micro-batches over all replicas. Seeds end equal on all of them.
            statistics: those for the moving averages over all replicas.
        """
        several = tf.distribute.get_replica_context().num_replicas_in_sync > 1
        for i, (variable, value) in enumerate(zip(self.carried, values)):
            if i in self.draws and several:
                value = variable.value + tf.cast(tf.stack([0, self.draws[i] * steps]), value.dtype)
            variable.assign(value)
        self.averages.assign(statistics)


def make_state(
    assigned: dict[int, tuple],
    of_data: dict[int, bool],
    layers: Iterable,
    counting: Collection[int] = (),
    direct: Collection = (),
) -> CarriedState:
    """The state of a window.

    Args:
        assigned: for each id(variable): (the variable, how often a forward pass assigns it).
        of_data: for each id of these, whether the assigned value depends on the examples.
        layers: the layers among which those of batch normalization are looked for.
        counting: the ids of variables that every micro-batch must assign although they do not
            depend on the examples.
        direct: the variables that are assigned at once.
    """
    at_once = {id(variable) for variable in direct}
    normalizing, calls = batch_norm.normalizing_layers(
        layers, {key: times for key, (_, times) in assigned.items()}
    )
    usual = [
        i
        for i, layer in enumerate(normalizing)
        if not layer.renorm and layer.momentum < 1 and id(layer.moving_mean) not in at_once
    ]
    averages = batch_norm.MovingAverages([normalizing[i] for i in usual], [calls[i] for i in usual])
    own = {id(variable) for variable in averages.variables} | at_once
    carried: list[Any] = [variable for key, (variable, _) in assigned.items() if key not in own]
    seeds = {i for i, v in enumerate(carried) if internals.is_seed_state(v)}
    return CarriedState(
        carried=carried,
        once={
            i
            for i, v in enumerate(carried)
            if i not in seeds and id(v) not in counting and not of_data[id(v)]
        },
        draws={i: assigned[id(carried[i])][1] for i in seeds},
        averages=averages,
        normalizing=[layer.name for layer in normalizing],
        direct_of_keras=list(direct),
    )

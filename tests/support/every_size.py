"""Updates of one model for micro-batches of every size, with one trace: tracing takes nearly all
the time of a test.

`gradlab.microbatched` and `gradlab.Trainer` compute their updates with `WindowUpdate`, whose
micro-batch size may be a variable. That update is what this tests. That `fit` and `step` hand their
windows to it needs tests of its own.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from gradlab._batches import map_tensors, spec_of, tensors_of
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.program.update import WindowUpdate
from gradlab.fit.replicas import rows_of_replica


class Updated(NamedTuple):
    """The state after an update from each of several windows, as NumPy arrays.

    Attributes:
        weights: those of the model, as `get_weights` returns them.
        optimizer: the values of the optimizer's variables.
        losses: the loss of each update, shape (updates,).
        outcomes: for each update its `Outcome`, as the first replica returned it.
    """

    weights: list
    optimizer: list
    losses: np.ndarray
    outcomes: list


class EverySize:
    """Updates a model from windows in micro-batches of any size, every time from the same start.

    In words::

        every_size = EverySize(model, keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        for size in (1, 3, 8):
            updated = every_size(size, windows_of((x, y), batch_size=8, epochs=2))

    Args:
        model: a built Keras model, created in the strategy's scope. It doesn't have to be compiled.
        optimizer: a Keras optimizer, created there too.
        loss: as for `keras.Model.compile`, or an `Objective`.
        loss_weights: as for `keras.Model.compile`.
        strategy: a strategy of tf.distribute, whose replicas divide each window as those of a
            `Trainer` do. None: one device.
        **options: those of `WindowUpdate`, such as clip, norms, and in_flight, which is "auto"
            unless it is given.
    """

    def __init__(self, model, optimizer, loss, loss_weights=None, strategy=None, **options):
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy or tf.distribute.get_strategy()
        self._start = {}
        self._created = []
        self._functions = {}
        if not isinstance(loss, Objective):
            loss = Objective(loss, loss_weights, getattr(model, "output_names", None))
        with self._strategy.scope(), tf.variable_creator_scope(self._created_variable):
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._size = tf.Variable(1, trainable=False)
            self._update = WindowUpdate(
                model, optimizer, loss, self._size, **{"in_flight": "auto", **options}
            )
            if self._strategy.num_replicas_in_sync > 1:
                self._update.prepare(())

    def __call__(self, size, windows):
        """Makes one update from each window, beginning with the variables that the model and the
        optimizer had first.

        Args:
            size: the examples of a micro-batch.
            windows: a list of (x,), (x, y) or (x, y, sample_weight), each of any length: nests of
                arrays, or None.

        Returns:
            The `Updated`.
        """
        windows = [
            map_tensors(tf.convert_to_tensor, (*window, None, None)[:3]) for window in windows
        ]
        functions = [self._function(window) for window in windows]
        for variable, value in self._start.values():
            variable.assign(value)
        self._size.assign(size)
        outcomes = [
            self._local(function(tensors_of(window)))
            for function, window in zip(functions, windows)
        ]
        self._update.warn()
        return Updated(
            weights=self._model.get_weights(),
            optimizer=[variable.numpy() for variable in self._optimizer.variables],
            losses=np.array([outcome.loss for outcome in outcomes]),
            outcomes=outcomes,
        )

    @property
    def traces(self):
        """The number of times that the update was traced: once for each structure and type of a
        window."""
        return len(self._functions)

    def _function(self, window):
        """The traced update for windows like this one, of any number of examples: a function
        (tensors) -> outcome."""
        specs = map_tensors(spec_of, window)
        key = repr(specs)
        if key not in self._functions:

            def run(tensors):
                rest = iter(tensors)
                return self._strategy.run(
                    self._on_replica, args=(map_tensors(lambda _: next(rest), specs),)
                )

            with self._strategy.scope(), tf.variable_creator_scope(self._created_variable):
                if self._strategy.num_replicas_in_sync == 1:
                    self._update.prepare(specs)
                function = tf.function(run, autograph=False)
                self._functions[key] = function.get_concrete_function(tensors_of(specs))
            for variable in (*self._model.variables, *self._optimizer.variables, *self._created):
                self._start.setdefault(id(variable), (variable, variable.numpy()))
        return self._functions[key]

    def _on_replica(self, window):
        if self._strategy.num_replicas_in_sync > 1:
            window = rows_of_replica(window, tf.constant(self._strategy.num_replicas_in_sync))
        return self._update(*window)

    def _local(self, outcome):
        """The outcome on the first replica."""
        return map_tensors(
            lambda one: self._strategy.experimental_local_results(one)[0].numpy(), outcome
        )

    def _created_variable(self, next_creator, **options):
        """Creates a variable, and remembers it, because it must be set back as well."""
        variable = next_creator(**options)
        self._created.append(variable)
        return variable


def windows_of(parts, batch_size, epochs=1):
    """The batches of some epochs, in order, as `fit` makes them without shuffling; the last of each
    may be smaller.

    Args:
        parts: (x,), (x, y) or (x, y, sample_weight): nests of arrays, or None.
        batch_size: the examples of a batch.
        epochs: the number of epochs.
    """
    examples = len(tensors_of(parts)[0])
    slices = [slice(start, start + batch_size) for start in range(0, examples, batch_size)]
    return [examples_in(parts, rows) for rows in slices] * epochs


def examples_in(parts, rows):
    """The examples of nests of arrays in a slice; None stays None."""
    return map_tensors(lambda part: part[rows], parts)

"""Evaluation and prediction of a Keras model in micro-batches, with the results of the whole
batch."""

import warnings
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import Cut, examples_of, map_tensors, spec_of, tensors_of
from gradlab.averaging import accumulation_dtype
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import Objective
from gradlab.fit.program.in_flight import choose
from gradlab.fit.program.precut import is_precut, rows_to_predict
from gradlab.fit.program.update import regularization_loss
from gradlab.fit.program.window_program import WindowProgram
from gradlab.fit.replicas import sum_over_replicas
from gradlab.fit.variables.assigned_at_once import assignments
from gradlab.window import Loop, Microbatch, accumulate


class Evaluated(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: the loss of the batch over all replicas, regularization included, a scalar.
        term_losses: the loss of each output, before loss weights.
        logs: what the model's own `compute_metrics` returned, by name; None for the losses.
    """

    loss: tf.Tensor
    term_losses: list
    logs: dict


class WindowEvaluation:
    """Computes the loss and the metrics of a batch. It is called on each replica.

    Args:
        model, objective, microbatch_size, jit: as for `gradlab.fit.program.window_program.WindowProgram`.
        in_flight: as in `gradlab.window.Loop`, or "auto".
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        microbatch_size: Any,
        in_flight: int | str,
        jit: bool,
    ):
        loop = Loop(weight_dtype=accumulation_dtype(keras.config.floatx()))
        self._model = model
        self._objective = objective
        self._warned: set[str] = set()
        self._program = WindowProgram(
            model,
            objective,
            microbatch_size,
            in_flight,
            loop,
            training=False,
            jit=jit,
            with_metrics=True,
        )

    def build(self) -> None:
        """Creates the variables of the evaluation; with several replicas, call it in the strategy's
        scope."""
        self._program.build()

    def __call__(
        self, x: Any, y: Any, sample_weight: Any = None, cut: Cut | None = None
    ) -> Evaluated:
        """Evaluates a batch: nests of tensors, this replica's part, and where it is cut if the size
        is "given"."""
        window = self._program((x, y, sample_weight), [], cut)
        for sentence in set(window.plan.traced.metrics.warnings) - self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=3)
        with tf.control_dependencies([window.sums.weights]):
            window.remember()
        steps, term_sums = sum_over_replicas((tf.size(window.sums.weights), window.losses))
        statistics = window.plan.state.averages.over_replicas(window.statistics)
        window.plan.state.end(window.variables, steps, statistics)
        loss, term_losses = window.plan.loss(term_sums)
        if self._objective.is_regularized:
            loss += tf.cast(regularization_loss(self._model.trainable_weights), loss.dtype)
        return Evaluated(loss, term_losses, window.logs)


def predict_in_microbatches(
    model: keras.Model, x: Any, microbatch_size: Any, *, in_flight: int | str = 1, jit: bool = False
) -> Any:
    """The model's outputs for a batch; microbatch_size is a number or "given", in_flight a number
    or "auto".

    Outputs that are no dense tensors, or have a first dimension of a fixed size, cannot be put
    together from those of micro-batches: the batch is then computed at once.
    """
    if is_precut(microbatch_size):
        microbatch_size = rows_to_predict(x)
        in_flight = 1
    found = []

    def call(x):
        return internals.outputs_of(model, x, False)

    @tf.function(autograph=False)
    def outputs(x):
        found.append(call(x))
        return found[-1]

    graph = outputs.get_concrete_function(map_tensors(spec_of, x)).graph
    count = (
        choose(lambda: graph, microbatch_size, 0).count if in_flight == "auto" else int(in_flight)
    )
    tensors = tensors_of(found[-1])
    whole = any(not isinstance(tensor, tf.Tensor) or not _has_rows(tensor) for tensor in tensors)
    whole = whole or any(True for _ in assignments(graph))  # a counter would count micro-batches
    call = tf.function(call, jit_compile=True, autograph=False) if jit else call
    if whole:
        return call(x)
    steps = -(-examples_of(x) // microbatch_size)
    arrays = [
        tf.TensorArray(tensor.dtype, steps, infer_shape=False, element_shape=tensor.shape)
        for tensor in tensors
    ]

    def forward(microbatch, number, arrays):
        predicted = tensors_of(call(microbatch))
        arrays = [array.write(number, one) for array, one in zip(arrays, predicted)]
        return Microbatch(tf.zeros([]), tf.ones([]), arrays)

    arrays = accumulate(forward, [], x, microbatch_size, arrays, loop=Loop(count)).state
    rows = iter(array.concat() for array in arrays)
    return map_tensors(lambda tensor: tf.ensure_shape(next(rows), tensor.shape), found[-1])


def _has_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is not None and tensor.shape.rank > 0 and tensor.shape[0] is None

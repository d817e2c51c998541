"""Losses over the whole batch, such as contrastive ones, for a model that computes its batch in
micro-batches.

In words (GradCache: Gao, Zhang, Han and Callan, arXiv 2101.06983)::

    first pass:   compute the predictions of all micro-batches, and keep nothing else
    in between:   g = gradient of the loss of all predictions with respect to the predictions
    second pass:  for each micro-batch: sum += gradient of (predictions * its part of g), with the same random numbers
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab._batches import map_tensors, tensors_of, times
from gradlab._traced_graphs import stateful_draws
from gradlab.averaging import accumulation_dtype
from gradlab.fit import keras_private as internals


@keras.saving.register_keras_serializable("gradlab")
class WholeBatch(keras.losses.Loss):
    """A loss that relates the examples of a batch to each other, and so must see all of them at
    once.

    `compile` of a model that `gradlab.microbatched` prepared takes it, and so does
    `gradlab.Trainer`. The update is the large batch's. Memory holds the activations of the
    micro-batches in flight, and the predictions of the whole batch. The forward pass is computed
    twice, with the same dropout masks and other random numbers of Keras' layers.

    Args:
        fn: a function (y, y_pred) -> the loss of the batch, a scalar, or one loss for each example.
            As the only loss of a model with several outputs it gets the nest of them. y is None if
            there are no targets. It may read variables of the model, such as a temperature, which
            are then trained. Or a loss of Keras, such as `keras.losses.Dice()`.
        reduction: as for `keras.losses.Loss`: how losses of the examples are reduced, with their
            sample weights. None: "sum_over_batch_size", or that of the loss of Keras.
        name: the name of the loss. None: that of the function.

    Raises:
        ValueError: fn cannot be called; or when it is computed, a scalar that sample weights should
            divide.

    Example:
        >>> def contrastive(y, y_pred):  # InfoNCE: row i of one half matches row i of the other half
        ...     one, other = tf.split(tf.math.l2_normalize(y_pred, -1), 2, axis=-1)
        ...     labels = tf.range(tf.shape(one)[0])
        ...     return keras.losses.sparse_categorical_crossentropy(labels, one @ tf.transpose(other), from_logits=True)
        >>> import gradlab, numpy as np
        >>> model = gradlab.microbatched(keras.Sequential([keras.Input([3]), keras.layers.Dense(4)]), 2)
        >>> model.compile("sgd", gradlab.WholeBatch(contrastive))
        >>> history = model.fit(np.eye(3), batch_size=3, verbose=0)      # three examples, two micro-batches, one update
        >>> int(model.optimizer.iterations)
        1
    """

    def __init__(
        self,
        fn: Callable | keras.losses.Loss,
        reduction: str | None = None,
        name: str | None = None,
    ):
        if not callable(fn):
            raise ValueError(f"fn must be a function (y, y_pred) -> loss. Received: {fn!r}")
        if name is not None and not isinstance(name, str):
            raise ValueError(f"name must be a text or None. Received: {name!r}")
        if reduction is not None and not isinstance(reduction, str):
            raise ValueError(
                f"reduction must be one of Keras' names or None. Received: {reduction!r}"
            )
        dtype = None
        function = fn
        own_name = getattr(fn, "__name__", type(fn).__name__)
        if isinstance(fn, keras.losses.Loss):
            reduction = reduction or fn.reduction
            dtype = fn.dtype
            function = fn.call
            own_name = fn.name
        super().__init__((name or own_name).strip("<>_"), reduction or "sum_over_batch_size", dtype)
        self.fn = fn
        self._function = function
        self._has_targets = True
        self._is_divided = False

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        # Keras' class converts the targets, and so cannot take None
        self._has_targets = y_true is not None
        self._is_divided = sample_weight is not None and self.reduction == "mean_with_sample_weight"
        return super().__call__(
            y_true if self._has_targets else tf.zeros([]), y_pred, sample_weight
        )

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """The loss of the batch, or of each example."""
        if (
            self._function is self.fn
            and tf.is_tensor(y_pred)
            and tf.is_tensor(y_true)
            and self._has_targets
        ):
            y_true, y_pred = internals.same_rank(y_true, y_pred)  # as Keras does for functions
        values = self._function(y_true if self._has_targets else None, y_pred)
        if self._is_divided and not tf.convert_to_tensor(values).shape.rank:
            raise ValueError(
                f"{self.name} must give a loss for each example if sample weights divide it, as "
                "those of weight_fn do. Received: one number for the whole batch"
            )
        return values

    def get_config(self) -> dict:
        return super().get_config() | {"fn": keras.saving.serialize_keras_object(self.fn)}

    @classmethod
    def from_config(cls, config: dict) -> "WholeBatch":
        return cls(**config | {"fn": keras.saving.deserialize_keras_object(config["fn"])})


class BatchLossInputs(NamedTuple):
    """A loss over the whole batch, and what it sees, of a micro-batch or of the batch.

    Attributes:
        loss: the loss.
        targets, predictions: nests of tensors.
        weights: the sample weights, or None.
        masks: for each prediction its mask, or None.
    """

    loss: keras.losses.Loss
    targets: Any
    predictions: Any
    weights: Any
    masks: list

    @property
    def seen(self) -> tuple:
        """What the loss sees: a nest of tensors."""
        return self[1:]

    def value(self) -> tf.Tensor:
        """The loss, a scalar."""
        for tensor, mask in zip(tf.nest.flatten(self.predictions), self.masks):
            if mask is not None:
                internals.set_mask(tensor, mask)
        with internals.undivided_losses():
            return tf.reduce_sum(self.loss(self.targets, self.predictions, self.weights))


def seen_by(loss: keras.losses.Loss, y: Any, y_pred: Any, sample_weight: Any) -> BatchLossInputs:
    """What a loss sees of a micro-batch."""
    masks = [internals.mask_of(tensor) for tensor in tf.nest.flatten(y_pred)]
    return BatchLossInputs(loss, y, y_pred, sample_weight, masks)


def check_passes(wholes: list[BatchLossInputs], graph: tf.Graph) -> None:
    """Raises ValueError if a model does not allow the two passes.

    Args:
        wholes: what its losses over the whole batch see of a micro-batch, traced for any number of
            examples.
        graph: the traced forward pass, of which the second pass must be able to draw the random
            numbers again.
    """
    for whole in wholes:
        for tensor in tensors_of(whole.seen):
            dense = isinstance(tensor, tf.Tensor)
            if not dense or not tensor.shape.rank or tensor.shape[0] is not None:
                received = (
                    f"a tensor of shape {tensor.shape}" if dense else f"a {type(tensor).__name__}"
                )
                rule = f"{whole.loss.name} needs outputs and targets with a row for each example"
                if not isinstance(whole.loss, WholeBatch):
                    rule += ", or batch_losses, if it is a mean or a sum over the examples"
                raise ValueError(f"{rule}. Received: {received}")
    drawing = stateful_draws(graph) if wholes else []
    if drawing:
        raise ValueError(
            f"{wholes[0].loss.name} needs random numbers that can be drawn twice: draw them with "
            "keras.random and a keras.random.SeedGenerator instead of tf.random. Received: "
            f"{drawing[0].name}"
        )


class Collector:
    """Collects what losses over the whole batch see of the micro-batches, in arrays that a loop
    carries along.

    Args:
        wholes: what the losses see of a micro-batch, traced for any number of examples.
    """

    def __init__(self, wholes: list[BatchLossInputs]):
        self._wholes = wholes

    def begin(self, steps: tf.Tensor) -> list:
        """The arrays before the first of a number of micro-batches."""
        return [
            tf.TensorArray(tensor.dtype, steps, infer_shape=False, element_shape=tensor.shape)
            for tensor in tensors_of([whole.seen for whole in self._wholes])
        ]

    def add(self, arrays: list, number: tf.Tensor, seen: list) -> list:
        """The arrays with what the losses see of the micro-batch with this number."""
        return [array.write(number, tensor) for array, tensor in zip(arrays, tensors_of(seen))]

    def end(self, arrays: list) -> list[BatchLossInputs]:
        """What the losses see of the whole batch, the examples of all replicas included."""
        rows = iter(_gathered(array.concat()) for array in arrays)
        return [
            BatchLossInputs(
                whole.loss,
                *map_tensors(lambda tensor: tf.ensure_shape(next(rows), tensor.shape), whole.seen),
            )
            for whole in self._wholes
        ]


class BatchLossGradients(NamedTuple):
    """What is computed between the two passes.

    Attributes:
        losses: the value of each loss.
        prediction_gradients: for each loss its gradients with respect to this replica's predictions, in the type
            in which gradients are summed, without the scale, and None for predictions that are not
            floating-point numbers. None: there is no loss over the whole batch.
        own_gradients: for each loss its gradients with respect to the variables that it reads, with
            the scale, and None for the others.
    """

    losses: Sequence = ()
    prediction_gradients: list | None = None
    own_gradients: Sequence = ()


def batch_loss_gradients(
    wholes: list[BatchLossInputs], scale: tf.Tensor, examples: tf.Tensor, variables: list
) -> BatchLossGradients:
    """The losses of the whole batch, and their gradients with respect to the predictions and to
    variables they read.

    Args:
        wholes: what the losses see of the whole batch.
        scale: the factor of the losses while they are differentiated.
        examples: the number of examples of this replica.
        variables: the variables that are trained.

    Raises:
        ValueError: a `WholeBatch` does not depend on the predictions.
    """
    losses = []
    all_slopes = []
    own = []
    rows = _own_rows(examples)
    for whole in wholes:
        predictions = [
            tensor for tensor in tf.nest.flatten(whole.predictions) if tensor.dtype.is_floating
        ]
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            loss = whole.value()
            scaled = loss * tf.cast(scale, loss.dtype)
        found, of_variables = tape.gradient(scaled, [predictions, variables])
        # A function may switch an output off with a constant.
        if isinstance(whole.loss, WholeBatch) and all(slope is None for slope in found):
            raise ValueError(
                f"{whole.loss.name} must depend on the predictions. Received: a loss that is "
                "constant in them"
            )
        zeros = [
            tf.zeros_like(one) if slope is None else slope for one, slope in zip(predictions, found)
        ]
        left = iter(_unscaled(tf.convert_to_tensor(slope)[rows], scale) for slope in zeros)
        losses.append(loss)
        own.append(of_variables)
        all_slopes.append(
            [
                next(left) if t.dtype.is_floating else None
                for t in tf.nest.flatten(whole.predictions)
            ]
        )
    return BatchLossGradients(losses, all_slopes, own)


def differentiable(whole: BatchLossInputs, prediction_gradients: list) -> tf.Tensor:
    """A scalar with the gradient of the whole batch's loss: the sum of the predictions times their
    prediction_gradients."""
    pairs = [
        pair
        for pair in zip(tf.nest.flatten(whole.predictions), prediction_gradients)
        if pair[1] is not None
    ]
    return tf.add_n(
        [tf.reduce_sum(tf.cast(tensor, slope.dtype) * slope) for tensor, slope in pairs]
    )


def with_own(sums: list, own_gradients: Sequence, loss_weights: list) -> list:
    """The sums of gradients, plus those of the variables that the losses read themselves.

    Args:
        sums: for each variable the sum over the micro-batches, or None.
        own_gradients: for each loss those of `batch_loss_gradients`, which are the same on all
            replicas.
        loss_weights: the factor of each loss.
    """
    sums = list(sums)
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    for gradients, loss_weight in zip(own_gradients, loss_weights):
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                part = times(gradient, loss_weight) / replicas
                sums[i] = part if sums[i] is None else sums[i] + tf.cast(part, sums[i].dtype)
    return sums


def _unscaled(prediction_gradients: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    dtype = accumulation_dtype(prediction_gradients.dtype)
    return tf.cast(prediction_gradients, dtype) / tf.cast(scale, dtype)


def _gathered(tensor: tf.Tensor) -> tf.Tensor:
    """The rows of all replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensor
    # TensorFlow gathers few types: masks, bytes and bfloat16 travel in one that holds each of their
    # values.
    dtype = tensor.dtype
    wider = tensor.dtype
    if dtype == tf.bfloat16:
        wider = tf.float32
    elif dtype.is_bool or dtype.is_integer:
        wider = tf.int64
    return tf.cast(context.all_gather(tf.cast(tensor, wider), axis=0), dtype)


def _own_rows(examples: tf.Tensor) -> slice:
    """This replica's rows among those of all replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return slice(None)
    ends = tf.cumsum(context.all_gather(tf.reshape(examples, [1]), axis=0))
    end = ends[context.replica_id_in_sync_group]
    return slice(end - examples, end)

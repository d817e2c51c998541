"""The last layer of a language model whose logits never exist as a whole: they are computed in the
loss, a chunk of the vocabulary at a time."""

from typing import Any

import keras
import tensorflow as tf

from gradlab import _checks, chunked
from gradlab.fit import keras_private as internals

# Of these and of Dense the logits are known. ReversibleEmbedding is new in Keras 3.13.
EMBEDDINGS = (
    keras.layers.Embedding,
    getattr(keras.layers, "ReversibleEmbedding", keras.layers.Embedding),
)


@keras.saving.register_keras_serializable("gradlab")
class ChunkedHead(keras.layers.Layer):
    """A dense layer over a vocabulary, or the embedding of the tokens, used the other way around.

    As the last layer of a model it passes on what it gets, the hidden states, so the model's output
    is not the logits. Its `loss` computes them, a chunk of the vocabulary at a time, in the forward
    and in the backward pass (`gradlab.chunked`): values and gradients are those of the dense layer
    with `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`. `logits` and `accuracy`
    take the place of what else needs the logits.

    Args:
        head: a `keras.layers.Dense` without an activation, or the `keras.layers.Embedding` of the
            tokens, whose weights are then shared ("tied").
        chunk: the classes whose logits exist at a time. None: a thirty-second of them.

    Raises:
        ValueError: head is no such layer, or chunk is no positive integer or larger than the
            vocabulary.

    Example:
        >>> import gradlab, numpy as np
        >>> tokens = keras.Input([None], dtype="int32")
        >>> hidden = keras.layers.Embedding(1000, 8)(tokens)
        >>> head = gradlab.ChunkedHead(keras.layers.Dense(1000), chunk=100)
        >>> model = gradlab.microbatched(keras.Model(tokens, head(hidden)), 1)
        >>> model.compile("sgd", loss=head.loss(), metrics=[head.accuracy()])
        >>> texts = np.arange(12).reshape(2, 6)
        >>> history = model.fit(texts[:, :-1], texts[:, 1:], verbose=0)
        >>> sorted(history.history), head.logits(model(texts)).shape.as_list()
        (['accuracy', 'loss'], [2, 6, 1000])
    """

    def __init__(self, head: keras.layers.Layer, chunk: int | None = None, **kwargs: Any):
        _check_head(head)
        is_dense = type(head) is keras.layers.Dense
        classes = head.units if is_dense else head.input_dim
        chunk = -(-classes // 32) if chunk is None else chunk
        _checks.positive_integer("chunk", chunk, otherwise="None or ")
        if chunk > classes:
            raise ValueError(
                f"chunk must be at most the size of the vocabulary, {classes}. Received: {chunk}"
            )
        super().__init__(**{"dtype": head.dtype_policy} | kwargs)
        self.supports_masking = True
        self.head = head
        self.is_dense = is_dense
        self.chunk = int(chunk)
        self.classes = classes

    def build(self, input_shape: Any) -> None:
        if not self.head.built:
            self.head.build(input_shape)

    def call(self, inputs: Any) -> Any:
        """The inputs: hidden states of shape (batch, length, features)."""
        return inputs

    def logits(self, hidden: Any) -> tf.Tensor:
        """The logits of hidden states, all at once: those of the head, shape (..., classes)."""
        hidden = tf.cast(hidden, self.compute_dtype)
        if self.is_dense:
            return self.head(hidden)
        return tf.matmul(hidden, tf.cast(self.head.embeddings, hidden.dtype), transpose_b=True)

    def loss(
        self,
        label_smoothing: float = 0.0,
        ignore_class: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "chunked_loss",
    ) -> "ChunkedLoss":
        """The loss for `compile`, with the meaning of `keras.losses.SparseCategoricalCrossentropy`.

        Args:
            label_smoothing: the part of each target that all classes share.
            ignore_class: a label that does not count, such as -1 or that of padding.
            reduction, name: as for `keras.losses.Loss`.
        """
        return ChunkedLoss(self, label_smoothing, ignore_class, reduction, name)

    def accuracy(self, name: str = "accuracy") -> keras.metrics.Metric:
        """A metric for `compile`: the share of labels whose logit is the largest. Labels that a
        mask or a weight of 0 leaves out do not count."""
        return ChunkedAccuracy(self, name)

    def get_config(self) -> dict:
        head = keras.saving.serialize_keras_object(self.head)
        return super().get_config() | {"head": head, "chunk": self.chunk}

    @classmethod
    def from_config(cls, config: dict) -> "ChunkedHead":
        return cls(**config | {"head": keras.saving.deserialize_keras_object(config["head"])})

    def arguments(self, hidden: tf.Tensor) -> dict[str, Any]:
        """What functions of `gradlab.chunked` need of it."""
        return {
            "inputs": tf.cast(hidden, self.compute_dtype),
            "kernel": self.head.kernel if self.is_dense else self.head.embeddings,
            "bias": self.head.bias if self.is_dense else None,
            "transposed": not self.is_dense,
            "chunk": self.chunk,
        }


class ChunkedLoss(keras.losses.Loss):
    """What `ChunkedHead.loss` returns.

    It belongs to the layer of one model and is not saved with it: load a model with
    `compile=False`, and compile it again.
    """

    def __init__(
        self,
        head: ChunkedHead,
        label_smoothing: float,
        ignore_class: int | None,
        reduction: str,
        name: str,
    ):
        super().__init__(name, reduction)
        self.head = head
        self.label_smoothing = label_smoothing
        self.ignore_class = ignore_class

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """A loss for each label."""
        labels = _labels(y_true, y_pred)
        if self.ignore_class is None:
            return self._losses(labels, y_pred)
        counts = labels != self.ignore_class
        losses = tf.where(counts, self._losses(tf.where(counts, labels, 0), y_pred), 0.0)
        internals.set_mask(losses, counts)
        return losses

    def _losses(self, labels: tf.Tensor, hidden: tf.Tensor) -> tf.Tensor:
        return chunked.cross_entropy(
            labels=labels, label_smoothing=self.label_smoothing, **self.head.arguments(hidden)
        )

    def get_config(self) -> dict:
        raise ValueError(
            "A chunked loss belongs to the layer of one model, so it is not saved: save the "
            "model's weights, or the model before compile. Received: " + self.name
        )


class ChunkedAccuracy(keras.metrics.MeanMetricWrapper):
    """What `ChunkedHead.accuracy` returns."""

    def __init__(self, head: ChunkedHead, name: str):
        def matches(y_true: Any, y_pred: Any) -> tf.Tensor:
            best = tf.cast(chunked.argmax(**head.arguments(y_pred)), tf.int64)
            return tf.cast(best == _labels(y_true, y_pred), self.dtype)

        super().__init__(matches, name)


def check_metrics(loss: Any, metrics: list) -> None:
    """Raises ValueError for metrics that would take hidden states for predictions.

    Args:
        loss: what a model was compiled with.
        metrics: its metrics, in nests.
    """
    if not any(isinstance(one, ChunkedLoss) for one in keras.tree.flatten(loss)):
        return
    for metric in keras.tree.flatten(metrics):
        if metric is not None and not isinstance(metric, ChunkedAccuracy):
            raise ValueError(
                "metrics of a model with a ChunkedHead must be its `accuracy`: its output is the "
                f"hidden states, not the logits. Received: {metric!r}"
            )


def _check_head(head: Any) -> None:
    problem = ""
    is_dense = type(head) is keras.layers.Dense
    if not is_dense and type(head) not in EMBEDDINGS:
        problem = repr(head)
    elif is_dense and head.activation is not keras.activations.linear:
        problem = f"an activation, {head.activation.__name__}"
    elif is_dense and head.activity_regularizer is not None:
        problem = f"an activity_regularizer, {head.activity_regularizer!r}"
    elif not getattr(head, "tie_weights", True):
        problem = "an embedding with tie_weights=False"
    elif getattr(head, "logit_soft_cap", None) is not None:
        problem = f"an embedding with logit_soft_cap={head.logit_soft_cap}"
    elif head.dtype_policy.quantization_mode is not None:
        problem = f"a quantized layer, {head.dtype_policy.name}"
    if problem:
        raise ValueError(
            "head must be a keras.layers.Dense without an activation, or a keras.layers.Embedding. "
            f"Received: {problem}"
        )


def _labels(y_true: Any, y_pred: Any) -> tf.Tensor:
    """The labels as int64, without a last axis of size 1, as Keras takes them."""
    labels = tf.cast(y_true, tf.int64)
    has_last = labels.shape.rank == y_pred.shape.rank and labels.shape[-1] == 1
    return tf.squeeze(labels, -1) if has_last else labels

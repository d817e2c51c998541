"""The large batch, as Keras itself computes it, and small models of every family to hold gradlab
against it.

Keras' loss, one gradient of the whole batch, Keras' optimizer: nothing here uses gradlab. Gradients
are made dense first, because Keras clips the rows of a sparse gradient one by one, which is another
update than the mathematics says.
"""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers

OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.125, momentum=0.875, nesterov=True, **kw),
    "rmsprop": lambda **kw: keras.optimizers.RMSprop(0.0078125, **kw),
    "adam": lambda **kw: keras.optimizers.Adam(0.015625, epsilon=2.0**-10, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(
        0.015625, epsilon=2.0**-10, **{"weight_decay": 0.125, **kw}
    ),
    "adadelta": lambda **kw: keras.optimizers.Adadelta(0.5, epsilon=2.0**-10, **kw),
    "adagrad": lambda **kw: keras.optimizers.Adagrad(0.125, **kw),
    "adamax": lambda **kw: keras.optimizers.Adamax(0.015625, epsilon=2.0**-10, **kw),
    "adafactor": lambda **kw: keras.optimizers.Adafactor(0.0625, **kw),
    "nadam": lambda **kw: keras.optimizers.Nadam(0.015625, epsilon=2.0**-10, **kw),
    "ftrl": lambda **kw: keras.optimizers.Ftrl(0.125, **kw),
    "lamb": lambda **kw: keras.optimizers.Lamb(0.015625, epsilon=2.0**-10, **kw),
    # Lion steps by the sign of a sum: where that is 0 but for rounding, two right answers differ.
    # See the test.
    "lion": lambda **kw: keras.optimizers.Lion(0.0078125, **kw),
}


class LargeBatch(keras.Model):
    """A model whose fit takes one dense gradient of each whole batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        if hasattr(model, "output_names"):
            self.output_names = model.output_names

    def compile(self, *args, run_eagerly=True, **kwargs):
        """Compiles as Keras does, but to run eagerly: the few updates of a test take less time than
        a trace."""
        super().compile(*args, run_eagerly=run_eagerly, **kwargs)

    def call(self, inputs):
        return self.model(inputs)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in self.trainable_variables])
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        return self.compute_metrics(x, y, y_pred, sample_weight)


def dense():
    """Regularization of kernels and of activity, weight by weight; a variable that the loss does
    not reach."""
    inputs = keras.Input([4])
    hidden = layers.Dense(
        5, "tanh", kernel_regularizer="l2", activity_regularizer="l1", name="hidden"
    )(inputs)
    return keras.Model(inputs, layers.Dense(3, bias_regularizer="l1", name="logits")(hidden))


def convolutional():
    inputs = keras.Input([6, 6, 1])
    hidden = layers.Conv2D(3, 3, activation="tanh")(inputs)
    hidden = layers.GroupNormalization(1)(layers.AveragePooling2D(2)(hidden))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))


def embedding():
    """Sparse gradients, with ids named twice."""
    inputs = keras.Input([5], dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(7, 2)(inputs))
    return keras.Model(inputs, layers.Dense(3)(hidden))


def two_by_two():
    """Two inputs, two outputs: a dict in, a dict out."""
    image, word = keras.Input([4], name="image"), keras.Input([2], dtype="int32", name="word")
    words = layers.Flatten()(layers.Embedding(7, 3)(word))
    both = layers.Dense(4, "tanh")(layers.Concatenate()([image, words]))
    outputs = {
        "kind": layers.Dense(3, name="kind")(both),
        "size": layers.Dense(1, name="size")(both),
    }
    return keras.Model({"image": image, "word": word}, outputs)


def shared():
    """One layer used twice, and its kernel a third time."""
    inputs = keras.Input([4])
    layer = layers.Dense(4, "tanh")
    return keras.Model(inputs, layers.Dense(3)(layer(layer(inputs)) + inputs))


def recurrent():
    inputs = keras.Input([5, 2])
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(3)(inputs)))


def masked():
    """Texts of different lengths: the loss is the mean over the tokens that are there."""
    inputs = keras.Input([5], dtype="int32")
    hidden = layers.GRU(3, return_sequences=True)(layers.Embedding(7, 2, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(3)(hidden))


def masked_and_whole():
    """Two losses that divide by different things: one by tokens, one by texts."""
    inputs = keras.Input([5], dtype="int32")
    hidden = layers.Dense(3, "tanh")(layers.Embedding(7, 2, mask_zero=True)(inputs))
    outputs = {
        "kind": layers.Dense(3, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden[:, 0]),
    }
    return keras.Model(inputs, outputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.logits = layers.Dense(4, "tanh"), layers.Dense(3)

    def call(self, inputs, training=None):
        hidden = self.hidden(inputs)
        self.add_loss(tf.reduce_mean(hidden**2))
        return self.logits(hidden)


FAMILIES = {f.__name__: f for f in (
    dense, convolutional, embedding, two_by_two, shared, recurrent, masked, masked_and_whole, Subclassed,
)}  # fmt: skip


def data(family: str, examples: int, seed: int = 0) -> tuple:
    """Features and targets of so many examples for a family, as (x, y)."""
    generator = np.random.default_rng(seed)
    normal = lambda *shape: generator.normal(size=(examples, *shape)).astype(keras.config.floatx())  # noqa: E731
    ids, labels = generator.integers(1, 7, (examples, 5)), generator.integers(0, 3, examples)
    lengths = generator.integers(1, 6, examples)
    tokens = np.where(np.arange(5) < lengths[:, np.newaxis], ids, 0)
    by_token = generator.integers(0, 3, (examples, 5))
    return {
        "dense": (normal(4), labels),
        "convolutional": (normal(6, 6, 1), labels),
        "embedding": (ids, labels),
        "two_by_two": (
            {"image": normal(4), "word": ids[:, :2]},
            {"kind": labels, "size": normal(1)},
        ),
        "shared": (normal(4), labels),
        "recurrent": (normal(5, 2), labels),
        "masked": (tokens, by_token),
        "masked_and_whole": (tokens, {"kind": by_token, "size": normal(1)}),
        "Subclassed": (normal(4), labels),
    }[family]


def loss(family: str, reduction: str = "sum_over_batch_size"):
    """What compile takes for a family."""
    kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    if family not in ("two_by_two", "masked_and_whole"):
        return {"loss": kind}
    return {
        "loss": {"kind": kind, "size": keras.losses.Huber(reduction=reduction)},
        "loss_weights": {"kind": 0.5, "size": 2.0},
    }


def build(family: str, seed: int = 0):
    """The family's model, with weights that depend on the seed alone."""
    model = FAMILIES[family]()
    if not model.built:
        model(data(family, 1)[0])
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(0, 0.5, weight.shape) for weight in model.get_weights()])
    return model

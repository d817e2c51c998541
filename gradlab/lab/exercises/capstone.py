"""The checker of the capstone in notebook 16: a loop over whole batches, ported to micro-batches."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, require


@exercise
def ported_loop(answer: Any) -> None:
    """A function: (model, optimizer, x, y, batch_size, epochs, most) trains the model with at most
    `most` examples."""
    _check_ported(answer, "with SGD", batch_size=8, most=4)
    _check_ported(answer, "with a batch that is not a multiple of `most`", batch_size=8, most=3)
    _check_ported(answer, "with Adam, clipping and a schedule", batch_size=10, most=4, adam=True)
    _check_ported(answer, "with one example at a time", batch_size=22, most=1)


class _Kept:
    """Counts the examples whose activations wait for their backward pass."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # of each call of the model
        self._events: list[tuple[str, int]] = []  # "forward" or "backward", and the call

    def __call__(self, outputs: Any) -> Any:
        """Pass the outputs of a layer on, and note when their gradient comes back."""
        import tensorflow as tf

        def forward(rows):
            self._rows.append(int(rows))
            self._events.append(("forward", len(self._rows) - 1))
            return np.int64(len(self._rows) - 1)

        def backward(call):
            self._events.append(("backward", int(call)))
            return np.int64(0)

        @tf.custom_gradient
        def counted(x):
            call = tf.numpy_function(forward, [tf.shape(x)[0]], tf.int64)

            def gradient(upstream):
                with tf.control_dependencies([tf.numpy_function(backward, [call], tf.int64)]):
                    return tf.identity(upstream)

            with tf.control_dependencies([call]):
                return tf.identity(x), gradient

        return counted(outputs)

    @property
    def _differentiated(self) -> set[int]:
        """The calls with a backward pass. Others, such as those of a check, have none."""
        return {call for event, call in self._events if event == "backward"}

    @property
    def largest_call(self) -> int:
        """The most examples in a call of the model."""
        return max(self._rows, default=0)

    @property
    def most(self) -> int:
        """The most examples that waited at once."""
        now = most = 0
        for event, call in self._events:
            if call in self._differentiated:
                now += self._rows[call] if event == "forward" else -self._rows[call]
                most = max(most, now)
        return most


def _check_ported(
    answer: Callable, case: str, batch_size: int, most: int, adam: bool = False
) -> None:
    import keras
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=[22, 3]).astype("float32")
    y = np.sin(3 * x[:, :1])
    schedule = keras.optimizers.schedules.PolynomialDecay(
        0.1, decay_steps=8, end_learning_rate=0.01
    )

    def made():
        """A model, its optimizer, and what counts its examples."""
        kept = _Kept()

        class Counted(keras.layers.Layer):
            supports_jit = False  # XLA cannot call Python

            def call(self, inputs):
                return kept(inputs) if isinstance(inputs, tf.Tensor) else inputs

        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(4, "tanh")
        model = keras.Sequential([keras.Input([3]), hidden, Counted(), keras.layers.Dense(1)])
        clipped = keras.optimizers.Adam(schedule, global_clipnorm=0.5)
        return model, clipped if adam else keras.optimizers.SGD(0.2), kept

    def trained(shares: Callable | None = None, kept_count: bool | None = None) -> list[np.ndarray]:
        """The weights of the large batch, or of micro-batches whose mean gradients have these shares.
        With `kept_count`, the sums of earlier batches stay, and their examples too if it is True."""
        model, optimizer, _ = made()
        variables = model.trainable_variables
        kept = [tf.zeros_like(each) for each in variables]
        examples = 0.0
        for start in [*range(0, 22, batch_size)] * 2:
            end = min(start + batch_size, 22)
            starts = range(start, end, most) if shares else [start]
            sizes = np.array([min(most if shares else 22, end - i) for i in starts], float)
            factors = shares(sizes) if shares else [1.0]
            with tf.GradientTape() as tape:
                errors = [
                    (model(x[i : i + int(n)]) - y[i : i + int(n)]) ** 2
                    for i, n in zip(starts, sizes)
                ]
                loss = tf.add_n([f * tf.reduce_mean(e) for f, e in zip(factors, errors)])
            gradients = tape.gradient(loss, variables)
            if kept_count is not None:
                kept = [old + sizes.sum() * new for old, new in zip(kept, gradients)]
                examples = sizes.sum() + (examples if kept_count else 0.0)
                gradients = [each / examples for each in kept]
            optimizer.apply(gradients, variables)
        return [variable.numpy() for variable in variables]

    def close(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all(np.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(one, other))

    model, optimizer, kept = made()
    answer(model, optimizer, x, y, batch_size, 2, most)
    updates = int(optimizer.iterations.numpy())
    wanted = 2 * -(-22 // batch_size)
    require(kept.most > 0, "no gradient of the model was taken")
    # Before `value_and_gradients` divides a batch, it calls the loss with two examples, as a check
    require(
        kept.largest_call <= max(2, most),
        f"the model was called with {kept.largest_call} examples at once, and only {most} fit",
    )
    require(
        kept.most <= most,
        f"the activations of {kept.most} examples were kept at once, and only {most} fit: take the "
        "gradient of a micro-batch before the next one is computed",
    )
    hint = "apply once for each batch, also for the shorter one at the end of an epoch"
    require(
        updates == wanted,
        f"{case}, the optimizer made {updates} updates in place of {wanted}: {hint}",
    )
    ours = [variable.numpy() for variable in model.trainable_variables]
    right = trained()
    if close(ours, right):
        return
    fewer = (
        "divide by the examples that a batch really has: its last micro-batch, and the last batch "
        "of an epoch, have fewer"
    )
    stays = "the sum begins with the gradients of the batch before: set it to zero"
    for mistake, hint in (
        (
            {"shares": lambda sizes: np.ones(len(sizes)) / len(sizes)},
            "weight each micro-batch by its number of examples",
        ),
        ({"shares": lambda sizes: np.ones(len(sizes))}, "add up, and then divide"),
        ({"shares": lambda sizes: sizes / batch_size}, fewer),
        ({"shares": lambda sizes: sizes / len(sizes) / most}, fewer),
        ({"kept_count": True}, stays),
        ({"kept_count": False}, stays),
    ):
        require(not close(ours, trained(**mistake)), f"{case}: {hint}")
    apart = max(np.abs(a - b).max() for a, b in zip(ours, right))
    require(
        False,
        f"{case}, a weight differs from the large batch's by {apart:.2g}: are the examples in their order?",
    )

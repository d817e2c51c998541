"""Every loss of Keras, in a training as it is and in micro-batches.

A loss that a later release of Keras adds must be put into one of the tables below: a test names it.
"""

import inspect

import keras
import large_batch
import numpy as np
import pytest
from keras import ops
from plain_and_microbatched import assert_equal, history
from targets import CLASSES, NUMBERS, ONE_HOT, X

import gradlab
from gradlab.fit.losses.loss_check import WINDOWS

L = keras.losses

# (loss, activation of its output, targets): one output of one model each.
EQUAL = [
    (L.BinaryCrossentropy, "sigmoid", ONE_HOT),
    (L.BinaryFocalCrossentropy, "sigmoid", ONE_HOT),
    (L.CategoricalCrossentropy, "softmax", ONE_HOT),
    (L.CategoricalFocalCrossentropy, "softmax", ONE_HOT),
    (L.CategoricalGeneralizedCrossEntropy, "softmax", CLASSES),
    (L.CategoricalHinge, "softmax", ONE_HOT),
    (L.CosineSimilarity, None, NUMBERS),
    (lambda **options: L.Dice(axis=-1, **options), "softmax", ONE_HOT),
    (L.Hinge, None, 2 * ONE_HOT - 1),
    (L.Huber, None, NUMBERS),
    (L.KLDivergence, "softmax", ONE_HOT),
    (L.LogCosh, None, NUMBERS),
    (L.MeanAbsoluteError, None, NUMBERS),
    (L.MeanAbsolutePercentageError, None, NUMBERS),
    (L.MeanSquaredError, None, NUMBERS),
    (L.MeanSquaredLogarithmicError, "softplus", NUMBERS),
    (L.Poisson, "softplus", NUMBERS),
    (L.SparseCategoricalCrossentropy, "softmax", CLASSES),
    (L.SquaredHinge, None, 2 * ONE_HOT - 1),
    (lambda **options: L.Tversky(axis=-1, **options), "softmax", ONE_HOT),
]
# Losses over the batch as a whole.


def contrastive(y_true, y_pred):
    return ops.logsumexp(y_pred @ ops.transpose(y_pred), axis=-1)


def divided(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2, axis=-1) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


def own(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2, axis=-1)


class Own(L.Loss):
    def call(self, y_true, y_pred):
        return own(y_true, y_pred)


IN_TWO_PASSES = {"Circle": (L.Circle, None, CLASSES), "Dice": (L.Dice, "softmax", ONE_HOT),
                 "Tversky": (L.Tversky, "softmax", ONE_HOT)}  # fmt: skip
REFUSED = {
    "contrastive": (lambda: contrastive, None, NUMBERS),
    "divided": (lambda: divided, None, NUMBERS),
}
ELSEWHERE = {"Loss", "CTC"}  # the base class, and what tests/examples has


def build(heads):
    inputs = keras.Input([4])
    return keras.Model(
        inputs, [keras.layers.Dense(3, activation)(inputs) for _, activation, _ in heads]
    )


def test_losses_are_those_of_the_large_batch():
    """Each loss with Keras' usual reduction, and one loss of each kind of targets with the other
    reductions.

    gradlab sums any loss in one way, and the divisor of the sum depends on the reduction, but not
    on the loss.
    """
    others = [
        L.BinaryCrossentropy,
        L.CategoricalGeneralizedCrossEntropy,
        L.Huber,
        L.SparseCategoricalCrossentropy,
    ]
    heads = [(head, "sum_over_batch_size") for head in EQUAL]
    heads += [
        (head, kind)
        for head in EQUAL
        for kind in ("mean_with_sample_weight", "sum")
        if head[0] in others
    ]
    assert len(heads) == len(EQUAL) + 2 * len(others)

    def run(model):
        model.compile("sgd", [make(reduction=reduction) for (make, _, _), reduction in heads])
        targets = [target for (_, _, target), _ in heads]
        weights = [np.linspace(0.5, 2, len(X))] * len(heads)
        # One batch an epoch: see "What is equal" on the losses of single outputs over a ragged
        # tail.
        fitted = model.fit(
            X, targets, sample_weight=weights, batch_size=19, epochs=2, shuffle=False, verbose=0
        )
        return history(fitted)

    assert_equal(lambda: build([head for head, _ in heads]), run, 3)


@pytest.mark.parametrize("name", IN_TWO_PASSES)
def test_losses_over_the_batch_of_keras_are_exact(name):
    make, _, targets = IN_TWO_PASSES[name]

    def run(model):
        model.compile(keras.optimizers.SGD(0.01), make())
        return history(model.fit(X, targets, batch_size=19, epochs=2, shuffle=False, verbose=0))

    assert_equal(lambda: build([IN_TWO_PASSES[name]]), run, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_losses_over_the_batch_are_refused(name):
    make, _, targets = REFUSED[name]
    # Of three examples, all may have labels of their own, which says nothing of a loss of pairs.
    model = gradlab.microbatched(build([REFUSED[name]]), 6)
    weights = [model.get_weights()]
    after_each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: weights.append(model.get_weights())
    )
    with pytest.raises(ValueError, match="does not depend on the other examples"):
        model.compile("sgd", make())
        model.fit(X, targets, batch_size=8, shuffle=False, verbose=0, callbacks=[after_each])
    # One window in twenty lies so close to a mean that it is the second one that shows it.
    assert len(weights) <= WINDOWS
    for one, other in zip(model.get_weights(), weights[-1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "loss", [own, Own(), Own(reduction="sum")], ids=["function", "object", "sum"]
)
def test_own_losses_of_each_example(loss):
    def run(model):
        model.compile("sgd", loss)
        return history(model.fit(X, NUMBERS, batch_size=8, epochs=2, shuffle=False, verbose=0))

    assert_equal(lambda: build([(None, None, None)]), run, 3)


def test_a_random_loss_of_each_example_is_named():
    def noisy(y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 2, axis=-1) * keras.random.uniform(
            ops.shape(y_pred)[:1]
        )

    model = gradlab.microbatched(build([(None, None, None)]), 3)
    model.compile("sgd", noisy)
    with pytest.warns(
        UserWarning,
        match="noisy draws random numbers, so gradlab cannot check that an example's loss",
    ):
        model.fit(X, NUMBERS, batch_size=8, verbose=0)


def test_every_loss_is_in_one_table():
    classes = {
        one.__name__ for _, one in inspect.getmembers(L, inspect.isclass) if issubclass(one, L.Loss)
    }
    here = {type(make()).__name__ for make, *_ in EQUAL}
    assert classes - here - set(IN_TWO_PASSES) - ELSEWHERE == set(), "put these losses into a table"


def test_weights_of_masked_tokens_do_not_count_in_a_mean_by_weights():
    x, y = large_batch.data("masked", 19)
    weights = np.linspace(0.2, 2, 19 * 5).reshape(19, 5)
    loss = {"from_logits": True, "reduction": "mean_with_sample_weight"}

    def run(model):
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(**loss))
        return history(
            model.fit(x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
        )

    assert_equal(lambda: large_batch.build("masked"), run, 3)

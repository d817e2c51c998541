"""Every metric of Keras, in a training as it is and in micro-batches.

A metric that a later release of Keras adds must be put into one of the tables below: a test names
it.
"""

import inspect

import keras
import numpy as np
import pytest
from plain_and_microbatched import assert_equal, differences, history, train
from targets import CLASSES, NUMBERS, ONE_HOT, X

M = keras.metrics

# By the kind of targets: (activation, loss, targets, metrics).
EQUAL = {
    "one of two classes": ("sigmoid", "binary_crossentropy", ONE_HOT, [
        M.AUC, M.BinaryAccuracy, M.BinaryCrossentropy, lambda: M.BinaryIoU([0, 1], 0.5), M.FalseNegatives,
        M.FalsePositives, lambda: M.FBetaScore(threshold=0.5), lambda: M.F1Score(threshold=0.5), M.Hinge, M.Precision,
        lambda: M.PrecisionAtRecall(0.5), M.Recall, lambda: M.RecallAtPrecision(0.5),
        lambda: M.SensitivityAtSpecificity(0.5), lambda: M.SpecificityAtSensitivity(0.5), M.SquaredHinge,
        M.TrueNegatives, M.TruePositives,
    ]),
    "one of several classes": ("softmax", "categorical_crossentropy", ONE_HOT, [
        M.Accuracy, M.CategoricalAccuracy, M.CategoricalCrossentropy, M.CategoricalHinge, M.CosineSimilarity,
        lambda: M.IoU(3, [0, 2], sparse_y_true=False, sparse_y_pred=False), M.KLDivergence,
        lambda: M.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False), lambda: M.OneHotIoU(3, [1]),
        lambda: M.OneHotMeanIoU(3), M.Poisson, lambda: M.TopKCategoricalAccuracy(2),
    ]),
    "class numbers": ("softmax", "sparse_categorical_crossentropy", CLASSES, [
        M.SparseCategoricalAccuracy, M.SparseCategoricalCrossentropy, lambda: M.SparseTopKCategoricalAccuracy(2),
    ]),
    "numbers": ("softplus", "mse", NUMBERS, [
        M.ConcordanceCorrelation, M.LogCoshError, M.MeanAbsoluteError, M.MeanAbsolutePercentageError,
        M.MeanSquaredError, M.MeanSquaredLogarithmicError, M.PearsonCorrelation, M.R2Score, M.RootMeanSquaredError,
    ]),
}  # fmt: skip
# Base classes, and metrics of one number.
NEITHER = {"Metric", "Mean", "MeanMetricWrapper", "Sum"}


def program(activation, loss, targets, metrics, weighted=1, evaluates=False):
    """A model and its training, as (build, run)."""

    def build():
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(3, activation)])

    def run(model):
        model.compile(
            "sgd",
            loss,
            metrics=[make() for make in metrics],
            weighted_metrics=[make() for make in metrics[:weighted]],
        )
        weights = np.linspace(0.5, 2, len(X))
        fitted = model.fit(
            X, targets, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        scores = (
            model.evaluate(X, targets, batch_size=8, verbose=0, return_dict=True)
            if evaluates
            else {}
        )
        return history(fitted) | {
            f"evaluate {name}": np.array(value) for name, value in scores.items()
        }

    return build, run


@pytest.mark.parametrize("kind", EQUAL)
def test_metrics_are_those_of_the_large_batch(kind):
    """Evaluations update metrics as trainings do, so they are compared for one kind only."""
    assert_equal(*program(*EQUAL[kind], evaluates=kind == "numbers"), 3, rtol=1e-4)


def test_a_correlation_over_the_batch_depends_on_the_other_examples():
    build, run = program(
        "softplus", "mse", NUMBERS, [lambda: M.ConcordanceCorrelation(axis=0)], weighted=0
    )
    assert differences(train(build, run), train(build, run, 3), 1e-2)


def test_every_metric_is_in_one_table():
    classes = {
        one for _, one in inspect.getmembers(M, inspect.isclass) if issubclass(one, M.Metric)
    }
    here = {type(make()).__name__ for *_, metrics in EQUAL.values() for make in metrics}
    assert {one.__name__ for one in classes} - here - NEITHER == set(), (
        "put these metrics into a table"
    )

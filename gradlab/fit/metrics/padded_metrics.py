"""Metrics of texts that are padded to another length in each micro-batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gradlab.fit import keras_private as internals
from gradlab.fit.losses.term import lengths_of, weighs

RULE = (
    "The metric {name} must not depend on padding, whose amount depends on how micro-batches are "
    "cut: give the outputs a mask (mask_zero=True) that the metric uses, or each token a weight "
    "and the metric to weighted_metrics. Received: a metric that counts all positions alike"
)


@contextlib.contextmanager
def means_over_tokens(model: keras.Model, is_padded: bool) -> Iterator[None]:
    """Lets metrics that are means count each token alike, whatever the length to which its text is
    padded.

    Keras takes the mean over the positions of each text first, so it divides by the padded length.

    Args:
        model: the model.
        is_padded: whether there are such texts; otherwise nothing is changed.

    Raises:
        ValueError: in the block, for one of Keras' metrics that counts padding too.
    """
    metrics = [
        one for one in _each_once(internals.metrics_of(model)) if is_padded and _compares(one)
    ]
    try:
        for metric in metrics:
            vars(metric)["update_state"] = functools.partial(_update, metric, metric.update_state)
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("update_state", None)


def _each_once(metrics: list) -> list:
    """The metrics without repetitions: one object may measure several outputs."""
    return list({id(metric): metric for metric in metrics}.values())


def _compares(metric: Any) -> bool:
    """Whether a metric of Keras compares targets and predictions, and is not just told numbers."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    told = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
    return type(metric).__module__.startswith("keras.") and not told


def _update(
    metric: Any, update_state: Callable, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> None:
    """Updates a metric, and multiplies what is added by the padded length if its texts are
    padded."""
    axes = lengths_of(y_pred)
    if not axes:
        update_state(y_true, y_pred, sample_weight)
        return
    is_mean = isinstance(metric, keras.metrics.Mean)
    weighted = weighs(sample_weight, axes)
    masked = (
        isinstance(metric, keras.metrics.MeanMetricWrapper)
        and internals.mask_of(y_pred) is not None
    )
    if not (weighted or masked) or (is_mean and axes[-1] == len(y_pred.shape) - 1):
        raise ValueError(RULE.format(name=metric.name))
    if not is_mean:
        update_state(y_true, y_pred, sample_weight)
        return
    before = [tf.identity(variable.value) for variable in metric.variables]
    # A difference of large sums would have lost the digits of what is added
    for variable in metric.variables:
        variable.assign(tf.zeros_like(variable.value))
    update_state(y_true, y_pred, sample_weight)
    length = tf.reduce_prod([tf.shape(y_pred)[axis] for axis in axes])
    for variable, old in zip(metric.variables, before):
        variable.assign(old + variable.value * tf.cast(length, old.dtype))

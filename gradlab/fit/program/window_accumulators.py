"""What a window adds up beside its gradients: named accumulators, which see one micro-batch at a
time.

In words::

    carry = init()
    for each micro-batch:
        carry = update(carry, its forward pass)
    result = finish(carry)

None of them assigns anything.
"""

from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from gradlab.fit.losses.term import Term
from gradlab.fit.metrics.window_metrics import MetricsPlan
from gradlab.fit.variables.batch_norm import MovingAverages
from gradlab.fit.variables.carried_variables import CarriedState


class ForwardPass(NamedTuple):
    """The result of one micro-batch's forward pass.

    Attributes:
        examples: the number of its examples, an integer scalar.
        share: these over the examples of the window.
        scope: the scope in which it ran, with the values of the variables after it.
        terms: the terms of its loss.
        logs: what the model's own `compute_metrics` returned, by name; None if it has none.
    """

    examples: tf.Tensor
    share: tf.Tensor
    scope: keras.StatelessScope
    terms: list[Term]
    logs: dict | None = None


class Accumulator(Protocol):
    """Adds up something over the micro-batches of a window."""

    def init(self) -> Any:
        """The carry before the first micro-batch: a nest of tensors."""

    def update(self, carry: Any, result: ForwardPass) -> Any:
        """The carry after one more micro-batch, of the same structure and shapes."""

    def finish(self, carry: Any) -> Any:
        """The result."""


class AssignedVariables:
    """The values of the variables that a forward pass assigns, from one micro-batch to the next."""

    def __init__(self, state: CarriedState):
        self._state = state

    def init(self) -> list:
        """The values before the window."""
        return self._state.begin()

    def update(self, carry: list, result: ForwardPass) -> list:
        """The values after the micro-batch."""
        return self._state.values(result.scope)

    def finish(self, carry: list) -> list:
        """The values after the window."""
        return carry


class BatchStatistics:
    """The mean and the variance of what batch normalization saw of the window."""

    def __init__(self, averages: MovingAverages, dtype: tf.DType):
        self._averages = averages
        self._dtype = dtype

    def init(self) -> list:
        """The statistics of no example."""
        return self._averages.zeros(self._dtype)

    def update(self, carry: list, result: ForwardPass) -> list:
        """The statistics with those of the micro-batch."""
        return self._averages.add(carry, result.scope, result.examples)

    def finish(self, carry: list) -> list:
        """The statistics of the window."""
        return carry


class LossSums:
    """The sums and the divisors of the terms of the loss.

    Args:
        terms: the number of terms.
        dtype: the type in which they are added up.
    """

    def __init__(self, terms: int, dtype: tf.DType):
        self._terms = terms
        self._dtype = dtype

    def init(self) -> list:
        """(total, divisor) of each term, both 0."""
        return [(tf.zeros([], self._dtype), tf.zeros([], self._dtype)) for _ in range(self._terms)]

    def update(self, carry: list, result: ForwardPass) -> list:
        """The sums with the totals and the divisors of the micro-batch."""
        return [
            (total + tf.cast(term.total, self._dtype), divisor + tf.cast(term.divisor, self._dtype))
            for term, (total, divisor) in zip(result.terms, carry)
        ]

    def finish(self, carry: list) -> list:
        """(total, divisor) of each term over the window."""
        return carry


class Examples:
    """The number of examples of the micro-batches that count.

    Args:
        dtype: the type in which they are added up.
    """

    def __init__(self, dtype: tf.DType):
        self._dtype = dtype

    def init(self) -> tf.Tensor:
        """0."""
        return tf.zeros([], self._dtype)

    def update(self, carry: tf.Tensor, result: ForwardPass) -> tf.Tensor:
        """The number with those of the micro-batch."""
        return carry + tf.cast(result.examples, self._dtype)

    def finish(self, carry: tf.Tensor) -> tf.Tensor:
        """The number over the window."""
        return carry


class Logs:
    """What the model's own `compute_metrics` returns."""

    def __init__(self, metrics: MetricsPlan):
        self._metrics = metrics

    def init(self) -> list:
        """The entries before the first micro-batch."""
        return self._metrics.no_logs()

    def update(self, carry: list, result: ForwardPass) -> list:
        """The entries with those of the micro-batch, by its share of the window."""
        if result.logs is None:
            return carry
        return self._metrics.add_logs(carry, result.logs, result.share)

    def finish(self, carry: list) -> dict:
        """The entries by name; None for those of the losses, which are known after the window."""
        found = dict(zip((name for name, *_ in self._metrics.logs), carry))
        return found | dict.fromkeys(self._metrics.losses)

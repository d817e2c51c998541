"""GradientAccumulator: gradients added up in variables, so that an update can wait for a whole window."""

from collections.abc import Sequence
from numbers import Real

import tensorflow as tf

from gradlab.averaging import accumulation_dtype, check_gradients, variable_name


class GradientAccumulator:
    """Adds up gradients in variables of its own and gives their weighted mean.

    In words::

        zero():          sum = 0                          weight = 0
        add(g, w):       sum = sum + w * g                weight = weight + w
        mean():          sum / weight

    The mean divides by what was really added, never by a planned number of micro-batches, so a window's ragged tail
    counts for what it is. Give each micro-batch the weight of its examples (or tokens) when they differ in number.

    It works eagerly, inside `tf.function`, and in a `tf.compat.v1` static graph. There, `zero`, `add` and `mean` build
    operations and tensors, to be run by a session in this order; one `session.run` each, since a graph has no order
    of its own.

    Args:
        variables: the variables whose gradients will come: tf.Variable or Keras variables.
        dtype: the type to add up in. None: float32 for half-precision variables, else the variable's own type.

    Example:
        >>> w = tf.Variable([1.0, 2.0], name="w")
        >>> accumulator = GradientAccumulator([w])
        >>> accumulator.add([tf.constant([3.0, 0.0])], weight=2)      # the mean gradient of two examples
        >>> accumulator.add([tf.constant([0.0, 3.0])], weight=1)      # the ragged tail: one example
        >>> accumulator.mean()[0].numpy()
        array([2., 1.], dtype=float32)
    """

    def __init__(self, variables: Sequence, dtype=None):
        self._variables = list(variables)
        if not self._variables:
            raise ValueError("GradientAccumulator needs at least one variable. Received: an empty list")
        self._dtypes = [tf.as_dtype(dtype) if dtype else accumulation_dtype(v.dtype) for v in self._variables]
        for variable, wanted in zip(self._variables, self._dtypes):
            if not wanted.is_floating:
                raise ValueError(
                    f"GradientAccumulator adds up in a floating type, which {variable_name(variable)} would not get. "
                    f"Received: {wanted.name}"
                )
        self._sums = [
            tf.Variable(tf.zeros(v.shape, wanted), trainable=False, name=f"{_leaf(v)}_sum")
            for v, wanted in zip(self._variables, self._dtypes)
        ]
        # float32 counts examples exactly up to 16.7 million a window.
        weight_dtype = tf.float64 if tf.float64 in self._dtypes else tf.float32
        self._weight = tf.Variable(tf.zeros([], weight_dtype), trainable=False, name="weight_sum")
        # A variable that no gradient ever reached has the mean None, as in the large batch: optimizers skip it.
        self._reached = [False] * len(self._variables)

    @property
    def variables(self) -> list[tf.Variable]:
        """The accumulator's own variables: one sum a model variable, and the weight."""
        return [*self._sums, self._weight]

    @property
    def weight(self) -> tf.Tensor:
        """The weight added since `zero()`: a scalar."""
        return tf.convert_to_tensor(self._weight)

    def zero(self):
        """Forgets everything: a new window begins. In a static graph: returns the operation that does."""
        return _done([variable.assign(tf.zeros_like(variable)) for variable in self.variables])

    def add(self, gradients: Sequence, weight=1.0):
        """Adds one micro-batch's gradients, each the gradient of that micro-batch's mean loss.

        Args:
            gradients: for each variable, in order, a tensor of its shape, a `tf.IndexedSlices` (whose rows are added
                in place, without a dense copy) or None, which counts as zero. In the variable's type or the
                accumulator's.
            weight: the micro-batch's examples: a number above or equal to 0, or a scalar tensor.

        Returns:
            In a static graph, the operation that adds; else None.

        Raises:
            ValueError: gradients of another structure, shape or type than the variables', or a bad weight.
        """
        gradients = list(gradients)
        check_gradients(gradients, self._variables, "GradientAccumulator.add", self._dtypes)
        if isinstance(weight, Real) and not 0 <= weight < float("inf"):
            raise ValueError(f"weight must be finite and 0 or more. Received: {weight!r}")
        added = [self._weight.assign_add(tf.cast(weight, self._weight.dtype))]
        for i, (total, gradient) in enumerate(zip(self._sums, gradients)):
            if gradient is None:
                continue
            self._reached[i] = True
            share = tf.cast(weight, total.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.cast(gradient.values, total.dtype) * share
                added.append(total.scatter_add(tf.IndexedSlices(rows, gradient.indices)))
            else:
                added.append(total.assign_add(tf.cast(gradient, total.dtype) * share))
        return _done(added)

    def mean(self) -> list:
        """The weighted mean of everything added since `zero()`.

        Returns:
            For each variable a tensor of its shape and type, or None when no gradient ever reached it.

        Raises:
            ValueError: nothing was added. Inside `tf.function` and static graphs the same sentence comes as a
                `tf.errors.InvalidArgumentError` when the operation runs.
        """
        names = ", ".join(variable_name(variable) for variable in self._variables)
        nothing = f"mean() needs gradients: none with a weight above 0 were added since zero() for {names}"
        if not any(self._reached) or (tf.executing_eagerly() and self._weight.numpy() == 0):
            raise ValueError(nothing)
        with tf.control_dependencies([tf.debugging.assert_positive(self._weight, message=nothing)]):
            weight = tf.identity(self._weight)
        return [
            tf.cast(total / tf.cast(weight, total.dtype), variable.dtype) if reached else None
            for total, variable, reached in zip(self._sums, self._variables, self._reached)
        ]


def _done(operations: list):
    """In a static graph, one operation that runs them all; elsewhere they have run or will in program order."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or graph.building_function:
        return None
    return tf.group(*operations)


def _leaf(variable) -> str:
    return variable_name(variable).replace("/", "_")

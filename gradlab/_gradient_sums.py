"""Where the gradients of a window are summed: in a tensor, in a variable, or row by row.

Each has a carry, which the loop over micro-batches passes on::

    carry = begin()
    for each micro-batch:
        carry = add(carry, gradient)
    sum = end(carry)
"""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from gradlab.averaging import accumulation_dtype, sum_rows, variable_name


class Carried:
    """A sum that is passed from one micro-batch to the next.

    Args:
        variable: the variable that the gradients belong to.
        dtype: the type in which they are summed.
    """

    def __init__(self, variable: tf.Variable, dtype: tf.DType):
        self._shape = variable.shape
        self._dtype = dtype

    def begin(self) -> tf.Tensor:
        """Zeros. They come from `Empty`: TensorFlow folds zeros of a known shape into a constant,
        and keeps that copy allocated."""
        return tf.raw_ops.Empty(shape=self._shape, dtype=self._dtype, init=True)

    def add(self, total: tf.Tensor, gradient: Any) -> tf.Tensor:
        """The sum with a gradient: a tensor, a `tf.IndexedSlices`, which stays sparse, or None."""
        if gradient is None:
            return total
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.cast(gradient.values, total.dtype)
            return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], rows)
        added = total + tf.cast(gradient, total.dtype)
        # A dimension of 1 and one that TensorFlow doesn't know make one that it doesn't know
        added.set_shape(total.shape)
        return added

    def end(self, total: tf.Tensor) -> tf.Tensor:
        """The sum."""
        return total


class InPlace:
    """A sum in a variable, which is set to zero first.

    Args:
        accumulator: the variable. Its type is that in which gradients are summed.
    """

    def __init__(self, accumulator: tf.Variable):
        self._accumulator = accumulator

    def begin(self) -> tuple:
        """Nothing, which is the carry."""
        total = self._accumulator
        total.assign(tf.raw_ops.Empty(shape=total.shape, dtype=total.dtype, init=True))
        return ()

    def add(self, carry: tuple, gradient: Any) -> tuple:
        """Adds a gradient: a tensor, a `tf.IndexedSlices`, which stays sparse, or None."""
        total = self._accumulator
        if isinstance(gradient, tf.IndexedSlices):
            # Variable.scatter_add does the same, but fails for a variable with one copy on each
            # replica.
            tf.raw_ops.ResourceScatterAdd(
                resource=total.handle,
                indices=gradient.indices,
                updates=tf.cast(gradient.values, total.dtype),
            )
        elif gradient is not None:
            total.assign_add(tf.cast(gradient, total.dtype))
        return carry

    def end(self, carry: tuple) -> tf.Tensor:
        """The sum."""
        return tf.convert_to_tensor(self._accumulator)


class Rows:
    """The rows of sparse gradients, which are kept until the window ends and then summed.

    Args:
        variable: the variable that the gradients belong to.
        dtype: the type in which they are summed.
    """

    def __init__(self, variable: tf.Variable, dtype: tf.DType):
        self._variable = variable
        self._dtype = dtype

    def begin(self) -> tuple[tf.TensorArray, tf.TensorArray]:
        """Empty arrays of rows and of their numbers. A micro-batch adds as many as it looks up."""
        shape = [None, *self._variable.shape[1:]]
        return (
            tf.TensorArray(self._dtype, 0, True, infer_shape=False, element_shape=shape),
            tf.TensorArray(tf.int64, 0, True, infer_shape=False, element_shape=[None]),
        )

    def add(self, carry: tuple, gradient: Any) -> tuple[tf.TensorArray, tf.TensorArray]:
        """The rows with those of a gradient.

        Raises:
            ValueError: the gradient isn't a `tf.IndexedSlices`.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            found = "none" if gradient is None else "one of all rows"
            raise ValueError(
                "The gradient of a sparse variable must be that of looked up rows, so the loss "
                f"must depend on it by lookups alone. Received: {found}, for "
                f"{variable_name(self._variable)}"
            )
        values, indices = carry
        number = values.size()
        return (
            values.write(number, tf.cast(gradient.values, self._dtype)),
            indices.write(number, tf.cast(gradient.indices, tf.int64)),
        )

    def end(self, carry: tuple) -> tf.IndexedSlices:
        """The sum, with each row once."""
        values, indices = (array.concat() for array in carry)
        numbers, sums = sum_rows(values, indices)
        shape = tf.constant(self._variable.shape.as_list(), tf.int64)
        return tf.IndexedSlices(sums, numbers, shape)


def gradient_sums(
    variables: Sequence[tf.Variable],
    dtype: tf.DType | str | None,
    accumulators: Sequence[tf.Variable] | None,
    sparse: Collection[int],
) -> list[Carried | InPlace | Rows]:
    """Where the gradients of each variable are summed; the arguments are those of `accumulate`.

    Args:
        variables: the variables that are differentiated.
        dtype: the type in which gradients are summed. None: `accumulation_dtype` of each variable.
        accumulators: for each of them that isn't sparse, the variable to add to. None or empty:
            their sums are carried.
        sparse: the positions of the variables whose rows are kept.
    """
    sums: list[Carried | InPlace | Rows] = []
    left = iter(accumulators or [])
    for i, variable in enumerate(variables):
        dtype_of_sum = accumulation_dtype(variable.dtype, dtype)
        if i in sparse:
            sums.append(Rows(variable, dtype_of_sum))
        elif accumulators:
            sums.append(InPlace(next(left)))
        else:
            sums.append(Carried(variable, dtype_of_sum))
    return sums

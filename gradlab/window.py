"""The loop over a window's micro-batches inside one compiled function: the heart of gradlab."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab.averaging import accumulation_dtype


class Microbatch(NamedTuple):
    """What the forward pass of one micro-batch gives to `accumulate`.

    Attributes:
        loss: its mean loss, a scalar: what is differentiated.
        weight: what that mean counts for in the window's, a scalar: its examples, or its tokens.
        state: what the next micro-batch starts from, of the structure and shapes that came in.
        examples: (loss of each example, weight of each) or None. Where it is given, the sum of weight * loss over the
            examples is differentiated, which should be weight * loss above: the same gradient in fewer operations.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    state: Any = ()
    examples: tuple | None = None


class Sums(NamedTuple):
    """What `accumulate` gives: sums over a window, not yet divided.

    Attributes:
        gradients: for each variable the sum of weight / unit * gradient, in the type to add up in, or None.
        weight: the weight of everything in these sums, a scalar.
        skipped: the micro-batches left out because something in them was not finite, an integer scalar.
        losses: each micro-batch's loss, shape (micro-batches,).
        weights: each micro-batch's weight, 0 where it was left out, shape (micro-batches,).
        squared_norms: each micro-batch's gradient's squared norm over all variables, shape (micro-batches,), or None.
        state: as the last micro-batch left it.
    """

    gradients: list
    weight: tf.Tensor
    skipped: tf.Tensor
    losses: tf.Tensor
    weights: tf.Tensor
    squared_norms: tf.Tensor | None
    state: Any


class Window(NamedTuple):
    """What one window gave.

    Attributes:
        gradients: for each variable the weighted mean over the window, in the variable's type, or None.
        losses: each micro-batch's weighted mean loss, shape (micro-batches,).
        weights: each micro-batch's weight, shape (micro-batches,).
        squared_norms: the squared norm of each micro-batch's gradient, shape (micro-batches,), or None.
    """

    gradients: list
    losses: tf.Tensor
    weights: tf.Tensor
    squared_norms: tf.Tensor | None


def accumulate(
    forward: Callable,
    variables: Sequence[tf.Variable],
    batch: Any,
    examples,
    microbatch_size,
    state: Any = (),
    *,
    in_flight: int = 1,
    dtype=None,
    weight_dtype=tf.float32,
    skip_nonfinite: bool = False,
    unit=1,
    accumulators: Sequence[tf.Variable] | None = None,
    stopped: Callable | None = None,
    norms: bool = True,
) -> Sums:
    """Adds up the gradients of a batch, one micro-batch at a time.

    In words::

        sum = 0
        for each micro-batch of microbatch_size examples (the last may be smaller):
            sum = sum + gradient of (its weight * its mean loss)

    Call it inside a `tf.function`: the loop is a `tf.while_loop`, so neither the number of micro-batches nor, when it
    is a tensor, their size makes TensorFlow trace again. A batch without examples gives sums of 0.

    Where examples and microbatch_size are numbers and the window has no ragged tail, TensorFlow knows all shapes: small
    networks gain 5 to 15 % of an update (measured), and XLA (`tf.function(jit_compile=True)`) compiles the loop well.
    The price is a trace for each pair of numbers.

    Where memory counts, give it accumulators: variables that are added to in place. Without them the sums are handed
    from one micro-batch to the next, and TensorFlow then holds over half a copy of the gradients more (measured for
    VGG-16). Adding in place keeps the micro-batches in order: with accumulators, in_flight makes no difference.

    Args:
        forward: a function (micro-batch, number, state) -> `Microbatch`. number counts the window's micro-batches from
            0: an integer scalar.
        variables: what to differentiate by.
        batch: any nest of tensors with the same first dimension; None where there is nothing.
        examples: that dimension, an integer or an integer scalar tensor.
        microbatch_size: examples a micro-batch: an integer or an integer scalar tensor.
        state: any nest of tensors, handed from one micro-batch to the next.
        in_flight: how many micro-batches may be under way at once. 1 is safe: the memory of one micro-batch, however
            many there are. Each further one adds the activations of a micro-batch and can save time where
            micro-batches are small.
        dtype: the type to add up in. None: float32 for half-precision variables, else the variable's own.
        weight_dtype: the type of losses, weights and norms.
        skip_nonfinite: leave out a micro-batch with NaN or inf in its loss or gradient, and count it.
        unit: what weights are counted in while adding up, a number or a scalar tensor. With the weight of a full
            micro-batch, the gradients inside the loop are as large as those of a mean loss: float16 likes that.
        accumulators: for each variable one of its shape to add up in, in place of the sums that go around; of the type
            to add up in. They are set to zero first.
        stopped: a function without arguments -> a boolean scalar, asked before each micro-batch: once it says so, the
            loop ends there. The losses of those left out are 0, and so are their weights.
        norms: whether to compute each micro-batch's squared norm: a read of every gradient.

    Returns:
        The `Sums`.
    """
    variables, unit = list(variables), tf.cast(unit, weight_dtype)
    steps = -(-examples // microbatch_size)
    microbatch = _cut(batch, examples, microbatch_size, steps)
    reached = [False] * len(variables)  # filled in while the loop's body is traced

    def body(step, sums, total, skipped, state, arrays):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss, weight, next_state, each = forward(microbatch(step), step, state)
            if each is None:
                scaled = loss * tf.cast(tf.cast(weight, weight_dtype) / unit, loss.dtype)
        if each is None:
            gradients = tape.gradient(scaled, variables)
        else:
            shares = tf.cast(each[1] / tf.cast(unit, each[1].dtype), each[0].dtype)
            gradients = tape.gradient(each[0], variables, output_gradients=shares)
        reached[:] = [gradient is not None for gradient in gradients]
        weight = tf.cast(weight, weight_dtype)

        def taken():
            added = [_add(total, gradient) for total, gradient in zip(accumulators or sums, gradients)]
            return [] if accumulators else added, total + weight, skipped, next_state, weight

        if skip_nonfinite:
            finite = _all_finite([loss, *gradients])
            left_out = lambda: (sums, total, skipped + 1, state, tf.zeros_like(weight))  # noqa: E731
            *carry, weight = tf.cond(finite, taken, left_out)
        else:
            *carry, weight = taken()
        seen = [tf.cast(loss, weight_dtype), weight]
        if norms:
            seen.append(squared_norm(gradients, weight_dtype))
        return step + 1, *carry, tuple(array.write(step, value) for array, value in zip(arrays, seen))

    sums = _zeros(variables, dtype)
    if accumulators:
        for accumulator, zeros in zip(accumulators, sums):
            accumulator.assign(zeros)
        sums = []
    arrays = tuple(tf.TensorArray(weight_dtype, steps, element_shape=[]) for _ in range(3 if norms else 2))
    _, sums, total, skipped, state, arrays = tf.while_loop(
        lambda step, *_: step < steps if stopped is None else (step < steps) & ~stopped(),
        body,
        (tf.constant(0), sums, tf.zeros([], weight_dtype), tf.constant(0), state, arrays),
        parallel_iterations=in_flight,
    )
    sums = [tf.convert_to_tensor(total) if seen else None for total, seen in zip(accumulators or sums, reached)]
    losses, weights, *seen = (array.stack() for array in arrays)
    squared_norms = tf.math.divide_no_nan(seen[0], (weights / unit) ** 2) if norms else None
    return Sums(sums, total, skipped, losses, weights, squared_norms, state)


def window_gradients(
    loss: Callable,
    variables: Sequence[tf.Variable],
    batch: Any,
    weights,
    microbatch_size,
    in_flight: int = 1,
    stopped: Callable | None = None,
    norms: bool = True,
) -> Window:
    """The gradients of a batch's mean loss, computed one micro-batch at a time.

    It is `accumulate`, divided by the weight of what was really seen: see there for the loop.

    Args:
        loss: a function (micro-batch, number) -> the loss of each example, shape (examples,). number counts the
            window's micro-batches from 0: an integer scalar.
        variables: what to differentiate by.
        batch: any nest of tensors with the same first dimension.
        weights: the examples' weights, shape (examples,); their sum must be above 0.
        microbatch_size: examples a micro-batch: an integer or an integer scalar tensor.
        in_flight: how many micro-batches may be under way at once, as in `accumulate`.
        stopped, norms: as in `accumulate`.

    Returns:
        A `Window`.

    Example:
        >>> w = tf.Variable(2.0)
        >>> squares = lambda x, number: (w * x) ** 2
        >>> window = tf.function(lambda x: window_gradients(squares, [w], x, tf.ones_like(x), 2))
        >>> result = window(tf.constant([1.0, 2.0, 3.0]))
        >>> round(float(result.gradients[0]), 4), result.losses.numpy()      # 2 * w * mean(x ** 2)
        (18.6667, array([10., 36.], dtype=float32))
    """

    def forward(microbatch, number, state):
        part, part_weights = microbatch
        weight = tf.reduce_sum(part_weights)
        each = tf.cast(loss(part, number), part_weights.dtype)
        mean = tf.math.divide_no_nan(tf.reduce_sum(each * part_weights), weight)
        return Microbatch(mean, weight, state, (each, part_weights))

    examples = tf.shape(weights)[0] if weights.shape[0] is None else weights.shape[0]
    sums = accumulate(
        forward, variables, (batch, weights), examples, microbatch_size, in_flight=in_flight,
        weight_dtype=weights.dtype, unit=microbatch_size, stopped=stopped, norms=norms,
    )  # fmt: skip
    gradients = divide(sums.gradients, sums.weight / tf.cast(microbatch_size, weights.dtype), variables)
    return Window(gradients, sums.losses, sums.weights, sums.squared_norms)


def divide(gradients: Sequence, weight, variables: Sequence) -> list:
    """Sums of weighted gradients over their weight (None: 1), each in its variable's type; None stays None."""
    if weight is not None:
        gradients = [s if s is None else tf.math.divide_no_nan(s, tf.cast(weight, s.dtype)) for s in gradients]
    return [s if s is None else tf.cast(s, variable.dtype) for s, variable in zip(gradients, variables)]


def _cut(batch, examples, microbatch_size, steps) -> Callable:
    """A function (step) -> the micro-batch of that number, whose size TensorFlow knows if it can be known."""
    known = isinstance(examples, int) and isinstance(microbatch_size, int) and examples % microbatch_size == 0

    def on_each(function, nest):
        return tf.nest.map_structure(lambda tensor: None if tensor is None else function(tensor), nest)

    if known:
        batch = on_each(lambda t: tf.reshape(t, tf.concat([[steps, microbatch_size], tf.shape(t)[1:]], 0)), batch)

    def microbatch(step):
        rows = step if known else _rows(step, microbatch_size, examples)
        return on_each(lambda tensor: tensor[rows], batch)

    return microbatch


def _rows(step, microbatch_size, examples) -> slice:
    """The examples of a micro-batch."""
    return slice(step * microbatch_size, tf.minimum((step + 1) * microbatch_size, examples))


def _zeros(variables: Sequence, dtype) -> list:
    """Sums of nothing. TensorFlow would keep zeros that it had folded into a constant for good: it folds no `Empty`."""
    dtypes = [tf.as_dtype(dtype) if dtype else accumulation_dtype(variable.dtype) for variable in variables]
    return [tf.raw_ops.Empty(shape=v.shape, dtype=dtype, init=True) for v, dtype in zip(variables, dtypes)]


def _add(total, gradient):
    """The sum with a gradient: a new tensor, or a variable added to in place. A sparse gradient stays sparse."""
    if gradient is None:
        return total
    in_place = isinstance(total, tf.Variable)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.values, total.dtype)
        if in_place:
            # Variable.scatter_add does the same, but not for a variable that each replica has its own of.
            return tf.raw_ops.ResourceScatterAdd(resource=total.handle, indices=gradient.indices, updates=rows)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], rows)
    gradient = tf.cast(gradient, total.dtype)
    return total.assign_add(gradient) if in_place else total + gradient


def squared_norm(gradients: Sequence, dtype):
    """The sum of the squares of every gradient's elements."""
    halves = [tf.zeros([], dtype)]
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):  # a row named twice must be added up before it is squared
            rows, position = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(rows))
        if gradient is not None:
            halves.append(tf.nn.l2_loss(tf.cast(gradient, dtype)))
    return 2 * tf.add_n(halves)


def _all_finite(tensors: Sequence):
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors if t is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])

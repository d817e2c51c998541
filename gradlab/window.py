"""The loop over a window's micro-batches inside one compiled function. All of gradlab accumulates
with it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from gradlab import _checks
from gradlab._batches import microbatches
from gradlab._gradient_sums import gradient_sums
from gradlab._graph_rewrites import additions_to_keep
from gradlab.averaging import all_finite, divide, mean_norms, squared_norm


class Microbatch(NamedTuple):
    """The result of one micro-batch's forward pass, as `accumulate` expects it.

    Attributes:
        loss: the mean loss of the micro-batch, of the shape `Loop.loss_shape`, usually a scalar.
        weight: how much this mean counts in the window's mean, a scalar: its number of examples or
            tokens.
        state: the state for the next micro-batch, with the structure and shapes of the incoming
            state.
        share: the factor of the loss when it is differentiated, a scalar. None: the weight.
        examples: (losses, shares) or None. If given, the sum of share * loss is differentiated
            instead of the factor times the mean loss: with one of each for an example, the same
            gradient in fewer operations; or that of another function than the loss that is kept. A
            share of None counts as 1.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    state: Any = ()
    share: tf.Tensor | None = None
    examples: tuple | None = None


class Sums(NamedTuple):
    """The result of `accumulate`: sums over a window, not yet divided by its weight.

    Attributes:
        gradients: for each variable the sum of share * gradient, or None if no loss depends on the
            variable; for a sparse one, a `tf.IndexedSlices` with each row once.
        weight: the sum of the weights, a scalar.
        skipped: the number of micro-batches left out because they were not finite, an integer
            scalar.
        losses: the loss of each micro-batch, shape `(micro-batches, *loss_shape)`.
        weights: the weight of each micro-batch, 0 if it was left out, shape (micro-batches,).
        records: what `record` returned for each micro-batch, shape `(micro-batches, *loss_shape)`,
            or None.
        state: the state that the last micro-batch returned.
    """

    gradients: list
    weight: tf.Tensor
    skipped: tf.Tensor
    losses: tf.Tensor
    weights: tf.Tensor
    records: tf.Tensor | None
    state: Any


class Window(NamedTuple):
    """The result of `window_gradients`.

    Attributes:
        gradients: for each variable the weighted mean gradient over the window, in the variable's
            type, or None.
        losses: the weighted mean loss of each micro-batch, shape (micro-batches,).
        weights: the weight of each micro-batch, shape (micro-batches,).
        gradient_norms: the norm of each micro-batch's mean gradient, shape (micro-batches,), or
            None.
    """

    gradients: list
    losses: tf.Tensor
    weights: tf.Tensor
    gradient_norms: tf.Tensor | None


@dataclass(frozen=True)
class Loop:
    """Settings of the loop in `accumulate`.

    Attributes:
        in_flight: the number of micro-batches that may be computed at once. With 1, the loop needs
            the memory of one micro-batch, however many there are. Each further one adds its
            activations and its gradient, and saves time on several cores.
        dtype: the type in which gradients are summed. None: float32 for half-precision variables,
            else the variable's own type.
        weight_dtype: the type of losses, weights and records.
        loss_shape: the shape of a micro-batch's loss: () for one training, (seeds,) for several
            that are computed together.
        axis: the axis of the batch's tensors along which the examples lie.
        skip_nonfinite: whether to leave out and count a micro-batch with NaN or inf in its loss or
            gradient.
        stopped: a function without arguments -> a boolean scalar, called before each micro-batch.
            Once it returns True the loop ends; the losses and weights of the remaining
            micro-batches are 0.

    Raises:
        ValueError: a setting out of range.
    """

    in_flight: int = 1
    dtype: Any = None
    weight_dtype: Any = tf.float32
    loss_shape: tuple[int, ...] = ()
    axis: int = 0
    skip_nonfinite: bool = False
    stopped: Callable[[], tf.Tensor] | None = None

    def __post_init__(self) -> None:
        _checks.positive_integer("in_flight", self.in_flight)
        _checks.floating_dtype("dtype", self.dtype)
        _checks.floating_dtype("weight_dtype", self.weight_dtype)
        _checks.natural_number("axis", self.axis)
        _checks.boolean("skip_nonfinite", self.skip_nonfinite)


def accumulate(
    forward: Callable[[Any, tf.Tensor, Any], Microbatch],
    variables: Sequence[tf.Variable],
    batch: Any,
    microbatch_size: int | tf.Tensor,
    state: Any = (),
    *,
    record: Callable[[tf.Tensor, list], tf.Tensor] | None = None,
    accumulators: Sequence[tf.Variable] | None = None,
    sparse: Collection[int] = (),
    loop: Loop = Loop(),
) -> Sums:
    """Sums the gradients of a batch, one micro-batch at a time.

    In words::

        sum = 0
        for each micro-batch of microbatch_size examples (the last one may be smaller):
            sum = sum + gradient of (share * mean loss)

    Call it inside a `tf.function`. The loop is a `tf.while_loop`, so TensorFlow does not trace it
    again when the number of micro-batches changes, nor when their size changes if the size is a
    tensor. A batch without examples gives sums of 0.

    If the number of examples and microbatch_size are Python numbers and there is no ragged tail,
    TensorFlow knows all shapes. An update of a small network then takes 5 to 15 % less time, and
    XLA (`tf.function(jit_compile=True)`) compiles the loop well. The price is one trace for each
    pair of numbers.

    To save memory, pass accumulators: variables to which gradients are added in place. Without them
    the sums are passed from one micro-batch to the next, which takes about half a copy of the
    gradients in addition (measured with VGG-16). Adding in place also runs the micro-batches in
    order, so `Loop.in_flight` then has no effect.

    Args:
        forward: a function (micro-batch, number, state) -> `Microbatch`. The number counts the
            window's micro-batches from 0: an integer scalar.
        variables: the variables to differentiate with respect to, of TensorFlow or Keras.
        batch: a nest of tensors with the same number of examples; None where a part is missing.
        microbatch_size: the examples of a micro-batch: an integer or an integer scalar tensor.
        state: a nest of tensors, passed from one micro-batch to the next.
        record: a function (loss, gradients) -> a tensor of the loss' shape to keep for each
            micro-batch, such as their squared norm. The gradients are those of share * loss. None:
            nothing is kept.
        accumulators: for each variable that isn't sparse, a variable of its shape in which its
            gradients are summed. They are set to zero first.
        sparse: the positions of the variables of which a micro-batch looks up a few rows. The rows
            of their gradients are kept until the window ends, instead of a sum of all rows.
        loop: the settings of the loop.

    Returns:
        The `Sums`.

    Raises:
        ValueError: the gradient of a sparse variable isn't a `tf.IndexedSlices`.
    """
    variables = [_tf_variable(variable) for variable in variables]
    steps, microbatch = microbatches(batch, microbatch_size, loop.axis)
    reached = [False] * len(variables)  # filled in while TensorFlow traces the loop's body
    sums = gradient_sums(variables, loop.dtype, accumulators, sparse)

    def body(step, carries, total, skipped, state, arrays):
        result, gradients = _differentiate(
            forward, variables, microbatch(step), step, state, loop.weight_dtype
        )
        reached[:] = [gradient is not None for gradient in gradients]
        with tf.control_dependencies(additions_to_keep(gradients, loop.in_flight)):
            weight = tf.identity(tf.cast(result.weight, loop.weight_dtype))

        def take():
            added = [
                sum_.add(carry, gradient) for sum_, carry, gradient in zip(sums, carries, gradients)
            ]
            return added, total + weight, skipped, result.state, weight

        if loop.skip_nonfinite:
            leave_out = lambda: (carries, total, skipped + 1, state, tf.zeros_like(weight))  # noqa: E731
            *carry, weight = tf.cond(all_finite([result.loss, *gradients]), take, leave_out)
        else:
            *carry, weight = take()
        kept = [tf.cast(result.loss, loop.weight_dtype), weight]
        if record is not None:
            kept.append(tf.cast(record(result.loss, gradients), loop.weight_dtype))
        return (
            step + 1,
            *carry,
            tuple(array.write(step, value) for array, value in zip(arrays, kept)),
        )

    shapes = [loop.loss_shape, ()] + [loop.loss_shape] * (record is not None)
    arrays = tuple(
        tf.TensorArray(loop.weight_dtype, steps, element_shape=shape) for shape in shapes
    )
    begin = [sum_.begin() for sum_ in sums]
    _, carries, total, skipped, state, arrays = tf.while_loop(
        lambda step, *_: step < steps if loop.stopped is None else (step < steps) & ~loop.stopped(),
        body,
        (tf.constant(0), begin, tf.zeros([], loop.weight_dtype), tf.constant(0), state, arrays),
        parallel_iterations=loop.in_flight,
    )
    gradients = [
        sum_.end(carry) if seen else None for sum_, carry, seen in zip(sums, carries, reached)
    ]
    losses, weights, *records = (array.stack() for array in arrays)
    return Sums(gradients, total, skipped, losses, weights, records[0] if records else None, state)


def window_gradients(
    loss: Callable[[Any, tf.Tensor], tf.Tensor],
    variables: Sequence[tf.Variable],
    batch: Any,
    weights: tf.Tensor,
    microbatch_size: int | tf.Tensor,
    *,
    in_flight: int = 1,
    stopped: Callable[[], tf.Tensor] | None = None,
    norms: bool = True,
) -> Window:
    """The gradients of a batch's mean loss, computed one micro-batch at a time.

    This is `accumulate`, divided by the weight of the examples that were processed; see there for
    details.

    Args:
        loss: a function (micro-batch, number) -> the loss of each example, shape (examples,). The
            number counts the window's micro-batches from 0: an integer scalar.
        variables: the variables to differentiate with respect to, of TensorFlow or Keras.
        batch: a nest of tensors with the same first dimension.
        weights: the weights of the examples, shape (examples,); their sum must be above 0.
        microbatch_size: the examples of a micro-batch: an integer or an integer scalar tensor.
        in_flight: the number of micro-batches that may be computed at once, as in `Loop`.
        stopped: a function that ends the loop early, as in `Loop`.
        norms: whether to compute the norm of each micro-batch's gradient, which reads every
            gradient once more.

    Returns:
        A `Window`.

    Raises:
        ValueError: tensors of different lengths, a microbatch_size that is not a positive integer,
            weights that are not floating-point numbers, or a loss that is not one number for each
            example.

    Example:
        >>> w = tf.Variable(2.0)
        >>> squares = lambda x, number: (w * x) ** 2
        >>> window = tf.function(lambda x: window_gradients(squares, [w], x, tf.ones_like(x), 2))
        >>> result = window(tf.constant([1.0, 2.0, 3.0]))
        >>> round(float(result.gradients[0]), 4), result.losses.numpy()      # 2 * w * mean(x ** 2)
        (18.6667, array([10., 36.], dtype=float32))
    """
    dtype = weights.dtype
    if not tf.as_dtype(dtype).is_floating:
        raise ValueError(
            f"weights must be floating-point numbers. Received: {tf.as_dtype(dtype).name}"
        )
    # Shares are weights divided by the micro-batch size, so that summed gradients are as large as
    # those of a mean loss.
    size = tf.cast(microbatch_size, dtype)

    def forward(microbatch, number, state):
        inputs, input_weights = microbatch
        weight = tf.reduce_sum(input_weights)
        each = tf.cast(loss(inputs, number), dtype)
        if each.shape.rank not in (None, 1):
            raise ValueError(
                "loss must return one number for each example. Received: a tensor of shape "
                f"{each.shape}"
            )
        mean = tf.math.divide_no_nan(tf.reduce_sum(each * input_weights), weight)
        return Microbatch(mean, weight, state, examples=(each, input_weights / size))

    def record(loss, gradients):
        return squared_norm(gradients, dtype)

    sums = accumulate(
        forward, variables, (batch, weights), microbatch_size, record=record if norms else None,
        loop=Loop(in_flight=in_flight, weight_dtype=dtype, stopped=stopped),
    )  # fmt: skip
    gradients = divide(sums.gradients, sums.weight / size, variables)
    gradient_norms = None if sums.records is None else mean_norms(sums.records, sums.weights / size)
    return Window(gradients, sums.losses, sums.weights, gradient_norms)


def _differentiate(
    forward, variables: list, microbatch, number, state, weight_dtype
) -> tuple[Microbatch, list]:
    """One micro-batch's forward and backward pass: its `Microbatch` and the gradients of share *
    loss."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        result = forward(microbatch, number, state)
        if result.examples is None:
            share = tf.cast(result.weight if result.share is None else result.share, weight_dtype)
            scaled = result.loss * tf.cast(share, result.loss.dtype)
    if result.examples is None:
        return result, tape.gradient(scaled, variables)
    losses, shares = result.examples
    return result, tape.gradient(
        losses, variables, None if shares is None else tf.cast(shares, losses.dtype)
    )


def _tf_variable(variable) -> tf.Variable:
    """The variable itself, or the one behind a Keras variable, which a tape cannot watch."""
    return (
        variable
        if callable(getattr(variable, "value", None))
        else getattr(variable, "value", variable)
    )

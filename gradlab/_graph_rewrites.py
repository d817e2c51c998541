"""Two rewrites of the graph that TensorFlow must not do in a loop over micro-batches."""

from collections.abc import Sequence

import tensorflow as tf

ADDITIONS = "Add", "AddV2", "AddN"


def additions_to_keep(gradients: Sequence, in_flight: int) -> list[tf.Operation]:
    """The additions of the current graph that TensorFlow must leave as they are, which it does if
    something waits.

    1. The addition of another tensor to a convolution, as in residual networks. On a CPU, the
       kernel of both at once keeps that tensor in the kernel. Two micro-batches in flight share the
       kernel: they crash (seen with TensorFlow 2.21), or one could get the other's numbers.
    2. The addition that ends a gradient, such as that of a layer that is called twice. TensorFlow
       would add its parts to the sum of the gradients one by one. That gives other bits than adding
       the gradient in place.

    Functions of one's own that are called inside the graph are not searched.

    Args:
        gradients: the gradients of a micro-batch: tensors, `tf.IndexedSlices` or None.
        in_flight: the number of micro-batches that may be computed at once.

    Raises:
        ValueError: several in flight and TensorFlow's fused batch normalization, whose kernel kept
            the statistics of a batch in some versions. The layer of Keras does not use it.
    """
    if tf.executing_eagerly():
        return []
    operations = tf.compat.v1.get_default_graph().get_operations()
    fused = [
        operation.name for operation in operations if operation.type.startswith("FusedBatchNorm")
    ]
    if in_flight > 1 and fused:
        raise ValueError(
            f"in_flight must be 1 with a fused batch normalization. Received: {in_flight}, and "
            f"{fused[0]}"
        )
    additions = [operation for operation in operations if operation.type in ADDITIONS]
    ends = {gradient.op.name for gradient in gradients if isinstance(gradient, tf.Tensor)}
    return [
        operation
        for operation in additions
        if operation.name in ends or _is_added_to_convolution(operation)
    ]


def _is_added_to_convolution(addition: tf.Operation) -> bool:
    """Whether an addition adds a tensor of its own size, so not a bias, to a convolution."""
    as_large = [one.shape.is_compatible_with(addition.outputs[0].shape) for one in addition.inputs]
    return all(as_large) and any(_is_convolution(one.op) for one in addition.inputs)


def _is_convolution(operation: tf.Operation, steps: int = 3) -> bool:
    """Whether an operation is a convolution, perhaps with its bias added."""
    if steps and operation.type in ("BiasAdd", "Squeeze", "Identity", "Add", "AddV2"):
        return any(_is_convolution(one.op, steps - 1) for one in operation.inputs)
    return operation.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative")

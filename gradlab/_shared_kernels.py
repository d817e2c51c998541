"""Two kernels of TensorFlow that micro-batches in flight must not share."""

import tensorflow as tf


def additions_to_convolutions(in_flight: int) -> list[tf.Operation]:
    """The additions of the current graph that TensorFlow could fuse with a convolution; something has to wait for them.

    On a CPU, the kernel of a convolution fused with the addition of another tensor, as in residual networks, keeps that
    tensor in the kernel. Two micro-batches in flight share the kernel: they crash, or one gets the other's numbers
    (seen with TensorFlow 2.21). TensorFlow does not fuse an operation for which another one waits.

    It is the same with one micro-batch in flight, so that the results have the same bits. Functions of one's own that
    are called inside the graph are not searched.

    Args:
        in_flight: the number of micro-batches that may be computed at once.

    Raises:
        ValueError: several in flight and TensorFlow's fused batch normalization, whose kernel kept the statistics of a
            batch in some versions. The layer of Keras does not use it.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    fused = [operation.name for operation in operations if operation.type.startswith("FusedBatchNorm")]
    if in_flight > 1 and fused:
        raise ValueError(f"in_flight must be 1 with a fused batch normalization. Received: {in_flight}, and {fused[0]}")
    return [
        operation
        for operation in operations
        if operation.type in ("Add", "AddV2", "AddN")
        and all(one.shape.is_compatible_with(operation.outputs[0].shape) for one in operation.inputs)
        and any(_is_convolution(one.op) for one in operation.inputs)
    ]


def _is_convolution(operation: tf.Operation, steps: int = 3) -> bool:
    """Whether an operation is a convolution, perhaps with its bias added."""
    if steps and operation.type in ("BiasAdd", "Squeeze", "Identity", "Add", "AddV2"):
        return any(_is_convolution(one.op, steps - 1) for one in operation.inputs)
    return operation.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative")

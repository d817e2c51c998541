"""How many micro-batches are computed at once, unless the user says so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from gradlab import runtime

MEBIBYTE = 2**20
# Loops, branches and functions hide what they compute. Fused batch normalization: see
# gradlab/_graph_rewrites.py.
HIDING = {
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
    *("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
}
# A process with TensorFlow needs more than three times as much before it has a model.
SMALL = 128 * MEBIBYTE
AS_ASKED = "as asked for"  # the reason for a number that a user gave


@dataclass(frozen=True)
class InFlight:
    """A number of micro-batches that are computed at once, and the reason for it.

    >>> print(InFlight(2, "one for each core"))
    gradlab: 2 micro-batches in flight, one for each core
    """

    count: int
    reason: str

    def __str__(self) -> str:
        return (
            f"gradlab: {self.count} micro-batch{'es' * (self.count > 1)} in flight, {self.reason}"
        )


def choose(
    trace: Callable[[], tf.Graph], microbatch_size: int | str | tf.Variable, accumulators: int
) -> InFlight:
    """Chooses how many micro-batches to compute at once.

    On a CPU, as many as there are cores, as long as the activations and gradients of all but the
    first take no more memory than 128 MiB or twice the accumulators, whichever is more, and no more
    than a quarter of what the process can still get. Otherwise fewer, and at least one. One on a
    GPU, whose kernels fill it, and one for several replicas, which share the cores already.

    Args:
        trace: a function () -> the traced forward pass of a micro-batch, with None where the number
            of examples belongs. It is called if the choice depends on it.
        microbatch_size: the number of examples, or "given"; a variable, which may change, counts as
            1.
        accumulators: the bytes of the summed gradients.
    """
    if isinstance(microbatch_size, str):
        return InFlight(1, "because the dataset determines their sizes")
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        return InFlight(1, f"because {replicas} replicas share the cores")
    if tf.distribute.has_strategy():
        return InFlight(1, "because the model belongs to a distribution strategy")
    if tf.config.list_logical_devices("GPU"):
        return InFlight(1, "because a GPU is faster with one after the other")
    cores = tf.config.threading.get_inter_op_parallelism_threads() or runtime.cores()
    if cores == 1:
        return InFlight(1, "because one operation runs at a time")
    examples = 1 if isinstance(microbatch_size, tf.Variable) else microbatch_size
    activations = activation_bytes(trace(), examples)
    if activations is None:
        return InFlight(1, "because the size of its activations is unknown")
    # A gradient waits until those of the micro-batches before it are added
    one = activations + accumulators
    room = max(SMALL, 2 * accumulators)
    available = runtime.available_memory() / 4
    count = int(min(cores, 1 + min(room, available) // max(1, one)))
    size = f"whose activations and gradients take {one / MEBIBYTE:.{int(one < 10 * MEBIBYTE)}f} MiB each"
    if count == cores:
        return InFlight(count, f"one for each core, {size}")
    return InFlight(count, f"because memory is short, {size}" if available < room else size)


def activation_bytes(graph: tf.Graph, examples: int) -> int | None:
    """The bytes of all tensors that a traced forward pass computes from the examples: at least its
    activations.

    Args:
        graph: the graph. A first dimension that is not known counts as the number of examples, or
            as what reshaping made of it. A tensor of another unknown size counts like the largest
            from which it is computed.
        examples: the number of examples.

    Returns:
        The bytes; None if nothing shows them: the size of an example is unknown, or an operation is
        one of `HIDING`.
    """
    sizes: dict[str, _Size] = {}
    for tensor in graph.inputs:
        if tensor.dtype != tf.resource:
            if tensor.shape.rank is None or None in tensor.shape[1:]:
                return None
            sizes[tensor.name] = _size(tensor, [_Size(1, examples)], False)
    found = 0
    for operation in graph.get_operations():
        known = [sizes[tensor.name] for tensor in operation.inputs if tensor.name in sizes]
        if not known:
            continue  # nothing that depends on the examples
        if operation.type in HIDING:
            return None
        for tensor in operation.outputs:
            size = sizes[tensor.name] = _size(tensor, known, operation.type == "Reshape")
            found += size.elements * max(1, tensor.dtype.size)
    return found


class _Size(NamedTuple):
    """The size of a tensor. rows is its first dimension, or that of other tensors like it if it is
    known."""

    elements: int
    rows: int


def _size(tensor: tf.Tensor, sources: list[_Size], is_reshaped: bool) -> _Size:
    """The size of a tensor that is computed from others."""
    largest, rows = (max(numbers) for numbers in zip(*sources))
    if tensor.dtype in (tf.resource, tf.variant):
        return _Size(0, rows)
    if tensor.shape.rank is None or None in tensor.shape[1:]:
        return _Size(largest, rows)
    if tensor.shape.rank == 0 or tensor.shape[0] is not None:
        return _Size(tensor.shape.num_elements(), rows)
    rest = max(1, tensor.shape[1:].num_elements())
    return _Size(largest, max(1, largest // rest)) if is_reshaped else _Size(rows * rest, rows)

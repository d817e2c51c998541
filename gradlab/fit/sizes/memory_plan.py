"""What takes the memory of a training, as a function of the micro-batch size, before it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from gradlab import _checks
from gradlab._batches import as_tensor, map_tensors
from gradlab.averaging import accumulation_dtype
from gradlab.fit import keras_private as internals
from gradlab.fit.losses.loss_terms import Objective, total_loss
from gradlab.fit.losses.whole_batch import differentiable
from gradlab.fit.sizes.liveness import Liveness, liveness

MEBIBYTE = 2**20


class Processor(NamedTuple):
    """What a training takes on a CPU besides its numbers, fitted to ten networks
    (benchmarks/NOTES.md).

    Attributes:
        start: the bytes that TensorFlow takes to compile and begin it.
        per_operation: so many more for each traced operation.
        variables, tensors: the factors by which these take more than their bytes: kernels copy
            some, and allocators leave gaps.
    """

    start: int
    per_operation: int
    variables: float
    tensors: float


WITH_ONEDNN = Processor(39 * MEBIBYTE, 63 * 1024, 1.18, 1.22)
WITHOUT_ONEDNN = Processor(67 * MEBIBYTE, 58 * 1024, 1.84, 1.96)
HELP = "mixed precision, smaller inputs, an optimizer with fewer averages and keras.remat take less"


def too_little(least: float, memory: float) -> str:
    """The sentence for a memory that does not hold the least that a training takes, both in
    bytes."""
    least = math.ceil(least / MEBIBYTE)
    memory = math.floor(memory / MEBIBYTE)
    return (
        f"memory must be at least {least:,} MiB for micro-batches of one example; {HELP}. "
        f"Received: {memory:,} MiB"
    )


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a training adds to a process, or takes on a GPU.

    Attributes:
        weights: the variables of the model.
        optimizer: the variables of the optimizer.
        accumulators: the summed gradients.
        runtime: an estimate of what TensorFlow takes to compile the training, and of gaps beside
            the variables; 0 on a GPU.
        in_flight: the number of micro-batches that are computed at once.
        copies: the factor by which activations and gradients take more memory than their numbers.

    Example:
        >>> model = keras.Sequential([keras.Input([1000]), keras.layers.Dense(1000), keras.layers.Dense(1)])
        >>> plan = plan_memory(model, "mse", "adam", (tf.zeros([1, 1000]), tf.zeros([1, 1])))
        >>> plan.weights == 4 * (1000 * 1000 + 1000 + 1000 + 1), plan.optimizer > 2 * plan.weights
        (True, True)
        >>> plan.total(2000) > plan.total(1000) > plan.total(1)
        True
        >>> plan.total(plan.largest(500 * 2**20)) <= 500 * 2**20
        True
    """

    weights: int
    optimizer: int
    accumulators: int
    runtime: int
    in_flight: int
    copies: float
    liveness: Liveness = field(repr=False)

    @property
    def fixed(self) -> int:
        """What does not depend on the micro-batch size: all of the above."""
        return self.weights + self.optimizer + self.accumulators + self.runtime

    def gradients(self, microbatch_size: int) -> int:
        """The gradients of the micro-batches in flight at the moment when most memory is in use."""
        return int(self.in_flight * self.copies * self.liveness.peak(microbatch_size)[1])

    def activations(self, microbatch_size: int) -> int:
        """Everything else that the micro-batches in flight keep at that moment, above all for the
        backward pass."""
        peak, gradients = self.liveness.peak(microbatch_size)
        return int(self.in_flight * self.copies * (peak - gradients))

    def total(self, microbatch_size: int) -> int:
        """All of it, at the moment when most memory is in use."""
        return self.fixed + self.gradients(microbatch_size) + self.activations(microbatch_size)

    def largest(self, memory: float) -> int:
        """The largest micro-batch size that fits.

        Args:
            memory: the bytes that the training may add.

        Raises:
            ValueError: memory is not a positive number, or not even one example fits.
        """
        _checks.positive_number("memory", memory)
        examples = self.liveness.most_examples((memory - self.fixed) / self.in_flight / self.copies)
        if examples < 1:
            raise ValueError(too_little(self.total(1), memory))
        return int(min(examples, 2**31 - 1))

    def table(self, microbatch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> str:
        """A Markdown table of the parts in MiB, a column for each size."""
        rows = {
            "weights": lambda b: self.weights,
            "optimizer": lambda b: self.optimizer,
            "accumulators": lambda b: self.accumulators,
            "gradients": self.gradients,
            "activations": self.activations,
            "TensorFlow": lambda b: self.runtime,
            "total": self.total,
        }
        lines = ["| MiB | " + " | ".join(f"b = {b}" for b in microbatch_sizes) + " |"]
        lines.append("| --- |" + " ---: |" * len(microbatch_sizes))
        for name, part in rows.items():
            lines.append(
                f"| {name} | "
                + " | ".join(f"{part(b) / MEBIBYTE:.0f}" for b in microbatch_sizes)
                + " |"
            )
        return "\n".join(lines)


def plan_memory(
    model: keras.Model, loss: Any, optimizer: Any, example: tuple, *, in_flight: int = 1
) -> MemoryPlan:
    """Plans the memory of a training. It traces a micro-batch's forward and backward pass, and does
    not run it.

    The plan counts the micro-batch, but not the batch from which it is cut, of which `fit` may hold
    several copies. On the CPU to which it was fitted, the peaks of ten networks with four sizes
    each were at most 15 % off (benchmarks/NOTES.md). Where TensorFlow does not use oneDNN by
    itself, a training takes up to twice as much, and the plan may be 40 % off; the environment
    variable TF_ENABLE_ONEDNN_OPTS=1 turns oneDNN on. On a GPU the plan leaves out
    the workspaces that cuDNN takes for convolutions. There the same networks took 0.99 to 1.06
    times the plan with attention or mixing, 1.25 times with dense layers, and up to 4.04 times with
    convolutions (benchmarks/RESULTS.md).

    Args:
        model: the model; its variables and those of the optimizer are created.
        loss: as for `keras.Model.compile`, or a `gradlab.WholeBatch`, whose predictions of the
            whole batch come on top.
        optimizer: a Keras optimizer, or its name.
        example: (x, y) or (x, y, sample_weight): nests of arrays with at least one example.
        in_flight: the number of micro-batches that are computed at once.

    Raises:
        ValueError: an argument out of range, or a model with loops, which hide their memory.
    """
    _checks.positive_integer("in_flight", in_flight)
    batch = map_tensors(as_tensor, keras.utils.unpack_x_y_sample_weight(example))
    optimizer = keras.optimizers.get(optimizer)
    if not model.built:
        model(map_tensors(lambda tensor: tensor[:1], batch[0]))
    if not optimizer.built:
        optimizer.build(model.trainable_weights)
    objective = Objective(loss, output_names=getattr(model, "output_names", None))
    found = plan_of(model, objective, optimizer, batch, in_flight)
    if found is None:
        raise ValueError(
            "model must have no loops, such as those of recurrent layers, whose memory its graph "
            f"does not show. Received: {model.name}"
        )
    return found


def plan_of(
    model: keras.Model,
    objective: Objective,
    optimizer: Any,
    batch: tuple,
    in_flight: int = 1,
    accumulator_dtype: Any = None,
) -> MemoryPlan | None:
    """The plan of a built model and optimizer, or None if loops hide the model's memory.

    Args:
        objective: the loss.
        batch: (x, y, sample_weight): tensors or their types.
        in_flight: the number of micro-batches that are computed at once.
        accumulator_dtype: as in `gradlab.Trainer`.
    """
    step = _Step(model, objective, batch)
    found = liveness(step.trace, step.gradients)
    if found is None:
        return None
    weights = sum(_bytes(variable, variable.dtype) for variable in model.variables)
    averages = sum(_bytes(variable, variable.dtype) for variable in optimizer.variables)
    accumulators = sum(
        _bytes(variable, accumulation_dtype(variable.dtype, accumulator_dtype))
        for variable in model.trainable_weights
    )
    cpu = WITH_ONEDNN if internals.uses_onednn() else WITHOUT_ONEDNN
    gaps = (cpu.variables - 1) * (weights + averages + accumulators)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    return MemoryPlan(
        weights=weights,
        optimizer=averages,
        accumulators=accumulators,
        runtime=0 if on_gpu else int(cpu.start + cpu.per_operation * len(found.fixed) + gaps),
        in_flight=in_flight,
        copies=1.0 if on_gpu else cpu.tensors,
        liveness=found,
    )


class _Step:
    """Traces the forward and backward pass of a micro-batch, and the addition of its gradients."""

    def __init__(self, model: keras.Model, objective: Objective, batch: tuple):
        self._model = model
        self._objective = objective
        self._batch = batch
        self._names: dict[int, set[str]] = {}

    def trace(self, examples: int) -> tf.Graph:
        """The graph for a number of examples."""
        specs = map_tensors(
            lambda tensor: tf.TensorSpec([examples, *tensor.shape[1:]], tensor.dtype), self._batch
        )
        variables = [variable.value for variable in self._model.trainable_weights]
        names: set[str] = set()

        @tf.function(autograph=False)
        def step(*batch):
            with internals.RecordingScope([]) as scope, tf.GradientTape() as tape:
                y_pred = internals.outputs_of(self._model, batch[0], True)
                terms = self._objective(batch, y_pred, scope.losses, examples)
                loss = total_loss(terms)
                for whole in (term.whole for term in terms if term.whole is not None):
                    loss += differentiable(
                        whole, [tf.ones_like(one) for one in tf.nest.flatten(whole.predictions)]
                    )
            gradients = [one for one in tape.gradient(loss, variables) if one is not None]
            names.update(
                (one.values if isinstance(one, tf.IndexedSlices) else one).name for one in gradients
            )
            # Reads each gradient, as its addition to the accumulator does.
            return loss, [tf.reduce_sum(tf.convert_to_tensor(one)) for one in gradients]

        graph = step.get_concrete_function(*specs).graph
        self._names[id(graph)] = names
        return graph

    def gradients(self, graph: tf.Graph) -> set[str]:
        """The names of the gradients of variables in a graph that was traced here."""
        return self._names[id(graph)]


def _bytes(variable: Any, dtype: Any) -> int:
    return tf.TensorShape(variable.shape).num_elements() * tf.as_dtype(dtype).size

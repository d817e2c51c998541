"""Every private part of Keras that gradlab uses, and one of TensorFlow. Tested with the oldest and
the newest Keras.

Each function says why the public API is not enough. Checked with Keras 3.14 and 3.15.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from tensorflow.python.util import _pywrap_util_port

from gradlab._batches import map_tensors, spec_of


class RecordingScope(keras.StatelessScope):
    """A stateless scope that keeps to the rules of `tf.Variable`, and records which variables were
    assigned.

    `keras.StatelessScope` is public, but inside it an assigned value passes on its gradient, which
    a `tf.Variable` does not. Here gradients of a trainable variable, whatever was assigned to it,
    are gradients of the variable. Each assignment inside the scope calls `add_update`.

    Args:
        mapping: pairs (variable, value to begin with). Other variables begin with their own value.
        shift: an integer scalar: other random seeds begin with a number that is so much larger.
            None: with their own.

        direct: variables that are assigned in loops, branches or functions inside the scope, whose
            values cannot leave these: they are assigned at once.

    Attributes:
        assigned: for each id(variable): (the variable, the number of assignments).
        direct: for each id(variable): those that were, or will be, assigned at once.
        callers: the outermost layers in whose calls variables were assigned.
    """

    def __init__(self, mapping: list[tuple], shift: tf.Tensor | None = None, direct: Iterable = ()):
        super().__init__([(v, _as_assigned(v, value)) for v, value in mapping], collect_losses=True)
        self._shift = shift
        self._graph = _graph()
        self.assigned: dict[int, tuple] = {}
        self.direct = {id(variable): variable for variable in direct}
        self.callers: list = []

    def add_update(self, update: tuple) -> None:
        variable, value = update
        self.assigned[id(variable)] = variable, self.assigned.get(id(variable), (None, 0))[1] + 1
        if id(variable) in self.direct or _graph() is not self._graph:
            self.direct[id(variable)] = variable
            variable._value.assign(value)
            return
        caller = getattr(global_state.get_global_attribute("current_call_ctx"), "entry_layer", None)
        if caller is not None and not any(caller is known for known in self.callers):
            self.callers.append(caller)
        super().add_update((variable, _as_assigned(variable, value)))

    def include(self, mapping: list[tuple]) -> None:
        """Lets more variables begin with a value: pairs (variable, value)."""
        self.state_mapping.update({id(v): _as_assigned(v, value) for v, value in mapping})

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable. Regularization losses need it for variables without a value in
        this scope too."""
        value = super().get_current_value(variable)
        if value is not None and id(variable) not in self.direct:
            return value
        if self._shift is not None and is_seed_state(variable):
            return variable._value + tf.cast(tf.stack([self._shift, 0]), variable.dtype)
        return variable._value


def _graph() -> Any:
    """The graph that is being traced; None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def variable_of_handle(handle: tf.Tensor) -> tf.DType | None:
    """The type of the variable behind a resource; None for another resource, such as a table."""
    shown = getattr(handle, "_handle_data", None)
    return (
        tf.as_dtype(shown.shape_and_type[0].dtype) if shown is not None and shown.is_set else None
    )


def _as_assigned(variable: Any, value: Any) -> Any:
    """The value of a variable after an assignment: the gradient stops, or is that of the variable
    if it is trained."""
    value = tf.stop_gradient(value)
    if not variable.trainable or not value.dtype.is_floating:
        return value
    own = tf.cast(variable.value, value.dtype)
    return value + (own - tf.stop_gradient(own))


class LossOfOutputs(CompileLoss):
    """Gives each output its loss, by the rules of `compile`, after each loss was replaced.

    The rules are private: nested structures, names of outputs, losses named by their shapes
    ("crossentropy").

    Args:
        loss, loss_weights, output_names: as for `keras.Model.compile`, and the names of the model's
            outputs.
        replace: a function (Keras loss, loss weight) -> the loss that is called instead.
    """

    def __init__(
        self, loss: Any, loss_weights: Any, output_names: list[str] | None, replace: Callable
    ):
        super().__init__(loss, loss_weights, output_names=output_names)
        self._flat_losses: Any
        self._replace = replace

    @property
    def metrics(self) -> list:
        return [_NoMetric()] * len(super().metrics)

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            one._replace(
                loss=self._replace(one.loss, 1.0 if one.loss_weights is None else one.loss_weights)
            )
            for one in self._flat_losses
        ]


class _NoMetric:
    variables = ()

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        pass


def compiled_loss(model: keras.Model) -> tuple:
    """What the model was compiled with: (loss, loss weights)."""
    loss = model._compile_loss
    return (None, None) if loss is None else (loss._user_loss, loss._user_loss_weights)


def compiled_metrics(model: keras.Model) -> list:
    """The metrics that the model was compiled with, in nests."""
    metrics = model._compile_metrics
    return [] if metrics is None else [metrics._user_metrics, metrics._user_weighted_metrics]


def never_build_loss(model: keras.Model) -> None:
    """Keeps Keras from calling the compiled loss to find out what it needs: it cannot pass on
    several outputs."""
    model._compile_loss.built = True


def compute_loss(model: keras.Model, *args: Any, training: bool) -> Any:
    """The result of the model's own `compute_loss`, whether or not it takes the argument
    `training`."""
    return model._compute_loss(*args, training=training)


def forget_added_losses(model: keras.Model) -> None:
    """Lets layers forget which losses they added before: they know them by `id`, which Python gives
    away again."""
    for layer in model._flatten_layers():
        layer._loss_ids.clear()


def layer_that_added(model: keras.Model, loss: Any) -> Any:
    """The layer that added a loss, or the model. The scope that collects losses does not keep
    it."""
    return next((layer for layer in model._flatten_layers() if id(loss) in layer._loss_ids), model)


def adds_means(layer: Any) -> bool:
    """Whether all losses that a layer adds are Keras' own activity regularization, a mean over the
    examples.

    Only Keras' own layers are sure to add nothing else.
    """
    regularizer = type(getattr(layer, "activity_regularizer", None))
    known = keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2
    return regularizer in known and type(layer).__module__.startswith("keras.src.layers.")


def has_own(model: keras.Model, method: str) -> bool:
    """Whether a model, or its class, has a method of its own instead of Keras' or gradlab's."""
    own = vars(model).get(method)
    if own is not None:
        return not hasattr(own, "of_gradlab")
    return getattr(type(model), method) is not getattr(keras.Model, method)


def metrics_of(model: keras.Model) -> list:
    """All metrics of a model, one by one. Keras puts those of `compile` into one object."""
    return [
        one
        for metric in model.metrics
        for one in (metric.metrics if isinstance(metric, CompileMetrics) else [metric])
    ]


def outputs_of(model: keras.Model, x: Any, training: bool) -> Any:
    """The outputs of a model, which learns of training only if its `call` takes that argument, as
    in Keras' steps."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


@contextlib.contextmanager
def frozen_metrics(model: keras.Model, but: Collection | None = None) -> Iterator[None]:
    """Lets `update_state` of the model's metrics do nothing, so that `compute_metrics` shows their
    results.

    Given some metrics, only those and the metrics of the model itself are updated.
    """
    metrics = [*model.metrics, *metrics_of(model)]
    if but is not None:
        metrics = [one for one in metrics_of(model) if not any(one is other for other in but)]
    try:
        for metric in metrics:
            vars(metric)["update_state"] = lambda *args, **kwargs: None
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("update_state", None)


def is_function_metric(metric: keras.Metric) -> bool:
    """Whether a metric is a function, of whose values `compile` takes the mean."""
    return type(metric) is keras.metrics.MeanMetricWrapper


def is_metric_of_keras(metric: keras.Metric) -> bool:
    """Whether Keras itself defines how a metric is updated."""
    return type(metric).update_state.__module__.startswith("keras.src.metrics.")


def loss_names(model: keras.Model) -> list[str]:
    """The names of the metrics of the losses, which a step updates after all others."""
    return ["loss", *(metric.name for metric in term_trackers(model))]


def create_global_seed() -> None:
    """Creates the variable behind random numbers without a seed of their own, unless it exists.

    No model owns it, and a stateless scope, in which Keras would create it, must not create
    variables.
    """
    state = random.getstate()
    with tf.init_scope():
        global_seed_generator()
    random.setstate(state)


def function_of_loss(loss: keras.losses.Loss) -> tuple[Callable | None, dict]:
    """The function behind a built-in loss and its arguments: tells what kind of labels the loss
    expects."""
    return getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})


# Keras' losses that give each example a loss of its own. One that a later Keras adds is not taken
# for such a one before somebody has looked at it.
BY_EXAMPLE = (
    *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error"),
    *("mean_squared_logarithmic_error", "huber", "log_cosh", "cosine_similarity", "poisson"),
    *("kl_divergence", "hinge", "squared_hinge", "categorical_hinge", "dice", "tversky", "ctc"),
    *("binary_crossentropy", "binary_focal_crossentropy", "sparse_categorical_crossentropy"),
    *("categorical_crossentropy", "categorical_focal_crossentropy"),
    "categorical_generalized_cross_entropy",
)


def is_by_example(loss: keras.losses.Loss) -> bool:
    """Whether a loss is one of Keras' own that give each example a loss of its own.

    An axis may still lie over the batch. A subclass with a `call` of its own is not Keras'.
    """
    function = function_of_loss(loss)[0]
    return (
        getattr(function, "__module__", None) == keras.losses.mean_squared_error.__module__
        and getattr(function, "__name__", "") in BY_EXAMPLE
        and getattr(type(loss), "call", None) is LossFunctionWrapper.call
    )


def relates_examples(loss: keras.losses.Loss) -> bool:
    """Whether a loss is Keras' own that compares the examples of a batch with each other."""
    return function_of_loss(loss)[0] is keras.losses.circle


def uses_onednn() -> bool:
    """Whether TensorFlow computes with oneDNN on this CPU, as it does by itself only on some."""
    return _pywrap_util_port.IsMklEnabled()


def same_rank(one: Any, other: Any) -> tuple:
    """Both tensors with the same rank, by the rule with which Keras aligns masks, weights and
    losses."""
    return squeeze_or_expand_to_same_rank(one, other)


_undivided = threading.local()
_swap = threading.Lock()
_inside = 0  # the number of blocks, of all threads, in which Keras' functions are exchanged


@contextlib.contextmanager
def undivided_losses() -> Iterator[None]:
    """Keeps Keras, in this thread, from dividing losses by the number of replicas to prepare a sum
    over them.

    It divides means over the examples, but no loss that is one number for a batch: a result does
    not show which it is. Outside of such blocks, Keras is as it was.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        yield
        return
    before = getattr(_undivided, "on", False)
    _undivided.on = True
    _exchange(1)
    try:
        yield
    finally:
        _exchange(-1)
        _undivided.on = before


def _exchange(more: int) -> None:
    """Exchanges the functions of Keras at the first block, and puts them back after the last."""
    global _inside
    with _swap:
        if _inside == 0:
            loss_module.scale_loss_for_distribution = _unless_undivided(_SCALE)
            loss_module.unscale_loss_for_distribution = _unless_undivided(_UNSCALE)
        _inside += more
        if _inside == 0:
            loss_module.scale_loss_for_distribution = _SCALE
            loss_module.unscale_loss_for_distribution = _UNSCALE


_SCALE = loss_module.scale_loss_for_distribution
_UNSCALE = loss_module.unscale_loss_for_distribution


def _unless_undivided(function: Callable) -> Callable:
    return lambda loss: loss if getattr(_undivided, "on", False) else function(loss)


def mask_of(tensor: Any) -> Any:
    """The mask that a layer attached to its output, or None. Losses read it from the tensor."""
    return getattr(tensor, "_keras_mask", None)


def layers_of(model: keras.Model) -> list:
    """All layers of a model, nested ones included. `model.layers` lists only the outermost ones."""
    return list(model._flatten_layers())


def variables_not_created() -> list[str]:
    """The paths of variables that layers wanted to create inside a stateless scope, which only
    leaves them waiting."""
    return [
        variable.path
        for variable in global_state.get_global_attribute("uninitialized_variables") or []
    ]


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`, which only its name
    shows."""
    return variable.name == "seed_generator_state"


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as layers do."""
    tensor._keras_mask = mask


def take_gradients_as_summed(optimizer: Any) -> None:
    """Tells a Keras optimizer that gradients are already summed over the replicas.

    Otherwise it sums them once more, and only after it has clipped them on each replica.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise ValueError(
            "Several replicas need a Keras optimizer, such as keras.optimizers.Adam. Received: "
            f"{optimizer!r}"
        )
    optimizer._all_reduce_sum_gradients = list


def loss_tracker(model: keras.Model) -> keras.Metric:
    """The metric "loss" of a compiled model, which `fit` shows."""
    return model._loss_tracker


def term_trackers(model: keras.Model) -> list:
    """The metrics of each output's own loss, in the order of the loss' terms; empty for a single
    output."""
    return model._compile_loss.metrics if model._compile_loss is not None else []


def build_from_batch(model: keras.Model, data: tuple, training: bool) -> None:
    """Creates the variables of a model, and to train those of its optimizer.

    Data is (x, y, sample_weight), or the types of these. `_symbolic_build` of Keras does the same,
    but not for sparse and ragged tensors. Without a strategy, metrics wait for `build_compiled`,
    which spares a call of the model.
    """
    layers_are_built = all(layer.built for layer in model._flatten_layers())
    if not layers_are_built or (tf.distribute.has_strategy() and _not_built(model)):

        def build():
            x, y, sample_weight = map_tensors(lambda tensor: _placeholder(spec_of(tensor)), data)
            with RecordingScope([]):  # which allows assignments in loops
                y_pred = outputs_of(model, x, training)
            _build_compiled(model, (x, y, sample_weight), y_pred, training)

        compute_output_spec(build)
    if training and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def build_compiled(model: keras.Model, batch: tuple, y_pred: Any, training: bool) -> None:
    """Creates the variables of the compiled metrics and losses, for traced tensors like these.

    In another thread: TensorFlow traces a function twice if a variable is created in its own.
    """
    if not _not_built(model):
        return
    failed: list[BaseException] = []
    types = map_tensors(tf.type_spec_from_value, (*batch, y_pred))
    masks = map_tensors(tf.type_spec_from_value, [mask_of(one) for one in tf.nest.flatten(y_pred)])

    def build():
        *alike, predicted = map_tensors(_placeholder, types)
        for tensor, mask in zip(tf.nest.flatten(predicted), map_tensors(_placeholder, masks)):
            if mask is not None:
                set_mask(tensor, mask)
        _build_compiled(model, tuple(alike), predicted, training)

    def build_outside():
        try:
            compute_output_spec(build)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=build_outside)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _not_built(model: keras.Model) -> list:
    """Those of the compiled losses and metrics that have not seen a batch yet."""
    both = model._compile_loss, model._compile_metrics
    return [one for one in both if one is not None and not one.built]


def _build_compiled(model: keras.Model, batch: tuple, y_pred: Any, training: bool) -> None:
    x, y, sample_weight = batch
    loss = model._compile_loss
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    if loss is not None and not loss.built:
        model._compute_loss(x, y, y_pred, sample_weight, training=training)


def _placeholder(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(spec.dtype, spec.shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = spec.shape[spec.ragged_rank + 1 :]
        return tf.compat.v1.ragged.placeholder(spec.dtype, spec.ragged_rank, shape)
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


@contextlib.contextmanager
def without_xla(model: keras.Model) -> Iterator[None]:
    """Keeps Keras from compiling a whole step with XLA; setting `jit_compile` itself would change
    the saved model."""
    kept = model.jit_compile
    model._jit_compile = False
    try:
        yield
    finally:
        model._jit_compile = kept

"""The optimizers of the experiments, once for tf.compat.v1 static graphs and once for TensorFlow 2.

Both versions clip, decay the weights and make their step once per update, with the mean gradients
of the window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from gradlab import _checks
from gradlab.lab.experiments.choices import OPTIMIZERS

if TYPE_CHECKING:
    import keras

v1 = tf.compat.v1


@dataclass(frozen=True)
class OptimizerConfig:
    """The settings of an optimizer, independent of the library that runs it.

    Attributes:
        name: "sgd", "momentum", "adam" or "adamw".
        momentum: the momentum of "momentum".
        beta_1, beta_2, epsilon: the parameters of "adam" and "adamw" (Kingma and Ba 2015).
        weight_decay: the weight decay of "adamw": each update first subtracts learning rate *
            weight_decay * weight from each weight (Loshchilov and Hutter 2019).
        clip_norm: the largest global norm of the gradients; larger gradients are scaled down to it.
            None: no clipping.
    """

    name: str = "adam"
    momentum: float = 0.9
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.004
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _checks.one_of("optimizer", self.name, OPTIMIZERS)
        if self.clip_norm is not None:
            _checks.positive_number("clip_norm", self.clip_norm)


def keras_optimizer(config: OptimizerConfig) -> "keras.Optimizer":
    """A Keras optimizer with these settings. Its learning rate is 0 until it is set, before each
    update."""
    import keras

    common: dict[str, Any] = {"learning_rate": 0.0, "global_clipnorm": config.clip_norm}
    adam = {"beta_1": config.beta_1, "beta_2": config.beta_2, "epsilon": config.epsilon}
    if config.name == "sgd":
        return keras.optimizers.SGD(**common)
    if config.name == "momentum":
        return keras.optimizers.SGD(momentum=config.momentum, **common)
    if config.name == "adam":
        return keras.optimizers.Adam(**adam, **common)
    return keras.optimizers.AdamW(weight_decay=config.weight_decay, **adam, **common)


def static_graph_optimizer(config: OptimizerConfig) -> Callable:
    """A function (learning rate tensor) -> tf.compat.v1.train.Optimizer with these settings."""

    def exact(value):
        # tf.compat.v1 rounds Python numbers to float32. It casts float64 tensors directly to the
        # variable's type.
        return lambda: tf.constant(value, tf.float64)

    def build(learning_rate):
        if config.name == "sgd":
            inner = v1.train.GradientDescentOptimizer(learning_rate)
        elif config.name == "momentum":
            inner = _KerasMomentum(learning_rate, exact(config.momentum))
        else:
            inner = v1.train.AdamOptimizer(
                learning_rate, exact(config.beta_1), exact(config.beta_2), exact(config.epsilon)
            )
        decay = config.weight_decay if config.name == "adamw" else 0.0
        return _ClipAndDecay(inner, learning_rate, decay, config.clip_norm)

    return build


class _KerasMomentum(tf.compat.v1.train.MomentumOptimizer):
    """Momentum as in Keras: velocity = momentum * velocity - rate * gradient; weight += velocity.

    In tf.compat.v1 the velocity does not include the rate. The two agree until the rate changes, as
    in a schedule.
    """

    def __init__(self, learning_rate: tf.Tensor, momentum: Callable[[], tf.Tensor]):
        super().__init__(learning_rate, momentum)
        self._rate = learning_rate
        self._keep = momentum

    def _resource_apply_dense(self, grad, var):
        return tf.raw_ops.ResourceApplyKerasMomentum(
            var=var.handle,
            accum=self.get_slot(var, "momentum").handle,
            lr=tf.cast(self._rate, grad.dtype),
            grad=grad,
            momentum=tf.cast(self._keep(), grad.dtype),
        )


class _ClipAndDecay:
    """A tf.compat.v1 optimizer that clips by the global norm and decays the weights before applying
    gradients."""

    def __init__(self, inner, learning_rate, weight_decay, clip_norm):
        self._inner = inner
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._clip_norm = clip_norm

    def compute_gradients(self, loss, variables):
        return self._inner.compute_gradients(loss, variables)

    def apply_gradients(self, grads_and_vars, global_step, name):
        gradients, variables = zip(*grads_and_vars)
        if self._clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._clip_norm)
        reached = [
            variable for gradient, variable in zip(gradients, variables) if gradient is not None
        ]
        decays = []
        if self._weight_decay:
            # The gradients must be computed before the weights decay.
            with tf.control_dependencies(
                [gradient for gradient in gradients if gradient is not None]
            ):
                rate = self._learning_rate * self._weight_decay
                decays = [
                    variable.assign_sub(variable * tf.cast(rate, variable.dtype))
                    for variable in reached
                ]
        with tf.control_dependencies(decays):
            return self._inner.apply_gradients(list(zip(gradients, variables)), global_step, name)

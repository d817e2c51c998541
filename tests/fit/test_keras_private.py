"""Each private part of Keras and TensorFlow that gradlab uses is where it was, and does what it did.

No test here traces a model: they say in a second what a new release has changed.
"""

import importlib
import inspect
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradlab.fit import keras_private


def built():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", ["mse"], metrics=["mae"])
    return model


def attribute(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


MODULES = [
    "keras.src.backend.compute_output_spec",
    "keras.src.backend.common.global_state.get_global_attribute",
    "keras.src.losses.loss.scale_loss_for_distribution",
    "keras.src.losses.loss.unscale_loss_for_distribution",
    "keras.src.losses.loss.squeeze_or_expand_to_same_rank",
    "keras.src.losses.losses.LossFunctionWrapper",
    "keras.src.random.seed_generator.global_seed_generator",
    "keras.src.trainers.compile_utils.CompileLoss",
    "keras.src.trainers.compile_utils.CompileMetrics",
    "tensorflow.python.util._pywrap_util_port.IsMklEnabled",
]


@pytest.mark.parametrize("path", MODULES)
def test_it_can_be_imported(path):
    assert callable(attribute(path)), f"{path} is gone: gradlab/fit/keras_private.py imports it"


ATTRIBUTES = {
    "Model._compile_loss": lambda: built()._compile_loss.built is False,
    "Model._compile_metrics": lambda: built()._compile_metrics.built is False,
    "CompileMetrics._user_metrics": lambda: built()._compile_metrics._user_metrics == ["mae"],
    "CompileMetrics._user_weighted_metrics": lambda: (
        built()._compile_metrics._user_weighted_metrics is None
    ),
    "Model._compute_loss": lambda: callable(built()._compute_loss),
    "Model._flatten_layers": lambda: (
        [type(one) for one in built()._flatten_layers()][1:]
        == [keras.layers.InputLayer, keras.layers.Dense]
        or [type(one) for one in built()._flatten_layers()][-1] is keras.layers.Dense
    ),
    "Model._loss_tracker": lambda: built()._loss_tracker.name == "loss",
    "Model._jit_compile": lambda: built()._jit_compile == built().jit_compile,
    "Model._post_build": lambda: callable(built()._post_build),
    "Model._call_has_training_arg": lambda: built()._call_has_training_arg is True,
    "Layer._loss_ids": lambda: built().layers[0]._loss_ids == set(),
    "CompileLoss._user_loss": lambda: built()._compile_loss._user_loss == ["mse"],
    "CompileLoss._user_loss_weights": lambda: built()._compile_loss._user_loss_weights is None,
    "LossFunctionWrapper.fn": lambda: (
        keras.losses.MeanSquaredError().fn is keras.losses.mean_squared_error
    ),
    "LossFunctionWrapper._fn_kwargs": lambda: (
        keras.losses.Huber(0.5)._fn_kwargs == {"delta": 0.5}
        or "delta" in keras.losses.Huber(0.5)._fn_kwargs
    ),
    "Variable._value": lambda: isinstance(keras.Variable([1.0])._value, tf.Variable),
    "Optimizer._all_reduce_sum_gradients": lambda: callable(
        keras.optimizers.SGD()._all_reduce_sum_gradients
    ),
    "the handle of a tf.Variable": lambda: (
        keras_private.variable_of_handle(tf.Variable(1.0).handle) == tf.float32
    ),
    "the name of a seed's variable": lambda: keras_private.is_seed_state(
        keras.random.SeedGenerator(1).state
    ),
    "the module of Keras' metrics": lambda: keras_private.is_metric_of_keras(
        keras.metrics.MeanSquaredError()
    ),
    "the module of Keras' losses": lambda: keras_private.is_by_example(
        keras.losses.MeanSquaredError()
    ),
    "the module of Keras' layers": lambda: keras_private.adds_means(
        keras.layers.Dense(1, activity_regularizer="l2")
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_it_is_what_it_was(name):
    rule = f"{name} is not what gradlab/fit/keras_private.py needs"
    try:
        assert ATTRIBUTES[name](), rule
    except AttributeError as error:
        pytest.fail(f"{rule}: {error}")


def test_every_loss_of_keras_is_known():
    """One that a later Keras adds fails here, and is compared meanwhile as an unknown one is."""
    module = sys.modules[keras.losses.mean_squared_error.__module__]
    functions = {
        name
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }
    helpers = {"convert_binary_labels_to_hinge"}
    assert functions - helpers == {*keras_private.BY_EXAMPLE, "circle"}


def test_a_loss_that_keras_adds_is_not_taken_for_one_by_example(monkeypatch):
    module = keras.losses.mean_squared_error.__module__

    def over_the_batch(y_true, y_pred):
        return keras.ops.max(y_true - y_pred, axis=0)

    over_the_batch.__module__ = module
    loss = keras.losses.MeanSquaredError()
    assert keras_private.is_by_example(loss)
    monkeypatch.setattr(loss, "fn", over_the_batch)
    assert not keras_private.is_by_example(loss)


def test_the_mask_of_a_tensor_is_an_attribute_of_it():
    masked = keras.layers.Masking()(np.zeros([1, 2, 3], "float32"))
    assert np.array_equal(keras_private.mask_of(masked), [[False, False]])


def test_losses_flattened_after_the_first_call_take_the_place_of_those_of_compile():
    taken = []

    def replace(loss, loss_weight):
        taken.append((loss.name, loss_weight))
        return lambda *seen: tf.zeros([])

    loss = keras_private.LossOfOutputs(["mse", "mae"], [1.0, 2.0], ["a", "b"], replace)
    both = [tf.ones([3, 1]), tf.ones([3, 1])]
    assert float(loss(both, both)) == 0
    assert [weight for _, weight in taken] == [1.0, 2.0]


def test_variables_in_a_stateless_scope_wait_to_be_created():
    with keras.StatelessScope():
        waiting = keras.Variable(keras.initializers.Zeros(), shape=[1], name="waits")
        assert waiting.path in keras_private.variables_not_created()
    assert waiting.path not in keras_private.variables_not_created()


def test_the_outermost_layer_of_a_call_is_known():
    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=[], initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign_add(1.0)
            return x

    layer = Counts()
    layer.build([1])
    with keras_private.RecordingScope([]) as scope:
        layer(np.zeros([1], "float32"))
    assert scope.callers == [layer] and scope.assigned[id(layer.count)][1] == 1

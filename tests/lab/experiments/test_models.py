"""The networks: their shapes, their initial weights and their dropout."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradlab.lab.experiments import models


def images(model, examples=3):
    return np.random.default_rng(0).random((examples, *model.input_shape), np.float32)


def test_lenet_is_the_published_network():
    assert models.lenet().shapes == {
        "conv1/kernel": (5, 5, 1, 6),
        "conv1/bias": (6,),
        "conv2/kernel": (5, 5, 6, 16),
        "conv2/bias": (16,),
        "dense1/kernel": (256, 120),
        "dense1/bias": (120,),
        "dense2/kernel": (120, 84),
        "dense2/bias": (84,),
        "logits/kernel": (84, 10),
        "logits/bias": (10,),
    }


@pytest.mark.parametrize("logit_relu", [True, False])
def test_lenet_computes_the_same_as_its_layers_in_keras(logit_relu):
    model = models.lenet(logit_relu=logit_relu)
    layers = keras.layers
    twin = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(6, 5, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10, activation="relu" if logit_relu else None),
        ]
    )
    weights = model.initial_weights(0)
    twin.set_weights(list(weights.values()))
    x = images(model)
    ours = model.logits(weights, x, None).numpy()
    np.testing.assert_allclose(ours, twin(x), rtol=1e-5, atol=1e-6)
    assert (ours >= 0).all() == logit_relu


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_every_model_takes_the_images_of_every_data_set(name, shape):
    model = models.build(name, shape)
    weights = model.initial_weights(0)
    assert model.logits(weights, images(model), None).shape == (3, 10)
    losses = model.losses(weights, images(model), [0, 5, 9], np.int32([1, 2]))
    assert losses.shape == (3,) and np.isfinite(losses).all()
    assert model.classes == 10


def test_initial_weights_are_glorot_uniform_and_repeatable():
    model = models.lenet()
    weights = model.initial_weights(3)
    for name, shape in model.shapes.items():
        assert weights[name].shape == shape and weights[name].dtype == np.float32
        if name.endswith("bias"):
            assert not weights[name].any()
        else:
            field = math.prod(shape[:-2])
            limit = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
            assert 0.9 * limit < np.abs(weights[name]).max() <= limit
            assert abs(weights[name].std() / (limit / math.sqrt(3)) - 1) < 0.15
        assert np.array_equal(weights[name], model.initial_weights(3)[name])
    assert not np.array_equal(weights["conv1/kernel"], model.initial_weights(4)["conv1/kernel"])


def test_dropout_depends_only_on_its_seed():
    model = models.lenet()
    weights, x = model.initial_weights(0), images(model, 20)
    compiled = tf.function(lambda seed: model.logits(weights, x, seed))
    first = compiled(tf.constant([1, 2])).numpy()
    assert np.array_equal(first, compiled(tf.constant([1, 2])))
    np.testing.assert_allclose(
        first, model.logits(weights, x, tf.constant([1, 2])), rtol=1e-5, atol=1e-6
    )
    for other in ([1, 3], [2, 2]):
        assert not np.allclose(first, compiled(tf.constant(other)))


def test_dropout_drops_its_rate_and_keeps_the_mean():
    rates = (0.2, 0.5, 0.5)
    ones = tf.ones([1000, 10, 10])
    masks = models.dropout_masks(tf.constant([0, 0]), ones, [(rate, (10, 10)) for rate in rates])
    dropped = [models.drop(ones, mask).numpy() for mask in masks]
    for rate, layer in zip(rates, dropped):
        assert set(np.unique(layer)) == {np.float32(0), np.float32(1 / (1 - rate))}
        assert abs((layer == 0).mean() - rate) < 0.01 and abs(layer.mean() - 1) < 0.02
    for one, other, share in ((0, 1, 0.5), (1, 2, 0.5)):  # the layers' masks are independent
        assert abs(((dropped[one] == 0) == (dropped[other] == 0)).mean() - share) < 0.01
    assert models.drop(ones, None) is ones


def test_dropped_units_have_no_gradient_and_kept_units_are_scaled():
    x = tf.Variable(np.random.default_rng(0).normal(size=[50, 8]).astype("float32"))
    [mask] = models.dropout_masks(tf.constant([3, 4]), x, [(0.5, (8,))])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(models.drop(x, mask) ** 2)
    np.testing.assert_allclose(
        tape.gradient(total, x), 2 * x.numpy() * mask.numpy() ** 2, rtol=1e-6
    )


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError, match="model must be one of lenet, dense, vgg. Received: 'resnet'"
    ):
        models.build("resnet")

"""Tests that every framework builds the same networks."""

import math

import numpy as np
import pytest

from benchmarks import networks
from benchmarks.keras_models import keras_model

NETWORKS = "lenet", "dense", "vgg16", "transformer", "resnet"
NEW = "transformer", "resnet"  # the networks without a gradlab model


def torch_ways():
    return pytest.importorskip(
        "benchmarks.torch_ways",
        reason="PyTorch is not installed (extra bench)",
        exc_type=ImportError,
    )


def jax_ways():
    return pytest.importorskip(
        "benchmarks.jax_ways", reason="JAX is not installed (extra bench)", exc_type=ImportError
    )


def random_weights(model) -> None:
    """Gives a Keras model random weights: with zero biases and scales of one, a wrong bias or scale
    has no effect."""
    rng = np.random.default_rng(1)
    for weight in model.weights:
        fan_in = math.prod(weight.shape[:-1]) if len(weight.shape) > 1 else 100
        weight.assign(weight + rng.normal(0, fan_in**-0.5, weight.shape))


def in_order(model) -> list[np.ndarray]:
    """A Keras model's weights in the order and shapes of `benchmarks.jax_ways.functions`."""
    weights = []
    for layer in model.layers:
        values = layer.get_weights()
        if type(layer).__name__ == "MultiHeadAttention":
            width, heads, size = values[0].shape
            kernel = np.concatenate(
                [kernel.reshape(width, heads * size) for kernel in values[0:6:2]], axis=1
            )
            bias = np.concatenate([bias.reshape(heads * size) for bias in values[1:6:2]])
            values = [kernel, bias, values[6].reshape(heads * size, width), values[7]]
        weights += values
    return weights


def copy_to_torch(weights: list[np.ndarray], module) -> None:
    """PyTorch has a kernel's outputs first, in (units, inputs) and (filters, channels, height,
    width)."""
    import torch

    with torch.no_grad():
        for (name, parameter), value in zip(module.named_parameters(), weights, strict=True):
            owner = module.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, (torch.nn.Linear, torch.nn.Conv2d)) and value.ndim > 1:
                value = np.moveaxis(value, (-1, -2), (0, 1))
            assert tuple(parameter.shape) == value.shape
            parameter.copy_(torch.from_numpy(value.copy()))


def keras_losses(model, x, y) -> np.ndarray:
    import keras

    return np.asarray(
        keras.losses.sparse_categorical_crossentropy(y, model(x, training=False), from_logits=True)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_keras_has_as_many_parameters_as_gradlab(name):
    network = networks.build(name)
    if network.model is None:
        assert name in NEW
    else:
        assert keras_model(network).count_params() == sum(
            map(math.prod, network.model.shapes.values())
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_has_as_many_parameters_as_keras(name):
    network = networks.build(name)
    found = sum(weight.numel() for weight in torch_ways().module(network).parameters())
    assert found == keras_model(network).count_params()


@pytest.mark.parametrize("name", NETWORKS)
def test_jax_has_as_many_parameters_as_keras(name):
    network = networks.build(name)
    weights, _ = jax_ways().functions(network)
    assert sum(weight.size for weight in weights) == keras_model(network).count_params()


@pytest.mark.parametrize("name", NEW)
def test_torch_gives_the_loss_of_keras(name):
    network = networks.build(name)
    x, y = networks.batch(network, 8)
    model, module = keras_model(network), torch_ways().module(network)
    random_weights(model)
    copy_to_torch(in_order(model), module)
    import torch

    inputs, classes = torch_ways().tensors(x, y)
    losses = (
        torch.nn.functional.cross_entropy(module(inputs), classes, reduction="none")
        .detach()
        .numpy()
    )
    np.testing.assert_allclose(losses, keras_losses(model, x, y), rtol=1e-4)


@pytest.mark.parametrize("name", NEW)
def test_jax_gives_the_loss_of_keras(name):
    network = networks.build(name)
    x, y = networks.batch(network, 8)
    model = keras_model(network)
    random_weights(model)
    initial, mean_loss = jax_ways().functions(network)
    weights = in_order(model)
    assert [weight.shape for weight in weights] == [weight.shape for weight in initial]
    import jax

    # One example at a time, so that errors of two examples cannot cancel in their mean.
    losses = [
        mean_loss(weights, x[i : i + 1], y[i : i + 1], jax.random.key(0)) for i in range(len(x))
    ]
    np.testing.assert_allclose(losses, keras_losses(model, x, y), rtol=1e-4)


def test_padding_does_not_change_the_output():
    network = networks.build("transformer")
    x, _ = networks.batch(network, 8)
    model = keras_model(network)
    random_weights(model)
    before = model(x).numpy()
    [embedding] = [layer for layer in model.layers if type(layer).__name__ == "Embedding"]

    def logits_with_other_vector(token):
        vectors = embedding.embeddings.numpy()
        vectors[token] += 1
        embedding.embeddings.assign(vectors)
        return model(x).numpy()

    assert (x == networks.PADDING).any()
    np.testing.assert_allclose(logits_with_other_vector(networks.PADDING), before, rtol=1e-6)
    # The first token is not padding
    assert abs(logits_with_other_vector(x[0, 0])[0] - before[0]).max() > 1e-3


def test_texts_are_tokens_followed_by_padding():
    network = networks.build("transformer")
    x, y = networks.batch(network, 1000)
    real = x != networks.PADDING
    lengths = real.sum(1)
    assert x.shape == (1000, 64) and x.dtype == y.dtype == np.int32
    assert x.min() == networks.PADDING and x.max() == 999 and set(y) == set(range(10))
    assert lengths.min() == networks.SHORTEST and lengths.max() == 64
    # Padding is only at the end
    np.testing.assert_array_equal(real, np.arange(64) < lengths[:, None])

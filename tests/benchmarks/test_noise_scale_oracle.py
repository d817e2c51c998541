"""The noise scales of the study of normalization layers against another package and another
framework: gns-pytorch, on the same transformer in PyTorch."""

import functools

import keras
import numpy as np
import pytest

import gradlab
from gradlab.lab.experiments import datasets
from gradlab.lab.reproduce import norm_layers

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra bench)")
gns_pytorch = pytest.importorskip(
    "gns_pytorch", reason="gns-pytorch is not installed (extra bench)"
)

EXAMPLES = 64


class Transformer(torch.nn.Module):
    """The study's transformer, with its layers in Keras' order."""

    def __init__(self):
        super().__init__()
        nn, features = torch.nn, norm_layers.FEATURES
        norm = functools.partial(nn.LayerNorm, features, eps=1e-3)  # Keras' epsilon
        made = [nn.Linear(56, features)]
        for _ in range(2):
            made += [norm(), nn.MultiheadAttention(features, 4, batch_first=True), norm()]
            made += [nn.Linear(features, 2 * features), nn.Linear(2 * features, features)]
        self.layers = nn.ModuleList([*made, norm(), nn.Linear(features, 10)])

    def forward(self, rows):
        first, *blocks, last_norm, last = self.layers
        x = first(rows)
        for start in (0, 5):
            norm, attention, second_norm, wide, back = blocks[start : start + 5]
            normalized = norm(x)
            x = x + attention(normalized, normalized, normalized, need_weights=False)[0]
            x = x + back(torch.nn.functional.gelu(wide(second_norm(x))))
        return last(last_norm(x).mean(dim=1))


def copy_weights(model: keras.Model, other: Transformer) -> None:
    """Gives the layers in PyTorch the weights of those in Keras."""
    layers = [layer for layer in model.layers if layer.weights]
    for layer, twin in zip(layers, other.layers, strict=True):
        weights = [torch.tensor(weight) for weight in layer.get_weights()]
        if isinstance(layer, keras.layers.MultiHeadAttention):
            features = norm_layers.FEATURES
            kernels = [kernel.reshape(features, features).T for kernel in weights[::2]]
            biases = [bias.reshape(features) for bias in weights[1::2]]
            set_to(twin.in_proj_weight, torch.cat(kernels[:3]))
            set_to(twin.in_proj_bias, torch.cat(biases[:3]))
            set_to(twin.out_proj.weight, kernels[3])
            set_to(twin.out_proj.bias, biases[3])
        else:
            kernel = weights[0]
            set_to(twin.weight, kernel.T if kernel.ndim == 2 else kernel)
            set_to(twin.bias, weights[1])


def set_to(parameter, value) -> None:
    assert parameter.shape == value.shape
    parameter.data = value.contiguous()


def test_the_noise_scales_are_those_of_gns_pytorch():
    data = datasets.load("mnist")
    x = norm_layers.sequences(data.train_images[:EXAMPLES])
    y = data.train_labels[:EXAMPLES].astype("int32")
    model = norm_layers.transformer(0)
    random = np.random.default_rng(0)
    # Where biases are 0 and scales 1, a wrong one has no effect
    model.set_weights([w + 0.1 * random.standard_normal(w.shape) for w in model.get_weights()])
    other = Transformer()
    copy_weights(model, other)
    logits = other(torch.tensor(x))
    np.testing.assert_allclose(logits.detach(), model(x), rtol=0, atol=1e-4)
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(y).long(), reduction="none")
    of_norms = [layer for layer in other.layers if isinstance(layer, torch.nn.LayerNorm)]
    expected = [
        gns_pytorch.compute_gns(losses, part, param_percentage=1.0, batch_percentage=1.0)
        for part in (other, torch.nn.ModuleList(of_norms))
    ]
    norms = norm_layers.ExampleNorms(model)
    squares, of_means, _ = norms.update(x, y)
    found = [
        gradlab.gradient_noise_scale(squares[i : i + 1] ** 0.5, of_means[i : i + 1] ** 0.5, 1).value
        for i in range(2)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-3)

"""The usual accumulation loop in PyTorch: eager, with the fused optimizer, and with a compiled
forward pass."""

import numpy as np
import torch
from torch import nn

from benchmarks.networks import EPSILON, PADDING, Network, Way, output_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# As TensorFlow does it on a GPU, unless told otherwise
torch.backends.cuda.matmul.allow_tf32 = True


class _Masked(nn.Module):
    """A layer whose forward pass also takes which tokens are real, that is, not padding; None for
    images."""


class _Layers(_Masked, nn.Sequential):
    def forward(self, x, real=None):
        for layer in self:
            x = layer(x, real) if isinstance(layer, _Masked) else layer(x)
        return x


class _Residual(_Layers):
    def forward(self, x, real=None):
        return x + super().forward(x, real)


class _TextReader(_Layers):
    def forward(self, x):
        return super().forward(x, x != PADDING)


class _Positions(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(tokens, width).uniform_(-0.05, 0.05))

    def forward(self, x):
        return x + self.vectors


class _Attention(_Masked):
    def __init__(self, width: int, heads: int, size: int):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * heads * size)
        self.outputs = nn.Linear(heads * size, width)

    def forward(self, x, real):
        # (examples, tokens, 3 * heads * size) becomes query, key and value, each (examples, heads,
        # tokens, size).
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, real[:, None, None])
        return self.outputs(mixed.transpose(1, 2).flatten(2))


class _MeanOfTokens(_Masked):
    def forward(self, x, real):
        ones = real[..., None].to(x.dtype)
        return (x * ones).sum(1) / ones.sum(1)


def module(network: Network) -> nn.Sequential:
    """Builds the network as a torch module. The images' channels come before their height and
    width."""
    layers = _modules(network.layers, network.input_shape)
    kind = _TextReader if network.reads_tokens else _Layers
    return kind(*layers).to(DEVICE)


def _modules(layers: tuple[tuple, ...], shape: tuple[int, ...]) -> list[nn.Module]:
    modules = []
    for layer in layers:
        modules.append(_module(layer, shape))
        shape = output_shape(layer, shape)
    return modules


def _module(layer: tuple, shape: tuple[int, ...]) -> nn.Module:
    """A layer as a torch module. shape: that of one input of the layer, with the channels last."""
    match layer:
        case "residual", layers:
            return _Residual(*_modules(layers, shape))
        case "conv", filters, size, padding:
            return nn.Conv2d(shape[-1], filters, size, padding=padding)
        case ("pool",):
            return nn.MaxPool2d(2)
        case ("mean of pixels",):
            return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        case ("flatten",):
            return nn.Flatten()
        case "dense", units:
            return nn.Linear(shape[-1], units)
        case ("relu",):
            return nn.ReLU()
        case "dropout", rate:
            return nn.Dropout(rate)
        case "group norm", groups:
            return nn.GroupNorm(groups, shape[-1], EPSILON)
        case ("layer norm",):
            return nn.LayerNorm(shape[-1], EPSILON)
        case "embedding", tokens, width:
            return nn.Embedding(tokens, width)
        case ("positions",):
            return _Positions(*shape)
        case "attention", heads, size:
            return _Attention(shape[-1], heads, size)
        case ("mean of tokens",):
            return _MeanOfTokens()
    raise ValueError(f"layer must be one of those that Network lists. Received: {layer}")


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes as `module` and the cross-entropy take them: images with the channels
    first."""
    x = x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x
    return torch.from_numpy(x).to(DEVICE), torch.from_numpy(y.astype("int64")).to(DEVICE)


def _loop(fused: bool = False, compiled: bool = False, channels_last: bool = False) -> Way:
    """Backward passes of loss / k for k micro-batches, then one optimizer step.

    fused: whether Adam changes all weights in one operation. compiled: whether torch.compile
    compiles the forward and backward passes of a micro-batch. channels_last: whether images lie in
    memory with their channels last.
    """

    def way(network, k, b, x, y):
        if channels_last and x.ndim != 4:
            raise RuntimeError("only images have channels")
        model = module(network).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
        inputs, classes = tensors(x, y)
        if channels_last:
            model, inputs = (
                model.to(memory_format=torch.channels_last),
                inputs.to(memory_format=torch.channels_last),
            )

        def loss_of(inputs, classes):
            return nn.functional.cross_entropy(model(inputs), classes) / k

        if compiled:
            # By default, all functions compiled from this line share one small cache, and PyTorch
            # goes back to eager execution without an error once it is full.
            loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False, isolate_recompiles=True)
            loss_of(inputs[:b], classes[:b]).backward()

        def run(updates):
            for _ in range(updates):
                optimizer.zero_grad()
                for start in range(0, k * b, b):
                    rows = slice(start, start + b)
                    loss = loss_of(inputs[rows], classes[rows])
                    loss.backward()
                optimizer.step()
                loss.item()

        return run

    return way


WAYS: dict[str, dict[str, Way]] = {
    "PyTorch loop": {
        "eager": _loop(),
        "fused Adam": _loop(fused=True),
        "fused Adam, channels last": _loop(fused=True, channels_last=True),
        "torch.compile, fused Adam": _loop(fused=True, compiled=True),
    }
}

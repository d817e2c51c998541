"""The usual accumulation loop in PyTorch."""

import numpy as np
import torch
from torch import nn

from benchmarks.networks import Network, Run, Way


def module(network: Network) -> nn.Sequential:
    """Builds the network as a torch module. The images' channels come before their height and width."""
    height, _, channels = network.input_shape
    layers = []
    for name, *sizes in network.layers:
        if name == "conv":
            filters, size, padding = sizes
            layers.append(nn.Conv2d(channels, filters, size, padding=padding))
            height, channels = height if padding == "same" else height - size + 1, filters
        elif name == "pool":
            layers.append(nn.MaxPool2d(2))
            height //= 2
        elif name == "flatten":
            layers.append(nn.Flatten())
            channels = height * height * channels
        elif name == "dense":
            layers.append(nn.Linear(channels, sizes[0]))
            channels = sizes[0]
        else:
            layers.append(nn.ReLU() if name == "relu" else nn.Dropout(*sizes))
    return nn.Sequential(*layers)


def loop(network: Network, k: int, b: int, x: np.ndarray, y: np.ndarray) -> Run:
    """A `Way`: backward passes of loss / k for k micro-batches, then one optimizer step."""
    model = module(network).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, classes = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y.astype("int64"))

    def run(updates):
        for _ in range(updates):
            optimizer.zero_grad()
            for start in range(0, k * b, b):
                rows = slice(start, start + b)
                loss = nn.functional.cross_entropy(model(images[rows]), classes[rows]) / k
                loss.backward()
            optimizer.step()
            loss.item()

    return run


WAYS: dict[str, Way] = {"PyTorch loop": loop}

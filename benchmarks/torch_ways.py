"""The usual accumulation loop in PyTorch."""

import torch
from torch import nn


def module(network):
    """The network as a torch module, channels first."""
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


def loop(network, k, b, x, y):
    """loss / k, backward, k times; then step."""
    model = module(network).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y.astype("int64"))

    def run(updates):
        for _ in range(updates):
            optimizer.zero_grad()
            for start in range(0, k * b, b):
                loss = nn.functional.cross_entropy(model(x[start : start + b]), y[start : start + b]) / k
                loss.backward()
            optimizer.step()
            loss.item()

    return run


WAYS = {"PyTorch loop": loop}

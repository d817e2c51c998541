"""The probes: small trainings in which each bug leaves a trace of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gradlab.auditing.models import SHAPES
from gradlab.auditing.problem import Problem, initial_weights

# What an adapter may say that its loop supports.
FEATURES = {
    "tokens": "texts with padding, averaged over their tokens",
    "clip_norm": "clipping by the global norm",
    "schedule": "a learning rate that changes from update to update",
    "momentum": "SGD with momentum 0.9",
    "adam": "Adam",
    "adamw": "AdamW with weight decay",
    "replicas": "several replicas that share the micro-batches of a window",
    "nonfinite": "leaving out gradients that are not finite",
    "contrastive": "a loss that compares each example with the others of the window",
    "dropout": "random masks in both passes of a contrastive loss",
}
BY_DEFAULT = ("tokens", "clip_norm", "schedule", "momentum", "adam", "adamw")


class ProbeTraining(NamedTuple):
    """A training that an adapter runs.

    Attributes:
        name: what it looks at.
        needs: the features that a loop must support for it.
        make: a function () -> a new `Problem`, whose arrays nobody else has.
        is_exact: whether a sum in half precision is known to the digit.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[], Problem]
    is_exact: bool = False


def _batches(model: str, sizes: list[int], seed: int) -> list[tuple]:
    """Micro-batches of these sizes with random data, in which the later ones have larger
    targets."""
    generator = np.random.default_rng(seed)
    found: list[tuple] = []
    x: Any
    y: Any
    for number, size in enumerate(sizes):
        if model == "tokens":
            lengths = (
                generator.integers(1, 7, size) if number % 2 else generator.integers(4, 7, size)
            )
            x, y = (
                generator.integers(0, SHAPES[model]["embedding"][0], [size, 6]) for _ in range(2)
            )
            found.append((x, y, (np.arange(6) < lengths[:, np.newaxis]).astype(float)))
        elif model == "embedding":
            targets = generator.normal(0.3 * number, 1, [size, 1])
            found.append((generator.integers(0, SHAPES[model]["embedding"][0], [size, 5]), targets))
        elif model == "pairs":
            x = generator.normal(0, 1, [size, 4])
            found.append((x, x + generator.normal(0, 0.5, [size, 4])))
        else:
            x = generator.normal(0, 1 + 0.15 * (number % 5), [size, 4])
            labels = model == "two_layers"
            y = (
                generator.integers(0, 3, size)
                if labels
                else generator.normal(0.2 * number, 1, [size, 1])
            )
            found.append((x, y))
    return found


def _made(model: str, seed: int, epochs: list[list[int]], k: int, **more: Any) -> Problem:
    data = [_batches(model, sizes, seed + number) for number, sizes in enumerate(epochs)]
    return Problem(model, initial_weights(model, seed), data, k, **more)


def _halves() -> Problem:
    """A gradient of 4096 and 63 of 1: in half precision, only the first one is left of their
    sum."""
    x = np.array([[1.0, 0.0, 0.0, 0.0]])
    window = [(x, np.array([[-2048.0]]))] + 63 * [(x, np.array([[-0.5]]))]
    weights = {name: np.zeros(shape) for name, shape in SHAPES["linear"].items()}
    return Problem("linear", weights, [window], 64, learning_rate=lambda update: 1e-3)


def _with_nan() -> Problem:
    problem = _made("linear", 9, [[4] * 12], 3, learning_rate=lambda update: 0.05)
    problem.epochs[0][4][0][1, 2] = np.nan  # in the second of four windows
    return problem


def _with_masks() -> Problem:
    masks = np.array([[2.0, 0.0, 2.0, 1.0], [0.0, 2.0, 1.0, 2.0]])
    return _made("pairs", 16, [[3] * 20], 2, learning_rate=_rate(0.1), masks=masks)


def _rate(rate: float) -> Callable[[int], float]:
    return lambda update: rate


PROBES = (
    ProbeTraining("a long window", (), _halves, is_exact=True),
    ProbeTraining(
        "full windows", (), lambda: _made("linear", 1, [[3] * 12], 4, learning_rate=_rate(0.05))
    ),
    ProbeTraining(
        "two layers", (), lambda: _made("two_layers", 2, [[3] * 6], 2, learning_rate=_rate(0.5))
    ),
    ProbeTraining(
        "embeddings", (), lambda: _made("embedding", 3, [[4] * 6], 3, learning_rate=_rate(0.3))
    ),
    ProbeTraining(
        "a short window",
        (),
        lambda: _made("linear", 4, [[3] * 10] * 2, 4, learning_rate=_rate(0.05)),
    ),
    ProbeTraining(
        "a short epoch",
        (),
        lambda: _made("linear", 14, [[3] * 3] * 3, 5, learning_rate=_rate(0.05)),
    ),
    ProbeTraining(
        "a short micro-batch",
        (),
        lambda: _made("linear", 5, [[5] * 7 + [2], [5] * 7 + [2]], 4, learning_rate=_rate(0.05)),
    ),
    ProbeTraining(
        "texts of different lengths",
        ("tokens",),
        lambda: _made("tokens", 6, [[2] * 9], 3, learning_rate=_rate(1.0), average_over="tokens"),
    ),
    ProbeTraining(
        "clipping",
        ("clip_norm",),
        lambda: _made("linear", 7, [[2] * 12], 4, learning_rate=_rate(0.1), clip_norm=1.5),
    ),
    ProbeTraining(
        "a schedule",
        ("schedule",),
        lambda: _made(
            "linear", 8, [[4] * 10, [4] * 7], 3, learning_rate=lambda update: 0.1 / (1 + update)
        ),
    ),
    ProbeTraining(
        "momentum",
        ("momentum",),
        lambda: _made(
            "linear", 10, [[4] * 6] * 2, 3, optimizer="momentum", learning_rate=_rate(0.02)
        ),
    ),
    ProbeTraining(
        "Adam",
        ("adam",),
        lambda: _made("linear", 11, [[4] * 6] * 2, 3, optimizer="adam", learning_rate=_rate(0.05)),
    ),
    ProbeTraining(
        "AdamW",
        ("adamw",),
        lambda: _made(
            "linear",
            12,
            [[4] * 12],
            4,
            optimizer="adamw",
            learning_rate=_rate(0.05),
            weight_decay=0.5,
        ),
    ),
    ProbeTraining(
        "two replicas",
        ("replicas",),
        lambda: _made("linear", 13, [[4, 2] * 6], 3, learning_rate=_rate(0.05), replicas=2),
    ),
    ProbeTraining(
        "pairs",
        ("contrastive",),
        lambda: _made("pairs", 15, [[3] * 12], 4, learning_rate=_rate(0.2)),
    ),
    ProbeTraining(
        "pairs, a short window",
        ("contrastive",),
        lambda: _made("pairs", 17, [[3] * 10], 4, learning_rate=_rate(0.2)),
    ),
    ProbeTraining(
        "pairs, a short micro-batch",
        ("contrastive",),
        lambda: _made("pairs", 18, [[3] * 7 + [2]], 4, learning_rate=_rate(0.2)),
    ),
    ProbeTraining("pairs with dropout", ("contrastive", "dropout"), _with_masks),
    ProbeTraining("a NaN", (), _with_nan),
)

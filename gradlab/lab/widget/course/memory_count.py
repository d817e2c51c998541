"""The memory that a training holds on each device, counted part by part: the arithmetic of
`memory_bars`.

The counts follow Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054) and Chen et al. 2016 (arXiv
1604.06174).
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from gradlab import _checks

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}  # copies of the weights that the optimizer keeps
PRECISIONS = {"float32": 4, "mixed": 2}  # bytes of a number in the activations
PARTS = ("weights", "gradients", "accumulator", "optimizer state", "activations")
MIB = 2**20


@dataclass(frozen=True)
class Training:
    """The settings of `memory`.

    Attributes:
        parameters: the number of trainable parameters.
        activations: the numbers that one example's forward pass keeps for the backward pass, at
            `reference_size`.
        reference_size: the side of the image, or the length of the sequence, that `activations` is
            counted for.
        size: the side or the length of the training's examples.
        power: activations grow with size to this power: 2 for the side of an image, 1 for a
            sequence whose attention keeps no matrix of all pairs.
        layers: the number of layers of about equal size, for activation checkpointing.
        microbatch_size: b, on each device.
        accumulation_steps: k.
        optimizer: "sgd", "momentum" or "adam".
        precision: "float32", or "mixed": as in Keras, weights and gradients stay float32,
            activations are float16.
        checkpointing: keep the inputs of about the square root of n segments of n layers, and
            compute one segment's activations again at a time (Chen et al. 2016).
        zero_stage: what ZeRO divides among the devices: 1 the optimizer state, 2 also the gradients
            and the accumulator, 3 also the weights (Rajbhandari et al. 2020).
        devices: the number of devices, each with its own micro-batches.
    """

    parameters: int = 14_714_688
    activations: int = 2_769_920
    reference_size: int = 96
    size: int = 96
    power: int = 2
    layers: int = 18
    microbatch_size: int = 1
    accumulation_steps: int = 32
    optimizer: str = "sgd"
    precision: str = "float32"
    checkpointing: bool = False
    zero_stage: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "checkpointing":
                if not isinstance(value, bool):
                    raise ValueError(f"checkpointing must be True or False. Received: {value!r}")
            elif field.name == "optimizer":
                _checks.one_of("optimizer", value, OPTIMIZERS)
            elif field.name == "precision":
                _checks.one_of("precision", value, PRECISIONS)
            elif field.name == "zero_stage":
                _checks.natural_number("zero_stage", value)
                if value > 3:
                    raise ValueError(f"zero_stage must be 0, 1, 2 or 3. Received: {value!r}")
            else:
                _checks.positive_integer(field.name, value, most=math.inf)

    @property
    def whole(self) -> "Training":
        """The same effective batch, at once on each device."""
        return replace(
            self,
            microbatch_size=self.microbatch_size * self.accumulation_steps,
            accumulation_steps=1,
        )


def memory(training: Training) -> dict[str, float]:
    """The bytes that one device holds in the backward pass, by part.

    In words, with P parameters, b examples of A activations each, n layers and N devices::

        weights          4 * P                  / N from stage 3 on
        gradients        4 * P                  / N from stage 2 on
        accumulator      4 * P  if k > 1        / N from stage 2 on
        optimizer state  4 * P * 0, 1 or 2      / N from stage 1 on
        activations      b * A * 4 or 2 bytes   * (s + n / s) / n with checkpointing, s = sqrt(n) rounded up; at most A

    The gradients are counted as a whole copy, as if all were held until the update. Not counted:
    the examples themselves, the scratch memory of operations, float16 copies of weights in mixed
    precision, the layer that stage 3 gathers, the buffers of communication, fragmentation, and what
    the framework takes. So a training needs more.

    Args:
        training: the settings.

    Returns:
        Bytes for each of `PARTS`.

    Example:
        >>> adam = Training(parameters=1000, activations=500, optimizer="adam", microbatch_size=2, accumulation_steps=8)
        >>> [int(part) for part in memory(adam).values()]
        [4000, 4000, 4000, 8000, 4000]
        >>> [int(part) for part in memory(adam.whole).values()]
        [4000, 4000, 0, 8000, 32000]
    """
    copy = 4.0 * training.parameters
    shared = [
        copy / training.devices if training.zero_stage >= stage else copy for stage in (0, 1, 2, 3)
    ]
    numbers = training.activations * (training.size / training.reference_size) ** training.power
    if training.checkpointing:
        segments = math.ceil(math.sqrt(training.layers))
        numbers *= min(1, (segments + training.layers / segments) / training.layers)
    return {
        "weights": shared[3],
        "gradients": shared[2],
        "accumulator": shared[2] if training.accumulation_steps > 1 else 0.0,
        "optimizer state": OPTIMIZERS[training.optimizer] * shared[1],
        "activations": training.microbatch_size * numbers * PRECISIONS[training.precision],
    }


def advice(training: Training, limit: float) -> str:
    """What to change first where accumulation does not fit, in a sentence.

    Args:
        training: the settings.
        limit: the bytes of the card.
    """
    if sum(memory(training).values()) <= limit:
        return "Nothing needs to change."
    b = training.microbatch_size
    k = training.accumulation_steps
    while b > 1 and b % 2 == 0:
        b = b // 2
        k = k * 2
        if (
            sum(memory(replace(training, microbatch_size=b, accumulation_steps=k)).values())
            <= limit
        ):
            return f"First make the micro-batches smaller: b = {b} and k = {k} fit."
    changes: list[tuple[str, dict[str, Any]]] = [
        ("switch on activation checkpointing", {"checkpointing": True})
    ]
    changes.append(("compute in mixed precision", {"precision": "mixed"}))
    if training.devices > 1:
        stages = range(training.zero_stage + 1, 4)
        changes += [
            (f"divide the state of the model, with ZeRO stage {stage}", {"zero_stage": stage})
            for stage in stages
        ]
    changes.append(("take an optimizer without state, SGD", {"optimizer": "sgd"}))
    changes.append(("halve the size of the examples", {"size": max(1, training.size // 2)}))
    for words, change in changes:
        if sum(memory(replace(training, **change)).values()) <= limit:
            return f"First {words}: then it fits."
    parts = memory(training)
    largest = max(parts, key=lambda part: parts[part])
    return f"No single change is enough. The largest part: {largest}."


PRESETS = {
    "VGG-16 without top, 96x96": Training(),
    "VGG-16 triplets, 224x224": Training(
        activations=45_235_200,
        reference_size=224,
        size=224,
        accumulation_steps=128,
        optimizer="adam",
    ),
    # 17 numbers for each token, layer and feature: the 34 bytes of Korthikanti et al. 2022 (arXiv
    # 2205.05198), in float16, without the attention matrix.
    "GPT-2 small, 1,024 tokens": Training(
        parameters=124_439_808,
        activations=17 * 1024 * 768 * 12,
        reference_size=1024,
        size=1024,
        power=1,
        layers=12,
        accumulation_steps=32,
        optimizer="adam",
    ),
}
# MiB that a process held: the growth of its peak as in the table of notebook 09, and 56 MiB of
# weights.
_VGG = PRESETS["VGG-16 without top, 96x96"]
MEASURED: dict[Training, float] = {_VGG: 143 + 56, _VGG.whole: 470 + 56}


def sentence(training: Training, limit: float) -> str:
    """The totals, whether they fit, and what to do first if not."""
    whole, cut = (sum(memory(each).values()) for each in (training.whole, training))
    b = training.microbatch_size
    k = training.accumulation_steps
    fits = {True: "fits", False: "does not fit"}
    return (
        f"On each device, one batch of {b * k:,} needs {mib(whole)} MiB and {fits[whole <= limit]} "
        f"in {mib(limit)} MiB. {k:,} micro-batches of {b:,} need {mib(cut)} MiB: this "
        f"{fits[cut <= limit]}. {advice(training, limit)}"
    )


def mib(number: float) -> str:
    """Bytes in MiB, rounded, as text."""
    return f"{number / MIB:,.0f}"

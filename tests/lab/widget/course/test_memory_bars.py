"""MemoryBars: its arithmetic against numbers computed by hand, its controls, and what it shows
without a kernel."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import ipywidgets
import pytest

from gradlab.lab.widget.course.memory_bars import MemoryBars, page, saved, svg, table
from gradlab.lab.widget.course.memory_count import (
    MEASURED,
    MIB,
    PARTS,
    PRESETS,
    Training,
    advice,
    memory,
)

# 1,000 parameters are 4,000 bytes; 500 activations are 2,000 bytes for each example.
SMALL = Training(
    parameters=1000,
    activations=500,
    optimizer="adam",
    microbatch_size=2,
    accumulation_steps=8,
    layers=16,
)


def changed(**settings) -> list[float]:
    return list(memory(replace(SMALL, **settings)).values())


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({}, [4000, 4000, 4000, 8000, 4000]),
        ({"accumulation_steps": 64}, [4000, 4000, 4000, 8000, 4000]),  # nothing grows with k
        ({"accumulation_steps": 1}, [4000, 4000, 0, 8000, 4000]),
        ({"microbatch_size": 16, "accumulation_steps": 1}, [4000, 4000, 0, 8000, 32_000]),
        ({"optimizer": "sgd"}, [4000, 4000, 4000, 0, 4000]),
        ({"optimizer": "momentum"}, [4000, 4000, 4000, 4000, 4000]),
        ({"precision": "mixed"}, [4000, 4000, 4000, 8000, 2000]),
        ({"size": 192}, [4000, 4000, 4000, 8000, 16_000]),  # twice the side
        ({"size": 192, "power": 1}, [4000, 4000, 4000, 8000, 8000]),  # twice the length
        # 4 inputs and a segment of 4, out of 16 layers
        ({"checkpointing": True}, [4000, 4000, 4000, 8000, 2000]),
        ({"checkpointing": True, "layers": 1}, [4000, 4000, 4000, 8000, 4000]),
        ({"zero_stage": 1, "devices": 4}, [4000, 4000, 4000, 2000, 4000]),
        ({"zero_stage": 2, "devices": 4}, [4000, 1000, 1000, 2000, 4000]),
        ({"zero_stage": 3, "devices": 4}, [1000, 1000, 1000, 2000, 4000]),
        ({"zero_stage": 0, "devices": 4}, [4000, 4000, 4000, 8000, 4000]),
    ],
)
def test_the_parts_by_hand(settings, by_hand):
    assert changed(**settings) == by_hand
    assert tuple(memory(SMALL)) == PARTS


def test_the_presets_by_hand():
    vgg, triplets, gpt = PRESETS.values()
    assert memory(vgg)["weights"] == 58_858_752 and memory(vgg)["activations"] == 11_079_680
    assert memory(triplets)["activations"] == 3 * 60_313_600
    assert memory(triplets.whole)["activations"] == 128 * 3 * 60_313_600
    assert memory(gpt)["activations"] == 4 * 17 * 1024 * 768 * 12


def test_the_measurements_hold_what_is_counted():
    """What was measured is near the arithmetic, which leaves out scratch memory."""
    for training, mib in MEASURED.items():
        assert 1 < mib * MIB / sum(memory(training).values()) < 1.2


@pytest.mark.parametrize(
    ("settings", "limit", "said"),
    [
        ({}, 24_000, "Nothing needs to change."),
        ({}, 23_000, "First make the micro-batches smaller: b = 1 and k = 16 fit."),
        ({"microbatch_size": 1}, 21_500, "First switch on activation checkpointing: then it fits."),
        (
            {"microbatch_size": 1, "layers": 1},
            21_000,
            "First compute in mixed precision: then it fits.",
        ),
        (
            {"microbatch_size": 1, "devices": 2},
            18_000,
            "First divide the state of the model, with ZeRO stage 1: then",
        ),
        (
            {"microbatch_size": 1},
            14_000,
            "First take an optimizer without state, SGD: then it fits.",
        ),
        (
            {"microbatch_size": 1},
            5000,
            "No single change is enough. The largest part: optimizer state.",
        ),
    ],
)
def test_advice(settings, limit, said):
    assert advice(replace(SMALL, **settings), limit).startswith(said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parameters": 0}, "parameters must be a positive integer. Received: 0"),
        ({"microbatch_size": 1.5}, "microbatch_size must be a positive integer. Received: 1.5"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, momentum, adam. Received: 'lion'"),
        ({"precision": "half"}, "precision must be one of float32, mixed. Received: 'half'"),
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3. Received: 4"),
        ({"zero_stage": -1}, "zero_stage must be an integer of 0 or more. Received: -1"),
        ({"checkpointing": 1}, "checkpointing must be True or False. Received: 1"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Training(**settings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"preset": "LeNet"}, "preset must be one of VGG-16 without top, 96x96"),
        ({"limit_gib": 13.0}, "limit_gib must be one of 0.25"),
        ({"colour": 1}, "a setting must be one of parameters"),
        ({"microbatch_size": 3}, "microbatch_size must be one of 1, 2, 4"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MemoryBars(**arguments)


def test_controls_change_the_bars():
    bars = MemoryBars()
    html = bars.view.children[-1]
    before = html.value
    bars.controls["optimizer"].value = "adam"
    assert (
        bars.training == replace(PRESETS["VGG-16 without top, 96x96"], optimizer="adam")
        and html.value != before
    )
    bars.controls["checkpointing"].value = True
    assert bars.training.checkpointing
    bars.controls["preset"].value = "GPT-2 small, 1,024 tokens"
    assert (
        bars.training
        == PRESETS["GPT-2 small, 1,024 tokens"]
        == replace(bars.training, parameters=124_439_808)
    )
    bars.controls["limit_gib"].value = 4.0
    assert bars.limit == 4 * 2**30 and "4,096 MiB" in html.value


@pytest.mark.parametrize("preset", PRESETS)
def test_controls_hold_the_exact_values_of_a_preset(preset):
    """A slider over floats rounds its value when a page shows it; a selection does not."""
    bars = MemoryBars(preset=preset)
    for name, control in bars.controls.items():
        if name not in ("preset", "limit_gib"):
            assert control.value == getattr(PRESETS[preset], name)
    assert not isinstance(bars.controls["parameters"], ipywidgets.FloatLogSlider)
    assert MemoryBars(parameters=1234).controls["parameters"].value == 1234


def test_every_choice_can_be_chosen():
    bars = MemoryBars()
    for name, control in bars.controls.items():
        for choice in getattr(control, "options", (False, True)):
            control.value = choice[1] if isinstance(choice, tuple) else choice
            assert name in ("preset", "limit_gib") or getattr(bars.training, name) == control.value


def test_every_control_is_labeled():
    for name, control in MemoryBars().controls.items():
        assert control.description.strip(), name


def test_the_picture_is_a_scale_drawing():
    limit = 0.5 * 2**30
    vgg = PRESETS["VGG-16 without top, 96x96"]
    drawn = ElementTree.fromstring(svg(vgg, limit).replace("&#9632;", ""))
    widths = [float(rect.get("width")) for rect in drawn.iter("rect")]
    parts = [*memory(vgg.whole).values(), *memory(vgg).values()]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [part / parts[0] for part in parts], abs=0.01
    )
    titles = [title.text for title in drawn.iter("title")]
    assert "measured: 526 MiB" in titles and "measured: 199 MiB" in titles
    assert drawn.get("role") == "img" and "fits" in drawn.get("aria-label")


def test_without_a_kernel():
    first, again = MemoryBars(), MemoryBars()
    shown, twice = first._repr_mimebundle_(), again._repr_mimebundle_()
    assert shown["text/html"] == twice["text/html"]
    assert saved(first.training, first.limit) in shown["text/html"]
    assert shown["text/plain"] == twice["text/plain"] == table(first.training, first.limit)
    assert "<svg" in page(first.training, first.limit) and "<svg" not in saved(
        first.training, first.limit
    )
    assert '<img alt="On each device' in shown["text/html"].split("<script")[0]
    assert re.search(r"total +450 +179\n", shown["text/plain"])

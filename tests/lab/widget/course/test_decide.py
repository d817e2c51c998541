"""Decide: its rules against numbers computed by hand, and its controls."""

import math
import re
from xml.etree import ElementTree

import pytest

from gradlab.lab.widget.course.decide import Decide, Situation, decide, svg

# 8 devices send 400 MB over 10 Gbit/s: 2 * 7/8 * 0.32 s = 0.56 s, and compute 8 examples in 0.08 s
EIGHT = dict(fits=8, devices=8, examples_per_second=100, gradient_mb=400, gigabits=10)


def test_the_fewest_micro_batches_that_hide_the_link():
    found = decide(Situation(**EIGHT, noise_scale=10_000))
    # k * 0.08 / (k * 0.08 + 0.56) is 0.8 at k = 28
    assert (found.b, found.k, found.batch) == (8, 28, 8 * 28 * 8)
    assert found.efficiency == pytest.approx(0.8)
    faster = decide(Situation(**EIGHT | {"gigabits": 400}, noise_scale=10_000))
    assert faster.k == 1 and faster.efficiency == pytest.approx(0.08 / (0.08 + 0.014))


def test_the_noise_scale_limits_the_batch():
    found = decide(Situation(**EIGHT, noise_scale=1000))
    assert found.k == 15 and found.batch == 960 <= 1000  # 16 would be 1,024
    assert found.efficiency == pytest.approx(1.2 / (1.2 + 0.56))
    assert "k = 28, a batch beyond the noise scale" in found.reasons["k"]
    small = decide(Situation(**EIGHT, noise_scale=20))
    assert (small.b, small.k, small.batch) == (2, 1, 16)
    assert "more than 2 would exceed the noise scale of 20" in small.reasons["b"]


def test_one_device_does_not_accumulate():
    found = decide(Situation(fits=8))
    assert (found.b, found.k, found.batch, found.efficiency) == (8, 1, 8, 1)


@pytest.mark.parametrize("batch", [1, 256, 4096])
def test_rate_and_half_life(batch):
    adam = Situation(fits=batch, noise_scale=10_000, batch=256, rate=0.001, beta_2=0.999)
    found = decide(adam)
    assert found.batch == batch
    assert found.rate == pytest.approx(0.001 * (batch / 256) ** 0.5)
    if batch == 4096:
        assert decide(Situation(**{**vars(adam), "beta_2": 0.95})).beta_2 == 0.9
    life = lambda beta_2, examples: examples * math.log(0.5) / math.log(beta_2)  # noqa: E731
    assert life(found.beta_2, batch) == pytest.approx(life(0.999, 256))
    sgd = decide(Situation(fits=batch, noise_scale=10_000, batch=256, rate=0.1, optimizer="SGD"))
    largest = 0.1 * (1 + 10_000 / 256)  # the best rate without noise
    assert sgd.rate == pytest.approx(largest / (1 + 10_000 / batch))


def test_a_recipe_keeps_its_batch():
    found = decide(Situation(**EIGHT, batch=256, is_recipe=True))
    assert (found.b, found.k, found.batch, found.rate, found.beta_2) == (8, 4, 256, 0.001, 0.999)
    for fits, devices, batch in ((8, 1, 100), (3, 2, 50), (64, 4, 10), (1, 1, 7)):
        found = decide(Situation(fits=fits, devices=devices, batch=batch, is_recipe=True))
        assert found.b <= fits and found.b * found.k * devices >= batch
        assert found.b * (found.k - 1) * devices < batch  # no micro-batch is left empty


def test_what_is_wrong_with_a_situation_is_said():
    many = decide(Situation(fits=8, devices=128, noise_scale=20))
    assert many.b == 1 and "exceed the noise scale of 20: use fewer" in many.reasons["b"]
    slow = decide(Situation(**EIGHT | {"gigabits": 0.1, "devices": 64}, noise_scale=100))
    assert slow.reasons["k"].endswith("This is slower than one device alone")
    idle = decide(Situation(fits=8, devices=128, batch=64, is_recipe=True))
    assert idle.reasons["batch"] == "the recipe's; 64 devices have nothing to do"
    recipe = decide(Situation(**EIGHT, batch=256, is_recipe=True))
    assert "the devices compute 36% of the time" in recipe.reasons["k"]


def test_controls_change_the_decision():
    shown = Decide()
    html = shown.view.children[-1]
    assert shown.decision.k == 1 and "beta_2" in html.value
    shown.controls["devices"].value = 8
    assert shown.decision.k == 15 and "<b>15</b>" in html.value
    shown.controls["is_recipe"].value = True
    assert shown.decision.batch == 256
    shown.controls["optimizer"].value = "SGD"
    assert "beta_2" not in repr(shown) and "beta_2" not in html.value
    assert all(control.description.strip() for control in shown.controls.values())
    bundle = shown._repr_mimebundle_()
    assert "script" not in bundle["text/html"] and "<svg" not in bundle["text/html"]
    assert bundle["text/plain"] == repr(shown) and "<svg" in html.value


def test_the_picture_is_a_scale_drawing():
    known = Situation(**EIGHT, noise_scale=1000)
    drawn = ElementTree.fromstring(svg(known))
    computing, sending = (float(one.get("width")) for one in drawn.iter("rect"))
    assert computing / (computing + sending) == pytest.approx(decide(known).efficiency, abs=0.001)
    tuned, batch = (float(one.get("cx")) for one in drawn.iter("circle"))
    noise = next(one for one in drawn.iter("path") if one.get("stroke") == "#D55E00")
    noise_x = float(noise.get("d").split()[0][1:])
    decade = (noise_x - 90) / 3  # the noise scale is 10 ** 3
    assert (batch - 90) / decade == pytest.approx(math.log10(960), abs=0.01)
    assert (tuned - 90) / decade == pytest.approx(math.log10(256), abs=0.01)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"fits": 0}, "fits must be a positive integer. Received: 0"),
        ({"noise_scale": math.nan}, "noise_scale must be a finite number above 0. Received: nan"),
        ({"gigabits": 0}, "gigabits must be a finite number above 0. Received: 0"),
        ({"optimizer": "adam"}, "optimizer must be one of SGD, Adam"),
        ({"beta_2": 1.0}, "beta_2 must be between 0 and 1. Received: 1.0"),
    ],
)
def test_bad_situations(known, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Situation(**known)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"fit": 3}, "a setting must be one of fits, devices"),
        ({"devices": 3}, "devices must be one of 1, 2, 4, 8"),
        ({"rate": 0.002}, "rate must be one of 0.0001"),
    ],
)
def test_bad_arguments(known, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Decide(**known)

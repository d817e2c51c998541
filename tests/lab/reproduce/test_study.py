"""Studies of papers: what is printed and written, the committed results, and each study's
arithmetic by hand."""

import csv
import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
import tensorflow as tf

from gradlab._parser import STUDIES
from gradlab.lab.experiments import datasets
from gradlab.lab.figures import picture
from gradlab.lab.reproduce import (
    adam_rule,
    growing_batch,
    half_life,
    late_switching,
    noise_scale,
    noisy_quadratic,
    norm_layers,
    small_batches,
    surge,
    vanilla_sgd,
)
from gradlab.lab.reproduce.study import Claim, Study

COMMITTED = datasets.data_folder() / "results"
NAMES = [name for name in STUDIES if name != "averaging"]
MODULES = {
    "noise-scale": noise_scale,
    "small-batches": small_batches,
    "growing-batch": growing_batch,
    "vanilla-sgd": vanilla_sgd,
    "surge": surge,
    "adam-rule": adam_rule,
    "norm-layers": norm_layers,
    "half-life": half_life,
}


def study(**changed) -> Study:
    drawn = picture.figure()[0]
    drawn.set_label("an empty figure")
    claims = [Claim("Two is one.", "equal", "2", False), Claim("One is one.", "equal", "1", True)]
    values = dict(
        name="a",
        paper="A. Author 2018",
        claims=claims,
        rows=[{"x": 1}],
        figure=drawn,
        quick=False,
        seconds=1,
    )
    return Study(**values | changed)


def test_a_claim_that_is_missed_is_printed_like_the_others():
    assert study().text().splitlines() == [
        "A. Author 2018",
        "",
        "DOES NOT AGREE: Two is one.",
        "    rule:  equal",
        "    found: 2",
        "agrees: One is one.",
        "    rule:  equal",
        "    found: 1",
    ]
    assert [claim["holds"] for claim in study().summary()] == [False, True]


def test_a_small_version_is_not_judged():
    quick = study(quick=True)
    assert "agree" not in quick.text().lower() and quick.text().count("not judged") == 2
    assert [claim["holds"] for claim in quick.summary()] == [None, None]


def test_what_is_written_can_be_read(tmp_path):
    files = study().write(tmp_path / "new")
    assert sorted(files) == sorted((tmp_path / "new").iterdir())
    about = json.loads((tmp_path / "new" / "a.json").read_text())
    assert about["claims"] == study().summary() and about["figure"] == "an empty figure"
    assert about["environment"]["tensorflow"]


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_claims_follow_from_the_committed_numbers(name):
    about = json.loads((COMMITTED / f"{name}.json").read_text())
    assert not about["quick"] and "+" not in about["environment"]["commit"]
    assert (COMMITTED / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (COMMITTED / f"{name}.csv").open() as file:
        rows = [{key: number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    if name == "noisy-quadratic":  # the last claim is about a training
        found = [
            float(word)
            for word in about["claims"][-1]["found"].replace(",", "").split()
            if word[0].isdigit()
        ]
        again = noisy_quadratic.judge(rows, *found)
    elif name == "growing-batch":
        trained = np.random.default_rng(0).random([growing_batch.SEEDS, growing_batch.PHASES])
        again = growing_batch.judge(rows, trained)[:-1]  # the last claim is about a training
    elif name == "late-switching":
        trained = np.random.default_rng(0).random([late_switching.SEEDS, 2])
        again = late_switching.judge(rows, trained)[:-1]  # as is this one
    else:
        again = MODULES[name].judge(rows)
    for claim, committed in zip(again, about["claims"]):
        assert (claim.text, claim.rule) == (committed["text"], committed["rule"])
        assert bool(claim.holds) == committed["holds"], claim.text
        assert claim.found == committed["found"], claim.text


def number(text: str):
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


@pytest.mark.slow
@pytest.mark.usefixtures("no_retracings_yet")
@pytest.mark.parametrize("name", NAMES)
def test_a_small_version_runs(name, capfd):
    made = importlib.import_module(f"gradlab.lab.reproduce.{name.replace('-', '_')}").study(
        quick=True
    )
    assert (
        made.quick
        and made.rows
        and made.figure.get_label()
        and all(claim.found for claim in made.claims)
    )
    assert "retracing" not in capfd.readouterr().err


# ---- the noisy quadratic ----


@pytest.mark.parametrize(("rate", "momentum"), [(0.5, 0.0), (0.3, 0.9), (3.0, 0.5)])
def test_the_expected_loss_is_that_of_the_recursion(rate, momentum):
    """One update after another, with E[w w], E[w v] and E[v v] of each weight as three numbers."""
    h, batch = 1 / np.arange(1, 8), 3
    learning_rate, ww, wv, vv, expected = (
        rate * (1 - momentum),
        np.ones(7),
        np.zeros(7),
        np.zeros(7),
        {},
    )
    for update in range(1, 65):
        with_new = momentum * wv + h * ww
        vv = momentum**2 * vv + 2 * momentum * h * wv + h**2 * ww + h / batch
        ww = ww - 2 * learning_rate * with_new + learning_rate**2 * vv
        wv = with_new - learning_rate * vv
        expected[update] = (h @ ww) / 2
    updates, start, noise = noisy_quadratic.expected_losses(h, rate, momentum)
    checked = [i for i, update in enumerate(updates) if update in expected]
    assert list(updates[checked]) == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        10,
        12,
        14,
        16,
        20,
        24,
        28,
        32,
        40,
        48,
        56,
        64,
    ]
    for i in checked:
        assert start[i] + noise[i] / batch == pytest.approx(expected[updates[i]], rel=1e-10)


def test_training_with_gradlab_has_the_expected_loss():
    mean, error, expected = noisy_quadratic.simulate(runs=400)
    assert abs(mean - expected) < 4 * error < 0.1 * expected


# ---- growing batches ----


def test_the_excess_loss_is_that_of_many_trainings():
    """3,000 trainings in NumPy, without the moments that the formula uses."""
    schedule = growing_batch.PhaseSchedule("test", False, 0.2, 4, math.sqrt(2), 2)
    rows = growing_batch.expected_losses(schedule, examples=64)
    random, h = np.random.default_rng(0), growing_batch.curvatures()
    errors = random.standard_normal([3000, len(h)])
    for phase in range(2):
        rate, batch = schedule.at(phase)
        for _ in range(64 // batch):
            x = random.standard_normal([3000, batch, len(h)]) * np.sqrt(h)
            residual = np.einsum("rbw,rw->rb", x, errors) + random.standard_normal([3000, batch])
            errors = errors - rate * np.einsum("rb,rbw->rw", residual, x) / batch
        losses = errors**2 @ h / 2
        assert abs(losses.mean() - rows[phase]["excess_loss"]) < 4 * losses.std() / math.sqrt(3000)
        assert losses.std() / math.sqrt(3000) < 0.03 * losses.mean()


def test_training_with_gradlab_follows_the_schedule(monkeypatch):
    schedule, asked = growing_batch.SCHEDULES[1], []

    class Watched(growing_batch.Trainer):
        def __init__(self, *arguments, accumulation):
            super().__init__(
                *arguments, accumulation=lambda made: asked.append(accumulation(made)) or asked[-1]
            )

    monkeypatch.setattr(growing_batch, "Trainer", Watched)
    losses = growing_batch.train(schedule, examples=640, seed=0)
    assert len(losses) == growing_batch.PHASES
    # Micro-batches of 4
    assert asked == [1] * 160 + [2] * 80 + [4] * 40 + [8] * 20 + [16] * 10 + [32] * 5
    rows = growing_batch.expected_losses(schedule, 640)
    assert [row["batch"] for row in rows] == [4, 8, 16, 32, 64, 128]
    assert [row["updates"] for row in rows] == [160, 240, 280, 300, 310, 315]


def test_schedules_that_do_not_match_are_seen():
    rows = [
        row
        for schedule in growing_batch.SCHEDULES
        for row in growing_batch.expected_losses(schedule, 1280)
    ]
    exact = np.array(
        [[row["excess_loss"] for row in rows if row["schedule"] == growing_batch.SCHEDULES[1].name]]
        * 3
    )
    trained = exact * [[0.99], [1], [1.01]]
    assert all(claim.holds for claim in growing_batch.judge(rows, trained))
    assert not growing_batch.judge(rows, 1.1 * trained)[-1].holds
    wrong = [
        row | {"excess_loss": row["excess_loss"] * (1.2 if "x 2" in row["schedule"] else 1)}
        for row in rows
    ]
    assert not growing_batch.judge(wrong, trained)[0].holds


# ---- late switching ----


def test_the_loss_of_a_switch_is_that_of_many_trainings(monkeypatch):
    """3,000 trainings in NumPy, without the moments that the formula uses."""
    monkeypatch.setattr(late_switching, "UPDATES", 40)
    monkeypatch.setattr(late_switching, "EVERY", 20)
    monkeypatch.setattr(late_switching, "RATE", 0.2)
    rows = late_switching.expected_losses(late_switching.Switch("test", 1, 20, 4))
    assert [row["examples"] for row in rows] == [20, 100]
    random, h = np.random.default_rng(0), late_switching.curvatures()
    errors = np.ones([3000, len(h)])
    for update in range(40):
        batch = 1 if update < 20 else 4
        x = random.standard_normal([3000, batch, len(h)]) * np.sqrt(h)
        residual = np.einsum("rbw,rw->rb", x, errors) + random.standard_normal([3000, batch])
        errors = errors - 0.2 * np.einsum("rb,rbw->rw", residual, x) / batch
        if update % 20 == 19:
            losses = errors**2 @ h / 2
            expected = rows[update // 20]["excess_loss"]
            assert abs(losses.mean() - expected) < 4 * losses.std() / math.sqrt(3000)


def test_the_control_is_the_one_of_growing_batch():
    for schedule in growing_batch.SCHEDULES[1:3]:
        phases = [schedule] * growing_batch.PHASES
        row = growing_batch.expected_losses(schedule, growing_batch.EXAMPLES)[-1]
        assert late_switching.last_loss(phases) == pytest.approx(row["excess_loss"], rel=1e-5)
        assert late_switching.last_loss(phases, growing_batch.PHASES) < 0.01 * row["excess_loss"]


def test_a_late_switch_is_judged_by_what_is_left_of_the_distance():
    rows = [
        row for switch in late_switching.SWITCHES for row in late_switching.expected_losses(switch)
    ]
    exact = [
        row["excess_loss"]
        for row in rows
        if row["schedule"] == late_switching.LATE.name
        and row["updates"] in (late_switching.SWITCH, late_switching.UPDATES)
    ]
    trained = np.outer([0.99, 1, 1.01], exact)
    catches_up, waits, _, _, as_computed = late_switching.judge(rows, trained)
    assert catches_up.holds and waits.holds and as_computed.holds
    assert not late_switching.judge(rows, 1.1 * trained)[-1].holds
    slow = [
        row
        | {
            "excess_loss": row["excess_loss"]
            * (1.05 if row["schedule"] == "4, from 3,000: 64" else 1)
        }
        for row in rows
    ]
    assert [claim.holds for claim in late_switching.judge(slow, trained)[:2]] == [False, False]
    soon = late_switching.LATE.name, late_switching.SWITCH + late_switching.SOON
    late = [
        row
        | {
            "excess_loss": row["excess_loss"]
            * (1.03 if (row["schedule"], row["updates"]) == soon else 1)
        }
        for row in rows
    ]
    assert [claim.holds for claim in late_switching.judge(late, trained)[:2]] == [False, True]


# ---- momentum for large and small batches ----


@pytest.mark.parametrize("momentum", [0.0, 0.4])
def test_the_mean_loss_of_the_runs_is_that_of_the_moments(momentum):
    """E[w w], E[w m] and E[m m] of each weight, one update after another."""
    batch, rate, h = 5.0, 0.03, vanilla_sgd.CURVATURES
    ww, wm, mm = np.ones(2), np.zeros(2), np.zeros(2)
    new = 1 - momentum
    for _ in range(10):
        squared = (1 + 1 / batch) * h**2 * ww  # of a gradient with its noise
        mm = momentum**2 * mm + 2 * momentum * new * h * wm + new**2 * squared
        wm = momentum * wm + new * h * ww
        ww, wm = ww - 2 * rate * wm + rate**2 * mm, wm - rate * mm
    setting = vanilla_sgd.Setting("test", batch, 10, momentum, rate)
    losses = vanilla_sgd.last_losses(setting, rate, 2_000).ravel()
    expected = ww @ h / 2
    assert abs(losses.mean() - expected) < 4 * losses.std() / math.sqrt(len(losses))
    assert losses.std() / math.sqrt(len(losses)) < 0.03 * expected


def momentum_rows(large: float, small: float) -> list[dict]:
    """Losses that momentum divides by `large` and `small` at each rate, least at the second."""
    divided = {"large batch, momentum": large, "small batch, momentum": small}
    return [
        {
            "setting": setting.name,
            "rate": rate,
            "median_loss": loss / divided.get(setting.name, 1),
            "least_of_groups": loss,
            "largest_of_groups": loss,
        }
        for setting in vanilla_sgd.SETTINGS
        for rate, loss in [(0.1, 2.0), (0.05, 2.0), (0.1, 1.0), (0.2, 3.0)]
    ]


@pytest.mark.parametrize(
    ("large", "small", "holds"),
    [
        (6, 1.1, [True, True, True]),
        (4, 1.1, [False, True, True]),
        (6, 1.3, [True, False, False]),
        (1.5, 0.5, [False, True, False]),
    ],
)
def test_momentum_is_judged_by_how_much_lower_the_loss_is(large, small, holds):
    found = vanilla_sgd.judge(momentum_rows(large, small))
    assert [claim.holds for claim in found] == holds


# ---- the best rate of signs ----


def test_the_best_rate_of_signs_lowers_the_mean_loss_most():
    """Drawn signs and a scan of rates, in a problem of three weights, without the formula."""
    curvatures = np.array([[1.0, 0.4, 0.2], [0.4, 2.0, 0.1], [0.2, 0.1, 0.5]])
    here = surge.LossPoint(np.array([0.5, -0.3, 0.2]), curvatures)
    noise = np.random.default_rng(0).standard_normal([200_000, 3]) / math.sqrt(4)
    signs = np.sign(here.gradient + noise)
    rates = np.linspace(0.01, 0.5, 491)
    slope = np.mean(signs @ here.gradient)
    bend = np.mean(np.einsum("di,ij,dj->d", signs, curvatures, signs))
    lowered = [rate * slope - rate**2 * bend / 2 for rate in rates]
    best = here.best_rate(surge.expected_signs(here.gradient, 4))
    assert best == pytest.approx(rates[int(np.argmax(lowered))], abs=0.002)
    measured, error = surge.measured_rate(here, 4, 20_000)
    assert abs(measured - best) < 4 * error < 0.1 * best


def surge_rows(peak: int, fall: float) -> list[dict]:
    """Best rates that rise up to a peak, and fall to a part of it."""
    rows = []
    for batch in surge.BATCHES.tolist():
        rate = min(batch / peak, 1) ** 0.5 if batch <= peak else fall
        rates = {"rate": rate, "later": min(batch / peak / 4, 1), "alone": batch, "sgd": batch}
        rows.append({"batch": batch} | rates | {"measured": rate, "standard_error": 0.1})
    return rows


@pytest.mark.parametrize(
    ("peak", "fall", "holds"),
    [
        (64, 0.5, [True, True, True, True, False, True, True]),
        (64, 0.9, [False, True, True, True, False, True, True]),
        (32, 0.5, [True, False, True, True, True, True, True]),
        (256, 0.5, [True, False, True, True, False, True, True]),
    ],
)
def test_a_surge_is_judged_by_its_place_and_its_fall(peak, fall, holds):
    assert [claim.holds for claim in surge.judge(surge_rows(peak, fall))] == holds
    falling = [row | {"sgd": -row["sgd"], "alone": -row["alone"]} for row in surge_rows(peak, fall)]
    assert [claim.holds for claim in surge.judge(falling)][3::2] == [False, False]
    apart = [row | {"measured": row["rate"] + 0.5} for row in surge_rows(peak, fall)]
    assert not surge.judge(apart)[-1].holds


# ---- Adam's rule ----


def test_the_rule_for_adam_scales_each_hyperparameter():
    rule = adam_rule.RULE
    assert (rule.batch, rule.rate, rule.epsilon) == pytest.approx((32, 8e-4, 2.5e-7))
    assert (rule.beta_1, rule.beta_2) == pytest.approx((0.84, 0.984))


def test_networks_that_adam_trains_together_are_trained_as_if_alone(monkeypatch):
    """The network of the last seed in NumPy, with Adam as Kingma and Ba write it."""
    monkeypatch.setattr(adam_rule, "IMAGES", 200)
    seed, way = adam_rule.SEEDS - 1, dataclasses.replace(adam_rule.RULE, epsilon=1e-12)
    networks = adam_rule.AdamNetworks()
    weights = [each[seed].astype("float64") for each in networks.weights()]
    numbers = adam_rule.images_of(way, 1, 3)
    networks.updates_of(way)(numbers)

    data = datasets.load("mnist")
    x, y = data.train_images[:200].reshape(200, -1), np.eye(10)[data.train_labels[:200]]
    means, squares = [np.zeros_like(each) for each in weights], [0 * each for each in weights]
    for update, rows in enumerate(numbers.numpy()[:, seed], start=1):
        kernel, bias, top, top_bias = weights
        active = np.maximum(x[rows] @ kernel + bias, 0)
        odds = np.exp(active @ top + top_bias)
        wrong = (odds / odds.sum(axis=1, keepdims=True) - y[rows]) / way.batch
        below = wrong @ top.T * (active > 0)
        gradients = [x[rows].T @ below, below.sum(0, keepdims=True), active.T @ wrong]
        gradients += [wrong.sum(0, keepdims=True)]
        for i, gradient in enumerate(gradients):
            means[i] = way.beta_1 * means[i] + (1 - way.beta_1) * gradient
            squares[i] = way.beta_2 * squares[i] + (1 - way.beta_2) * gradient**2
            mean, square = (
                means[i] / (1 - way.beta_1**update),
                squares[i] / (1 - way.beta_2**update),
            )
            weights[i] = weights[i] - way.rate * mean / (np.sqrt(square) + way.epsilon)
    for found, expected in zip(networks.weights(), weights):
        np.testing.assert_allclose(found[seed], expected, atol=2e-5)
    odds = np.exp(np.maximum(x @ weights[0] + weights[1], 0) @ weights[2] + weights[3])
    losses = -np.log((odds / odds.sum(axis=1, keepdims=True))[np.arange(200), y.argmax(axis=1)])
    assert networks.losses()[seed] == pytest.approx(losses.mean(), abs=1e-4)


def adam_rows(**apart: float) -> list[dict]:
    """Losses that are so many times those of the small batch."""
    of_way = dict(zip(adam_rule.WAYS, (1.0, *apart.values())))
    return [
        {"way": way.name, "images": look, "seed": seed, "loss": times / (1 + look + seed)}
        for way, times in of_way.items()
        for look in range(3)
        for seed in range(adam_rule.SEEDS)
    ]


@pytest.mark.parametrize(
    ("apart", "holds"),
    [
        ((1.02, 0.98, 1.03, 1.2), [True, True, True]),
        ((1.02, 1.06, 1.03, 1.2), [False, True, False]),
        ((1.02, 1.01, 1.03, 0.98), [True, False, True]),
        ((1.1, 1.01, 0.98, 0.7), [True, True, True]),
    ],
)
def test_the_rule_is_judged_by_two_runs_with_other_images(apart, holds):
    rows = adam_rows(**dict(zip(("again", "rule", "rate_only", "linear"), apart)))
    assert [claim.holds for claim in adam_rule.judge(rows)] == holds


# ---- normalization layers ----


def test_norms_of_examples_are_those_of_single_gradients():
    """One example after another, and the layers by their names."""
    data = datasets.load("mnist")
    x = norm_layers.sequences(data.train_images[:5])
    y = data.train_labels[:5].astype("int32")
    np.testing.assert_array_equal(x[3, :, :28], data.train_images[3].reshape(28, 28))
    model = norm_layers.transformer(0)
    names = [variable.path for variable in model.trainable_variables]
    chosen = np.array(["layer_normalization" in name for name in names])
    assert chosen.sum() == 10 and len(names) > 30
    gradients = []
    for image, label in zip(x, y):
        with tf.GradientTape() as tape:
            logits = model(image[None])[0]
            loss = tf.reduce_logsumexp(logits) - logits[label]
        gradients.append(
            [
                each.numpy()
                for each in tape.gradient(loss, [v.value for v in model.trainable_variables])
            ]
        )
    squares = np.array([[np.sum(each**2) for each in of_one] for of_one in gradients])
    of_mean = np.array([np.sum(np.mean(each, axis=0) ** 2) for each in zip(*gradients)])
    before = model.get_weights()
    norms = norm_layers.ExampleNorms(model)
    found, found_mean, _ = norms.update(x, y)
    expected = np.array([squares.sum(axis=1), squares[:, chosen].sum(axis=1)])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_allclose(found_mean, [of_mean.sum(), of_mean[chosen].sum()], rtol=1e-4)
    # The first update of Adam moves each weight by the rate, in the direction of the mean gradient
    for one, other, each in zip(before, model.get_weights(), zip(*gradients)):
        mean = np.mean(each, axis=0)
        clear = np.abs(mean) > 1e-3  # far above epsilon
        moved = -norm_layers.RATE * np.sign(mean[clear])
        np.testing.assert_allclose((other - one)[clear], moved, rtol=0.01)


@pytest.mark.parametrize(
    ("exponent", "wrong", "holds"),
    [(1.0, 1, [True, True]), (2.0, 1, [True, False]), (1.0, 6, [False, False])],
)
def test_the_norm_layers_are_judged_by_correlation_and_ratio(exponent, wrong, holds):
    scales = np.geomspace(50, 1000, norm_layers.PARTS)
    others = scales**exponent
    others[:wrong] = others[-wrong:] if wrong > 1 else others[:wrong]
    rows = [
        {"seed": seed, "updates": part, "noise_scale": one, "of_norm_layers": other}
        for seed in range(2)
        for part, (one, other) in enumerate(zip(scales, others))
    ]
    assert [claim.holds for claim in norm_layers.judge(rows)] == holds


# ---- noise scale, small batches ----


def scale_rows(first: float, last: float, later: float = 900) -> list[dict]:
    """A noise scale that grows along the first run, and is constant later."""
    values = np.full(noise_scale.PARTS, float(later))
    values[: noise_scale.FIRST_PARTS] = np.linspace(first, last, noise_scale.FIRST_PARTS)
    return [
        {"seed": seed, "updates": i, "noise_scale": value}
        for seed in range(3)
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("first", "last", "later", "holds"),
    [
        (200, 1600, 100, [True, True, True]),  # 900 at the end of the first run
        (800, 1000, 100, [True, False, True]),
        (20, 400, 400, [False, True, False]),
        (20, 400, 1200, [False, True, True]),  # (10 * 210 + 30 * 1200) / 40 is 953
        (20, 400, 1120, [False, True, False]),  # and 893
        (900, 3600, 100, [False, True, True]),
    ],
)
def test_the_noise_scale_is_judged_by_its_mean_its_growth_and_its_length(first, last, later, holds):
    claims = noise_scale.judge(scale_rows(first, last, later))
    assert [claim.holds for claim in claims] == holds


def test_passes_are_counted_to_the_end_of_a_part():
    assert (noise_scale.FIRST_PARTS, noise_scale.PARTS, noise_scale.EPOCHS) == (10, 40, 20)
    assert noise_scale.passes_until(np.array([800.0, 1000] + 38 * [0.0])) == 1
    assert noise_scale.passes_until(np.array(39 * [899.0] + [1000])) == 20


def test_the_noise_scale_has_to_grow_from_each_seed():
    rows = scale_rows(200, 1600)
    for row in rows[-noise_scale.PARTS :]:
        row["noise_scale"] = 899.0  # the last seed's does not grow
    claims = noise_scale.judge(rows)
    assert [claim.holds for claim in claims] == [True, False, False]
    assert claims[2].found == "after 5 passes, after 5 passes, never"


def accuracy_rows(best: int, width) -> list[dict]:
    """Accuracies that fall by one point for each doubling away from the best batch, at
    `width(batch)` base rates."""
    return [
        {
            "batch": batch,
            "base_rate": rate,
            "seed": seed,
            "accuracy": accuracy - 50 * (i >= width(batch)) + 0.01 * seed,
        }
        for batch in small_batches.BATCHES
        for i, rate in enumerate(small_batches.BASE_RATES)
        for seed in range(small_batches.SEEDS)
        for accuracy in [95 - 0.1 * abs(math.log2(batch / best))]
    ]


def test_small_batches_are_judged_by_the_best_one_and_by_how_many_rates_work():
    def narrowing(batch):
        return 12 - int(math.log2(batch))

    assert [bool(c.holds) for c in small_batches.judge(accuracy_rows(8, narrowing))] == [
        True,
        True,
        True,
    ]
    assert [bool(c.holds) for c in small_batches.judge(accuracy_rows(64, narrowing))] == [
        False,
        True,
        True,
    ]
    assert [bool(c.holds) for c in small_batches.judge(accuracy_rows(8, lambda batch: 5))] == [
        True,
        True,
        False,
    ]


def test_networks_that_are_trained_together_are_trained_as_if_alone():
    """One network in NumPy: the third base rate, the second seed, one epoch of 64 images in batches
    of 16."""
    rows = small_batches.Networks(images=64, epochs=1).train(16)
    data = datasets.load("mnist")
    x, y = (
        data.train_images[:64].reshape(64, -1).astype("float64"),
        np.eye(10)[data.train_labels[:64]],
    )
    seed, place = 1, 8
    kernels = []
    for i, o in ((784, small_batches.HIDDEN), (small_batches.HIDDEN, 10)):
        limit = math.sqrt(6 / (i + o))
        kernels.append(np.random.default_rng([seed, i]).uniform(-limit, limit, [i, o]))
    (hidden, top), biases = kernels, [np.zeros(small_batches.HIDDEN), np.zeros(10)]
    rate = 16 * small_batches.BASE_RATES[place]
    for part in np.random.default_rng([seed, 0]).permutation(64).reshape(4, 16):
        active = np.maximum(x[part] @ hidden + biases[0], 0)
        odds = np.exp(active @ top + biases[1])
        wrong = (odds / odds.sum(axis=1, keepdims=True) - y[part]) / 16
        below = wrong @ top.T * (active > 0)
        top, hidden = top - rate * active.T @ wrong, hidden - rate * x[part].T @ below
        biases = [biases[0] - rate * below.sum(axis=0), biases[1] - rate * wrong.sum(axis=0)]
    tests = data.test_images.reshape(-1, 784)
    logits = np.maximum(tests @ hidden + biases[0], 0) @ top + biases[1]
    accuracy = 100 * np.mean(logits.argmax(axis=1) == data.test_labels)
    [row] = [
        r for r in rows if (r["base_rate"], r["seed"]) == (small_batches.BASE_RATES[place], seed)
    ]
    assert row["accuracy"] == pytest.approx(accuracy, abs=0.03)

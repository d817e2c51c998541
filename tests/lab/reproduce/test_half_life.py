"""The study of Adam's half-life: its language model in NumPy, its training with Keras' optimizers,
and its judgment of invented losses."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradlab.lab.experiments import datasets
from gradlab.lab.reproduce import half_life

COPIES = 2


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Different weights of each copy, larger than a training starts with, so that all parts count."""
    rng = np.random.default_rng(1)
    return np.stack([3 * half_life.starting_weights(rng) for _ in range(COPIES)])


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    text = datasets.shakespeare()
    starts = np.random.default_rng(2).integers(1000, size=[6 * 2])
    return half_life.texts_at(text.train, starts).reshape(6, 2, half_life.LENGTH + 1)


def loss_of(weights: np.ndarray, text: np.ndarray) -> float:
    """The mean loss of one copy and one text: one place after another, in float64."""
    parts = np.split(weights.astype("float64"), np.cumsum(half_life.SIZES)[:-1])
    shapes = half_life.SHAPES
    m = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts)}

    def scaled(v):
        return v / np.sqrt(np.mean(v**2) + 1e-5)

    seen, losses = [], []
    for place, (number, following) in enumerate(itertools.pairwise(text)):
        x = m["characters"][number] + m["places"][place]
        query, key, value = np.split(scaled(x) @ m["queries, keys, values"], 3)
        seen.append((key, value))
        shares = np.exp([query @ key / np.sqrt(half_life.FEATURES) for key, _ in seen])
        mean = sum(share * value for share, (_, value) in zip(shares, seen)) / shares.sum()
        x = x + mean @ m["attention"]
        x = x + np.maximum(scaled(x) @ m["wide"], 0) @ m["narrow"]
        logits = scaled(x) @ m["logits"]
        losses.append(np.log(np.sum(np.exp(logits))) - logits[following])
    return float(np.mean(losses))


def test_the_loss_is_that_of_one_place_after_another(weights, texts):
    found = half_life.mean_losses(tf.constant(weights), tf.constant(texts[0])).numpy()
    expected = [np.mean([loss_of(copy, text) for text in texts[0]]) for copy in weights]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(expected[0] - expected[1]) > 0.01


def test_a_text_is_where_the_numbers_stand():
    numbers = np.arange(100, 200)
    found = half_life.texts_at(numbers, np.array([3, 0]))
    assert found.shape == (2, 33)
    assert list(found[0, [0, -1]]) == [103, 135] and list(found[1, [0, -1]]) == [100, 132]


def trained_by(optimizer, weights: np.ndarray, texts: np.ndarray, rate: float) -> np.ndarray:
    """Weights of one copy after a loop with one of Keras' optimizers. Six updates have no warm-up."""
    variable = keras.Variable(weights[None])
    optimizer.build([variable])
    for update, batch in enumerate(texts):
        with tf.GradientTape() as tape:
            loss = half_life.mean_losses(variable.value, tf.constant(batch))[0]
        optimizer.learning_rate = rate * (1 + np.cos(np.pi * update / len(texts))) / 2
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])
    return variable.numpy()[0]


@pytest.mark.parametrize("way", [half_life.SGD, half_life.HALF_LIFE])
def test_each_copy_is_trained_with_its_own_rate(weights, texts, way):
    rates = np.array([0.01, 0.002], "float32")
    arguments = tf.constant(weights), tf.constant(texts), tf.constant(rates)
    if way == half_life.SGD:
        found = half_life.train_by_sgd(*arguments).numpy()
        optimizers = [keras.optimizers.SGD() for _ in rates]
    else:
        found = half_life.train_by_adam(*arguments, tf.constant(0.7)).numpy()
        optimizers = [keras.optimizers.Adam(beta_2=0.7, epsilon=1e-8) for _ in rates]
    for copy, rate in enumerate(rates):
        expected = trained_by(optimizers[copy], weights[copy], texts, float(rate))
        moved = np.linalg.norm(expected - weights[copy])
        assert moved > 0.01
        assert np.linalg.norm(found[copy] - expected) < 1e-3 * moved


def test_the_rate_rises_and_falls():
    factors = [float(half_life._schedule(tf.constant(update), 100)) for update in range(100)]
    np.testing.assert_allclose(factors[:6], [0, 0.2, 0.4, 0.6, 0.8, 1], rtol=1e-6)
    np.testing.assert_allclose(factors[5:], np.cos(np.pi * np.arange(95) / 190) ** 2, atol=1e-6)


def test_the_half_life_is_the_same_in_characters():
    for batch in half_life.BATCHES:
        beta_2 = half_life.beta_2_of(half_life.HALF_LIFE, batch)
        characters = np.log(0.5) / np.log(beta_2) * batch * half_life.LENGTH
        np.testing.assert_allclose(characters, 6919, rtol=1e-4)
        assert half_life.beta_2_of(half_life.FIXED, batch) == 0.95


# ---- the verdicts ----


def rows_of(lowest: dict, best: dict | None = None, slope: dict | None = None) -> list[dict]:
    """Invented losses: at each rate the lowest one, and for each step from the best rate a slope
    more. The second seed is 0.01 higher."""
    best, slope = best or {}, slope or {}
    return [
        {
            "way": way,
            "batch": batch,
            "seed": seed,
            "rate": rate,
            "loss": lowest.get((way, batch), 2.0)
            + 0.01 * seed
            + slope.get(batch, 0.1) * abs(step - best.get(batch, 4)),
        }
        for way in (half_life.SGD, half_life.FIXED, half_life.HALF_LIFE)
        for batch in half_life.BATCHES
        for seed in range(half_life.SEEDS)
        for step, rate in enumerate(half_life.rates_of(way, batch))
    ]


AS_SAID = {
    (half_life.SGD, 1): 1.95,
    (half_life.FIXED, 1): 1.92,
    (half_life.HALF_LIFE, 1): 1.90,
    (half_life.SGD, 256): 2.5,
}
SLOPES = {1: 0.05, 256: 0.1}


def test_losses_as_the_paper_says_agree():
    # At the same place of both grids, the rates differ by a factor of 8
    claims = half_life.judge(rows_of(AS_SAID, slope=SLOPES))
    assert [claim.holds for claim in claims] == [True] * 5
    assert claims[0].found == "8.0" and claims[2].found == "1: 1.905, 16: 2.005, 256: 2.005"
    # 5% of 1.905 is 1.905 steps of 0.05 away on each side, 5% of 2.005 is 1.0025 steps of 0.1
    assert claims[4].found == "a factor of 14, and of 4"


@pytest.mark.parametrize(
    ("claim", "lowest", "best", "slope"),
    [
        (0, {}, {1: 3, 256: 4}, {}),
        (1, {(half_life.FIXED, 1): 1.90}, {}, {}),
        (2, {(half_life.HALF_LIFE, 256): 1.89}, {}, {}),
        (3, {(half_life.SGD, 1): 2.2}, {}, {}),
        (4, {}, {}, {1: 0.2}),
    ],
)
def test_losses_that_say_otherwise_do_not(claim, lowest, best, slope):
    claims = half_life.judge(rows_of(AS_SAID | lowest, best, SLOPES | slope))
    assert [each.holds for each in claims] == [number != claim for number in range(5)]


def test_each_seed_counts():
    rows = rows_of(AS_SAID, slope=SLOPES)
    for row in rows:
        if (row["way"], row["batch"], row["seed"]) == (half_life.HALF_LIFE, 1, 1):
            row["loss"] += 0.03  # in the mean still below a fixed beta_2
    claims = half_life.judge(rows)
    assert claims[1].found == "1.900 and 1.940 against 1.920 and 1.930" and not claims[1].holds


def test_the_better_adam_counts_and_growth_has_two_ends():
    claims = half_life.judge(rows_of(AS_SAID | {(half_life.FIXED, 256): 1.95}, slope=SLOPES))
    assert claims[3].found == "0.050 and 0.550"
    claims = half_life.judge(rows_of(AS_SAID, {1: 7, 256: 2}, SLOPES))
    assert claims[0].found == "0.2" and not claims[0].holds  # 2 ** (-7 - -5)


def test_a_run_that_diverged_is_no_best_one():
    rows = rows_of(AS_SAID)
    for row in rows:
        if row["rate"] == half_life.rates_of(row["way"], row["batch"])[-1]:
            row["loss"] = float("nan")
    assert half_life.lowest_loss(rows, half_life.HALF_LIFE, 1) == pytest.approx(1.905)
    assert half_life.best_rate(rows, half_life.HALF_LIFE, 1) == 2.0**-8


def test_a_range_of_good_rates_ends_where_the_tried_rates_do():
    rows = rows_of({}, slope={1: 0.001})
    assert half_life.good_rates(rows, half_life.HALF_LIFE, 1) == 2**7

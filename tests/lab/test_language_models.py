"""The exercises of notebook 13: each usual mistake has its own hint, and what is wrong in another way is
not right. The last one trains."""

import math

import keras
import numpy as np
import pytest

from gradlab.lab.exercises import language_models
from gradlab.lab.experiments import datasets


def said(checker, answer, capsys) -> str:
    checker(answer)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("checker", "answer", "hint"),
    [
        ("beta_2", lambda half_life, tokens: 0.5 ** (half_life / tokens), "each leaves more"),
        ("beta_2", lambda half_life, tokens: 1 - tokens / half_life, "a whole half-life"),
        ("beta_2", lambda half_life, tokens: 1 - tokens / half_life / 2, "multiplies"),
        ("beta_2", lambda half_life, tokens: math.exp(-tokens / half_life), "not 1 / e"),
        ("beta_2", lambda half_life, tokens: 0.5**0.5, "beta_2 of 1,024 tokens"),
        ("beta_2", lambda half_life, tokens: 2 ** (tokens / half_life), "above 1"),
        ("beta_2", lambda half_life, tokens: 1 - 0.5 ** (tokens / half_life), "what is left"),
        ("accumulation", lambda t, n, b, d: math.ceil(t / n / b), "the devices compute"),
        ("accumulation", lambda t, n, b, d: math.ceil(t / n / d), "`microbatch_size` texts"),
        ("accumulation", lambda t, n, b, d: math.ceil(t / b / d), "`length` tokens"),
        ("accumulation", lambda t, n, b, d: math.ceil(t / n), "texts of all micro-batches"),
        ("accumulation", lambda t, n, b, d: t // (n * b * d), "round up"),
        ("accumulation", lambda t, n, b, d: t / (n * b * d), "k counts whole micro-batches"),
        ("accumulation", lambda t, n, b, d: 37, "and should be 36"),
        ("accumulation", lambda t, n, b, d: np.ceil(t / (n * b * d)), "an integer. Received: np.f"),
        ("weight_decay", lambda w, r, b, q, c: w * b / c, "each must decay less"),
        ("weight_decay", lambda w, r, b, q, c: w * r / q, "8 times as many"),
        ("weight_decay", lambda w, r, b, q, c: w * (c / b) ** 0.5, "without a root"),
        ("weight_decay", lambda w, r, b, q, c: w * c / b, "the rate has changed"),
        ("weight_decay", lambda w, r, b, q, c: w * c / b * q / r, "must grow by that factor"),
        ("weight_decay", lambda w, r, b, q, c: 0.0125, "a quarter of the rate"),
    ],
)
def test_the_mistake_is_named(checker, answer, hint, capsys):
    found = said(getattr(language_models, checker), answer, capsys)
    assert found.startswith("not yet: ") and hint in found


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({"sizes": ..., "learning_rate": 0.1}, "in place of the dots"),
        ({"sizes": {0: 1, 9: 2}}, "a dict with the keys sizes and learning_rate"),
        ({"sizes": {0: 4, 9: 2}, "learning_rate": 0.1}, "sizes' batch sizes must rise"),
        (
            {"sizes": {0: 4096, 9: 8192}, "learning_rate": 0.1},
            "at most 2,048 texts. Received: 4096",
        ),
        (
            {"sizes": {0: 1, 1000: 2}, "learning_rate": 0.1},
            "at most 1,000 updates. These are 1,524",
        ),
        ({"sizes": {0: 4}, "learning_rate": 0.1}, "must be a dict of two batch sizes or more"),
        (
            {"sizes": {0: 4, 600: 8}, "learning_rate": 0.1},
            "end after 512 updates, before the batch",
        ),
        ({"sizes": {0: 2, 900: 256}, "learning_rate": 0.1}, "end after 900 updates, before the"),
        ({"sizes": {0: 64, 9: 128}, "learning_rate": 0.1}, "20 updates end at"),
    ],
)
def test_a_recipe_is_checked_and_trained(answer, hint, capsys):
    found = said(language_models.recipe, answer, capsys)
    assert found.startswith("not yet: ") and hint in found


def test_the_exact_weight_decay_is_right(capsys):
    def exact(decay, rate, batch, new_rate, new_batch):
        return (1 - (1 - rate * decay) ** (new_batch / batch)) / new_rate

    assert said(language_models.weight_decay, exact, capsys) == "right\n"


@pytest.mark.parametrize("batch", [4, {0: 1, 8: 4}, {0: 1, 9: 4}])
def test_texts_are_used_once_each(monkeypatch, batch):
    """Sixteen updates at a time, as the program makes them, do not make more of them than there are."""
    monkeypatch.setattr(language_models, "TEXTS", 24)
    x, y = language_models.texts()
    assert x.shape == y.shape == (24, 32)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    plays = datasets.shakespeare()
    assert plays.read(x[0]) in plays.read(plays.train)
    seen = []

    fit = keras.Model.fit

    def spied(model, batches, **options):
        seen.extend(np.concatenate([part for part, _ in batches.as_numpy_iterator()]))
        return fit(model, batches, **options)

    monkeypatch.setattr(keras.Model, "fit", spied)
    optimizer = keras.optimizers.SGD(0.0)
    updates, _ = language_models.train(optimizer, batch)
    used = 24 if batch != {0: 1, 9: 4} else 21  # three are too few for one more update of four
    np.testing.assert_array_equal(seen, x[:used])
    assert updates == int(optimizer.iterations) == (6 if batch == 4 else 12)


def test_the_places_of_characters_are_learned():
    model = language_models.network()
    assert model.count_params() == 17_921
    tables = [tuple(each.shape) for each in model.trainable_variables if "embedding" in each.path]
    assert sorted(tables) == [(32, 32), (65, 32)]

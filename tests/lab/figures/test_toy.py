"""The toy: its closed form compared with a long descent, its arithmetic, and its words."""

import subprocess
import sys

import numpy as np
import pytest

from gradlab.lab.figures import toy


@pytest.mark.parametrize(
    ("k", "rate", "noise"), [(1, 0.3, 2.0), (5, 0.3, 2.0), (20, 0.1, 1.0), (3, 1.1, 0.5)]
)
def test_the_floor_is_where_a_long_descent_settles(k, rate, noise):
    losses = toy.descend(k, rate, noise, updates=60_000).losses[200:]
    assert np.mean(losses) == pytest.approx(toy.noise_floor(k, rate, noise), rel=0.05)


def test_the_floor_is_halved_by_twice_the_micro_batches():
    assert toy.noise_floor(10) == pytest.approx(toy.noise_floor(5) / 2)
    assert toy.noise_floor(5, 0.001) == pytest.approx(toy.noise_floor(5, 0.002) / 2, rel=1e-2)


def test_an_update_is_the_mean_gradient_times_the_rate():
    made = toy.descend(4, 0.25)
    at, after = made.path[made.looked_at], made.path[made.looked_at + 1]
    np.testing.assert_allclose(after, at - 0.25 * made.mean)
    assert made.gradients.shape == (4, 2) and made.path.shape == (61, 2)
    np.testing.assert_allclose(made.losses[0], (toy.CURVATURE * toy.START**2).sum() / 2)


def test_its_description_has_numbers():
    for k in (1, 20):
        description = toy.describe(toy.descend(k))
        assert f"Toy: {k} micro-batch gradients" in description
        assert f"settles near {toy.noise_floor(k):.3f}." in description


def test_it_needs_no_tensorflow():
    words = "toy.describe(toy.descend(3))"
    program = f"import sys; from gradlab.lab.figures import toy; {words}; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0,), "accumulation_steps must be a positive integer. Received: 0"),
        ((3, 1.25), "learning_rate must be below 1.25, or the toy diverges. Received: 1.25"),
        ((3, 0.1, -1.0), "noise must be a finite number above 0. Received: -1.0"),
        ((3, 0.1, 1.0, 0), "updates must be a positive integer. Received: 0"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy.descend(*arguments)

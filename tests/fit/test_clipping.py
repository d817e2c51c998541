"""Adaptive clipping against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from gradlab import clipping


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_each_column_has_a_limit_of_its_own_whatever_the_loss_scale(scale):
    generator = np.random.default_rng(0)
    kernel = generator.normal(size=(4, 3)) * 0.2
    gradient = generator.normal(size=(4, 3)) * 0.1
    norms = np.linalg.norm(gradient, axis=0)
    largest = 0.6 * np.linalg.norm(kernel, axis=0)
    assert (norms > largest).any() and (norms < largest).any()
    [found] = clipping.clip_adaptively([tf.constant(scale * gradient)], [kernel], 0.6, scale=scale)
    expected = gradient * np.minimum(1, largest / norms)
    np.testing.assert_allclose(found.numpy() / scale, expected, rtol=1e-12)


def test_bad_limits_are_refused():
    for name in ("clipping", "eps"):
        with pytest.raises(ValueError, match=f"^{name} must be a finite number above 0. Received"):
            clipping.clip_adaptively([], [], **{name: -1})

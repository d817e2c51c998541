"""The six programs that train in 1 GiB get the update of the large batch."""

import keras
import numpy as np
import pytest

from benchmarks.six_models import MODELS
from benchmarks.six_programs import PROGRAMS

SIDES = {"VGG-16 triplets": 32, "text transformer": 24}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_program_learns_what_plain_keras_learns(name):
    build, data = PROGRAMS[name]
    side, found = SIDES.get(name, 16), []
    for size in (None, 3):
        keras.utils.set_random_seed(0)
        model = build(side, size)
        # A trace of plain Keras takes longer than two updates without one. So does one of the GAN's
        # two loops; tests/fit/test_value_and_gradients.py traces a GAN.
        model.run_eagerly = size is None or name == "GAN"
        before = [weight.copy() for weight in model.get_weights()]
        model.fit(**data(side, 8, size), epochs=2, verbose=0)
        found.append(model.get_weights())
    moved = max(np.abs(one - other).max() for one, other in zip(before, found[0]))
    apart = max(np.abs(one - other).max() for one, other in zip(*found))
    assert apart < 1e-3 * moved, (apart, moved)

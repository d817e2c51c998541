"""Types that Keras computes in, chosen for one test and forgotten after it."""

import keras
import pytest


@pytest.fixture
def float64():
    yield from _computing_in("float64")


@pytest.fixture(params=["float64", "float32"])
def floatx(request):
    yield from _computing_in(request.param)


def _computing_in(dtype):
    keras.utils.clear_session()  # forgets the policy that layers were last made with
    keras.config.set_floatx(dtype)
    yield dtype
    keras.config.set_floatx("float32")
    keras.utils.clear_session()

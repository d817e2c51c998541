"""What several test modules start from: a type to compute in, and two devices to train on."""

import keras
import pytest
import tensorflow as tf


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


@pytest.fixture(scope="session")
def two_devices():
    """One strategy for all tests: TensorFlow mixes up the collectives of two such in one process."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

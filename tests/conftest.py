"""What several test modules start from: a type to compute in, and two devices to train on."""

import keras
import pytest
import tensorflow as tf
from hypothesis import settings

# An example may take longer than Hypothesis' 200 ms on a busy machine; that is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

collect_ignore_glob = ["*_worker.py"]  # programs that tests start in processes of their own


@pytest.fixture
def float64():
    keras.utils.clear_session(free_memory=False)  # forgets the policy that layers were last made with
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.utils.clear_session(free_memory=False)


@pytest.fixture(scope="session")
def two_devices():
    """One strategy for all tests: TensorFlow mixes up the collectives of two such in one process."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

"""Fixtures of several test modules: a seed, float64 as the type of computation, two devices to
train on, and TensorFlow's count of retracings."""

import os
import sys

import pytest

# Programs and plugins of processes that tests start.
collect_ignore_glob = ["*_worker.py", "keras_suite/recorder.py"]


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same weights in every run; another GRADLAB_TEST_SEED shows which
    tolerances are too tight."""
    if "keras" in sys.modules:  # a test that has to stay without TensorFlow stays so
        import keras

        keras.utils.set_random_seed(int(os.environ.get("GRADLAB_TEST_SEED", "0")))


@pytest.fixture
def float64():
    import keras

    # Forgets the policy that layers were last made with
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.utils.clear_session(free_memory=False)


@pytest.fixture(scope="session")
def two_devices():
    """One strategy for all tests of a process: with two of them, TensorFlow confuses their
    collectives."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.fixture
def no_retracings_yet():
    """TensorFlow counts, by the line of a function, how often a process traced it, and warns: a
    fresh process has traced nothing, and this one whatever the tests before needed."""
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    polymorphic_function._frequent_tracing_detector_manager._detectors.clear()

"""Keras' own tests of training, callbacks and dense layers, with every model that they train also in micro-batches.

`python tests/keras_suite/suite.py` runs all of Keras' tests that train.
"""

import pytest

from tests.keras_suite.suite import compare, verdict

FILES = ["trainers/trainer_test", "trainers/compile_utils_test", "callbacks/", "layers/core/dense_test"]

# Tests that may end otherwise in micro-batches, and why.
ALLOWED = {"float8": "gradlab refuses float8 training: the gradients of its scales are new values, not gradients"}


@pytest.mark.slow
def test_what_keras_trains_is_equal_in_micro_batches():
    found = compare(FILES)
    new = {
        name: verdict
        for name, verdict in found.items()
        if verdict[0] != "equal" and not any(word in name for word in ALLOWED)
    }
    assert len(found) > 40, "hardly a test of Keras ran"
    assert not new, "\n".join(f"new failure: {name}: {kind}, {why}" for name, (kind, why) in new.items())


def test_a_difference_is_seen():
    one = [("fit", "", {"loss": [1.0]}, [[2.0]])]
    passed = "passed", ""
    assert verdict(one, one, passed)[0] == "equal"
    assert verdict(one, [("fit", "", {"loss": [1.01]}, [[2.0]])], passed)[0] == "differs"
    assert verdict(one, [("fit", "", {"loss": [1.0]}, [[2.01]])], passed)[0] == "differs"
    assert verdict(one, [("fit", "no", {"loss": [1.0]}, [[2.0]])], passed) == ("refused", "no")
    assert verdict(one, one, ("failed", "why")) == ("fails", "why")

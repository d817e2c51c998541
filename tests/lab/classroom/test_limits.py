"""What a visitor may ask for."""

import pytest

from gradlab.lab.classroom.limits import BATCH, Limits
from gradlab.lab.experiments.experiment import Experiment

TOO_MUCH = {
    "batch": (
        dict(microbatch_size=100, accumulation_steps=50, seeds=3),
        f"seeds * towers * accumulation_steps * microbatch_size must be at most {BATCH} in this "
        "classroom. Received: 3 * 5000 = 15000",
    ),
    "updates": (
        dict(updates=10**9),
        "a run may use at most 10000000 examples in this classroom, over all its seeds. Received: "
        "1 * 100000000000 = 100000000000",
    ),
    "examples": (
        dict(updates=None, examples=10**7, seeds=20),
        "a run may use at most 10000000 examples in this classroom, over all its seeds. Received: "
        "20 * 10000000 = 200000000",
    ),
    "micro-batches": (
        dict(updates=10**7, microbatch_size=1, accumulation_steps=1),
        "a run may use at most 250000 micro-batches in this classroom, over all its seeds. "
        "Received: 1 * 10000000 = 10000000",
    ),
    "seconds": (
        dict(updates=None, seconds=121),
        "a run may train for at most 120 seconds in this classroom, over all its seeds. Received: "
        "1 * 121",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_takes_too_much_is_refused(name):
    fields, sentence = TOO_MUCH[name]
    with pytest.raises(ValueError) as error:
        Limits().check(Experiment(**dict(model="dense", updates=10, seeds=1) | fields))
    assert str(error.value) == sentence


def test_what_is_allowed_may_train_for_so_long():
    assert Limits().check(Experiment()) == 120
    assert Limits(seconds=7).check(Experiment()) == 7


def test_limits_are_checked():
    with pytest.raises(ValueError, match="^visitors must be a positive integer. Received: 0$"):
        Limits(visitors=0)
    with pytest.raises(ValueError, match="^seconds must be a finite number above 0. Received: -1$"):
        Limits(seconds=-1)

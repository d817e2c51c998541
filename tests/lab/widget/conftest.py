"""Labs for the tests, closed after each test with all their threads."""

import pytest
from lab_widgets import lab_threads

import gradlab

# Drawing takes most of a short run's time, so only one view is shown where a test does not ask for
# all with hide=().
QUICK = dict(updates=5, eval_every=5, seeds=2, hide=("accuracy", "noise", "scale", "cost", "toy"))


@pytest.fixture
def make():
    """A function that makes a lab with short runs; its arguments are those of the lab."""
    labs = []

    def make(**preset):
        labs.append(gradlab.AccumulationLab(**QUICK | preset))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
    assert not lab_threads()

"""Sweeps in TOML files."""

import re

import pytest

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs import sweep_file


def read(tmp_path, text):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return sweep_file.read(path)


def test_a_run_overrides_what_all_share_and_the_grid_overrides_both(tmp_path):
    found = read(
        tmp_path,
        """
        [all]
        updates = 10
        microbatch_size = 5
        [[run]]
        updates = 20
        microbatch_size = 6
        [grid]
        microbatch_size = [7]
        """,
    )
    assert found == [Experiment(updates=20, microbatch_size=7)]


def test_runs_and_a_grid(tmp_path):
    found = read(
        tmp_path,
        """
        [all]
        model = "dense"
        updates = 10
        [[run]]
        accumulation_steps = 1
        microbatch_size = 100
        [[run]]
        seeds = [3, 5]
        [grid]
        method = ["placeholders", "microbatched"]
        """,
    )
    shared = dict(model="dense", updates=10)
    assert found == [
        Experiment(method=method, **shared, **run)
        for run in (dict(accumulation_steps=1, microbatch_size=100), dict(seeds=(3, 5)))
        for method in ("placeholders", "microbatched")
    ]


def test_a_grid_alone_and_nothing_at_all(tmp_path):
    found = read(tmp_path, "[grid]\naccumulation_steps = [1, 2]\nlearning_rate = [0.1, 0.2]")
    assert [(e.accumulation_steps, e.learning_rate) for e in found] == [
        (1, 0.1),
        (1, 0.2),
        (2, 0.1),
        (2, 0.2),
    ]
    assert read(tmp_path, "") == [Experiment()]


def test_the_example_in_the_docstring(tmp_path):
    text = re.sub(r"(?m)^    ", "", sweep_file.__doc__.split("\n", 1)[1])
    assert len(read(tmp_path, text)) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[all", "a sweep file must be TOML. Received: .*sweep.toml"),
        (
            "[runs]",
            r"a sweep file may have the tables \[all\], \[\[run\]\] and \[grid\]. Received: runs",
        ),
        ("[run]\nupdates = 3", r"\[\[run\]\] in double brackets. Received: run = {'updates': 3}"),
        ("run = [3]", r"\[\[run\]\] in double brackets. Received: run = \[3\]"),
        ("all = 3", r"at most one table \[all\], .* Received: all = 3"),
        (
            "[grid]\nupdates = 3",
            r"\[grid\] must give each field a list of values. Received: updates = 3",
        ),
        ("[grid]\nupdates = []", r"\[grid\] must give each field a list"),
        ("[all]\nk = 3", "an experiment's field must be one of dataset, .* Received: 'k'"),
        (
            "[grid]\nmodel = ['lenet', 'resnet']",
            "model must be one of lenet, dense, vgg. Received: 'resnet'",
        ),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, text)

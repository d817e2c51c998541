"""The published table: its experiments, its three protocols, its conclusion, and the committed
results."""

import csv
import json
import math
import pathlib

import numpy as np
import pytest

from gradlab.lab.experiments import datasets
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.reproduce import averaging as reproduce

COMMITTED = datasets.data_folder() / "results"


def synthetic(experiment: Experiment, shift=0.0) -> Result:
    """Accuracies that rise by 0.0001 an update from a seed's own start, with a peak at update 5 in
    seed 0."""
    seeds, updates, k = (
        len(experiment.seed_numbers),
        experiment.updates,
        experiment.accumulation_steps,
    )
    accuracies = np.full([seeds, updates], np.nan)
    numbers = np.arange(experiment.eval_every, updates + 1, experiment.eval_every)
    accuracies[:, numbers - 1] = (
        0.85 + shift + 1e-4 * numbers + 0.001 * (np.arange(seeds) % 10)[:, None]
    )
    if experiment.eval_every == 5:
        accuracies[0, 4] = 0.99
    return Result(
        experiment=experiment,
        seeds=experiment.seed_numbers,
        endings=("finished",) * seeds,
        losses=np.ones([seeds, updates, k]),
        weights=np.full([seeds, updates, k], float(experiment.microbatch_size)),
        gradient_norms=np.ones([seeds, updates, k]),
        window_gradient_norms=np.ones([seeds, updates]),
        accuracies=accuracies,
        update_seconds=np.ones([seeds, updates]),
        peak_memory_bytes=np.ones(seeds),
        environments=({"python": "3", "date": "2026-01-01"},) * seeds,
    )


def test_the_experiments_are_the_published_ones():
    made = reproduce.experiments()
    assert len(made) == 8
    for e in made:
        assert (e.dataset, e.model, e.optimizer, e.learning_rate) == (
            "mnist",
            "lenet",
            "adam",
            1e-3,
        )
        assert (e.updates, len(e.seed_numbers), e.effective_batch) == (1000, 30, 100)
        assert 100 % (e.eval_every * e.accumulation_steps) == 0 and 100 % e.eval_every == 0
    shapes = [(e.accumulation_steps, e.microbatch_size) for e in made[:4]]
    assert shapes == list(reproduce.PUBLISHED) == [(1, 100), (5, 20), (10, 10), (20, 5)]


def test_each_protocol_looks_where_it_says():
    result = synthetic(reproduce.experiments()[3])  # 20 x 5: a look every 5 updates as published
    scores = reproduce.scores(result)
    assert scores["as published"][0] == pytest.approx(99)  # the peak at update 5
    # Not seen every 100
    assert scores["equal looks"][0] == scores["last value"][0] == pytest.approx(95)
    assert scores["as published"][9] == scores["last value"][9] == pytest.approx(95.9)
    looks = [reproduce.looks(result.experiment, protocol) for protocol in reproduce.PROTOCOLS]
    assert looks == [200, 10, 1]
    assert [reproduce.looks(e, "as published") for e in reproduce.experiments()[:4]] == [
        10,
        50,
        100,
        200,
    ]


def test_the_figures_of_the_table():
    rows = reproduce.table([synthetic(e) for e in reproduce.experiments()])
    assert len(rows) == 24
    [row] = [
        r
        for r in rows
        if (r["method"], r["accumulation_steps"], r["protocol"])
        == ("microbatched", 5, "last value")
    ]
    values = 95 + 0.1 * (np.arange(30) % 10)
    assert (row["mean"], row["std"]) == (
        pytest.approx(95.45),
        pytest.approx(values.std(ddof=1), abs=1e-3),
    )
    error = math.sqrt(values.var(ddof=1) / 30 + 0.325**2 / 10)
    assert row["standard_errors"] == pytest.approx((95.45 - 94.9) / error, abs=0.01)


def test_four_means_are_compared_together():
    """Each within two standard errors, and yet together beyond the limit."""
    rows = reproduce.table([synthetic(e) for e in reproduce.experiments()])
    apart = [row | {"standard_errors": 1.9} for row in rows]
    assert reproduce.distance(apart, "placeholders") == pytest.approx(4 * 1.9**2)
    assert "differ from" in reproduce.conclusion(apart)
    near = [row | {"standard_errors": 1.8 * (row["protocol"] == "as published")} for row in rows]
    assert "agree with" in reproduce.conclusion(near)


def test_the_words_follow_the_figures():
    near = reproduce.table([synthetic(e, -0.003) for e in reproduce.experiments()])
    assert "agree with the published ones" in reproduce.conclusion(near)
    far = reproduce.table([synthetic(e, 0.01) for e in reproduce.experiments()])
    assert "differ from the published ones" in reproduce.conclusion(far)
    assert "by +0.00 in the last value" in reproduce.conclusion(far)
    assert "no change beyond chance" in reproduce.conclusion(far)
    better = [synthetic(e, 0.02 * (e.accumulation_steps == 20)) for e in reproduce.experiments()]
    assert "a change beyond chance" in reproduce.conclusion(reproduce.table(better))
    quick = reproduce.table([synthetic(e) for e in reproduce.experiments(quick=True)])
    assert "cannot be compared" in reproduce.conclusion(quick)
    # Before the published means stand beside
    assert reproduce.text(quick).startswith(reproduce.conclusion(quick))
    assert reproduce.text(near).endswith(reproduce.conclusion(near))
    for rows in (near, quick):
        lines = reproduce.text(rows).replace(reproduce.conclusion(rows), "").splitlines()
        assert max(map(len, lines)) <= 100
    assert "95.0 ± 0.17" in reproduce.text(near)


def test_what_is_written_can_be_read(tmp_path):
    results = [synthetic(e) for e in reproduce.experiments(quick=True)]
    files = reproduce.write(results, tmp_path / "new")
    assert sorted(files) == sorted((tmp_path / "new").iterdir())
    check(tmp_path / "new", runs=16)


def test_the_committed_results_are_whole():
    about, rows = check(COMMITTED, runs=240)
    assert all(row["updates"] == 1000 for row in about["table"])
    assert about["environments"][0]["tensorflow"] and "+" not in about["environments"][0]["commit"]
    assert all(row["ending"] == "finished" for row in rows)


def check(folder: pathlib.Path, runs: int):
    """The files go together: the table is that of the runs, and the runs are those of the looks."""
    about = json.loads((folder / "reproduce.json").read_text())
    table, each, looks = (
        list(csv.DictReader((folder / f"reproduce{name}.csv").open()))
        for name in ("", "_runs", "_looks")
    )
    assert [{name: str(value) for name, value in row.items()} for row in about["table"]] == table
    assert [Experiment.from_fields(fields) for fields in about["experiments"]]
    assert about["conclusion"] == reproduce.conclusion(about["table"])
    assert len(each) == runs
    for row in table:
        ours = [r for r in each if same(r, row)]
        mean = np.mean([float(r[row["protocol"].replace(" ", "_")]) for r in ours])
        assert mean == pytest.approx(float(row["mean"]), abs=0.006) and len(ours) == int(
            row["seeds"]
        )
    for run in each:
        seen = {
            int(r["update"]): float(r["accuracy"])
            for r in looks
            if same(r, run) and r["seed"] == run["seed"]
        }
        every = 100 // int(run["accumulation_steps"])
        last = max(seen)
        best = max(value for update, value in seen.items() if update % every == 0 or update == last)
        assert float(run["as_published"]) == best and float(run["last_value"]) == seen[last]
    assert (folder / "reproduce.png").read_bytes().startswith(b"\x89PNG")
    return about, each


def same(one, other) -> bool:
    return all(one[name] == other[name] for name in ("method", "accumulation_steps"))

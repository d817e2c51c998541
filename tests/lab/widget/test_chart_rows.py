"""The numbers that the page gets of a run: the same as those of the result, however they arrive."""

import dataclasses

import numpy as np
import pytest
from synthetic_results import synthetic

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.run import run, updates_of
from gradlab.lab.figures import curves
from gradlab.lab.widget.chart_rows import COLUMNS, DOTS, ChartRows


def expected(result) -> dict:
    """The columns, each from the functions that the figures use."""
    scales = [scale for scale in result.noise_scale(0.95)] if result.losses.shape[2] > 1 else []
    above, below = (
        np.mean([getattr(s, name) for s in scales], axis=0)
        for name in ("variance", "squared_gradient")
    )
    loss, accuracy = (
        curves.mean_and_deviation(values)
        for values in (result.window_losses, 100 * result.accuracies)
    )
    horizontal = [
        curves.horizontal(result, against).mean(axis=0) for against in ("examples", "seconds")
    ]
    scale = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)
    return dict(zip(COLUMNS, [*loss, *accuracy, *horizontal, scale]))


def columns(rows: np.ndarray) -> dict:
    return dict(zip(COLUMNS, rows.T))


def check(rows: np.ndarray, result) -> None:
    for name, values in expected(result).items():
        np.testing.assert_allclose(columns(rows)[name], values, rtol=2e-6, err_msg=name)


def test_the_rows_of_a_result_are_what_the_figures_draw():
    result = synthetic(4)
    chart_rows = ChartRows.of(result)
    check(chart_rows.rows(0), result)
    assert chart_rows.rows(0).dtype == np.float32 and chart_rows.counts == [40, 40, 40]
    np.testing.assert_allclose(chart_rows.dots(0), result.losses[0], rtol=1e-6)


# All seeds together, and one after the other
@pytest.mark.parametrize("method", ["microbatched", "variables"])
def test_updates_that_arrive_one_by_one_give_the_same_rows_as_the_result(method):
    experiment = Experiment(
        model="dense", method=method, updates=7, seeds=2, eval_every=3, accumulation_steps=3
    )
    jobs = (
        [experiment] if method == "microbatched" else [experiment.of_seeds(seed) for seed in (0, 1)]
    )
    chart_rows, made, page = ChartRows(experiment), {}, np.zeros([0, len(COLUMNS)], np.float32)
    for job in jobs:
        for updates in updates_of(job):
            known = list(chart_rows.counts)
            for seed, update in updates:
                made.setdefault(seed, []).append(update)
            chart_rows.grow(made)
            first = chart_rows.first_new(known)
            assert first == (len(made[updates[0][0]]) - 1)  # a page gets the new rows alone
            # And puts them in the place of its own
            page = np.concatenate([page[:first], chart_rows.rows(first)])
    result = run(experiment)
    result = dataclasses.replace(
        result, update_seconds=np.array([[u.seconds for u in made[s]] for s in (0, 1)])
    )
    check(page, result)
    np.testing.assert_array_equal(page, chart_rows.rows(0))


def test_a_page_gets_what_it_does_not_have():
    chart_rows = ChartRows.of(synthetic(4))
    assert chart_rows.first_new([40, 40, 40]) == 40 and chart_rows.rows(40).shape == (
        0,
        len(COLUMNS),
    )
    # One seed after the other: the mean changes from there on
    assert chart_rows.first_new([40, 12, 40]) == 12
    assert chart_rows.first_new([30, 12, 40]) == 12  # the earliest change counts
    # A page that knows another run, or none
    assert chart_rows.first_new([]) == 0 == chart_rows.first_new([3])
    assert chart_rows.rows(38).tobytes() == chart_rows.rows(0)[38:].tobytes()
    assert chart_rows.dots(38).shape == (2, 4)


def test_many_micro_batches_are_chosen_evenly():
    result = synthetic(50)
    dots = ChartRows.of(result).dots(0)
    chosen = np.arange(DOTS) * 50 // DOTS
    np.testing.assert_allclose(dots, result.losses[0][:, chosen], rtol=1e-6)


def test_short_windows_have_as_many_dots_as_losses():
    large = Experiment(
        model="dense", method="large_batch", updates=3, seeds=1, accumulation_steps=5
    )
    dots = ChartRows.of(run(large)).dots(0)  # one loss for the whole batch
    assert np.isfinite(dots[:, 0]).all() and np.isnan(dots[:, 1:]).all() and dots.shape == (3, 5)
    sizes = dict(accumulation_steps=50, microbatch_size=101)
    ragged = Experiment(model="dense", method="microbatched", updates=11, seeds=1, **sizes)
    chart_rows, made = ChartRows(ragged), {0: []}
    for updates in updates_of(ragged):
        made[0] += [update for _, update in updates]
        chart_rows.grow(made)
    assert len(made[0][-1].losses) < 50  # the last window of the epoch
    np.testing.assert_array_equal(chart_rows.dots(0), ChartRows.of(run(ragged)).dots(0))


def test_a_seed_that_diverges_leaves_the_noise_scale_and_the_page_gets_every_row_again():
    diverged = synthetic(4, endings=("finished", "diverged", "finished"))
    diverged.gradient_norms[1, 20:] = np.inf
    scale = columns(ChartRows.of(diverged).rows(0))["noiseScale"]
    np.testing.assert_allclose(scale, expected(diverged)["noiseScale"], rtol=2e-6)
    wild = dict(optimizer="sgd", learning_rate=1e30)
    experiment = Experiment(model="dense", method="microbatched", updates=9, seeds=2, **wild)
    chart_rows, made, numbers = ChartRows(experiment), {}, set()
    for updates in updates_of(experiment):
        for seed, update in updates:
            made.setdefault(seed, []).append(update)
        chart_rows.grow(made)
        numbers.add(chart_rows.number)
    assert len(numbers) > 1


def test_numbers_that_are_not_there_are_nan():
    diverged = synthetic(4)
    diverged.losses[1, 20:] = np.inf
    diverged.gradient_norms[1, 20:] = np.nan
    rows = columns(ChartRows.of(diverged).rows(0))
    np.testing.assert_allclose(
        rows["loss"][20:], diverged.window_losses[[0, 2], 20:].mean(axis=0), rtol=1e-6
    )
    assert np.isnan(rows["accuracy"][:9]).all() and np.isfinite(rows["accuracy"][9])
    assert np.isfinite(rows["noiseScale"]).all()
    assert np.isnan(
        columns(ChartRows.of(synthetic(1)).rows(0))["noiseScale"]
    ).all()  # one micro-batch does not show its noise

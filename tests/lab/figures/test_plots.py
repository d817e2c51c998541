"""The figures of results: they draw what the results contain, with labels, units, styles and a text
alternative."""

import dataclasses
import threading

import numpy as np
import pytest
from synthetic_results import EXPERIMENT, synthetic

from gradlab.lab.figures import plots
from gradlab.measure import noise

RESULTS = [synthetic(2), synthetic(8)]
EVERY = [
    plots.losses,
    plots.accuracy,
    lambda results: plots.accuracy(results, "examples"),
    lambda results: plots.accuracy(results, "seconds"),
    plots.loss_noise,
    plots.noise_scale,
    plots.cost,
]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.parametrize("draw", EVERY)
def test_every_figure_has_units_a_text_and_fits(draw):
    figure = draw(RESULTS)
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel()
    assert len(figure.get_label()) > 60 and figure.get_label().endswith(".")
    assert "k = 2" in figure.get_label() and "k = 8" in figure.get_label()
    assert plots.to_png(figure).startswith(b"\x89PNG")
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    for box in boxes:  # nothing is cut off
        assert (
            box.x0 >= 0
            and box.y0 >= 0
            and box.x1 <= figure.bbox.width
            and box.y1 <= figure.bbox.height
        )
    for legend in figure.legends:
        for axes in figure.axes:
            assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))


@pytest.mark.parametrize("draw", EVERY[:6])
def test_series_differ_by_more_than_color(draw):
    [axes] = draw(RESULTS).axes
    styles = [
        (line.get_linestyle(), line.get_marker())
        for line in lines(axes).values()
        if line.get_label()[0] != "_"
    ]
    assert len(styles) >= 2 and len(set(styles)) == len(styles)


def test_seven_series_have_seven_styles():
    assert (
        len({str((s["linestyle"], s["marker"])) for s in plots.STYLES})
        == len({s["color"] for s in plots.STYLES})
        == 7
    )


def test_losses_are_the_mean_over_seeds_and_the_band_a_standard_deviation():
    [axes] = plots.losses(RESULTS, smoothing=0.0).axes
    drawn = lines(axes)["k = 2"].get_ydata()
    np.testing.assert_allclose(drawn, RESULTS[0].window_losses.mean(axis=0))
    band = axes.collections[0].get_paths()[0].vertices
    top = RESULTS[0].window_losses.mean(axis=0) + RESULTS[0].window_losses.std(axis=0, ddof=1)
    assert band[:, 1].max() == pytest.approx(top.max())
    smooth = lines(plots.losses(RESULTS, smoothing=0.9).axes[0])["k = 2"].get_ydata()
    expected = np.mean([noise.running_mean(seed, 0.9) for seed in RESULTS[0].window_losses], axis=0)
    np.testing.assert_allclose(smooth, expected)


def test_accuracy_against_updates_examples_and_seconds():
    for against, expected in (
        ("updates", [10, 20, 30, 40]),
        ("examples", [400, 800, 1200, 1600]),
        ("seconds", RESULTS[0].update_seconds.cumsum(axis=1).mean(axis=0)[9::10]),
    ):
        line = lines(plots.accuracy(RESULTS, against).axes[0])["k = 2"]
        np.testing.assert_allclose(line.get_xdata(), expected)
        np.testing.assert_allclose(
            line.get_ydata(), 100 * RESULTS[0].accuracies[:, 9::10].mean(axis=0)
        )


def test_noise_against_k_follows_the_law():
    results = [synthetic(k, updates=400) for k in (16, 1, 4)]
    [axes] = plots.loss_noise(results).axes
    drawn = lines(axes)
    assert drawn["window of k, measured"].get_xdata().tolist() == [1, 4, 16]
    np.testing.assert_allclose(
        drawn["window of k, measured"].get_ydata(), 0.4 / np.array([1, 2, 4]), rtol=0.08
    )
    np.testing.assert_allclose(drawn["micro-batch"].get_ydata()[1:], 0.4, rtol=0.03)
    np.testing.assert_allclose(
        drawn["micro-batch / √k: the law"].get_ydata()[1:], [0.2, 0.1], rtol=0.03
    )
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_the_noise_scale_is_a_ratio_of_means():
    [axes] = plots.noise_scale(RESULTS, smoothing=0.0).axes
    result, k, b = RESULTS[0], 2, 20
    small, big = (result.gradient_norms**2).mean(axis=2), result.window_gradient_norms**2
    variance, signal = (small - big) * k * b / (k - 1), (k * big - small) / (k - 1)
    variance, signal = variance.mean(axis=0), signal.mean(axis=0)
    # Noise makes some negative; there the ratio has no meaning, and nothing is drawn
    assert (signal < 0).any()
    np.testing.assert_allclose(
        lines(axes)["k = 2"].get_ydata(), np.where(signal > 0, variance / signal, np.nan)
    )


def test_cost_shows_medians_and_memory():
    times, memory = plots.cost(RESULTS).axes
    np.testing.assert_allclose(
        times.get_lines()[0].get_ydata(),
        [1000 * np.median(result.update_seconds) for result in RESULTS],
    )
    assert times.get_ylabel() == "time of an update (ms)"
    np.testing.assert_allclose(memory.get_lines()[0].get_ydata(), [500, 500])
    unreadable = [
        dataclasses.replace(result, peak_memory_bytes=np.full(3, np.nan)) for result in RESULTS
    ]
    assert plots.cost(unreadable).axes[1].texts[0].get_text() == "not available on this system"
    together = [
        dataclasses.replace(result, environments=({"seeds_together": 3},) * 3) for result in RESULTS
    ]
    assert plots.cost(together).axes[0].get_ylabel() == "time of an update of 3 seeds (ms)"


def test_a_seed_that_diverged_is_shown_and_does_not_spoil_the_rest():
    losses = RESULTS[0].losses.copy()
    losses[1, 20:] = np.nan
    accuracies = RESULTS[0].accuracies.copy()
    accuracies[1, 20:] = np.nan
    weights = RESULTS[0].weights.copy()
    weights[1, 21:] = 0
    norms = RESULTS[0].gradient_norms.copy()
    norms[1, 20:] = np.inf
    gone = dataclasses.replace(
        RESULTS[0],
        endings=("finished", "diverged", "finished"),
        losses=losses,
        accuracies=accuracies,
        weights=weights,
        gradient_norms=norms,
    )
    assert gone.updates.tolist() == [40, 21, 40] and gone.sound_updates.tolist() == [40, 20, 40]
    for draw in (plots.losses, plots.accuracy, plots.noise_scale, plots.loss_noise, plots.cost):
        assert "1 of 6 seeds diverged" in draw([gone, RESULTS[1]]).get_label()
    for draw in (plots.losses, plots.accuracy):
        figure = draw([gone, RESULTS[1]])
        assert "1 of 6 seeds diverged" in figure.get_label()
        assert "1 of 6 seeds diverged" in figure.axes[0].get_title(loc="left")
        assert np.isfinite(lines(figure.axes[0])["k = 2"].get_ydata()).all()
    others = RESULTS[0].window_losses[[0, 2], -1].mean()
    assert lines(plots.losses([gone], 0.0).axes[0])["microbatched"].get_ydata()[
        -1
    ] == pytest.approx(others)


def test_a_table_of_dots():
    figure = plots.accuracy_table(
        ["1 x 100", "20 x 5"], {"published": [(95, 0.2), (95.2, 0.3)], "ours": [(95, 0.1)] * 2}
    )
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 x 100", "20 x 5"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is on top
    published, ours = axes.containers
    assert published.lines[0].get_xdata().tolist() == [95, 95.2]
    assert (published.lines[0].get_ydata() < ours.lines[0].get_ydata()).all()
    assert "20 x 5 95.20 ± 0.30 %" in figure.get_label()


def test_labels_name_what_differs():
    ways = [
        EXPERIMENT,
        dataclasses.replace(EXPERIMENT, learning_rate=0.1),
        dataclasses.replace(EXPERIMENT, method="variables", towers=2),
    ]
    assert plots.labels(ways) == [
        "microbatched, T = 1, learning rate = 0.001",
        "microbatched, T = 1, learning rate = 0.1",
        "variables, T = 2, learning rate = 0.001",
    ]
    assert plots.labels([EXPERIMENT]) == ["microbatched"]
    other = dataclasses.replace(EXPERIMENT, updates=None, examples=250, learning_rate=10**-0.3)
    assert plots.labels([EXPERIMENT, other]) == [
        f"updates = {EXPERIMENT.updates}, learning rate = 0.001",
        "examples = 250, learning rate = 0.501",
    ]


def test_bad_input_gets_one_sentence():
    with pytest.raises(
        ValueError, match=r"a figure needs a list of results, at least one. Received: \[\]"
    ):
        plots.losses([])
    with pytest.raises(
        ValueError, match="against must be one of updates, examples, seconds. Received: 'days'"
    ):
        plots.accuracy(RESULTS, "days")
    with pytest.raises(ValueError, match="windows of 2 micro-batches or more"):
        plots.noise_scale([synthetic(1)])


def test_threads_may_draw_and_pyplot_is_left_alone():
    import sys

    failed = []

    def draw():
        try:
            for each in EVERY:
                plots.to_png(each(RESULTS))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()

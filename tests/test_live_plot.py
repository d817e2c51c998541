"""The figures: what is on them, and their text alternative."""

import threading

import numpy as np

from gradlab.lab import live_plot, plots
from gradlab.lab.training import Update


def updates(count, wild=None):
    generator = np.random.default_rng(0)
    made = []
    for number in range(1, count + 1):
        losses = 2.3 / number + generator.uniform(0, 0.1, 4)
        if number == wild:
            losses[0] = np.nan
        accuracy = number / count if number % 2 == 0 else None
        made.append(Update(number, losses, np.array([5, 5, 5, 1]), losses, 1.0, accuracy, 0.01, number / count))
    return made


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_micro_batches_window_means_and_accuracy_are_where_they_belong():
    made = updates(6)
    figure = live_plot.training_figure(made, total=10, label="a run")
    losses, accuracies = figure.axes
    drawn = lines(losses)
    assert len(drawn["micro-batch"].get_xdata()) == 24
    assert drawn["micro-batch"].get_xdata()[:4].tolist() == [0.125, 0.375, 0.625, 0.875]
    means = drawn["window mean"].get_ydata()
    np.testing.assert_allclose(means, [np.average(u.losses, weights=u.weights) for u in made])
    [line] = accuracies.get_lines()
    assert line.get_xdata().tolist() == [2, 4, 6]
    np.testing.assert_allclose(line.get_ydata(), [100 / 3, 200 / 3, 100])
    for axes in (losses, accuracies):
        assert axes.get_xlim() == (0, 10)
        assert axes.get_xlabel() == "updates"
    assert losses.get_ylabel() == "loss (nats)"
    assert "(%)" in accuracies.get_ylabel()
    assert figure.get_suptitle() == "a run"


def test_the_run_before_differs_by_style_and_not_by_colour_alone():
    figure = live_plot.training_figure(updates(4), 10, earlier=updates(6))
    before, now = lines(figure.axes[0])["window mean, run before"], lines(figure.axes[0])["window mean"]
    assert (before.get_linestyle(), now.get_linestyle()) == ("--", "-")
    assert before.get_linewidth() < now.get_linewidth()
    assert {line.get_marker() for line in figure.axes[1].get_lines()} == {"x", "o"}


def test_losses_that_are_not_finite_do_not_spoil_the_axes():
    figure = live_plot.training_figure(updates(4, wild=1), 10)
    assert np.isfinite(figure.axes[0].get_ylim()).all()
    assert plots.to_png(figure).startswith(b"\x89PNG")


def test_the_text_alternative_says_what_is_seen():
    assert live_plot.training_figure(updates(6), 10).get_label().startswith("Training after 6 of 10 updates.")
    assert "the test accuracy is 100.0 %" in live_plot.training_figure(updates(6), 10).get_label()
    assert "empty" in live_plot.training_figure([], 10).get_label()


def test_every_figure_has_the_same_size():
    import struct

    for made in ([], updates(1), updates(300)):
        png = plots.to_png(live_plot.training_figure(made, 300, "x" * 80, hint="go"))
        assert struct.unpack(">II", png[16:24]) == (960, 380)


def test_threads_may_draw():
    failed = []

    def draw():
        try:
            plots.to_png(live_plot.training_figure(updates(20), 20))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed

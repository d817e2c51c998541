"""The views of the lab: what they draw of the current run, of pinned runs and of earlier runs."""

import dataclasses

import numpy as np
import pytest
from synthetic_results import synthetic

from gradlab.lab.figures import curves
from gradlab.lab.figures.style import STYLES, to_png
from gradlab.lab.widget import toy, views
from gradlab.lab.widget.views import PICTURES, Point, Shown

NOW, OTHER = synthetic(4), synthetic(8)
EMPTY = Shown(NOW.experiment, "now")
FULL = Shown(NOW.experiment, "now", NOW, pinned=[("other", OTHER)], points=[Point.of(OTHER)])


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.parametrize("name", ["toy", *PICTURES])
def test_every_view_has_one_size_a_description_and_fits(name):
    for shown in (
        EMPTY,
        FULL,
        dataclasses.replace(FULL, result=None),
        dataclasses.replace(FULL, against="seconds"),
    ):
        png, description = (
            toy.picture(toy.descend(5)) if name == "toy" else views.picture(name, shown)
        )
        assert png[16:24] == (442).to_bytes(4, "big") + (338).to_bytes(4, "big")
        assert len(description) > 10 and description.endswith(".")
        figure = toy.draw(toy.descend(5)) if name == "toy" else getattr(views, name)(shown)
        to_png(figure)
        for axes in figure.axes:
            box = axes.get_tightbbox(figure.canvas.get_renderer())
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 443 and box.y1 <= 338, (name, box)


def test_losses_show_micro_batches_window_means_and_pins():
    [axes] = views.losses(FULL).axes
    drawn = lines(axes)
    dots = axes.get_lines()[0]
    np.testing.assert_allclose(dots.get_ydata(), NOW.losses[0].ravel())
    np.testing.assert_allclose(dots.get_xdata()[:4], [0.125, 0.375, 0.625, 0.875])
    np.testing.assert_allclose(drawn["now"].get_ydata(), NOW.window_losses.mean(axis=0))
    np.testing.assert_allclose(drawn["other"].get_ydata(), OTHER.window_losses.mean(axis=0))
    assert drawn["now"].get_color() == STYLES[0]["color"] != drawn["other"].get_color()
    assert drawn["now"].get_linestyle() != drawn["other"].get_linestyle()
    assert axes.get_xlim() == (0, 40)


def test_a_window_that_is_watched_shows_its_micro_batches_so_far():
    [axes] = views.losses(dataclasses.replace(FULL, window=np.array([1.5, 1.7]))).axes
    marks = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [float(line.get_ydata()[0]) for line in marks] == [1.5, 1.7]


def test_a_pinned_run_keeps_its_style_when_there_is_no_run():
    with_run = lines(views.losses(FULL).axes[0])["other"].get_color()
    without = lines(views.losses(dataclasses.replace(FULL, result=None)).axes[0])[
        "other"
    ].get_color()
    assert with_run == without


def test_noise_is_of_runs_with_the_same_micro_batch():
    elsewhere = Point.of(synthetic(2, b=7))
    shown = dataclasses.replace(FULL, points=[Point.of(OTHER), elsewhere])
    [axes] = views.noise(shown).axes
    earlier, now, law = axes.get_lines()
    assert earlier.get_xdata() == [8] and now.get_xdata() == [4]
    expected = curves.noise_of(NOW)
    assert now.get_ydata() == [expected.window]
    np.testing.assert_allclose(law.get_ydata(), expected.microbatch / np.sqrt(law.get_xdata()))
    assert f"{expected.law:.3f}" in views.noise(shown).get_label()


def test_cost_has_time_and_memory():
    time, memory = views.cost(FULL).axes
    assert [line.get_ydata()[0] for line in memory.get_lines()] == [500, 500]
    assert time.get_lines()[1].get_ydata()[0] == pytest.approx(1000 * np.median(NOW.update_seconds))


def test_without_accumulation_the_noise_scale_says_what_it_needs():
    one = synthetic(1)
    [axes] = views.scale(Shown(one.experiment, "now", one)).axes
    assert axes.texts[0].get_text() == "needs k of 2 or more"

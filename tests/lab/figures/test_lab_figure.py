"""The lab's views as one figure: what they draw of the current run, of pinned runs and of earlier
runs."""

import dataclasses
import io

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.quiver import Quiver
from matplotlib.text import Text
from PIL import Image
from synthetic_results import synthetic

from gradlab.lab.figures import curves, toy
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.lab_figure import lab_views, series_of
from gradlab.lab.figures.shown import VIEWS, Shown
from gradlab.lab.figures.style import STYLES, for_any_ground, to_png, to_small_png

NOW, OTHER = synthetic(4), synthetic(8)
EMPTY = Shown(NOW.experiment, "now")
FULL = Shown(NOW.experiment, "now", NOW, pinned=[("other", OTHER)], points=[Point.of(OTHER)])


def axes_of(name, shown=FULL):
    return lab_views(shown, [name]).axes


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


SHOWN = {
    "empty": EMPTY,
    "full": FULL,
    "no_run": dataclasses.replace(FULL, result=None),
    "seconds": dataclasses.replace(FULL, against="seconds"),
    "long_names": dataclasses.replace(
        FULL, pinned=[(f"run {n}{' of many' * 9}", OTHER) for n in range(7)]
    ),
}


@pytest.mark.parametrize("names", [VIEWS, ("scale",)])
@pytest.mark.parametrize("shown", SHOWN)
def test_nothing_is_cut_off_or_hidden(shown, names):
    figure = lab_views(SHOWN[shown], names)
    to_png(figure)
    renderer = figure.canvas.get_renderer()
    width, height = figure.bbox.size
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    assert len(boxes) == (7 if names == VIEWS else 1) + (shown != "empty")
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert not box.count_overlaps(boxes[:number])


@pytest.mark.parametrize("shown", ["empty", "full", "no_run"])
def test_every_view_is_described(shown):
    figure = lab_views(SHOWN[shown])
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert len(titles) == len(VIEWS) and all(title in figure.get_label() for title in titles)
    missing = {"empty": 5, "full": 0, "no_run": 2}  # no_run: noise and cost
    assert figure.get_label().count(": no data yet.") == missing[shown]


def test_only_what_is_named_is_drawn_three_views_in_a_row():
    sizes = [lab_views(EMPTY, VIEWS[:count]).get_size_inches() for count in (1, 3, 4)]
    assert [width / sizes[0][0] for width, _ in sizes] == pytest.approx([1, 3, 3])
    assert sizes[0][1] == sizes[1][1] < sizes[2][1]
    nothing = lab_views(FULL, ())
    assert not nothing.axes and to_png(nothing).startswith(b"\x89PNG")


def test_the_legend_names_the_runs():
    [legend] = lab_views(FULL).legends
    assert [text.get_text() for text in legend.get_texts()] == ["now", "other"]
    assert not lab_views(EMPTY).legends


def test_losses_show_micro_batches_window_means_and_pins():
    [axes] = axes_of("losses")
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
    [axes] = axes_of("losses", dataclasses.replace(FULL, window=np.array([1.5, 1.7]), window_at=7))
    [marks] = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert marks.get_ydata().tolist() == [1.5, 1.7] and marks.get_xdata().tolist() == [7.25, 7.75]


def test_a_pinned_run_keeps_its_style_when_there_is_no_run():
    without = dataclasses.replace(FULL, result=None)
    colors = [lines(axes_of("losses", shown)[0])["other"].get_color() for shown in (FULL, without)]
    assert colors == [STYLES[1]["color"]] * 2


def test_the_current_run_has_a_style_that_no_pinned_run_has():
    many = dataclasses.replace(FULL, pinned=[(f"run {number}", OTHER) for number in range(9)])
    first, *others = [style for _, _, style in series_of(many)]
    assert len(others) == 9 and first == STYLES[0] not in others


def test_noise_is_of_runs_with_the_same_micro_batch():
    elsewhere = Point.of(synthetic(2, b=7))
    shown = dataclasses.replace(FULL, points=[Point.of(OTHER), elsewhere])
    [axes] = axes_of("noise", shown)
    earlier, now, law = axes.get_lines()
    assert earlier.get_xdata() == [8] and now.get_xdata() == [4]
    expected = curves.noise_of(NOW)
    assert now.get_ydata() == [expected.window]
    np.testing.assert_allclose(law.get_ydata(), expected.microbatch / np.sqrt(law.get_xdata()))
    assert f"{expected.law:.3f} predicted" in lab_views(shown, ["noise"]).get_label()


def test_few_updates_say_nothing_about_the_noise_of_a_run():
    few = synthetic(4, updates=curves.POINT_UPDATES - 1)
    shown = Shown(few.experiment, "now", few)
    assert lab_views(shown, ["noise"]).get_label() == "noise of the loss (nats): no data yet."
    assert "an update takes" in lab_views(shown, ["cost"]).get_label()
    enough = synthetic(4, updates=curves.POINT_UPDATES)
    assert Point.of(enough).window == curves.noise_of(enough).window


def test_the_cost_is_the_median_time():
    [time] = axes_of("cost")
    assert time.get_lines()[1].get_ydata()[0] == pytest.approx(1000 * np.median(NOW.update_seconds))


def test_a_loss_that_grows_stays_in_the_view_up_to_four_times_the_first():
    for factor, top in ((3.0, 3.0), (100.0, 4.0)):
        losses = NOW.losses.copy()
        first = float(NOW.window_losses[:, 0].mean())
        losses[:, -1] *= factor * first / NOW.window_losses[:, -1].mean()
        grown = dataclasses.replace(NOW, losses=losses)
        [axes] = axes_of("losses", Shown(NOW.experiment, "now", grown))
        assert axes.get_ylim()[1] == pytest.approx(1.25 * top * first)


def test_without_accumulation_the_noise_scale_says_what_it_needs():
    one = synthetic(1)
    [axes] = axes_of("scale", Shown(one.experiment, "now", one))
    assert axes.texts[0].get_text() == "needs k of 2 or more"


def test_the_thick_arrow_points_where_the_update_leads():
    start = (1.0, -2.0)
    descent = toy.descend(NOW.experiment.accumulation_steps, start=start)
    shown = dataclasses.replace(EMPTY, start=start)
    valley, losses = axes_of("toy", shown)
    gradients, mean = [each for each in valley.collections if isinstance(each, Quiver)]
    step = descent.path[descent.looked_at + 1] - descent.path[descent.looked_at]
    arrow = np.array([mean.U[0], mean.V[0]])
    np.testing.assert_allclose(arrow / np.linalg.norm(arrow), step / np.linalg.norm(step))
    np.testing.assert_allclose([gradients.U.mean(), gradients.V.mean()], arrow)
    assert losses.get_lines()[1].get_ydata() == [descent.floor] * 2
    assert toy.describe(descent) in lab_views(shown).get_label()


def contrast(color, ground: float) -> float:
    """The contrast of a color with white (1.0) or black (0.0), as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    lighter, darker = sorted((luminance, ground), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_a_saved_picture_is_read_on_white_and_on_black():
    before = [line.get_color() for line in lab_views(FULL).findobj(Line2D)]
    figure = for_any_ground(lab_views(FULL))
    after = [line.get_color() for line in figure.findobj(Line2D)]
    assert STYLES[0]["color"] in after and "black" in before and "black" not in after
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert len(texts) > 30
    for text in texts:
        assert min(contrast(text.get_color(), ground) for ground in (0.0, 1.0)) >= 4.5
    picture = Image.open(io.BytesIO(to_small_png(figure))).convert("RGBA")
    alpha = np.asarray(picture)[..., 3]
    assert alpha[0, 0] == 0 and np.mean(alpha == 0) > 0.5 and alpha.max() >= 250
    opaque = Image.open(io.BytesIO(to_small_png(lab_views(FULL)))).convert("RGBA")
    assert np.asarray(opaque)[..., 3].min() == 255

"""The view of one update: what Python sends to the page, and what the lab's figure shows of it."""

import numpy as np
import pytest

from gradlab.lab.figures import toy
from gradlab.lab.widget.one_update import OneUpdate


def test_the_noise_reaches_the_page_exactly():
    view = OneUpdate(5)
    sent = np.frombuffer(view.noise, "<i2").reshape(toy.UPDATES, toy.MOST, 2)
    np.testing.assert_array_equal(sent, toy.draws())
    assert abs(sent).max() < 2**15 - 1  # nothing was cut off
    made = toy.descend(5)
    noise = made.gradients - toy.CURVATURE * made.path[made.looked_at]
    np.testing.assert_allclose(noise, toy.NOISE * toy.UNIT * sent[made.looked_at, :5], atol=1e-12)
    assert 0.97 < (toy.UNIT * sent).std() < 1.03 and abs((toy.UNIT * sent).mean()) < 0.03
    assert len(view.noise) < 30_000


def test_a_larger_window_has_the_micro_batches_of_a_smaller_one():
    few, many = toy.descend(3, updates=1), toy.descend(100, updates=1)
    np.testing.assert_array_equal(many.gradients[:3], few.gradients)


def test_the_figure_follows_the_starting_point(make):
    lab = make(accumulation_steps=5, hide=())
    assert toy.describe(toy.descend(5)) in lab.figure.get_label()
    lab._controller.layout.one_update.start = [1.0, -2.0]
    assert toy.describe(toy.descend(5, start=(1.0, -2.0))) in lab.figure.get_label()


def test_a_reset_outlasts_a_point_that_was_sent_before_it(monkeypatch):
    view, sent = OneUpdate(5), []
    monkeypatch.setattr(view, "send", sent.append)
    view.reset()
    # The page moved the ring before, and another thread was slower
    view.set_state({"start": [-3.75, 2.45]})
    view._handle_custom_msg({"reset": True}, [])  # the page's answer: its messages keep their order
    assert view.start == toy.START.tolist() and sent == [{"start": toy.START.tolist()}]


def test_the_lab_shows_all_micro_batches_of_its_towers(make):
    lab = make(accumulation_steps=7, hide=())
    assert "7 micro-batch gradients" in lab.figure.get_label()
    view = lab._controller.layout.one_update
    assert (view.accumulation_steps, view.towers) == (7, 1)
    wide = make(accumulation_steps=150, hide=(), rerun=False)
    assert f"{toy.MOST} micro-batch gradients" in wide.figure.get_label()


def test_more_micro_batches_than_there_is_noise_for_are_refused():
    with pytest.raises(
        ValueError, match="accumulation_steps must be at most 100 in the toy. Received: 101"
    ):
        toy.descend(101)

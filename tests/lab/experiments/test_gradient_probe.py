"""The probe at fixed weights, compared with gradients and losses that are computed here."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from gradlab.lab.experiments import datasets, models
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.gradient_probe import probe

WAY = Experiment(model="dense", method="microbatched", microbatch_size=20, accumulation_steps=16)
EXAMPLES = 2_700  # the full gradient is computed in blocks of 500, so the last one is ragged


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """A small training set, because a probe computes the gradient of all of it."""
    mnist = datasets.load()
    few = dataclasses.replace(
        mnist,
        train_images=mnist.train_images[:EXAMPLES],
        train_labels=mnist.train_labels[:EXAMPLES],
    )
    monkeypatch.setattr(datasets, "load", lambda name="mnist": few)
    monkeypatch.setitem(datasets.TRAINING_EXAMPLES, "mnist", EXAMPLES)


@pytest.mark.slow
def test_the_law_holds_at_fixed_weights():
    look = probe(WAY, after=5, count=60)
    assert look.losses.shape == look.cosines.shape == (60, 16) and look.window_cosines.shape == (
        60,
    )
    low, high = look.noise.window_interval
    assert low < look.noise.law < high
    # The variance of a window of 16 is a sixteenth, and its gradient points closer to the full
    # data's gradient.
    assert look.window_variance == pytest.approx(look.variance / 16, rel=0.15)
    assert look.window_cosines.mean() > look.cosines.mean() + 0.2
    expected = look.full_norm / np.sqrt(look.full_norm**2 + look.window_variance)
    assert look.window_cosines.mean() == pytest.approx(expected, abs=0.03)


def test_the_full_gradient_is_that_of_all_the_data():
    network, mnist = models.build("dense"), datasets.load()
    weights = {name: tf.constant(value) for name, value in network.initial_weights(2).items()}
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_mean(network.losses(weights, mnist.train_images, mnist.train_labels))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in tape.gradient(loss, weights).values()))
    look = probe(WAY, seed=2, count=4)
    assert look.full_norm == pytest.approx(norm, rel=1e-4)
    assert look.losses.mean() == pytest.approx(float(loss), abs=0.1)


def test_updates_before_the_probe_lower_the_loss_and_dropout_draws_many_masks():
    assert probe(WAY, after=60, count=4).losses.mean() < probe(WAY, count=4).losses.mean() / 2
    with_dropout = probe(
        Experiment(model="lenet", microbatch_size=1, accumulation_steps=2), count=4
    )
    assert len(set(with_dropout.losses.ravel())) == 8


def test_the_same_probe_gives_the_same_losses():
    expected = probe(WAY, after=2, count=4).losses
    other_budget = dataclasses.replace(WAY, updates=None, examples=1)  # has no effect on the probe
    assert np.array_equal(probe(other_budget, after=2, count=4).losses, expected)


def test_invalid_input_raises_an_error_that_names_the_value():
    with pytest.raises(ValueError, match="after must be an integer of 0 or more. Received: -1"):
        probe(WAY, after=-1)
    with pytest.raises(ValueError, match="count must be an integer of 4 or more. Received: 3"):
        probe(WAY, count=3)

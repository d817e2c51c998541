"""Seeds that are trained together: the losses of each are those of the seed alone."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from gradlab import averaging, window
from gradlab.lab.experiments import batched_seeds, datasets, models, training
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.jobs.seed_jobs import can_run_together
from gradlab.lab.experiments.progress import Stop
from gradlab.lab.experiments.training import train

WAY = Experiment(
    model="dense",
    method="microbatched",
    microbatch_size=7,
    accumulation_steps=3,
    updates=12,
    seeds=3,
    eval_every=5,
)


@pytest.fixture
def nothing_idle(monkeypatch):
    """Methods are built in this test, not taken from earlier trainings."""
    monkeypatch.setattr(training, "idle_methods", collections.defaultdict(list))


def alone(experiment, seed):
    return run(experiment.of_seeds(seed))


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *(("microbatched", optimizer) for optimizer in ("sgd", "momentum", "adam", "adamw")),
        # The same function for all seeds as with micro-batches, with another size
        ("large_batch", "adam"),
    ],
)
def test_the_losses_of_each_seed_are_those_of_the_seed_alone(method, optimizer):
    way = dataclasses.replace(WAY, method=method, optimizer=optimizer, learning_rate=0.01)
    found = run(way)
    assert found.environments[0]["seeds_together"] == 3
    for i, seed in enumerate(way.seed_numbers):
        expected = alone(way, seed)
        assert expected.environments[0]["seeds_together"] == 1
        np.testing.assert_allclose(found.losses[i], expected.losses[0], rtol=1e-5)
        np.testing.assert_allclose(found.gradient_norms[i], expected.gradient_norms[0], rtol=1e-4)
        np.testing.assert_allclose(
            found.window_gradient_norms[i], expected.window_gradient_norms[0], rtol=1e-4
        )
        np.testing.assert_allclose(found.accuracies[i], expected.accuracies[0], atol=2e-4)
        np.testing.assert_array_equal(found.weights[i], expected.weights[0])


def test_seed_3_of_several_equals_seed_3_alone_for_every_way_of_training():
    for method, model, seeds in (
        ("microbatched", "dense", 10),
        ("variables", "dense", 4),
        ("microbatched", "lenet", 4),
    ):
        way = dataclasses.replace(WAY, method=method, model=model, updates=2, seeds=seeds)
        np.testing.assert_allclose(run(way).losses[3], alone(way, 3).losses[0], rtol=1e-5)


@pytest.fixture
def few_images(monkeypatch):
    """A training set of 550 images, so that an epoch with a ragged tail is short."""
    mnist = datasets.load()
    few = dataclasses.replace(
        mnist, train_images=mnist.train_images[:550], train_labels=mnist.train_labels[:550]
    )
    monkeypatch.setattr(datasets, "load", lambda name="mnist": few)
    monkeypatch.setitem(datasets.TRAINING_EXAMPLES, "mnist", 550)


def check_ragged_windows():
    """Three windows of 140 examples, the tail of 130, and one more, whose losses show the effect of
    the tail."""
    way = dataclasses.replace(
        WAY, microbatch_size=70, accumulation_steps=2, updates=5, optimizer="sgd", seeds=2
    )
    way = dataclasses.replace(way, learning_rate=0.1)
    found = run(way)
    assert found.weights[0, 3].tolist() == [70, 60]
    for i in (0, 1):
        np.testing.assert_allclose(found.losses[i], alone(way, i).losses[0], rtol=1e-5)


def test_a_ragged_tail_is_divided_by_its_number_of_examples(few_images):
    check_ragged_windows()


def test_the_check_fails_if_the_tail_is_divided_by_the_configured_batch(
    monkeypatch, nothing_idle, few_images
):
    def divide(sums, weight, variables):
        return averaging.divide(sums, tf.constant(140.0), variables)

    monkeypatch.setattr(batched_seeds, "divide", divide)
    with pytest.raises(AssertionError):
        check_ragged_windows()


def check_against_the_large_batch():
    """The losses of seeds that are trained together follow those of the large batch, which has no
    loop."""
    way = dataclasses.replace(WAY, updates=4, optimizer="sgd", learning_rate=0.1, seeds=2)
    expected = alone(dataclasses.replace(way, method="large_batch"), 1)
    np.testing.assert_allclose(run(way).window_losses[1], expected.window_losses[0], rtol=1e-5)


def test_the_seeds_are_accumulated_by_the_loop_of_the_helper(monkeypatch, nothing_idle):
    accumulate, calls = window.accumulate, []

    def counted(*arguments, **options):
        calls.append(options["loop"].loss_shape)
        return accumulate(*arguments, **options)

    monkeypatch.setattr(window, "accumulate", counted)
    check_against_the_large_batch()
    assert calls == [(2,)]  # once, when the update is traced


def test_a_bug_in_the_loop_of_the_helper_is_seen_in_the_seeds(monkeypatch, nothing_idle):
    accumulate = window.accumulate

    def twice(*arguments, **options):
        sums = accumulate(*arguments, **options)
        return sums._replace(gradients=[2 * gradient for gradient in sums.gradients])

    monkeypatch.setattr(window, "accumulate", twice)
    with pytest.raises(AssertionError):
        check_against_the_large_batch()


def test_which_experiments_run_together():
    can = can_run_together
    assert can(WAY) and can(dataclasses.replace(WAY, method="large_batch"))
    assert not can(WAY.of_seeds(3))
    # Measured: with convolutions it saves no time
    assert not can(dataclasses.replace(WAY, model="lenet"))
    # A static graph trains one network
    assert not can(dataclasses.replace(WAY, method="placeholders"))
    # Seconds would be those of all seeds
    assert not can(dataclasses.replace(WAY, updates=None, seconds=1.0))


def test_the_seeds_stop_within_a_micro_batch(monkeypatch, nothing_idle):
    """The fiftieth micro-batch of 200 requests the stop: few more are begun, and no update is
    made."""
    stop = Stop()
    begun = []
    original = models.MODELS["dense"]

    def counting(input_shape):
        model = original(input_shape)

        def count(images):
            begun.append(images.shape[:2])
            if len(begun) == 50:
                stop.set()
            return images

        def logits(weights, images, dropout_seed):
            if images.shape.rank == 1 + 1 + len(input_shape):  # an evaluation is of one seed
                images = tf.ensure_shape(
                    tf.numpy_function(count, [images], images.dtype), images.shape
                )
            return model.logits(weights, images, dropout_seed)

        return dataclasses.replace(model, logits=logits)

    monkeypatch.setitem(models.MODELS, "dense", counting)
    found = run(
        dataclasses.replace(WAY, microbatch_size=1, accumulation_steps=200, updates=2), stop=stop
    )
    assert set(found.endings) == {"stopped"} and found.losses.shape[:2] == (3, 0)
    assert 50 <= len(begun) <= 70 and set(begun) == {(3, 1)}  # a few micro-batches may be in flight


def test_progress_is_called_for_every_seed():
    seen = []
    run(
        dataclasses.replace(WAY, updates=3),
        progress=lambda seed, update: seen.append((seed, update.number)),
    )
    assert sorted(seen) == [(seed, number) for seed in range(3) for number in (1, 2, 3)]


def test_the_same_experiment_gives_the_same_bits():
    assert run(WAY) == run(WAY)
    one = b"".join(u.losses.tobytes() for u in train(WAY, 2))
    assert one == b"".join(u.losses.tobytes() for u in train(WAY, 2))

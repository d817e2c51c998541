"""Seeds that are trained as one: the losses of each are those of the seed alone."""

import collections
import dataclasses
import threading

import numpy as np
import pytest

from gradlab.lab.experiments import together, training
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.sweep import run
from gradlab.lab.experiments.training import Stop, train

WAY = Experiment(
    model="dense", method="microbatched", microbatch_size=7, accumulation_steps=3, updates=30, seeds=5, eval_every=10
)


def alone(experiment, seed):
    return run(experiment.of_seeds(seed))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("method", ["microbatched", "large_batch"])
def test_each_seed_s_losses_are_those_of_the_seed_alone(method, optimizer):
    way = dataclasses.replace(WAY, method=method, optimizer=optimizer, learning_rate=0.01)
    found = run(way)
    assert found.environments[0]["seeds_together"] == 5
    for i, seed in enumerate(way.seed_numbers):
        expected = alone(way, seed)
        assert expected.environments[0]["seeds_together"] == 1
        np.testing.assert_allclose(found.losses[i], expected.losses[0], rtol=1e-5)
        np.testing.assert_allclose(found.gradient_norms[i], expected.gradient_norms[0], rtol=1e-4)
        np.testing.assert_allclose(found.window_gradient_norms[i], expected.window_gradient_norms[0], rtol=1e-4)
        np.testing.assert_allclose(found.accuracies[i], expected.accuracies[0], atol=2e-4)
        np.testing.assert_array_equal(found.weights[i], expected.weights[0])


def test_seed_3_of_10_is_seed_3_alone_whatever_trains_it():
    for method, model in (("microbatched", "dense"), ("variables", "dense"), ("microbatched", "lenet")):
        way = dataclasses.replace(WAY, method=method, model=model, updates=4, seeds=10 if model == "dense" else 4)
        np.testing.assert_allclose(run(way).losses[3], alone(way, 3).losses[0], rtol=1e-5)


def check_ragged_windows():
    """Three windows of 14,000 examples, the epoch's tail of 13,000, and one more: its losses show what the tail did."""
    way = dataclasses.replace(WAY, microbatch_size=7_000, accumulation_steps=2, updates=5, optimizer="sgd", seeds=2)
    way = dataclasses.replace(way, learning_rate=0.1)
    found = run(way)
    assert found.weights[0, 3].tolist() == [7_000, 6_000]
    for i in (0, 1):
        np.testing.assert_allclose(found.losses[i], alone(way, i).losses[0], rtol=1e-5)


def test_a_ragged_tail_is_divided_by_what_it_holds():
    check_ragged_windows()


def test_the_check_sees_a_tail_divided_by_k(monkeypatch):
    kept = together.optimizers.keras_optimizer

    def wrong(config):
        """Divides by the configured batch, whatever the tail holds."""
        optimizer = kept(config)
        apply, calls = optimizer.apply, together.tf.Variable(0)

        def scaled(gradients, variables):
            share = together.tf.where(calls.assign_add(1) % 4 == 0, 13 / 14, 1.0)
            return apply([share * gradient for gradient in gradients], variables)

        optimizer.apply = scaled
        return optimizer

    monkeypatch.setattr(together.optimizers, "keras_optimizer", wrong)
    monkeypatch.setattr(training, "_idle", collections.defaultdict(list))  # none that was built before
    with pytest.raises(AssertionError):
        check_ragged_windows()


def test_which_experiments_run_together():
    can = together.can_run_together
    assert can(WAY) and can(dataclasses.replace(WAY, method="large_batch"))
    assert not can(WAY.of_seeds(3))
    assert not can(dataclasses.replace(WAY, model="lenet"))  # facts of measurement: it does not pay
    assert not can(dataclasses.replace(WAY, method="placeholders"))  # a static graph is one network
    assert not can(dataclasses.replace(WAY, updates=None, seconds=1.0))  # their seconds are not comparable


def test_they_stop_within_a_micro_batch():
    way = dataclasses.replace(WAY, microbatch_size=1, accumulation_steps=20_000, updates=2)
    stop = Stop()
    threading.Timer(1.0, stop.set).start()
    found = run(way, stop=stop)
    assert set(found.endings) == {"stopped"} and found.losses.shape[:2] == (5, 0)


def test_progress_tells_of_every_seed():
    seen = []
    run(dataclasses.replace(WAY, updates=3), progress=lambda seed, update: seen.append((seed, update.number)))
    assert sorted(seen) == [(seed, number) for seed in range(5) for number in (1, 2, 3)]


def test_the_same_bits_again():
    assert run(WAY) == run(WAY)
    one = b"".join(u.losses.tobytes() for u in train(WAY, 2))
    assert one == b"".join(u.losses.tobytes() for u in train(WAY, 2))

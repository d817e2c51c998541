"""Experiments: checked as a whole, repeatable, and the same for every method."""

import itertools

import numpy as np
import pytest

from gradlab.lab import datasets, experiment
from gradlab.lab.experiment import Experiment, train

QUICK = dict(model="dense", microbatch_size=7, accumulation_steps=3, updates=6, eval_every=4)


def losses(updates):
    return np.array([update.loss for update in updates])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(dataset="digits"), "dataset must be one of mnist, fashion_mnist, cifar10. Received: 'digits'"),
        (dict(model="resnet"), "model must be one of lenet, dense, vgg. Received: 'resnet'"),
        (dict(method="magic"), "method must be one of large_batch, .* Received: 'magic'"),
        (dict(optimizer="lion"), "optimizer must be one of sgd, momentum, adam, adamw. Received: 'lion'"),
        (dict(accumulation_steps=0), "accumulation_steps must be a positive integer. Received: 0"),
        (dict(microbatch_size="4"), "microbatch_size must be a positive integer. Received: '4'"),
        (dict(updates=-3), "updates must be a positive integer. Received: -3"),
        (dict(eval_every=2.5), "eval_every must be a positive integer. Received: 2.5"),
        (dict(learning_rate=0), "learning_rate must be a finite number above 0. Received: 0"),
        (dict(learning_rate=float("nan")), "learning_rate must be a finite number above 0. Received: nan"),
        (dict(method="microbatched", towers=2), 'towers must be 1 for method "microbatched"'),
        (
            dict(microbatch_size=1000, accumulation_steps=56),
            r"at most the 55000 training examples of mnist. Received: 1 \* 56 \* 1000 = 56000",
        ),
    ],
)
def test_bad_experiments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Experiment(**arguments)


def test_experiments_are_equal_by_content_and_hashable():
    assert len({Experiment(), Experiment(microbatch_size=20), Experiment(microbatch_size=10)}) == 2


def test_an_epoch_is_cut_into_windows_and_a_ragged_tail():
    windows = list(experiment._windows(10, Experiment(microbatch_size=2, accumulation_steps=2, updates=7), seed=0))
    assert [len(rows) for rows in windows] == [4, 4, 2, 4, 4, 2, 4]
    first, second = np.concatenate(windows[:3]), np.concatenate(windows[3:6])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()


def test_the_same_experiment_gives_the_same_bits():
    for method in ("microbatched", "variables"):
        way = Experiment(method=method, **QUICK)
        first, second = (b"".join(u.losses.tobytes() for u in train(way, seed=2)) for _ in range(2))
        assert first == second
        assert first != b"".join(u.losses.tobytes() for u in train(way, seed=3))


def test_every_method_trains_alike():
    """Same seed, so the same weights and examples: the windows' losses agree, whichever way the update is made."""
    expected = losses(train(Experiment(method="large_batch", **QUICK), seed=1))
    for method, towers, steps in (
        ("microbatched", 1, 3),
        ("variables", 1, 3),
        ("placeholders", 1, 3),
        ("towers", 1, 3),
        ("towers", 3, 1),
        ("variables", 3, 1),
    ):
        way = Experiment(method=method, towers=towers, **QUICK | dict(accumulation_steps=steps))
        np.testing.assert_allclose(losses(train(way, seed=1)), expected, rtol=1e-5)


def test_updates_tell_what_happened():
    updates = list(train(Experiment(**QUICK)))
    assert [update.number for update in updates] == [1, 2, 3, 4, 5, 6]
    assert [update.accuracy is not None for update in updates] == [False, False, False, True, False, True]
    assert all(update.weights.tolist() == [7, 7, 7] and update.seconds > 0 for update in updates)


def test_the_accuracy_is_that_of_the_test_images():
    way = Experiment(**QUICK)
    network = experiment.models.build("dense")
    weights = network.initial_weights(0)
    mnist = datasets.load()
    guesses = np.argmax(network.logits(weights, mnist.test_images, None), axis=1)
    expected = (guesses == mnist.test_labels).mean()
    assert float(experiment._accuracy_measure("mnist", "dense")(weights)) == pytest.approx(expected, abs=1e-6)
    assert 0.05 < expected < 0.2  # not trained yet
    assert list(train(way))[-1].accuracy > expected


@pytest.mark.slow
def test_it_really_learns():
    way = Experiment(model="dense", method="microbatched", updates=300, eval_every=300)
    updates = list(train(way))
    assert updates[-1].accuracy > 0.9
    assert losses(updates)[-50:].mean() < 0.5 < losses(updates)[:5].mean()


def test_a_training_that_diverges_ends():
    way = Experiment(**QUICK | dict(optimizer="sgd", learning_rate=1e30, updates=50))
    updates = list(train(way))
    assert len(updates) < 10
    assert not np.isfinite(updates[-1].loss) and updates[-1].accuracy is not None


def test_two_trainings_at_once_do_not_share_their_weights():
    way = Experiment(**QUICK)
    alone = losses(train(way, seed=5)), losses(train(way, seed=6))
    together = np.array([(a.loss, b.loss) for a, b in zip(train(way, seed=5), train(way, seed=6))]).T
    assert np.array_equal(together, alone)


def test_a_method_is_used_again_and_given_back_when_a_training_is_left():
    way = Experiment(**QUICK | dict(method="placeholders", optimizer="momentum"))
    idle = experiment._idle[experiment._kind(way)]
    updates = train(way)
    list(itertools.islice(updates, 2))
    assert len(idle) == 0
    updates.close()
    assert len(idle) == 1
    built = idle[0]
    list(train(way))
    assert idle == [built]


def test_a_bad_seed_gets_one_sentence():
    with pytest.raises(ValueError, match="seed must be an integer of 0 or more. Received: -1"):
        next(train(Experiment(**QUICK), seed=-1))

"""Trainings are repeatable, equal for all methods, within their budget, and stop within a
micro-batch."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments import datasets, methods, models, training
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Stop
from gradlab.lab.experiments.training import Budget, train, window_rows

QUICK = dict(model="dense", microbatch_size=7, accumulation_steps=3, updates=6, eval_every=4)


def losses(updates):
    return np.array([update.loss for update in updates])


def test_an_epoch_is_cut_into_windows_and_a_ragged_tail():
    made = list(
        window_rows(Experiment(microbatch_size=10_000, accumulation_steps=2, updates=7), seed=0)
    )
    assert [len(rows) for rows in made] == [20_000, 20_000, 15_000, 20_000, 20_000, 15_000, 20_000]
    first, second = np.concatenate(made[:3]), np.concatenate(made[3:6])
    assert np.array_equal(np.sort(first), np.arange(55_000)) and np.array_equal(
        np.sort(second), np.arange(55_000)
    )
    assert not np.array_equal(first, second)


def test_a_budget_of_examples_is_met_exactly():
    made = list(
        window_rows(
            Experiment(microbatch_size=10_000, accumulation_steps=2, examples=90_001), seed=0
        )
    )
    assert [len(rows) for rows in made] == [20_000, 20_000, 15_000, 20_000, 15_001]
    way = Experiment(
        model="dense", method="microbatched", microbatch_size=7, accumulation_steps=3, examples=50
    )
    updates = list(train(way))
    assert [update.weights.tolist() for update in updates] == [[7, 7, 7], [7, 7, 7], [7, 1]]
    assert [update.progress for update in updates] == [0.42, 0.84, 1.0]
    assert updates[-1].accuracy is not None


def test_a_budget_of_seconds_is_reached_and_not_overrun():
    way = Experiment(model="dense", method="microbatched", seconds=0.2, eval_every=3)
    updates = list(train(way))
    spent = np.cumsum([update.seconds for update in updates])
    assert spent[-1] >= 0.2 and (spent[:-1] < 0.2).all()
    assert updates[-1].progress == 1 and updates[-1].accuracy is not None


def evaluations(experiment, examples=1, seconds=1.0):
    """The numbers of the updates after which the accuracy is measured, for updates of this size and
    time."""
    budget, updates = Budget(experiment), []
    while not budget.used_up:
        record = WindowRecord(np.ones(1), np.array([examples]), np.ones(1), 1.0)
        updates.append(budget.update(record, seconds, lambda: 0.5))
    return [update.number for update in updates if update.accuracy is not None]


def test_by_default_the_accuracy_is_measured_ten_times_for_every_kind_of_budget():
    assert evaluations(Experiment(updates=1000)) == list(range(100, 1001, 100))
    assert evaluations(Experiment(updates=60)) == list(range(6, 61, 6))
    assert evaluations(Experiment(updates=25)) == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    assert evaluations(Experiment(examples=6_000), examples=100) == list(range(6, 61, 6))
    assert evaluations(Experiment(examples=1_000), examples=25) == list(range(4, 41, 4))
    seconds = evaluations(Experiment(seconds=2.0), seconds=0.03)
    assert len(seconds) == 10 and seconds[-1] == 67 and set(np.diff(seconds)) <= {6, 7}


def test_short_runs_are_evaluated_after_every_update():
    for updates in range(1, 11):
        assert evaluations(Experiment(updates=updates)) == list(range(1, updates + 1))
    assert evaluations(Experiment(examples=50), examples=10) == [1, 2, 3, 4, 5]
    assert evaluations(Experiment(seconds=1.0), seconds=0.3) == [1, 2, 3, 4]


def test_eval_every_counts_updates_and_the_last_one_is_always_evaluated():
    assert evaluations(Experiment(updates=60, eval_every=25)) == [25, 50, 60]
    assert evaluations(Experiment(examples=60, eval_every=4), examples=10) == [4, 6]
    assert evaluations(Experiment(seconds=1.0, eval_every=2), seconds=0.3) == [2, 4]


def test_a_training_of_60_updates_has_ten_accuracies():
    updates = list(train(Experiment(model="dense", method="microbatched", updates=60)))
    assert [update.number for update in updates if update.accuracy is not None] == list(
        range(6, 61, 6)
    )


def test_the_same_experiment_gives_the_same_bits():
    for method in ("microbatched", "variables"):
        way = Experiment(method=method, **QUICK)
        first, second = (b"".join(u.losses.tobytes() for u in train(way, seed=2)) for _ in range(2))
        assert first == second
        assert first != b"".join(u.losses.tobytes() for u in train(way, seed=3))


def test_all_methods_train_alike():
    """The same seed means the same initial weights and examples, so the windows' losses agree for
    all methods."""
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


def test_updates_are_recorded_one_by_one():
    updates = list(train(Experiment(**QUICK)))
    assert [update.number for update in updates] == [1, 2, 3, 4, 5, 6]
    assert [update.accuracy is not None for update in updates] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert all(update.weights.tolist() == [7, 7, 7] and update.seconds > 0 for update in updates)


def test_the_accuracy_is_that_of_the_test_images():
    way = Experiment(**QUICK)
    network = models.build("dense")
    weights = network.initial_weights(0)
    mnist = datasets.load()
    guesses = np.argmax(network.logits(weights, mnist.test_images, None), axis=1)
    expected = (guesses == mnist.test_labels).mean()
    assert float(training.accuracy_measure("mnist", "dense")(weights)) == pytest.approx(
        expected, abs=1e-6
    )
    assert 0.05 < expected < 0.2  # not trained yet
    assert list(train(way))[-1].accuracy > expected


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
    together = np.array(
        [(a.loss, b.loss) for a, b in zip(train(way, seed=5), train(way, seed=6))]
    ).T
    assert np.array_equal(together, alone)


def test_a_method_is_reused_and_returned_when_a_training_is_abandoned(monkeypatch):
    way = Experiment(**QUICK | dict(method="placeholders", optimizer="momentum"))
    monkeypatch.setattr(training, "idle_methods", collections.defaultdict(list))
    updates = train(way)
    list(itertools.islice(updates, 2))
    [idle] = training.idle_methods.values()
    assert len(idle) == 0
    updates.close()
    assert len(idle) == 1
    built = idle[0]
    list(train(way))
    assert idle == [built]


def test_an_invalid_seed_raises_an_error_that_names_it():
    with pytest.raises(ValueError, match="seed must be an integer of 0 or more. Received: -1"):
        next(train(Experiment(**QUICK), seed=-1))


def test_gradient_norms_are_those_of_the_gradients():
    """Compares with gradients computed here at the initial weights, where the rows of each
    micro-batch are known."""
    network, mnist = models.build("dense"), datasets.load()
    way = Experiment(**QUICK)
    weights = {name: tf.constant(value) for name, value in network.initial_weights(4).items()}

    def norm(rows):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(
                network.losses(weights, mnist.train_images[rows], mnist.train_labels[rows])
            )
        return np.sqrt(sum(np.sum(np.square(g)) for g in tape.gradient(loss, weights).values()))

    rows = next(window_rows(way, seed=4))
    for method in methods.METHODS:
        first = next(train(Experiment(method=method, **QUICK), seed=4))
        microbatches = [rows] if method == "large_batch" else np.split(rows, 3)
        np.testing.assert_allclose(
            first.gradient_norms, [norm(each) for each in microbatches], rtol=1e-5
        )
        np.testing.assert_allclose(first.window_gradient_norm, norm(rows), rtol=1e-5)


@pytest.mark.parametrize("method", ["microbatched", "variables", "placeholders"])
def test_a_stop_takes_a_micro_batch_and_not_a_window(method, monkeypatch):
    """The fiftieth micro-batch of 200 requests the stop: few more are begun, and no update is
    made."""
    stop, begun, armed = Stop(), [], []
    original = models.MODELS["dense"]

    def counting(input_shape):
        model = original(input_shape)

        def count(images):
            begun.append(len(images))
            if armed and len(begun) == 50:
                stop.set()
            return images

        def logits(weights, images, dropout_seed):
            if dropout_seed is not None:  # not an evaluation
                images = tf.ensure_shape(
                    tf.numpy_function(count, [images], images.dtype), images.shape
                )
            return model.logits(weights, images, dropout_seed)

        return dataclasses.replace(model, logits=logits)

    monkeypatch.setitem(models.MODELS, "dense", counting)
    monkeypatch.setattr(training, "idle_methods", collections.defaultdict(list))
    way = Experiment(
        method=method, model="dense", microbatch_size=1, accumulation_steps=200, updates=3
    )
    updates = train(way, stop=stop)
    first = next(updates)
    assert len(first.losses) == 200 and len(begun) >= 200 and set(begun) == {1}
    begun.clear()
    armed.append(True)
    assert list(updates) == []
    assert 50 <= len(begun) <= 70  # a few micro-batches may be in flight
    # The next training can use the method again.
    again = next(train(way, stop=Stop()))
    assert np.array_equal(again.losses, first.losses)


def test_a_stop_set_before_ends_the_training_and_one_set_after_has_no_effect():
    stop = Stop()
    stop.set()
    assert list(train(Experiment(**QUICK), stop=stop)) == []
    late = Stop()
    assert len(list(train(Experiment(**QUICK), stop=late))) == 6
    late.set()
    assert len(list(train(Experiment(**QUICK)))) == 6


def test_a_gradient_that_is_not_finite_ends_the_training(monkeypatch):
    """A gradient can overflow while the loss is still finite."""
    record = WindowRecord(np.ones(2), np.ones(2), np.array([1.0, np.inf]), np.inf)
    monkeypatch.setattr(methods.Microbatched, "update", lambda *args, **kwargs: record)
    way = Experiment(**QUICK | dict(method="microbatched"))
    updates = list(train(way))
    assert len(updates) == 1 and updates[0].diverged and updates[0].accuracy is not None


def test_no_two_micro_batches_of_a_training_draw_the_same_masks(monkeypatch):
    drawn = []
    update = methods.Microbatched.update

    def noting(self, features, *arguments, dropout_seed=(0, 0)):
        drawn.append((len(features), dropout_seed))
        return update(self, features, *arguments, dropout_seed=dropout_seed)

    monkeypatch.setattr(methods.Microbatched, "update", noting)
    list(
        train(
            Experiment(
                model="dense",
                method="microbatched",
                microbatch_size=7,
                accumulation_steps=3,
                examples=50,
            ),
            4,
        )
    )
    assert drawn[-3:] == [(21, (4, 0)), (21, (4, 3)), (8, (4, 6))]

"""Experiments: their checks, their equality and their JSON."""

import dataclasses
import json

import pytest

from gradlab.lab.experiments.experiment import Experiment


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            dict(dataset="digits"),
            "dataset must be one of mnist, fashion_mnist, cifar10. Received: 'digits'",
        ),
        (dict(model="resnet"), "model must be one of lenet, dense, vgg. Received: 'resnet'"),
        (dict(method="magic"), "method must be one of large_batch, .* Received: 'magic'"),
        (
            dict(optimizer="lion"),
            "optimizer must be one of sgd, momentum, adam, adamw. Received: 'lion'",
        ),
        (dict(accumulation_steps=0), "accumulation_steps must be a positive integer. Received: 0"),
        (dict(microbatch_size="4"), "microbatch_size must be a positive integer. Received: '4'"),
        (dict(updates=-3), "updates must be a positive integer. Received: -3"),
        (dict(updates=0), "updates must be a positive integer. Received: 0"),
        (dict(examples=0), "examples must be a positive integer. Received: 0"),
        (dict(seconds=0), "seconds must be a finite number above 0. Received: 0"),
        (dict(seconds=float("inf")), "seconds must be a finite number above 0. Received: inf"),
        (
            dict(updates=5, examples=50),
            "one budget: updates, examples or seconds. Received: updates=5, examples=50",
        ),
        (dict(eval_every=2.5), "eval_every must be None or a positive integer. Received: 2.5"),
        (dict(eval_every=0), "eval_every must be None or a positive integer. Received: 0"),
        (dict(learning_rate=0), "learning_rate must be a finite number above 0. Received: 0"),
        (
            dict(learning_rate=float("nan")),
            "learning_rate must be a finite number above 0. Received: nan",
        ),
        (
            dict(seeds=0),
            "seeds must be different integers of 0 or more, or a positive integer. Received: 0",
        ),
        (
            dict(seeds="3"),
            "seeds must be different integers of 0 or more, or a positive integer. Received: '3'",
        ),
        (dict(seeds=()), r"at least one seed, all different. Received: \(\)"),
        (dict(seeds=(1, 1)), r"at least one seed, all different. Received: \(1, 1\)"),
        (dict(seeds=(1, -1)), "a seed must be an integer of 0 or more. Received: -1"),
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
    assert Experiment(seeds=[0, 1]) == Experiment(seeds=2) != Experiment(seeds=(1, 0))
    assert Experiment(updates=1000) == Experiment() != Experiment(examples=1000)
    assert Experiment(learning_rate=1).to_json() == Experiment(learning_rate=1.0).to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Experiment().updates = 3


@pytest.mark.parametrize(
    "experiment",
    [
        Experiment(),
        Experiment(method="towers", towers=3, examples=12_345, seeds=(5, 3), learning_rate=0.1),
        Experiment(seconds=1.5, seeds=1, eval_every=7),
    ],
)
def test_json_keeps_everything(experiment):
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment and hash(again) == hash(experiment)
    assert again.seed_numbers == experiment.seed_numbers
    assert json.loads(experiment.to_json())["eval_every"] == experiment.eval_every


def test_by_default_the_budget_decides_when_the_accuracy_is_measured():
    assert (
        Experiment().eval_every is None
        and Experiment.from_json('{"updates": 60}').eval_every is None
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "an experiment must be a JSON object .* Received: '{'"),
        ("[1]", r"an experiment must be a JSON object. Received: '\[1\]'"),
        ('{"k": 3}', "an experiment's field must be one of dataset, model, .* Received: 'k'"),
        ('{"updates": 0}', "updates must be a positive integer. Received: 0"),
    ],
)
def test_bad_json_gets_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        Experiment.from_json(text)

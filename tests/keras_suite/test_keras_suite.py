"""A quarter of Keras' own tests that train, with every model also trained in micro-batches.

`make test-keras` runs all of them.
"""

import pytest

from tests.keras_suite import suite
from tests.keras_suite.suite import Verdict, compare, table, verdict

PASSED, FAILED = ("passed", ""), ("failed", "why")
TRAINED = [("", {"loss": [1.0]}, [[2.0]], True)]
NOTHING = [("", {"loss": [1.0]}, [], False)]


@pytest.mark.slow
def test_what_keras_trains_is_equal_in_micro_batches():
    found = compare(quick=True)
    failing = [f"{name}: {one.reason}" for name, one in found.items() if one.kind == "failing"]
    assert not failing, "\n".join(failing)
    run = sum(one.kind != "not here" for one in found.values())
    assert run > 90, table(found)


@pytest.mark.parametrize(
    ("small", "reason"),
    [
        ([("", {"loss": [1.01]}, [[2.0]], True)], "log loss: relative error 0.01"),
        ([("", {"loss": [1.0]}, [[2.01]], True)], "weight 0: relative error 0.005"),
        ([("", {"loss": [1.0], "mae": [1.0]}, [[2.0]], True)], "logs ['loss'], ['loss', 'mae']"),
        ([("", {"loss": [1.0]}, [[2.0], [2.0]], True)], "1 weights, 2"),
        ([("", {"loss": [1.0]}, [[2.0, 2.0]], True)], "weight 0: shape (1,), (2,)"),
        ([("it must not", {"loss": [1.0]}, [[2.0]], True)], "refused: it must not"),
        ([], "1 trainings, 0 in micro-batches"),
    ],
)
def test_a_difference_is_seen(small, reason):
    assert verdict(PASSED, TRAINED, PASSED, TRAINED) == Verdict("equal")
    assert verdict(PASSED, TRAINED, PASSED, small) == Verdict("failing", reason)


def test_outcomes_count():
    assert verdict(PASSED, TRAINED, FAILED, TRAINED) == Verdict("failing", "why")
    assert verdict(FAILED, TRAINED, PASSED, TRAINED) == Verdict("not here", "why")
    assert verdict(("error", "why"), [], PASSED, []) == Verdict(
        "failing", "the file cannot be read: why"
    )
    assert verdict(PASSED, [], PASSED, []) is None and verdict(PASSED, NOTHING, PASSED, []) is None
    assert verdict(("skipped", ""), [], PASSED, []) is None


def test_the_table_counts_by_folder():
    names = {
        "keras/src/layers/a.py": "equal",
        "keras/src/layers/b.py": "allowed",
        "keras/src/ops/c.py": "failing",
    }
    rows = table({name: Verdict(kind) for name, kind in names.items()}).splitlines()
    assert rows[2:] == [
        "| layers | 2 | 1 | 0 | 1 | 0 |",
        "| ops | 1 | 0 | 0 | 0 | 1 |",
        "| all | 3 | 1 | 0 | 1 | 1 |",
    ]


@pytest.mark.parametrize(
    ("kind", "missing", "as_it_should_be"),
    [("equal", 0, True), ("failing", 0, False), ("equal", 11, False), ("not here", 0, False)],
)
def test_the_whole_suite_fails_on_a_difference_and_on_another_number_of_tests(
    monkeypatch, kind, missing, as_it_should_be
):
    verdicts = {f"keras/src/a/{n}": Verdict(kind) for n in range(suite.documented() - missing)}
    monkeypatch.setattr(suite, "compare", lambda words: verdicts)
    assert suite.main([]) is as_it_should_be

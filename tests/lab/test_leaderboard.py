"""The leaderboard: settings are really trained, rows are kept, and a table that cannot be read is
never overwritten."""

import pytest

from gradlab.lab.exercises import batch_size, leaderboard
from gradlab.lab.exercises.leaderboard import Row, Table, train

GOOD = {"microbatch_size": 20, "accumulation_steps": 1, "optimizer": "adam", "learning_rate": 0.003}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def row(accuracy, **settings) -> Row:
    return Row(**(GOOD | settings), updates=100, seconds=5.0, accuracy_percent=accuracy)


def test_rows_are_kept_between_calls_and_ordered_by_accuracy():
    assert Table().rows() == []
    for k, accuracy in ((1, 96.0), (2, 97.5), (3, 95.0), (4, 97.5)):
        Table().add(row(accuracy, accumulation_steps=k))
    assert [kept.accumulation_steps for kept in Table().rows()] == [2, 4, 1, 3]
    assert Table().rows()[0] == row(97.5, accumulation_steps=2)


def test_the_same_settings_replace_their_row():
    Table().add(row(97.0))
    Table().add(row(96.0, learning_rate=0.001))
    Table().add(row(95.5))
    assert [kept.accuracy_percent for kept in Table().rows()] == [96.0, 95.5]


def test_the_best_are_kept_and_the_new_one_is_shown_in_any_case():
    for k in range(1, leaderboard.KEPT + 1):
        Table().add(row(97.0, accumulation_steps=k))
    standing = Table().add(row(50.0, accumulation_steps=99))
    assert len(Table().rows()) == leaderboard.KEPT and 99 not in [
        kept.accumulation_steps for kept in Table().rows()
    ]
    lines = repr(standing).splitlines()
    assert [line.endswith("<- this run") for line in lines] == [False] * (leaderboard.KEPT + 1) + [
        True,
        False,
    ]
    assert lines[-2].split()[:3] == [str(leaderboard.KEPT + 1), "20", "99"]


def test_the_table_as_text_and_as_html():
    Table().add(row(96.0))
    standing = Table().add(row(97.25, optimizer="sgd", learning_rate=0.5))
    assert repr(standing).splitlines() == [
        "rank   b  k  optimizer  learning rate  updates  seconds  test accuracy (%)",
        "   1  20  1        sgd            0.5      100     5.00              97.25  <- this run",
        "   2  20  1       adam          0.003      100     5.00              96.00",
        leaderboard.NOTE,
    ]
    page = standing._repr_html_()
    assert (
        page.count("<tr") == 3 and page.count("font-weight: bold") == 1 and "&lt;- this run" in page
    )
    assert "Seconds of different machines cannot be compared" in page


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its first line is not the one that gradlab writes"),
        (b"\x89PNG\xff", "codec can't decode"),
        (b"my,own,notes\n1,2,3\n", "its first line is not the one that gradlab writes"),
        (b"{header}\n20,1,adam,0.003,100,5.0\n", "line 2: "),
        (
            b"{header}\n20,1,adam,0.003,100,5.0,97.1\n20,1,adam,often,100,5.0,97.1\n",
            "line 3: could not convert",
        ),
        (
            b"{header}\n20,1,adam,0.003,100,5.0,nan\n",
            "line 2: accuracy_percent must be from 0 to 100. Received: nan",
        ),
    ],
)
def test_a_broken_file_is_reported_in_a_sentence_and_left_as_it_is(
    content, reason, cache, capsys, monkeypatch
):
    header = b"microbatch_size,accumulation_steps,optimizer,learning_rate,updates,seconds,accuracy_percent"
    path = Table().path
    path.write_bytes(broken := content.replace(b"{header}", header))
    monkeypatch.setattr(
        leaderboard, "train", lambda settings: pytest.fail("it trained before it read the table")
    )
    batch_size.leaderboard_row(GOOD)
    said = capsys.readouterr().out
    assert (
        said.startswith(f"not yet: the table {path} cannot be read (")
        and reason in said
        and said.count("\n") == 1
    )
    with pytest.raises(ValueError, match="cannot be read"):
        Table().add(row(97.0))
    assert path.read_bytes() == broken and [file.name for file in cache.iterdir()] == [path.name]


def test_a_cache_that_is_a_file(cache, capsys):
    cache.write_text("not a folder")
    batch_size.leaderboard_row(GOOD)
    said = capsys.readouterr().out
    assert said.startswith("not yet: the results cannot be kept: ") and said.count("\n") == 1


def test_settings_are_trained_and_enter_the_table(monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "SECONDS", 0.3)
    monkeypatch.setattr(batch_size, "ENOUGH", 0)  # a slow machine makes few updates in this time
    batch_size.leaderboard_row(GOOD)
    said = capsys.readouterr().out
    assert "<- this run" in said and said.endswith("right\n")
    [kept] = Table().rows()
    assert kept.settings == tuple(GOOD.values()) and kept.updates > 0
    assert kept.seconds >= 0.3 and kept.accuracy_percent > 0


def test_a_poor_result_is_kept_but_is_not_yet_right(monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "SECONDS", 0.05)
    monkeypatch.setattr(batch_size, "ENOUGH", 101)
    batch_size.leaderboard_row(GOOD)
    said = capsys.readouterr().out.splitlines()
    assert (
        said[-1].startswith("not yet: ")
        and "can be reached" in said[-1]
        and len(Table().rows()) == 1
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"microbatch_size": 0}, "microbatch_size must be a positive integer. Received: 0"),
        (
            {"accumulation_steps": 2.5},
            "accumulation_steps must be a positive integer. Received: 2.5",
        ),
        (
            {"optimizer": "magic"},
            "optimizer must be one of sgd, momentum, adam, adamw. Received: 'magic'",
        ),
        ({"learning_rate": -1}, "learning_rate must be a finite number above 0. Received: -1"),
        ({"learning_rate": ...}, "learning_rate must have a value: put yours in place of the dots"),
        ({"microbatch_size": 60_000}, "must be at most the 55000 training examples of mnist"),
        ({"seconds": 600}, "can be chosen here. Received: 'seconds'"),
    ],
)
def test_bad_settings_get_a_sentence_and_no_row(change, sentence, capsys):
    batch_size.leaderboard_row(GOOD | change)
    said = capsys.readouterr().out
    assert said.startswith("not yet: ") and sentence in said and said.count("\n") == 1
    assert Table().rows() == []


def test_a_training_that_diverges_is_no_result(monkeypatch):
    monkeypatch.setattr(leaderboard, "SECONDS", 1.0)
    with pytest.raises(
        ValueError, match="must not diverge.*Received: learning_rate 1e[+]30 with 'sgd'"
    ):
        train(GOOD | {"optimizer": "sgd", "learning_rate": 1e30})


def test_an_update_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(leaderboard, "SECONDS", 0.02)
    with pytest.raises(
        ValueError, match="must take less than .*Received: 55000 micro-batches of 1 examples"
    ):
        train(GOOD | {"microbatch_size": 1, "accumulation_steps": 55_000})

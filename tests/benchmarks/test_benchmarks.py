"""Tests that the benchmark runs every way and writes its tables. How fast a way is is not tested
here."""

import json

import pytest

import benchmarks.__main__ as benchmark
import benchmarks.classroom.__main__ as classroom
import gradlab
from benchmarks import (
    chunked,
    first_update,
    gpu,
    growth,
    guard,
    memory,
    plan_error,
    report,
    six_models,
    speed,
    tokens,
    whole_batch,
)
from gradlab.fit.sizes import memory_room
from gradlab.lab.figures import plots

CELLS = [
    {
        "network": "lenet",
        "way": way,
        "k": k,
        "b": b,
        "setting": "x",
        "milliseconds": ratio,
        "spread": [1, 2],
        "ratio": ratio,
    }
    for way, ratio in (("big batch", 1.0), ("gradlab in your function", 1.5))
    for k, b in speed.SHAPES["lenet"]
]


def test_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    assert ended.value.code == 0 and "--quick" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--quick", "--write"])
    assert (
        ended.value.code == 2 and "--quick must be used without --write" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_quick_run_measures_every_way_and_writes_no_file(capsys):
    files = report.RESULTS, report.JSON, report.FIGURE
    before = [path.read_bytes() for path in files]
    benchmark.main(["--quick", "--tables", "speed", "--networks", "dense"])
    printed = capsys.readouterr().out
    table = printed[printed.index("**Dense") :].splitlines()
    rows = {row.split("|")[1].strip(): row for row in table if row.startswith("| ")}
    from benchmarks.tensorflow_ways import WAYS

    assert set(WAYS) <= set(rows) and not [row for row in rows.values() if "| - |" in row], printed
    assert rows["big batch"].count("(1.00)") == len(benchmark.QUICK_SHAPES)
    assert [path.read_bytes() for path in files] == before


@pytest.mark.slow
def test_memory_is_measured():
    added = memory.growth("tensorflow-auto", "gradlab in fit", "dense", 2, 4)
    assert 1 < added < memory.growth("tensorflow-auto", "gradlab in fit", "dense", 2, 4, "--whole")
    assert memory.growth("tensorflow-auto", "no such way", "dense", 2, 4) is None


@pytest.mark.slow
def test_workers_are_measured():
    assert min(growth.workers(2)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", "captcha", "structured_data"])
def test_the_first_update_is_timed_with_what_a_program_says_of_its_losses(name):
    program = first_update._load(first_update.EXAMPLES / f"{name}.py")
    assert min(first_update.seconds(program, None), first_update.seconds(program, gradlab)) > 0


def test_growth_table_of_known_rows():
    of_k = [{"k": k, "milliseconds": 1.5, "mebibytes": m} for k, m in ((1, 10.0), (512, 11.0))]
    of_parameters = [
        {"parameters": p, "milliseconds": 2 * p, "mebibytes": 8 * p} for p in (1.0, 100.0)
    ]
    of_towers = [
        {"towers": n, "workers": n, "milliseconds": 10.0 * n, "mebibytes": 5 * n} for n in (1, 2)
    ]
    found = {"k": of_k, "parameters": of_parameters, "towers": of_towers, "workers": of_towers}
    table = growth.as_table(found)
    assert "(ms per micro-batch) | 1 | 512 | 1.5 to 1.5 | 10 to 11 |" in table
    assert "(ms per update) | 1 | 100 | 2 to 200 | 8 to 800 |" in table
    assert "MiB per worker) | 1 | 2 | 10 to 20 | 5 to 10 |" in table


def test_table_of_losses_over_the_whole_batch():
    times = zip(whole_batch.WAYS, (90.0, 100.0, 140.0), (800.0, 100.0, 110.0))
    rows = [
        {"k": 4, "b": 16, "way": way, "milliseconds": ms, "mebibytes": m} for way, ms, m in times
    ]
    assert "| two passes, 4 x 16 | 140 (1.40) | 110 |" in whole_batch.as_table(rows)


@pytest.mark.slow
def test_losses_over_the_whole_batch_are_measured(monkeypatch):
    monkeypatch.setattr(whole_batch, "SHAPES", ((2, 2),))
    rows = whole_batch.measure(1)
    assert [row["way"] for row in rows] == list(whole_batch.WAYS) and min(
        row["milliseconds"] for row in rows
    ) > 0


def test_the_table_of_plans():
    rows = [
        {"network": "dense", "b": b, "planned": 110.0 - b, "measured": 100.0}
        for b in plan_error.SIZES
    ]
    assert plan_error.as_table(rows).endswith("| dense | +8 % | +2 % | -6 % | -22 % |")


@pytest.mark.slow
def test_plans_are_measured(monkeypatch):
    wide = "*not used to fit:* two wide convolutions, 28x28"
    monkeypatch.setattr(plan_error, "NETWORKS", {wide: plan_error.NETWORKS[wide]})
    monkeypatch.setattr(plan_error, "SIZES", (8,))
    monkeypatch.setattr(plan_error, "PROCESSES", 2)
    [row] = plan_error.measure()
    # Without oneDNN a plan may be 40 % off, and peaks differ from process to process
    assert 0.5 < row["planned"] / row["measured"] < 2


def test_the_published_plans():
    found = report.read()
    errors = [row["planned"] / row["measured"] for row in found["plan"]]
    # What the docs say
    assert max(abs(error - 1) for error in errors) <= 0.15 and len(errors) == 52
    assert all(len(row["peaks"]) == plan_error.PROCESSES for row in found["plan"])


def test_the_tables_of_a_gpu(monkeypatch):
    found = json.loads((report.JSON.parent / "gpu.json").read_text())
    tables = gpu.as_markdown(found)
    assert f"<!-- gpu -->\n{tables}\n<!-- /gpu -->" in report.RESULTS.read_text()
    assert "| gradlab | 32 x 8 | 319 (1.52) | 5,337 |" in tables
    # What the docstring of the plan says, and that the margin on a GPU holds the worst of them
    times = [row["found"]["measured"] / row["found"]["planned"] for row in found["plan"]]
    assert round(min(times), 2) == 0.99 and round(max(times), 2) == 4.04
    monkeypatch.setattr(memory_room.tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
    assert memory_room.times_planned() > max(times)


@pytest.mark.slow
def test_rounding_is_measured(monkeypatch):
    monkeypatch.setattr(gpu, "MODELS", {"dense": gpu.MODELS["dense"]})
    rows = gpu.rounding()
    assert len(rows) == 16 and all(1e-8 < row["error"] < 1e-5 for row in rows)


def test_the_classroom_memory_over_time():
    seen = [(100.0 + i, float(i)) for i in range(110)]  # the last ten after the end
    found = classroom.over_time(seen, 100.0, 200.0)
    assert list(found.values()) == [109.0, 29.5, 89.5]


def test_tables_of_texts_and_of_six_models():
    rows = [
        {"way": way, "tokens": 1000.0 * i, "padding": 0.2, "mebibytes": 50}
        for i, way in enumerate(tokens.WAYS, 1)
    ]
    table = tokens.as_table(rows)
    assert "each micro-batch padded to its longest text | 3000 (1.00) | 20 % | 50 |" in table
    assert "| gradlab, `token_batches` | 6000 (2.00) | 20 % | 50 |" in table
    table = six_models.as_table([{"model": "CLIP", "Keras": 3000.4, "gradlab": 900.0}])
    assert (
        "(whole_batch.md#two-towers-as-in-clip) | 256 | 3000 MiB | 900 MiB | `gradlab.micro"
        in table
    )


@pytest.mark.slow
def test_texts_and_six_models_are_measured(monkeypatch):
    ways = {"fixed, padded micro-batches": "fixed", "token_batches": "by tokens"}
    monkeypatch.setattr(tokens, "WAYS", ways)
    fixed, by_tokens = tokens.measure(1, texts=64)
    assert (
        by_tokens["padding"] < fixed["padding"] < 1
        and min(fixed["tokens"], by_tokens["tokens"]) > 0
    )
    monkeypatch.setattr(six_models, "MODELS", {"CLIP": six_models.MODELS["CLIP"]})
    [row] = six_models.measure(1)
    assert row["gradlab"] < row["Keras"]


def test_tables_and_figure_of_known_cells():
    table = speed.as_table(CELLS, "lenet")
    assert table.splitlines()[0].endswith("| 1 x 100 | 5 x 20 | 10 x 10 | 20 x 5 | 100 x 1 |")
    assert "| gradlab in your function | 1.5 (1.50) |" in table
    assert "gradlab in your function: 1 x 100 1.50" in plots.speed(CELLS).get_label()
    with pytest.raises(
        ValueError, match="cells must hold some of the network. Received: none of 'vgg16'"
    ):
        plots.speed(CELLS, "vgg16")
    words = report.as_markdown({"speed": {"cells": CELLS, "missing": ["torch"]}})
    assert "**LeNet" in words and "Left out, because they are not installed: torch." in words


def test_of_several_variants_and_settings_the_fastest_counts_and_fit_is_compared_with_fit():
    found = {
        ("big batch", "", "a"): [2.0, 2.0], ("big batch", "", "b"): [1.0, 1.0],
        ("big batch in fit", "", "a"): [4.0, 8.0], ("gradlab in fit", "", "a"): [6.0, 8.0],
        ("PyTorch loop", "eager", "c"): [9.0, 9.0], ("PyTorch loop", "compiled", "c"): [3.0, 5.0],
    }  # fmt: skip
    order = ["big batch in fit", "gradlab in fit", "big batch", "PyTorch loop"]
    cells = speed._cells("dense", 2, 4, found, order)
    assert [(cell["way"], cell["setting"], cell["ratio"]) for cell in cells] == [
        ("big batch in fit", "a", 1.0), ("gradlab in fit", "a", 1.25), ("big batch", "b", 1.0),
        ("PyTorch loop", "c, compiled", 4.0),
    ]  # fmt: skip


def test_the_largest_batch_that_fits():
    rows = [
        {"way": way, "k": k, "mebibytes": mebibytes}
        for way, sizes in {
            "big batch": (600, 1500, 9000),
            "gradlab in fit": (600, 610, None),
        }.items()
        for k, mebibytes in zip((1, 8, 64), sizes)
    ]
    table = memory.curve_as_table(rows)
    assert "| gradlab in fit | 600 | 610 | - |" in table
    assert "| big batch | 4 | 32 | 32 |" in table and "| gradlab in fit | 32 or more |" in table


def test_figures_are_written_on_a_clean_commit_only(monkeypatch, capsys):
    monkeypatch.setattr(report, "environment", lambda: {"commit": "abc+"})
    with pytest.raises(SystemExit):
        benchmark.main(["--write"])
    assert (
        "--write must run on a clean commit, which the figures then name. Received: abc+"
        in capsys.readouterr().err
    )


def test_the_published_tables_are_the_measured_ones():
    """The tables in RESULTS.md equal those written from the committed JSON, digit by digit."""
    found = report.read()
    published = report.RESULTS.read_text()
    assert report.between_markers(published, report.as_markdown(found)) == published
    published = report.SIX_MODELS.read_text()
    assert report.between_markers(published, six_models.as_table(found["six"])) == published
    assert (
        max(row["gradlab"] for row in found["six"])
        < 1024
        < min(row["Keras"] for row in found["six"])
    )
    assert set(found) >= {"speed", "memory", "growth", "training", "environment"}
    assert (
        set(found["speed"]["rounds"]) <= set(speed.SHAPES)
        and min(found["speed"]["rounds"].values()) >= 5
    )
    with pytest.raises(ValueError, match="The page must contain the markers"):
        report.between_markers("no markers", "tables")


def test_the_guard_names_what_is_slower_and_nothing_else():
    by_processor = json.loads(guard.RECORDED.read_text())
    assert all(set(ratios) == set(guard.CASES) for ratios in by_processor.values())
    recorded = guard.recorded_for("another processor")
    assert all(
        recorded[case] == max(ratios[case] for ratios in by_processor.values())
        for case in guard.CASES
    )
    assert guard.recorded_for("AMD EPYC") == by_processor["AMD EPYC"]
    assert guard.too_slow(recorded, recorded) == []
    slower = recorded | {"fit, lenet 20x5": 1.31 * recorded["fit, lenet 20x5"]}
    assert len(guard.too_slow(slower, recorded)) == 1


@pytest.mark.slow
def test_a_worker_reports_errors_and_goes_on():
    worker = speed.Worker("tensorflow-auto")
    try:
        with pytest.raises(RuntimeError, match="nothing , dense, 1 x 8, tensorflow-auto: KeyError"):
            worker.seconds("nothing", "", "dense", 1, 8, 1)
        assert worker.seconds("big batch", "", "dense", 1, 8, 1) > 0
        with pytest.raises(RuntimeError, match="it took longer than 0.01 s, with return code -9"):
            worker.seconds("gradlab in fit", "", "dense", 2, 4, 1000, limit=0.01)
        worker.forget("big batch", "")
        assert worker.seconds("big batch", "", "dense", 1, 8, 1) > 0
        worker._process.kill()  # as the operating system does if memory runs out
        worker._process.wait()
        worker.forget("big batch", "")
        with pytest.raises(speed.EndedError, match="it ended by itself, with return code -9"):
            worker.seconds("big batch", "", "dense", 1, 8, 1)
        assert worker.seconds("big batch", "", "dense", 1, 8, 1) > 0
    finally:
        worker.close()


@pytest.mark.slow
def test_a_table_in_chunks_never_exists_as_a_whole():
    """Three quarters of a table of 512 x 32,768 logits are saved. 8,192 x 8,192 pairs, whose table
    alone takes 256 MiB, need less."""
    whole, chunks = chunked.measure("text", 0), chunked.measure("text", 1024, 1)
    assert chunks["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert whole["mebibytes"] - chunked.measure("text", 1024)["mebibytes"] > 64 * 3 / 4
    assert chunked.measure("pairs", 512)["mebibytes"] < 256
    table = chunked.as_table("text", [(0, whole, chunks), (1024, whole, chunks)])
    assert table.count("(1.00) |") == 2 and "512 x 1,024" in table

"""What a saved notebook keeps of a lab: a picture, a table, and recorded runs that agree with fresh
ones."""

import base64
import html
import json

import numpy as np
import pytest
from lab_widgets import run_to_the_end
from paths import ROOT

from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.figures import toy
from gradlab.lab.figures.curves import Point
from gradlab.lab.widget import page_messages, pins, presets, record, saved_page
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows


def floats(text: str, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_a_lab_that_has_not_run_shows_the_recorded_runs(make):
    lab = make(hide=())
    bundle = lab._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/png"].startswith(b"\x89PNG") and bundle["text/html"] == saved_page.page()
    for words in (
        repr(lab),
        "Recorded runs: dense on mnist, adam, 5 seeds, 300 updates",
        "recorded, k = 50",
    ):
        assert words in bundle["text/plain"]
    run_to_the_end(lab)
    own = lab._repr_mimebundle_()["text/html"]  # its own picture and table instead
    assert "<script" not in own and "recorded" not in own
    # The memory of the process goes on changing
    words, _ = lab.figure.get_label().split("; peak memory")
    assert f'alt="{html.escape(words)}; peak memory' in own
    assert own.count("<tr>") == 2 and f"<td>{pins.summary(lab.result)[0]}</td>" in own


def test_the_recorded_lab_is_small_and_loads_nothing():
    page = saved_page.page()
    assert len(page.encode()) <= 200_000
    assert (
        "http:" not in page and "https:" not in page and "import " not in page.split("<script")[1]
    )
    # What is left where scripts are dropped
    assert page.index("<img") < page.index("<table>") < page.index("<script")


@pytest.mark.parametrize(
    "notebook", ["00_start_here", "01_how_it_works", "06_noise_and_accuracy", "app/lab"]
)
def test_the_saved_notebooks_have_the_present_page(notebook):
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    pages = [
        "".join(output.get("data", {}).get("text/html", ""))
        for c in cells
        for output in c.get("outputs", [])
    ]
    assert [page for page in pages if "gradlab-recorded" in page] == [saved_page.page()], (
        "run make notebooks"
    )


def test_the_recorded_toy_is_that_of_the_lab():
    kept = saved_page.recorded()["toy"]
    noise = floats(kept["noise"], "<i2").reshape(toy.UPDATES, kept["constants"]["most"], 2)
    np.testing.assert_array_equal(noise, toy.draws()[:, : max(record.STEPS)])
    assert kept["start"] == toy.START.tolist() and kept["looked_at"] == toy.LOOKED_AT


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(record.STEPS)))
def test_recorded_runs_agree_with_fresh_ones(number):
    """Machines differ in the last digits, which training amplifies: the means over seeds agree in
    two digits only."""
    kept, e = saved_page.recorded()["runs"][number], record.experiment(record.STEPS[number])
    assert {name: kept[name] for name in page_messages.facts(e)} == page_messages.facts(e)
    assert e.updates == presets.DEFAULTS["updates"] and kept["counts"] == [300] * 5
    # The first updates are enough, except of the run that the page begins with
    if e != presets.experiment(0, {}):
        e = presets.experiment(0, {"accumulation_steps": e.accumulation_steps, "updates": 50})
    result = run(e)
    rows = floats(kept["rows"]).reshape(300, -1)[: e.updates]
    fresh = ChartRows.of(result).rows(0)[:, [COLUMNS.index(name) for name in record.KEPT]]
    for column, tolerance in (("loss", 0.02), ("accuracy", 0.01)):
        place = record.KEPT.index(column)
        there = np.isfinite(rows[:, place])  # accuracies are measured every 50 updates
        assert there[49] and np.isfinite(fresh[there, place]).all()
        np.testing.assert_allclose(
            rows[there, place], fresh[there, place], rtol=tolerance, err_msg=column
        )
    dots = floats(kept["dots"], "<u2").reshape(300, -1)[: e.updates]
    found = np.where(dots == record.MISSING, np.nan, record.UNIT * dots)
    np.testing.assert_allclose(found[:20], ChartRows.of(result).dots(0)[:20], atol=0.02)
    if e.updates == 300:
        assert kept["point"]["window"] == pytest.approx(Point.of(result).window, rel=0.05)


def test_the_command_writes_what_a_page_reads(tmp_path, monkeypatch):
    def short(steps):
        return presets.experiment(0, {"accumulation_steps": steps, "updates": 9, "seeds": 1})

    monkeypatch.setattr(record, "experiment", short)
    monkeypatch.setattr(record, "STEPS", (1, 5))
    record.write(tmp_path)
    written = json.loads((tmp_path / "recorded.json").read_text())
    assert written.keys() == saved_page.recorded().keys() and len(written["runs"]) == 2
    assert (tmp_path / "recorded.png").read_bytes().startswith(b"\x89PNG")
    rows = floats(written["runs"][1]["rows"]).reshape(9, -1)
    np.testing.assert_array_equal(rows[:, 0], ChartRows.of(run(short(5))).rows(0)[:, 0])

"""What a saved notebook keeps of a lab: a picture, a table that agrees with fresh runs, and a lab
that trains in the page (tests/browser/test_saved_page.py)."""

import base64
import html
import json
import re

import numpy as np
import pytest
from lab_widgets import run_to_the_end
from paths import ROOT

from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.figures import toy
from gradlab.lab.figures.shown import VIEWS
from gradlab.lab.widget import pins, presets, record, saved_page


def test_a_lab_that_has_not_run_shows_the_recorded_runs_and_trains_in_the_page(make):
    lab = make(hide=())
    bundle = lab._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/png"].startswith(b"\x89PNG") and bundle["text/html"] == saved_page.page(
        lab.experiment
    )
    for words in (
        repr(lab),
        "Recorded runs: dense on mnist, adam, 5 seeds, 300 updates",
        "recorded, k = 50",
    ):
        assert words in bundle["text/plain"]
    run_to_the_end(lab)
    own = lab._repr_mimebundle_()["text/html"]  # its own picture and table instead
    assert "<script" not in own and "recorded" not in own
    assert f'alt="{html.escape(lab.figure.get_label())}"' in own
    assert own.count("<tr>") == 2 and f"<td>{pins.summary(lab.result)[0]}</td>" in own


def test_a_lab_of_two_weights_shows_them_instead_of_runs_that_it_never_makes(make):
    lab = make(hide=[name for name in VIEWS if name != "toy"])
    bundle = lab._repr_mimebundle_()
    assert bundle["image/png"] != saved_page.recorded_picture()
    assert bundle["text/plain"] == repr(lab)
    page = bundle["text/html"]
    assert base64.b64encode(bundle["image/png"]).decode() in page and "Recorded runs" not in page
    assert f'alt="{html.escape(lab.figure.get_label())}"' in page


def test_the_page_is_small_and_loads_nothing():
    page = saved_page.page(presets.experiment(0, {}))
    assert len(page.encode()) <= 800_000
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
    [page] = [page for page in pages if "gradlab-offline" in page]
    for part in (
        saved_page.css(),
        saved_page.javascript(),
        json.dumps(saved_page.sources())[1:-1],
        json.dumps(saved_page.toy_facts()),
    ):
        assert part in page, "run make notebooks"


def test_the_toy_of_the_page_is_that_of_the_lab():
    kept = saved_page.toy_facts()
    noise = np.frombuffer(base64.b64decode(kept["noise"]), "<i2")
    noise = noise.reshape(toy.UPDATES, kept["constants"]["most"], 2)
    np.testing.assert_array_equal(noise, toy.draws()[:, : saved_page.MOST_STEPS])
    assert kept["start"] == toy.START.tolist() and kept["looked_at"] == toy.LOOKED_AT


@pytest.mark.slow
def test_the_recorded_table_agrees_with_fresh_runs():
    """Machines differ in the last digits, which training amplifies: the means over seeds agree in
    two digits only."""
    rows = [re.split(r" {2,}", line) for line in saved_page.recorded()["table"].splitlines()[1:]]
    assert [row[0] for row in rows] == [f"recorded, k = {k}" for k in record.STEPS]
    for place in (0, 2):  # k = 1 and 5; larger ones take long
        fresh = pins.summary(run(record.experiment(record.STEPS[place])))
        assert rows[place][1:4] == fresh[:3]
        for kept, found in zip(rows[place][4:6], fresh[3:5]):
            accuracy_or_noise = float(kept.split(" ")[0])
            assert accuracy_or_noise == pytest.approx(float(found.split(" ")[0]), rel=0.05)


def test_the_command_writes_what_a_page_reads(tmp_path, monkeypatch):
    def short(steps):
        return presets.experiment(0, {"accumulation_steps": steps, "updates": 9, "seeds": 1})

    monkeypatch.setattr(record, "experiment", short)
    monkeypatch.setattr(record, "STEPS", (1, 5))
    record.write(tmp_path)
    written = json.loads((tmp_path / "recorded.json").read_text())
    assert written.keys() == saved_page.recorded().keys()
    assert len(written["table"].splitlines()) == 3
    assert (tmp_path / "recorded.png").read_bytes().startswith(b"\x89PNG")

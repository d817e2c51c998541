"""The lab without a browser: runs, presets, pinned runs and exports."""

import html
import json
import re
import resource

import numpy as np
import pandas as pd
import pytest
from events import wait_until
from lab_widgets import click, run_to_the_end, updates_made, widget, widgets

import gradlab
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.figures.shown import VIEWS
from gradlab.lab.widget.live_run import State


def test_a_new_lab_is_idle(make):
    lab = make(hide=())
    assert lab.status.startswith("idle: press Run") and lab.status in widget(
        lab, "status"
    ).value.replace("</b>", "")
    assert lab.result is None and lab.state is State.IDLE and lab.narration == ""
    toy, *charts = VIEWS
    assert toy == "toy" and widget(lab, "charts").shown == charts
    assert lab.figure.get_label().count("no data yet") == len(charts)
    with pytest.raises(RuntimeError, match=r"needs a run: call run\(\) first"):
        lab.wait()


def test_run_trains_to_the_end(make):
    lab = make(hide=())
    click(lab, "run")
    assert lab.wait() is State.FINISHED
    assert updates_made(lab) == 5 and widget(lab, "progress").value == 1
    assert lab.result.seeds == (0, 1) and lab.result.endings == ("finished", "finished")
    assert lab.status.startswith("finished: 2 seeds, update 5 of 5")
    assert "training loss (nats). now: k = 5, b = 20: from " in lab.figure.get_label()
    assert lab.result == run(lab.experiment)


def test_stop_ends_a_run_and_keeps_its_updates(make):
    lab = make(updates=100_000, accumulation_steps=1)
    lab.run()
    wait_until(lambda: updates_made(lab) > 5)
    click(lab, "stop")
    assert lab.wait() is State.FINISHED
    assert 5 < updates_made(lab) < 100_000
    assert lab.status.startswith("stopped: ") and set(lab.result.endings) == {"stopped"}


def test_the_seed_chooses_the_run(make):
    losses = []
    for seed in (4, 4, 5):
        lab = make(seed=seed)
        run_to_the_end(lab)
        losses.append(lab.result.losses[:, :3].tolist())
    assert losses[0] == losses[1] != losses[2]


def test_its_text_form_is_short_and_always_the_same(make):
    lab = make(method="towers", towers=2)
    bundle = lab._repr_mimebundle_()
    first, *_ = bundle["text/plain"].splitlines()
    assert (
        first
        == repr(lab)
        == "AccumulationLab: towers, dense on mnist, effective batch 2 x 5 x 20 = 200"
    )
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_without_a_front_end_it_shows_a_picture_and_a_table(make):
    lab = make(hide=())
    run_to_the_end(lab)
    bundle = lab._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "this run" in bundle["text/plain"] and "5 × 20 = 100" in bundle["text/plain"]


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        (
            dict(k=5),
            r"AccumulationLab takes seed, hide, lock, rerun, against, executor, "
            r"dataset, .* Received: k",
        ),
        (dict(accumulation_steps=0), "accumulation_steps must be a positive integer. Received: 0"),
        (dict(seed=-1), "seed must be an integer of 0 or more. Received: -1"),
        (dict(seeds=(1, 2)), r"seeds must be a positive integer. Received: \(1, 2\)"),
        (
            dict(hide=("optimiser",)),
            "a name in hide must be one of accumulation_steps, .* Received: 'optimiser'",
        ),
        (dict(lock="run"), "a name in lock must be one of accumulation_steps, .* Received: 'run'"),
        (
            dict(against="days"),
            "against must be one of updates, examples, seconds. Received: 'days'",
        ),
        (
            dict(updates=3, seconds=2.0),
            "one budget: updates, examples or seconds. Received: updates=3, seconds=2.0",
        ),
        (dict(method="towers", towers=9), "towers must be at most 3, .* Received: 9"),
    ],
)
def test_bad_presets_get_one_sentence(preset, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradlab.AccumulationLab(**preset)


def test_a_preset_is_a_line_and_back(make):
    lab = make(
        accumulation_steps=20,
        hide=("optimizer", "toy", "csv"),
        lock=("microbatch_size",),
        seed=3,
        against="seconds",
    )
    assert widget(lab, "microbatch_size").disabled and not widget(lab, "learning_rate").disabled
    assert "Toy" not in lab.figure.get_label() and "Toy" in make(hide=()).figure.get_label()
    assert not widgets(lab, "toy") and widgets(make(hide=()), "toy")
    assert (
        "cost" not in widget(make(hide="cost"), "charts").shown
        and not widget(make(hide="pins"), "charts").chips
    )
    assert not widgets(lab, "optimizer") and widgets(lab, "method")
    assert not widgets(lab, "csv") and widgets(lab, "png")
    again = make(**json.loads(json.dumps(lab.to_dict())))
    assert again.to_dict() == lab.to_dict() and again.experiment == lab.experiment
    assert again.experiment.seed_numbers == (3, 4)


@pytest.mark.parametrize("rerun", [True, False])
def test_reset_brings_back_the_preset_and_runs_it_where_a_change_does(make, rerun):
    lab = make(accumulation_steps=4, rerun=rerun)
    lab.run(accumulation_steps=60, model="lenet", method="variables", seeds=1)
    assert widget(lab, "accumulation_steps").value == 60
    wait_until(lambda: updates_made(lab) > 0)
    lab.pin("kept")
    click(lab, "reset")
    assert widget(lab, "accumulation_steps").value == 4
    assert [name for name, _ in lab.pinned] == ["kept"]
    if rerun:
        assert lab.wait() is State.FINISHED
        assert lab.result == run(lab.experiment)
    else:
        assert lab.state is State.IDLE and lab.result is None and lab.status.startswith("idle: ")


def test_pins_are_named_and_compared(make):
    lab = make()
    click(lab, "pin")
    assert "no run to pin yet" in lab.status
    for steps in (1, 5):
        run_to_the_end(lab, accumulation_steps=steps)
        click(lab, "pin")
    lab.pin()
    assert [name for name, _ in lab.pinned] == [
        "k = 1, b = 20",
        "k = 5, b = 20",
        "k = 5, b = 20 (2)",
    ]
    description = lab.figure.get_label()
    assert "k = 1, b = 20: from" in description and "now: k = 5" in description


def test_accuracies_are_drawn_against_the_chosen_axis(make):
    lab = make(hide=())
    run_to_the_end(lab)
    widget(lab, "against").value = "examples"
    assert "after 500 examples" in lab.figure.get_label()
    widget(lab, "against").value = "seconds"
    assert " seconds." in lab.figure.get_label()
    assert lab.state is State.FINISHED  # the same run


def test_the_noise_view_says_what_was_measured_and_predicted(make):
    lab = make(updates=12, hide=())
    run_to_the_end(lab, accumulation_steps=10)
    description = lab.figure.get_label()
    assert "k = 10" in description and "measured" in description
    assert "predicted by 1/√k" in description


def test_each_view_has_a_description_that_follows_the_run(make):
    lab = make(updates=10, hide=())
    # Without a browser, whose link moves the view of one update
    run_to_the_end(lab, accumulation_steps=7)
    description = lab.figure.get_label()
    assert "7 micro-batch gradients" in description and "no data yet" not in description


def test_exports_write_new_files(make, tmp_path):
    lab = make()
    with pytest.raises(ValueError, match="there is nothing to write yet: press Run"):
        lab.to_csv(tmp_path)
    run_to_the_end(lab)
    lab.pin("kept")
    frame = pd.read_csv(lab.to_csv(tmp_path))
    assert set(frame.run) == {"this run", "kept"} and len(frame) == 2 * 2 * 5 * 5
    assert lab.to_csv(tmp_path).name == "gradlab-runs-2.csv"  # nothing is overwritten
    assert lab.to_png(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_export_buttons_give_the_page_files_or_say_why_not(make, monkeypatch):
    lab = make()
    sent = []
    monkeypatch.setattr(
        type(lab._controller.layout.charts), "send", lambda self, *message: sent.append(message)
    )
    click(lab, "csv")
    assert "not downloaded: there is nothing to write yet" in lab.status
    run_to_the_end(lab)
    lab.pin("kept")
    for name, file, begins in (("csv", "runs", b"run,seed,"), ("png", "views", b"\x89PNG")):
        sent.clear()
        click(lab, name)
        assert f"downloaded: gradlab-{file}.{name}" in lab.status
        [(message, [content])] = [each for each in sent if "download" in each[0]]
        assert message == {"download": f"gradlab-{file}.{name}"} and content.startswith(begins)


def test_a_disk_that_is_full_leaves_no_half_file(make, tmp_path):
    lab = make()
    run_to_the_end(lab)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The file system takes no more than that of a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for write in (lab.to_csv, lab.to_png):
            with pytest.raises(OSError, match="File too large"):
                write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    lab.to_csv(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_code_repeats_the_run(make):
    lab = make(accumulation_steps=4, learning_rate=0.01)
    run_to_the_end(lab)
    widget(lab, "code").value = True
    shown = re.sub("<.*?>", "", widget(lab, "listing").value.split("<pre>")[1])
    assert html.unescape(shown).strip() == lab.code().strip()
    found = {}
    exec(lab.code(), found)  # setup reports that it was called before with just these arguments
    assert found["result"] == lab.result


def test_other_kinds_of_budget(make):
    lab = make(updates=None, examples=250)
    assert lab.experiment.examples == 250 and lab.experiment.updates is None
    run_to_the_end(lab)
    assert lab.result.examples[0, -1] == 250
    widget(lab, "budget_kind").value = "seconds"
    assert lab.experiment.seconds == 1.0
    run_to_the_end(lab, updates=4)
    assert updates_made(lab) == 4 and widget(lab, "budget_kind").value == "updates"
    run_to_the_end(lab, seconds=0.2)
    assert np.nansum(lab.result.update_seconds[0]) >= 0.2

"""The audit's reports, its command and its pytest fixture."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from events import LIMIT
from paths import ROOT
from planted_loops import planted

import gradlab
from gradlab.__main__ import main
from gradlab.auditing.bugs import BUGS
from gradlab.auditing.report import Difference, FoundBug

LOOP = """
def train(problem):
    weights, history = problem.weights, []
    for epoch in problem.epochs:
        for start in range(0, len(epoch), problem.k):
            window = epoch[start : start + problem.k]
            total = sum(problem.size(one) for one in window)
            parts = [(problem.gradients(weights, one)[1], problem.size(one) / total) for one in window]
            rate = problem.learning_rate(len(history)) FACTOR
            weights = {n: weights[n] - rate * sum(g[n] * share for g, share in parts) for n in weights}
            history.append(weights)
    return history

train.supports = ["schedule"]
"""


@pytest.fixture(scope="module")
def two():
    return gradlab.audit(planted("divided_by_k", "clipped_per_microbatch"), supports=["clip_norm"])


def test_text_for_a_terminal(two):
    words = str(two)
    assert words.startswith("gradlab audit: 2 bugs found\n")
    assert "1. divided_by_k: A window with fewer than k micro-batches is divided by k" in words
    assert re.search(
        r'In the probe "a short window", after update 3: 0\.\d+ from the weights of the large '
        r"batch",
        words,
    )
    assert (
        "Fix: Clip once, after averaging.\n   See: notebooks/07_pitfalls.ipynb, 5. Clipping each "
        "micro-batch" in words
    )
    assert (
        'Skipped "Adam": the loop does not support adam.' in words
        and "batch normalization" in words
    )
    assert str(gradlab.audit(planted())).startswith("gradlab audit: no bug found\n")


def test_markdown_for_an_issue_thread(two):
    lines = two.markdown().splitlines()
    assert lines[0] == "**gradlab audit: 2 bugs found**"
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == 2 and all(row.count("|") == 5 for row in rows)
    assert "(notebooks/07_pitfalls.ipynb#5.-Clipping-each-micro-batch)" in two.markdown()


def test_json_for_a_program(two):
    found = json.loads(two.json())
    assert set(found) == {"clean", "findings", "skipped", "notes"} and found["clean"] is False
    assert [one["bug"] for one in found["findings"]] == ["divided_by_k", "clipped_per_microbatch"]
    evidence = found["findings"][0]["evidence"]
    assert evidence["update"] == 3 and evidence["distance"] > 0.01 > evidence["distance_with_bug"]
    missing = Difference("a probe", 3, float("nan"), None, [np.zeros(2)] * 2, [np.zeros(2)] * 3, [])
    # NaN is no JSON
    assert FoundBug("tail_dropped", "", missing).summary()["evidence"]["distance"] is None
    assert str(missing) == 'In the probe "a probe" the loop makes 2 updates, and the large batch 3.'


def test_table_in_a_notebook(two):
    shown = two._repr_html_()
    assert (
        shown.count("<tr>") == 2
        and "divided_by_k" in shown
        and "5. Clipping each micro-batch" in shown
    )
    assert "<script" not in shown and "<table" not in gradlab.audit(planted())._repr_html_()


def test_plot_of_both_trajectories(two):
    [axes] = two.plot(1).axes
    assert [line.get_label() for line in axes.lines] == [
        "large batch",
        "with clipped_per_microbatch",
        "your loop",
    ]
    right, with_bug, loop = (np.asarray(line.get_ydata()) for line in axes.lines)
    np.testing.assert_allclose(loop, with_bug, rtol=1e-3)
    assert np.abs(loop - right).max() > 0.01
    with pytest.raises(ValueError, match="number must be that of a finding, below 2. Received: 2"):
        two.plot(2)


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_explained_in_a_section_that_exists(name):
    notebook, _, heading = BUGS[name].section.partition(", ")
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert any(
        line.lstrip("# ") == heading
        for text in found
        for line in text.splitlines()
        if line.startswith("##")
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a right loop, one with a bug, and one that fails."""
    for name, factor in {
        "right_loop": "",
        "wrong_loop": "* len(window)",
        "failing_loop": "/ 0",
    }.items():
        (tmp_path / f"{name}.py").write_text(LOOP.replace("FACTOR", factor))
    (tmp_path / "needing_loop.py").write_text("import no_such_framework.models")
    (tmp_path / "ending_loop.py").write_text("import sys\n\ndef train(problem):\n    sys.exit(0)\n")
    (tmp_path / "ending_script.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("right_loop", "wrong_loop", "failing_loop", "ending_loop"):
        sys.modules.pop(name, None)


def test_the_command_says_by_its_status_what_it_found(folder, capsys):
    assert main(["audit", "right_loop:train"]) == 0
    assert capsys.readouterr().out.startswith("gradlab audit: no bug found")
    assert main(["audit", "wrong_loop:train", "--plot", "bug.png"]) == 1
    assert "1. sum_for_mean" in capsys.readouterr().out
    assert (folder / "bug.png").read_bytes().startswith(b"\x89PNG")
    assert main(["audit", "wrong_loop:train", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["bug"] == "sum_for_mean"
    assert main(["audit", "wrong_loop:train", "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("**gradlab audit")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["right_loop"],
            "MODULE:NAME must name a module and a function in it. Received: right_loop",
        ),
        (
            ["no_loop:train"],
            "no_loop:train could not be audited. ModuleNotFoundError: No module named 'no_loop'",
        ),
        (
            ["needing_loop:train"],
            "needing_loop:train could not be audited. no_such_framework is not installed.",
        ),
        (
            ["right_loop:loop"],
            "right_loop:loop could not be audited. AttributeError: module 'right_loop' has no",
        ),
        (
            ["failing_loop:train"],
            'could not be audited. The audit was running the probe "a long window". '
            "ZeroDivisionError",
        ),
        (
            ["ending_loop:train"],
            "ending_loop:train could not be audited. train must return, not end the process",
        ),
        (
            ["ending_script:train"],
            "not end the process, which would end the audit before it is complete. Received: S",
        ),
        (["right_loop:train", "--supports", "token"], "supports must hold names of tokens, "),
        (["right_loop:train", "--plot", "none/bug.png"], "there is no folder none"),
    ],
)
def test_what_could_not_be_audited_has_status_two_and_a_sentence(
    folder, capsys, arguments, sentence
):
    assert main(["audit", *arguments]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out


def test_the_command_in_a_process_of_its_own_imports_no_tensorflow(folder):
    code = """import sys; from gradlab.__main__ import main
print(main(['audit', 'wrong_loop:train']), 'tensorflow' in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.splitlines()[-1] == "1 False", done.stderr


TWO_LINES = """
from {module} import train

def test_accumulation(gradlab_audit):
    gradlab_audit(train)

def test_what_is_known(gradlab_audit):
    assert gradlab_audit(train, known=["sum_for_mean"]).findings

def test_a_name_that_does_not_exist(gradlab_audit):
    gradlab_audit(train, known=["no_such_bug"])
"""


def test_the_pytest_fixture_needs_two_lines(folder):
    (folder / "test_loop.py").write_text(TWO_LINES.format(module="wrong_loop"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_loop.py"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "gradlab audit: 1 bug found" in done.stdout and "known must hold names of" in done.stdout

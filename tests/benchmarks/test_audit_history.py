"""The tables of audited releases are those of the committed results, and README says the same."""

import json
import pathlib
import sys

import pytest
from paths import ROOT

from benchmarks.audit_history import __main__ as command
from benchmarks.audit_history import tables
from benchmarks.audit_history.releases import HISTORY, TODAY, Release

FOUND = json.loads(tables.JSON.read_text())


def row(**audit):
    empty = {"clean": True, "findings": [], "skipped": {}, "notes": []}
    return {
        "library": "keras",
        "version": "3.4.1",
        "adapter": "keras_option",
        "audit": {**empty, **audit},
    }


def finding(bug, *candidates, probe="full windows"):
    return {"bug": bug, "candidates": list(candidates), "evidence": {"probe": probe}}


def test_a_cell_says_right_the_bug_or_that_it_is_not_known():
    found = row(
        findings=[
            finding("tail_carried"),
            finding("unknown", probe="Adam"),
            finding("ambiguous", "decay_per_microbatch and off_by_one", "last_only"),
        ],
        skipped={"clipping": "the loop does not support clip_norm"},
        notes=["A NaN in a micro-batch raises FloatingPointError."],
    )
    names, _, cells, _, right = tables.today_as_table([found]).splitlines()
    cells = dict(zip(names.split(" | "), cells.split(" | ")))
    assert cells["ragged tail"] == "`tail_carried`" and cells["clipping"] == "-"
    assert cells["full windows"] == "`last_only`" and cells["a NaN |"] == "FloatingPointError |"
    assert (
        cells["Adam, decay"] == "`unknown`"
        and right == "Right in all of them: tokens, sizes; replicas."
    )
    failed = {
        "library": "keras",
        "version": "9",
        "adapter": "keras_option",
        "error": "no such release",
    }
    assert "Could not be audited: Keras' option 9 (no such release)." in tables.today_as_table(
        [failed]
    )
    assert "| keras 3.4.1 | no bug | [keras#19990](" in tables.history_as_table([row()])


def test_the_published_tables_are_those_of_the_committed_audits():
    text = tables.PAGE.read_text()
    assert tables.page(FOUND, text) == text
    for name, releases in (("today", TODAY), ("history", HISTORY)):
        audited = [(one["library"], one["version"], one["adapter"]) for one in FOUND[name]]
        assert audited == [(one.library, one.version, one.adapter) for one in releases]
    # Most of the longest is the import of a library, and DeepSpeed compiles a part of itself
    assert max(one["seconds"] for rows in FOUND.values() for one in rows if "audit" in one) < 60


@pytest.mark.slow
def test_a_release_is_audited_in_an_environment_of_its_own(tmp_path):
    python = tmp_path / "none-1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = command.audit(Release("none", "1", "tensorflow_loop"), tmp_path)
    assert found["audit"]["clean"] and found["seconds"] > 0, found
    assert "error" in command.audit(Release("none", "1", "no_such_adapter"), tmp_path)
    with pytest.raises(StopIteration):
        tables.release_of(found)
    assert pathlib.Path(ROOT, "data", "results", "audit.json").exists()

"""The paths of the course's widgets before they had a room of their own, as copied notebooks have
them."""

import importlib
import subprocess
import sys

import pytest
from paths import ROOT

from gradlab.lab.widget import MOVED

SHOWN = {
    "gradlab.lab.predict": ("ask", "predict"),
    "gradlab.lab.widget.bug_figures": ("draw_all",),
    "gradlab.lab.widget.bug_lab": ("BugLab",),
    "gradlab.lab.widget.memory_bars": ("MemoryBars",),
    "gradlab.lab.widget.memory_count": ("PRESETS", "memory"),
    "gradlab.lab.widget.schedules": ("schedule",),
    "gradlab.lab.widget.timeline": ("Timeline", "compare"),
}


@pytest.mark.parametrize(("path", "names"), SHOWN.items())
def test_an_earlier_path_leads_to_the_same_objects(path, names):
    room, module = "gradlab.lab.widget.course", path.rpartition(".")[2]
    now = importlib.import_module(f"{room}.{module}")
    for name in names:
        found = {}
        exec(f"from {path} import {name}\nimport {path}\nother = {path}.{name}", found)
        assert found[name] is found["other"] is getattr(now, name)
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        exec(f"from {path} import nothing_of_this_name")


def test_all_that_moved_is_tried():
    assert {path.rpartition(".")[2] for path in SHOWN} == {*MOVED, "predict"}


def test_the_lab_does_not_import_what_moved():
    """Nor does a search through all modules, as `inspect` makes one."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import gradlab, inspect\n"
        "from gradlab.lab.widget import accumulation_lab\n"
        "inspect.getmodule(inspect.currentframe())\n"
        "assert not [name for name in sys.modules if 'widget.course' in name]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

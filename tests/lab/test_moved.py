"""The paths by which notebooks that were copied earlier import what has moved since."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
from paths import ROOT

from gradlab.lab import MOVED

SHOWN = {
    "gradlab.lab.figures.memory": ("memory_plan",),
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
    now = importlib.import_module(MOVED.get(path, "gradlab.lab.widget.course.predict"))
    for name in names:
        found = {}
        exec(f"from {path} import {name}", found)
        assert found[name] is pkgutil.resolve_name(f"{path}.{name}") is getattr(now, name)
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        exec(f"from {path} import nothing_of_this_name")


def test_each_path_is_tried():
    assert {*MOVED, "gradlab.lab.predict"} == SHOWN.keys()


def in_a_process_of_its_own(program: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_can_be_the_first_import():
    in_a_process_of_its_own(
        "from gradlab.lab.widget.schedules import schedule; schedule('gpipe', 2, 2)"
    )


def test_the_lab_does_not_import_what_moved():
    """Nor does a search through all modules, as `inspect` makes one."""
    in_a_process_of_its_own(
        "import inspect\n"
        "from gradlab.lab.widget import accumulation_lab\n"
        "inspect.getmodule(inspect.currentframe())\n"
        "assert not [name for name in sys.modules if 'widget.course' in name]"
    )

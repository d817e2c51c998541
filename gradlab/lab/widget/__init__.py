"""AccumulationLab, the interactive lab of the notebooks, built from ipywidgets: what the lab needs.

The notebooks' other widgets are in course/. Notebooks that were copied before they moved there
still find them here.
"""

import importlib
import sys
import types
from typing import Any

MOVED = ("bug_figures", "bug_lab", "memory_bars", "memory_count", "schedules", "timeline")


class _Moved(types.ModuleType):
    """A module of course/ by its old path, imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of each module, such as its file
            raise AttributeError(name)
        package, _, module = self.__name__.rpartition(".")
        return getattr(importlib.import_module(f"{package}.course.{module}"), name)


for _name in MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Moved(f"{__name__}.{_name}")

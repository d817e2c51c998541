"""The lab of the notebooks: experiments, figures, an interactive widget and exercises, built on the
helper modules."""

import importlib
import sys
import types
from typing import Any

# What notebooks import that were copied before these modules moved: the old path and the new one
MOVED = {
    "gradlab.lab.figures.memory": "gradlab.lab.figures.memory_figure",
    "gradlab.lab.widget.bug_figures": "gradlab.lab.widget.course.bug_figures",
    "gradlab.lab.widget.bug_lab": "gradlab.lab.widget.course.bug_lab",
    "gradlab.lab.widget.memory_bars": "gradlab.lab.widget.course.memory_bars",
    "gradlab.lab.widget.memory_count": "gradlab.lab.widget.course.memory_count",
    "gradlab.lab.widget.schedules": "gradlab.lab.widget.course.schedules",
    "gradlab.lab.widget.timeline": "gradlab.lab.widget.course.timeline",
}


class _Moved(types.ModuleType):
    """A module by its old path. The module itself is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of each module, such as its file
            raise AttributeError(name)
        return getattr(importlib.import_module(MOVED[self.__name__]), name)


sys.modules |= {path: _Moved(path) for path in MOVED}

"""Runs a notebook in this process, and compares what its cells show with what is committed.

nbval, which compares the outputs, would start a kernel for it, and each kernel imports TensorFlow
anew. Here the notebook finds what it would find in a fresh kernel, and what it may change is put
back afterwards. Figures of pyplot are not displayed, as they are in a kernel: a notebook that has
some would be reported as different.
"""

import atexit
import contextlib
import pathlib
import random
import sys
import types
import warnings

import keras
import matplotlib
import nbformat
import numpy as np
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot
from nbval.plugin import IPyNbFile, coalesce_streams, get_sanitize_patterns
from paths import ROOT
from traitlets.config import Config

from gradlab import runtime

SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"
QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def differences(session, path: pathlib.Path) -> list[str]:
    """Run a notebook from top to bottom, and describe each cell that shows something else.

    A description has the notebook's name, the number of the cell as the notebook shows it, and
    both outputs. Pictures and the identifiers of widgets are not compared, as in `make test`. The
    run ends at the first cell that raises.

    Args:
        session: the session of pytest.
        path: the notebook.
    """
    notebook = IPyNbFile.from_parent(session, path=path)
    notebook.sanitize_patterns.update(get_sanitize_patterns(SANITIZE.read_text()))
    found = []
    with fresh_shell(path.parent) as shell:
        for number, cell in enumerate(notebook.collect(), start=1):
            place = f"{path.parent.name}/{path.name}, cell [{number}]"
            shown, error = run_cell(shell, cell.cell.source)
            if error is not None:
                said = "".join(output.get("text", "") for output in shown)
                return [*found, f"{place} raised {error!r}:\n{said}"]
            if not cell.options["check"]:
                continue
            committed = coalesce_streams(cell.cell.outputs)
            if not cell.compare_outputs(coalesce_streams(shown), committed):
                fault = "\n".join(cell.comparison_traceback)
                found.append(f"{place} shows something else:\n{fault}")
    return found


def run_cell(shell: InteractiveShell, source: str) -> tuple[list, BaseException | None]:
    """Run a cell: its outputs as a notebook keeps them, and what it raised or None."""
    with (
        warnings.catch_warnings(record=True) as warned,
        shell.display_trap,  # entered first: inside it, the shell keeps the hook that captures
        capture_output() as said,
    ):
        warn_as_a_kernel()
        result = shell.run_cell(source)
    outputs = [nbformat.v4.new_output("display_data", data=each.data) for each in said.outputs]
    errors = said.stderr + "".join(f"{each.category.__name__}: {each.message}\n" for each in warned)
    for name, text in (("stdout", said.stdout), ("stderr", errors)):
        if text:
            outputs.append(nbformat.v4.new_output("stream", name=name, text=text))
    return outputs, result.error_before_exec or result.error_in_exec


def warn_as_a_kernel() -> None:
    """Set the filters of warnings that a kernel begins with; those of pytest are others."""
    warnings.simplefilter("default")
    for category in QUIET:
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


@contextlib.contextmanager
def fresh_shell(folder: pathlib.Path):
    """An IPython whose `__main__` is empty and where `gradlab.setup` has not run, in a folder."""
    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "nocolor"
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, runtime, "_arguments", runtime._arguments)
        undo.callback(setattr, runtime, "_runtime", runtime._runtime)
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(keras.utils.clear_session, free_memory=False)
        undo.callback(pyplot.close, "all")
        undo.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        undo.callback(sys.path.__setitem__, slice(None), list(sys.path))
        undo.enter_context(matplotlib.rc_context())
        undo.enter_context(contextlib.chdir(folder))
        # TensorFlow accepts a second `setup` in this process, if its number of threads is the same.
        runtime._arguments = None
        runtime._runtime = None
        keras.utils.clear_session(free_memory=False)  # layers are numbered from the beginning
        assert not InteractiveShell.initialized()
        main = types.ModuleType("__main__")
        shell = InteractiveShell.instance(config=settings, user_module=main)
        undo.callback(InteractiveShell.clear_instance)
        undo.callback(atexit.unregister, shell.atexit_operations)  # would keep the shell alive
        yield shell

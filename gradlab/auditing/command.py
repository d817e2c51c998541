"""The audit of a loop that a command line names."""

import contextlib
import importlib
import os
import sys

from gradlab.auditing.audit import audit
from gradlab.auditing.report import Audit


def audit_named(adapter: str, supports: str | None = None) -> Audit:
    """Audits an adapter.

    Args:
        adapter: MODULE:NAME; the module may lie in the working directory.
        supports: the features of the loop, with commas between, or None, as for `audit`.

    Raises:
        ValueError: the name is wrong, or the loop or its module raises an error or ends the
            process: it could not be audited.
    """
    module, _, name = adapter.partition(":")
    if not module or not name:
        raise ValueError(
            f"MODULE:NAME must name a module and a function in it. Received: {adapter}"
        )
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever the loop prints
            train = getattr(importlib.import_module(module), name)
            return audit(train, tuple(supports.split(",")) if supports else None)
    except SystemExit as error:  # a script that trains and exits when it is imported
        raise ValueError(
            f"{adapter} could not be audited. Its module must be importable, not end the process, "
            f"which would end the audit before it is complete. Received: SystemExit({error.code!r})"
        ) from error
    except Exception as error:  # whatever the loop or its imports raise
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            what = f"{error.name} is not installed."
        where = getattr(error, "__notes__", [])
        raise ValueError(" ".join([f"{adapter} could not be audited.", *where, what])) from error

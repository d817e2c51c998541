"""The one private part of ipykernel that the lab uses."""

from typing import Any


def answer_beside_cells(comm: Any) -> None:
    """Lets messages of the page reach a widget while cells run.

    JupyterLab opens a subshell of the kernel for them. Since ipykernel 7.4, a connection that was
    opened in a cell answers in the shell of the cells all the same, where messages wait for every
    cell that is queued: after Run All, for the whole notebook. Earlier versions have no such rule,
    and neither does a kernel without subshells.

    Args:
        comm: the connection of a widget; None after the widget was closed.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = _as_sent


def _as_sent(data: Any, subshell: str | None) -> str | None:
    """The subshell that the page asked for."""
    return subshell

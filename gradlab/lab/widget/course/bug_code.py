"""The loop of `BugLab` as code, with the line that each bug changes."""

import html
from typing import NamedTuple

# The right loop. `grad` gives the mean gradient over the tokens of a micro-batch, and their number.
LINES = (
    "for update, window in enumerate(windows):",
    "    window = normalized(window)",
    "    total, count = 0.0, 0",
    "    for microbatch in window:  # one at a time",
    "        gradient, tokens = grad(w, microbatch)",
    "        total += tokens * gradient",
    "        count += tokens",
    "    mean = clip(total / count)",
    "    w = optimizer.step(w, mean, number=update)",
)


class Suspect(NamedTuple):
    """A line that a bug changes.

    Attributes:
        number: its place in `LINES`.
        wrong: what it says with the bug.
    """

    number: int
    wrong: str


SUSPECTS = {
    "sum": Suspect(7, "    mean = clip(total / count * len(window))"),
    "tail_by_k": Suspect(7, "    mean = clip(total / count * len(window) / k)"),
    "tail_dropped": Suspect(
        0, "for update, window in enumerate(each for each in windows if len(each) == k):"
    ),
    "mean_of_means": Suspect(
        4, "        gradient, tokens = grad(w, microbatch)[0], len(microbatch)"
    ),
    "clip_each": Suspect(5, "        total += tokens * clip(gradient)"),
    "clocks": Suspect(8, "    w = optimizer.step(w, mean, number=grad.calls - 1)"),
    "batch_norm": Suspect(1, "    window = [normalized([each])[0] for each in window]"),
    "in_flight": Suspect(3, "    for microbatch in window:  # ten at a time"),
}


def listing(suspected: str = "", hidden: str = "") -> str:
    """The loop as HTML.

    Args:
        suspected: the bug whose line is marked, or "".
        hidden: the bug that is no longer a secret, or "". Its line is struck out, and followed by
            what this loop says instead.
    """
    shown = [html.escape(line) for line in LINES]
    if hidden:
        number, wrong = SUSPECTS[hidden]
        shown[number] = f"<del>{shown[number]}</del>\n<b>{html.escape(wrong)}</b>"
    elif suspected:
        number = SUSPECTS[suspected].number
        shown[number] = f"<mark>{shown[number]}</mark>"
    lines = "\n".join(shown)
    return f"<pre>{lines}</pre>"

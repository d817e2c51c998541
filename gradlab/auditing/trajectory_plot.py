"""The figure of a finding: a weight of the loop, of the large batch, and of a loop with the bug."""

from typing import Any

import numpy as np


def figure(bug: str, evidence: Any) -> Any:
    """Draws the weight that differs most from the large batch's, after each update.

    Args:
        bug: the name of the bug.
        evidence: the `Difference`.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shared = min(len(evidence.weights), len(evidence.right))
    difference = np.abs(np.array(evidence.weights[:shared]) - np.array(evidence.right[:shared]))
    weight = int(np.argmax(np.nan_to_num(difference).max(0))) if shared else 0
    made = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = made.subplots()
    lines = (
        ("large batch", evidence.right, {"color": "#444444", "linewidth": 2}),
        (f"with {bug}", evidence.with_bug, {"color": "#d55e00", "linewidth": 5, "alpha": 0.4}),
        ("your loop", evidence.weights, {"color": "#0072b2", "marker": "o", "linestyle": "none"}),
    )
    for label, weights, style in lines:
        if weights:
            values = [each[weight] for each in weights]
            axes.plot(np.arange(1, len(values) + 1), values, label=label, **style)
    axes.set(
        xlabel="update", ylabel=f"weight {weight}", title=f'{bug}, in the probe "{evidence.probe}"'
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return made

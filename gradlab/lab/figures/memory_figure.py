"""A figure of what takes the memory of a training, for several micro-batch sizes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from gradlab.fit.sizes.memory_plan import MemoryPlan
from gradlab.lab.figures.picture import figure
from gradlab.measure.memory import MEBIBYTE

# of the parts, as in the course's memory bars and film
COLORS = {
    "weights": "#0072B2",
    "optimizer": "#009E73",
    "accumulators": "#CC79A7",
    "gradients": "#D55E00",
    "activations": "#E69F00",
    "TensorFlow": "#999999",
}


def memory_plan(
    plan: MemoryPlan, microbatch_sizes: Sequence[int] = (1, 2, 4, 8, 16), memory: float = 0
) -> Figure:
    """Stacked bars of a plan's parts, one bar for each micro-batch size.

    Args:
        plan: what `gradlab.measure.memory.plan` returned.
        microbatch_sizes: the sizes.
        memory: a limit in bytes, drawn as a line; 0 for none.
    """
    drawn, axes = figure(size=(7.0, 3.2))
    axes.set_axisbelow(True)
    parts = {
        "weights": lambda b: plan.weights,
        "optimizer": lambda b: plan.optimizer,
        "accumulators": lambda b: plan.accumulators,
        "gradients": plan.gradients,
        "activations": plan.activations,
        "TensorFlow": lambda b: plan.runtime,
    }
    below = np.zeros(len(microbatch_sizes))
    places = np.arange(len(microbatch_sizes))
    for name, part in parts.items():
        heights = np.array([part(b) for b in microbatch_sizes]) / MEBIBYTE
        axes.bar(
            places,
            heights,
            bottom=below,
            label=name,
            color=COLORS[name],
            width=0.6,
            edgecolor="white",
            linewidth=0.5,
        )
        below += heights
    for place, height in zip(places, below):
        axes.annotate(
            f"{height:,.0f}",
            (place, height),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
        )
    words = [f"b = {b}: {height:.0f} MiB" for b, height in zip(microbatch_sizes, below)]
    if memory:
        axes.axhline(memory / MEBIBYTE, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"{memory / MEBIBYTE:.0f} MiB",
            (-0.45, memory / MEBIBYTE),
            xytext=(0, 2),
            textcoords="offset points",
        )
        words.append(f"the limit is {memory / MEBIBYTE:.0f} MiB")
    axes.set_xticks(places, [str(b) for b in microbatch_sizes])
    axes.set(
        xlabel="micro-batch size b", ylabel="MiB", ylim=(0, 1.12 * max(*below, memory / MEBIBYTE))
    )
    drawn.legend(frameon=False, loc="outside right upper", reverse=True)
    drawn.set_label("What takes the memory of a training. " + "; ".join(words) + ".")
    return drawn

"""Wang et al. 2026: small batches for most of a training run, large ones only at its end.

The paper says: after a switch from small to large batches, the loss soon is that of a run with
large batches throughout ("fast catch-up"), because gradient noise is forgotten quickly. So large
batches can wait until a late stage, which takes far fewer examples; and of schedules with the same
number of examples, the one that switches late ends lowest, on a problem that is hard in the paper's
sense.

The problem is the linear regression of `growing_batch`, with its exact expected losses. All
schedules have the same learning rate and 4,000 updates. The late switch has 76,000 examples, and so
have two schedules that it is compared with: a constant batch, and a switch after a quarter of the
updates.

The rules of the first two claims were decided after a single trial of the two schedules that they
compare, the others before any run. Two more statements are judged. The first asks whether the
catch-up explains the control of `growing_batch` that did not come out as expected (batch x 4 in
place of half the rate): then its earlier batches would not matter for its last loss. The second
compares the exact losses with gradlab: a model of `microbatched` trains the late switch in `fit`,
with batches of `BatchRamp`, from 20 seeds.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from gradlab.batch_ramp import BatchRamp
from gradlab.fit.microbatched import microbatched
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce import growing_batch
from gradlab.lab.reproduce.growing_batch import (
    WEIGHTS,
    PhaseSchedule,
    as_trained,
    curvatures,
    gradient_moments,
)
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "J. Wang, B. Li, Z. Zhou, M. Wang, Y. Sun, J. Zhang, X. Cai and L. Wu 2026, Fast Catch-Up, Late "
    "Switching: Optimal Batch Size Scheduling via Functional Scaling Laws, arXiv:2602.14208"
)
RATE = 0.02
UPDATES = 4_000
SWITCH = 3_000
SOON = 100  # updates after the switch
SMALL, LARGE = 4, 64
SEEDS = 20
MICROBATCH = 4
EVERY = 50  # updates between two rows
# of the distance at the switch
LEFT_SOON, LEFT_AT_END = 2 / 3, 1 / 3
FEWER = 0.5  # of the examples of large batches
NEAR = 0.05  # how far above their loss the late switch may end
SAME = 0.03  # how far the control may move with other batches before its last phase


class Switch(NamedTuple):
    """A schedule whose batch changes once; update 0 if it never does."""

    name: str
    before: int
    update: int
    after: int

    def at(self, update: int) -> int:
        """The batch of an update, counted from 0."""
        return self.before if update < self.update else self.after


LATE = Switch("4, from 3,000: 64", SMALL, SWITCH, LARGE)
THROUGHOUT = Switch("64 throughout", LARGE, 0, LARGE)
CONSTANT = Switch("19 throughout", 19, 0, 19)  # these two have the examples of LATE
EARLY = Switch("4, from 1,000: 24", SMALL, 1_000, 24)
SWITCHES = (LATE, THROUGHOUT, CONSTANT, EARLY)


def study(quick: bool = False) -> Study:
    """Compute the exact losses of all schedules, and train one of them with gradlab.

    Args:
        quick: whether to train from three seeds instead.
    """
    began = time.monotonic()
    rows = [row for switch in SWITCHES for row in expected_losses(switch)]
    trained = np.array([train(seed) for seed in range(3 if quick else SEEDS)])
    claims = judge(rows, trained)
    seconds = time.monotonic() - began
    return Study("late-switching", PAPER, claims, rows, figure(rows), quick, seconds)


def expected_losses(switch: Switch) -> list[dict[str, Any]]:
    """The exact expected excess loss after every EVERY updates: rows with the updates and examples
    so far, the batch, and the loss."""
    m = np.ones(WEIGHTS)
    examples = 0
    rows = []
    for update in range(UPDATES):
        batch = switch.at(update)
        m = squared_errors_after(m, RATE, batch)
        examples += batch
        if (update + 1) % EVERY == 0:
            rows.append(
                {
                    "schedule": switch.name,
                    "updates": update + 1,
                    "examples": examples,
                    "batch": batch,
                    "excess_loss": float(f"{curvatures() @ m / 2:.6g}"),
                }
            )
    return rows


def squared_errors_after(
    m: np.ndarray, rate: float, batch: int, label_noise: float = 1.0
) -> np.ndarray:
    """The expected squared errors of the weights after an update of SGD."""
    noise = gradient_moments(m, batch, label_noise)[1]
    return (1 - rate * curvatures()) ** 2 * m + rate**2 * noise


def control_question() -> Claim:
    """Judge whether the catch-up explains the control of `growing_batch` for SGD that ended near."""
    doubling, control = growing_batch.SCHEDULES[1:3]
    last = growing_batch.PHASES - 1
    moved = last_loss([doubling] * last + [control]) / last_loss([control] * (last + 1)) - 1
    half = growing_batch.PHASES // 2
    left = [
        1 - last_loss([schedule] * (last + 1), half) / last_loss([schedule] * (last + 1))
        for schedule in (control, doubling)
    ]
    return Claim(
        "The catch-up explains the control of growing-batch that ended near. (A question of ours.)",
        f"with the doubling batches before its last phase, it ends at most {SAME:.0%} away",
        f"{moved:+.0%}. The noise of its first {half} phases makes {left[0]:.0%} of its last loss, "
        f"and {left[1]:.0%} of that of the doubling batches",
        abs(moved) <= SAME,
    )


def last_loss(phases: Sequence[PhaseSchedule], noisy_from: int = 0) -> float:
    """The excess loss at the end of the schedules of `growing_batch`, one for each phase, if labels
    have noise from a phase on."""
    m = np.ones(WEIGHTS)
    for phase, schedule in enumerate(phases):
        rate, batch = schedule.at(phase)
        for _ in range(growing_batch.EXAMPLES // batch):
            m = squared_errors_after(m, rate, batch, float(phase >= noisy_from))
    return float(curvatures() @ m / 2)


def train(seed: int) -> list[float]:
    """Train with gradlab: the excess loss at the switch, and at the end."""
    h = curvatures()
    random = np.random.default_rng(seed)
    truth = random.standard_normal(WEIGHTS)
    count = SMALL * SWITCH + LARGE * (UPDATES - SWITCH)
    x = random.standard_normal([count, WEIGHTS]) * np.sqrt(h)
    y = x @ truth + random.standard_normal(count)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = microbatched(keras.Sequential([keras.Input([WEIGHTS]), layer]), MICROBATCH)
    # Keras' loss is not halved, so the rate is
    model.compile(keras.optimizers.SGD(RATE / 2), "mse", steps_per_execution=EVERY)
    examples = tf.data.Dataset.from_tensor_slices(
        (x.astype("float32"), y[:, np.newaxis].astype("float32"))
    )
    batches = BatchRamp({0: SMALL, SWITCH: LARGE}).batches(examples.repeat(), model.optimizer)
    losses = []
    for updates in (SWITCH, UPDATES - SWITCH):
        model.fit(batches, steps_per_epoch=updates, shuffle=False, verbose=0)
        losses.append(float(h @ (layer.get_weights()[0][:, 0] - truth) ** 2 / 2))
    return losses


def judge(rows: list[dict[str, Any]], trained: np.ndarray) -> list[Claim]:
    """Judge the paper's claims by the rows of `study` and the losses of `train`, shape (seeds, 2)."""
    excess = {(row["schedule"], row["updates"]): row["excess_loss"] for row in rows}
    examples = {row["schedule"]: row["examples"] for row in rows}  # the last row's
    late, constant, early = (excess[each.name, UPDATES] for each in (LATE, CONSTANT, EARLY))
    above = [
        excess[LATE.name, update] / excess[THROUGHOUT.name, update] - 1
        for update in (SWITCH, SWITCH + SOON, UPDATES)
    ]
    share = examples[LATE.name] / examples[THROUGHOUT.name]
    exact = np.array([excess[LATE.name, update] for update in (SWITCH, UPDATES)])
    return [
        Claim(
            "After the switch the loss soon is that of large batches throughout.",
            f"of the distance at the switch, at most {LEFT_SOON:.0%} is left after {SOON} updates, "
            f"and {LEFT_AT_END:.0%} at the end",
            "above it by {:.1%} at the switch, {:.1%} and {:.1%} later".format(*above),
            above[1] <= LEFT_SOON * above[0] and above[2] <= LEFT_AT_END * above[0],
        ),
        Claim(
            "So large batches can wait, with far fewer examples.",
            f"at most {FEWER:.0%} of the examples, and a last loss at most {NEAR:.0%} above",
            f"{share:.0%} of the examples, {above[2]:.1%} above",
            share <= FEWER and above[2] <= NEAR,
        ),
        Claim(
            "Of schedules with the same number of examples, the one that switches late ends lowest.",
            "lower than a constant batch, and than a switch after a quarter of the updates",
            f"{late:.4g}; constant {constant:.4g}, early {early:.4g}",
            late < min(constant, early),
        ),
        control_question(),
        as_trained("at the switch and at the end", exact, trained),
    ]


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the excess loss against updates, and the distance to large batches after the switch."""
    drawn, (left, right) = picture.figure(2, size=(8.5, 3.6))
    of_large = np.array([row["excess_loss"] for row in rows if row["schedule"] == THROUGHOUT.name])
    ends = []
    for switch, style in zip(SWITCHES, STYLES):
        chosen = [row for row in rows if row["schedule"] == switch.name]
        updates = np.array([row["updates"] for row in chosen])
        excess = np.array([row["excess_loss"] for row in chosen])
        examples = chosen[-1]["examples"]
        label = f"batch {switch.name} ({examples:,} examples)"
        looks = style | {"markevery": 10}
        left.plot(updates, excess, label=label, **looks)
        if switch is not THROUGHOUT:
            right.plot(updates, 100 * (excess / of_large - 1), **looks)
        ends.append(f"{label}: {excess[-1]:.3g}")
    left.set(yscale="log", xlabel="updates", ylabel="excess loss")
    right.set(xlabel="updates", ylabel="above batches of 64 (%)", ylim=(0, None))
    right.axvline(SWITCH, linestyle=":", color="black")
    plain_numbers(left)
    drawn.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    drawn.set_label(
        "The excess loss against updates, and how far it is above that of batches of 64 "
        f"throughout. At the end: {'; '.join(ends)}."
    )
    return drawn

"""Smith et al. 2018 and Meterez et al. 2025 (Seesaw): growing the batch in place of lowering the
learning rate.

Both papers say: where a schedule divides the learning rate, a schedule that multiplies the batch
instead has the same loss after the same number of examples, with fewer updates. For SGD, the
product of both factors decides (Smith et al.; Seesaw, theorem 1). For normalized SGD, which stands
for Adam, the factor of the learning rate times the square root of the factor of the batch decides
(Seesaw): halve the rate, or divide it by the square root of 2 and double the batch.

The problem is linear regression with noise, whose expected loss after each update can be computed
exactly. The inputs have 100 independent normal components with the variances h[i] = 1/i, the labels
are a linear function plus noise with the variance 1, and the loss is the squared error / 2.
Training has six phases with the same number of examples each; at the end of each of the first five,
the schedule acts. Normalized SGD divides the gradient by the square root of its expected squared
norm.

The rules were decided before the first run. They compare the excess of the expected loss over its
least value, 1/2. As a control, one schedule multiplies the batch by 4 where the other halves the
learning rate, which must not agree. The exact losses are compared with gradlab: `Trainer` trains
the growing schedule from 20 seeds.
"""

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from matplotlib.figure import Figure

from gradlab.fit.trainer import Trainer
from gradlab.lab.figures import picture
from gradlab.lab.figures.style import STYLES, plain_numbers
from gradlab.lab.reproduce.study import Claim, Study

PAPER = (
    "S. L. Smith, P.-J. Kindermans, C. Ying and Q. V. Le 2018, Don't Decay the Learning Rate, "
    "Increase the Batch Size, arXiv:1711.00489; A. Meterez, D. Morwani, J. Wu, C.-A. Oncescu, C. "
    "Pehlevan and S. Kakade 2025, Seesaw: Accelerating Training by Balancing Learning Rate and "
    "Batch Size Scheduling, arXiv:2510.14717"
)
# EXAMPLES in each phase
WEIGHTS = 100
PHASES = 6
EXAMPLES = 16_000
TOLERANCE = 0.1  # how far the excess losses of two schedules may be apart at the end of a phase
APART = 0.25  # how far the control must be apart at least, at the end of the last phase
# of the training with gradlab
SEEDS = 20
MICROBATCH = 4


class PhaseSchedule(NamedTuple):
    """A learning rate that is divided, and a batch that is multiplied, at the end of each phase but
    the last."""

    name: str
    normalized: bool
    rate: float
    batch: int
    divide: float
    multiply: int

    def at(self, phase: int) -> tuple[float, int]:
        """The learning rate and the batch of a phase."""
        return self.rate / self.divide**phase, self.batch * self.multiply**phase


SGD = (0.1, 4)  # the first learning rate and batch
NORMALIZED = (0.05, 4)
SCHEDULES = (
    PhaseSchedule("SGD, rate / 2", False, *SGD, 2, 1),
    PhaseSchedule("SGD, batch x 2", False, *SGD, 1, 2),
    PhaseSchedule("SGD, batch x 4 (control)", False, *SGD, 1, 4),
    PhaseSchedule("normalized, rate / 2", True, *NORMALIZED, 2, 1),
    PhaseSchedule("normalized, rate / 1.41, batch x 2", True, *NORMALIZED, math.sqrt(2), 2),
    PhaseSchedule("normalized, batch x 2 (control)", True, *NORMALIZED, 1, 2),
)


def study(quick: bool = False) -> Study:
    """Compute the exact losses of all schedules, and train one of them with gradlab.

    Args:
        quick: whether to use phases of 1,280 examples and three seeds instead.
    """
    began = time.monotonic()
    examples, seeds = (1_280, 3) if quick else (EXAMPLES, SEEDS)
    rows = [row for schedule in SCHEDULES for row in expected_losses(schedule, examples)]
    trained = np.array([train(SCHEDULES[1], examples, seed) for seed in range(seeds)])
    return Study(
        "growing-batch",
        PAPER,
        judge(rows, trained),
        rows,
        figure(rows),
        quick,
        time.monotonic() - began,
    )


def expected_losses(schedule: PhaseSchedule, examples: int) -> list[dict[str, Any]]:
    """The exact expected excess loss at the end of each phase.

    Args:
        schedule: learning rate and batch of each phase.
        examples: the examples of a phase.

    Returns:
        For each phase, a row with its number, examples and updates so far, learning rate, batch and
        excess loss.
    """
    h = curvatures()
    m = np.ones(WEIGHTS)
    updates = 0
    rows = []
    for phase in range(PHASES):
        rate, batch = schedule.at(phase)
        for _ in range(examples // batch):
            signal, noise = gradient_moments(m, batch)
            step = rate / math.sqrt((signal + noise).sum()) if schedule.normalized else rate
            m = (1 - step * h) ** 2 * m + step**2 * noise
        updates += examples // batch
        row = {
            "schedule": schedule.name,
            "phase": phase + 1,
            "examples": (phase + 1) * examples,
            "updates": updates,
        }
        rows.append(
            row | {"rate": round(rate, 6), "batch": batch, "excess_loss": float(f"{h @ m / 2:.6g}")}
        )
    return rows


def gradient_moments(
    m: np.ndarray, batch: int, label_noise: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """The square of the expected gradient of a batch, and the variance around it, shapes (WEIGHTS,).

    With the squared errors m of the weights, one example's gradient has the mean square 2 h**2 m +
    h (h m) + h in each component (the fourth moments of normal inputs, and the variance 1 of the
    labels' noise), and the mean gradient's square is h**2 m.
    """
    h = curvatures()
    signal = h**2 * m
    return signal, (signal + h * (h @ m) + label_noise * h) / batch


def curvatures() -> np.ndarray:
    """The variances h of the inputs, shape (WEIGHTS,)."""
    return 1 / np.arange(1, WEIGHTS + 1)


def train(schedule: PhaseSchedule, examples: int, seed: int) -> list[float]:
    """Train with gradlab, where the batch grows in micro-batches: the excess loss at the end of
    each phase."""
    h = curvatures()
    random = np.random.default_rng(seed)
    truth = random.standard_normal(WEIGHTS)
    model = keras.Sequential([keras.Input([WEIGHTS]), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].set_weights([np.zeros([WEIGHTS, 1])])
    ends = np.cumsum([examples // schedule.at(phase)[1] for phase in range(PHASES)])

    def microbatches(updates: int) -> int:
        return schedule.at(int(np.searchsorted(ends, updates, side="right")))[1] // MICROBATCH

    def batches(epoch: int) -> Iterator[tuple]:
        for _ in range(100):
            x = random.standard_normal([640, WEIGHTS]) * np.sqrt(h)
            yield (
                x.astype("float32"),
                (x @ truth + random.standard_normal(640))[:, None].astype("float32"),
            )

    losses = []

    def note(step) -> None:
        if step.update in ends:
            losses.append(float(h @ (model.layers[0].get_weights()[0][:, 0] - truth) ** 2 / 2))

    def half_squared_error(y, prediction):
        return keras.ops.sum((y - prediction) ** 2, axis=-1) / 2

    optimizer = keras.optimizers.SGD(schedule.rate)
    trainer = Trainer(model, optimizer, half_squared_error, MICROBATCH, accumulation=microbatches)
    trainer.fit(batches, int(ends[-1]), on_update=note, verbose=False)
    return losses


def judge(rows: list[dict[str, Any]], trained: np.ndarray) -> list[Claim]:
    """Judge the papers' claims by the rows of `study` and the losses of `train`, shape (seeds,
    phases)."""
    names = [schedule.name for schedule in SCHEDULES]
    excess = {
        name: np.array([row["excess_loss"] for row in rows if row["schedule"] == name])
        for name in names
    }
    updates = {
        name: max(row["updates"] for row in rows if row["schedule"] == name) for name in names
    }
    near = f"the excess losses differ by at most {TOLERANCE:.0%} at the end of each phase"
    far = f"the excess losses differ by more than {APART:.0%} at the end of the last phase"
    claims = []
    for falling, growing, control in (names[:3], names[3:]):
        apart = np.abs(excess[growing] / excess[falling] - 1)
        wrong = abs(excess[control][-1] / excess[falling][-1] - 1)
        saved = f"{updates[falling]:,} and {updates[growing]:,} updates"
        claims += [
            Claim(
                f"{falling} and {growing} have the same loss.",
                near,
                _percent(apart),
                bool(apart.max() <= TOLERANCE),
            ),
            Claim(
                f"{growing} needs fewer updates.",
                "fewer",
                saved,
                updates[growing] < updates[falling],
            ),
            Claim(
                f"{control} does not have the same loss.", far, f"{wrong:.0%}", bool(wrong > APART)
            ),
        ]
    when = f"{names[1]}: at the end of each phase"
    return [*claims, as_trained(when, excess[names[1]], trained)]


def as_trained(when: str, exact: np.ndarray, trained: np.ndarray) -> Claim:
    """Judge exact losses by those of training runs with gradlab, shape (seeds, losses)."""
    error = trained.std(axis=0, ddof=1) / math.sqrt(len(trained))
    distances = (trained.mean(axis=0) - exact) / error
    return Claim(
        "The expected loss is the one computed here. (A check with gradlab.)",
        f"{when}, the mean of {len(trained)} seeds is within 4 standard errors",
        ", ".join(f"{each:+.1f}" for each in distances),
        bool(np.abs(distances).max() <= 4),
    )


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Draw the excess loss against examples and against updates."""
    drawn, axes = picture.figure(2, size=(8.5, 3.6))
    for schedule, style in zip(SCHEDULES, STYLES):
        chosen = [row for row in rows if row["schedule"] == schedule.name]
        excess = [row["excess_loss"] for row in chosen]
        axes[0].plot(
            [row["examples"] / 1000 for row in chosen], excess, label=schedule.name, **style
        )
        axes[1].plot([row["updates"] / 1000 for row in chosen], excess, **style)
    axes[0].set(yscale="log", xlabel="examples (thousands)", ylabel="excess loss")
    axes[1].set(yscale="log", xlabel="updates (thousands)")
    for each in axes:
        plain_numbers(each)
    drawn.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    ends = "; ".join(
        f"{row['schedule']}: {row['excess_loss']:.2g} after {row['updates']:,} updates"
        for row in rows
        if row["phase"] == PHASES
    )
    drawn.set_label(
        "The excess loss at the end of each phase, against examples and against updates. At the "
        f"end: {ends}."
    )
    return drawn


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{value:.1%}" for value in values)

"""The bugs that the audit knows by name: what they do to a loop's rules, and how to fix them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

from gradlab.auditing.rules import LoopRules

PITFALLS = "notebooks/07_pitfalls.ipynb"
ACCUMULATION = "notebooks/04_variable_accumulation.ipynb"
WHOLE_BATCH = "notebooks/11_losses_over_the_whole_batch.ipynb"
HALF = "notebooks/10_remat_and_half_precision.ipynb"


@dataclass(frozen=True)
class KnownBug:
    """A bug of a training loop.

    Attributes:
        sentence: what the loop does, and what it should do.
        fix: the line to change.
        section: where the course explains it: a notebook and the heading of a section, with a comma
            between.
        variants: the ways in which loops have it: for each the fields of `LoopRules` that differ.
    """

    sentence: str
    fix: str
    section: str
    variants: tuple[dict[str, Any], ...]


class Hypothesis(NamedTuple):
    """What a loop may do: the names of its bugs and its rules."""

    bugs: frozenset[str]
    rules: LoopRules


CORRECT = Hypothesis(frozenset(), LoopRules())


def _variants(**choices: tuple) -> list[dict[str, Any]]:
    """All combinations of some choices for fields, each with the fields that differ from the
    defaults."""
    found = [dict(zip(choices, values)) for values in product(*choices.values())]
    plain = LoopRules()
    return [
        {name: value for name, value in one.items() if value != getattr(plain, name)}
        for one in found
    ]


BUGS = {
    "sum_for_mean": KnownBug(
        "The update gets the sum of the micro-batches' gradients, not their mean: it is about k "
        "times too large.",
        "Divide by what the window saw: gradient = total / weight.",
        f"{PITFALLS}, 1. A sum instead of a mean",
        ({"divisor": "none"}, {"divisor": "count"}, {"replicas": "sum"}),
    ),
    "divided_by_k": KnownBug(
        "A window with fewer than k micro-batches is divided by k instead of by its own size: its "
        "update is too small.",
        "Count the micro-batches, examples or tokens of the window, and divide by that count.",
        f"{PITFALLS}, 2. The ragged tail divided by k",
        ({"divisor": "k"}, {"divisor": "share"}),
    ),
    "tail_dropped": KnownBug(
        "The micro-batches that are left at the end of an epoch make no update: their examples "
        "are lost.",
        "Update after the last micro-batch of an epoch, too.",
        f"{PITFALLS}, 3. The tail dropped, or carried into the next epoch",
        ({"tail": "dropped"}, {"stops": True}),
    ),
    "tail_carried": KnownBug(
        "The gradients that are left at the end of an epoch go into the first window of the next "
        "one.",
        "Update after the last micro-batch of an epoch, too, and set the sum to zero.",
        f"{PITFALLS}, 3. The tail dropped, or carried into the next epoch",
        (
            *_variants(tail=("carried",), short_epochs=(False, True), stops=(False, True)),
            *_variants(tail=("added",), divisor=("seen", "k", "share")),
        ),
    ),
    "mean_of_means": KnownBug(
        "Micro-batches with different numbers of examples or tokens get equal weight: the loss is "
        "a mean of means.",
        "Weight each micro-batch by its examples or tokens, and divide by their sum.",
        f"{PITFALLS}, 4. Tokens: a mean of means",
        ({"alike": True}, {"replicas": "mean"}),
    ),
    "clipped_per_microbatch": KnownBug(
        "Each micro-batch's gradient is clipped, not the update's.",
        "Clip once, after averaging.",
        f"{PITFALLS}, 5. Clipping each micro-batch",
        ({"clip": "each"}, {"clip": "part"}, {"clip": "running"}),
    ),
    "schedule_per_microbatch": KnownBug(
        "The learning-rate schedule counts micro-batches, not updates: it runs about k times too "
        "fast.",
        "Step the schedule where the optimizer steps.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        tuple(
            _variants(
                schedule=(
                    lambda updates, microbatches, k: microbatches - 1,
                    lambda updates, microbatches, k: microbatches,
                    lambda updates, microbatches, k: updates * k,
                ),
                schedule_of=("training", "epoch"),
            )
        ),
    ),
    "schedule_restarts": KnownBug(
        "The learning-rate schedule begins anew in every epoch.",
        "Count the updates of the whole training.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        ({"schedule_of": "epoch"},),
    ),
    "schedule_stretched": KnownBug(
        "The learning-rate schedule advances once in k updates: it runs k times too slowly.",
        "Step the schedule once per update; do not divide its number by k a second time.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        ({"schedule": lambda updates, microbatches, k: updates // k},),
    ),
    "bias_correction_per_microbatch": KnownBug(
        "Adam's bias correction counts micro-batches, not updates.",
        "Count the optimizer's steps where it updates.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        (
            {"correction": lambda updates, microbatches, k: microbatches},
            {"correction": lambda updates, microbatches, k: microbatches + 1},
            {"correction": lambda updates, microbatches, k: updates * k + 1},
        ),
    ),
    "decay_per_microbatch": KnownBug(
        "Weight decay is applied for each micro-batch: it is k times too strong.",
        "Decay the weights where the optimizer updates.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        ({"decay": "microbatch"}, {"decay": "k times"}),
    ),
    "first_only": KnownBug(
        "Only the first micro-batch of a window counts.",
        "Add each micro-batch's gradient to the sum.",
        f"{ACCUMULATION}, Step 3: add and apply",
        ({"keep": "first"}, {"keep": "first of all"}),
    ),
    "last_only": KnownBug(
        "Only the last micro-batch of a window counts: its gradient replaces the sum.",
        "Add each micro-batch's gradient to the sum; set it to zero after an update only.",
        f"{ACCUMULATION}, Step 3: add and apply",
        (
            {"keep": "last"},
            {"keep": "last of all"},
            # Of a contrastive loss, whose gradient by the scale is there before the second pass
            {"keep": "last of all", "scale_gradient": "whole"},
        ),
    ),
    "not_reset": KnownBug(
        "The sum is not set to zero after an update: old gradients are applied again and again.",
        "Set the sum to zero after each update.",
        f"{ACCUMULATION}, Step 2: zero",
        ({"reset": "divisor"}, {"reset": "none"}, {"reset": "kept"}),
    ),
    "step_per_microbatch": KnownBug(
        "The optimizer makes a step for each micro-batch: nothing is accumulated.",
        "Call the optimizer once per window.",
        f"{ACCUMULATION}, One window",
        (
            *_variants(
                step=("each", "running"),
                divisor=("seen", "window"),
                recorded=("updates", "windows"),
            ),
            *_variants(step=("each by k",), recorded=("updates", "windows")),
        ),
    ),
    "scaled_twice": KnownBug(
        "The gradient is divided by k twice: once in the loss, and once in the mean.",
        "Remove one of the two divisions.",
        f"{PITFALLS}, 1. A sum instead of a mean",
        ({"twice": True},),
    ),
    "off_by_one": KnownBug(
        "A count is off by one: the schedule's, or that of the micro-batches of a window.",
        "Update when (number + 1) % k == 0, counted from 0; the first update has the rate of "
        "update 0.",
        f"{PITFALLS}, 6. Clocks: schedules and Adam count micro-batches",
        (
            *_variants(window=(1, -1, "early", "late"), divisor=("seen", "k")),
            {"schedule": lambda updates, microbatches, k: updates + 1},
            {"schedule": lambda updates, microbatches, k: updates - 1},
        ),
    ),
    "nonfinite_poisons": KnownBug(
        "A NaN in one micro-batch spoils all later windows: it reaches the weights, or stays in "
        "the sum.",
        "Leave out a window that is not finite, and set the sum to zero then, too.",
        f"{HALF}, One bad micro-batch",
        ({"nonfinite": "stays"}, {"nonfinite": "stays", "recorded_skips": False}),
    ),
    "low_precision_sum": KnownBug(
        "Gradients are summed in half precision: what is small beside the sum is lost.",
        "Sum in float32, whatever the type of the gradients.",
        f"{HALF}, Half precision: what must not be halved",
        ({"precision": "float16"}, {"precision": "bfloat16"}),
    ),
    "negatives_of_microbatch": KnownBug(
        "Each example is compared with those of its own micro-batch only: a contrastive loss with "
        "fewer negatives.",
        "Compute the embeddings of the whole window, then the loss, then each micro-batch's "
        "gradient in a second pass.",
        f"{WHOLE_BATCH}, Accumulated, it is another loss",
        ({"negatives": "microbatch"},),
    ),
    "labels_without_offset": KnownBug(
        "The labels of a micro-batch begin at 0, although its logits are those of the window: its "
        "examples are drawn to the first ones of the window.",
        "Add the number of examples before the micro-batch to its labels.",
        f"{WHOLE_BATCH}, Two passes",
        ({"labels": "microbatch"},),
    ),
    "temperature_without_gradient": KnownBug(
        "The scale of a contrastive loss is never trained: its gradient is lost between the two "
        "passes.",
        "Take the loss's gradient by the scale, too, where the gradients by the embeddings are "
        "taken.",
        f"{WHOLE_BATCH}, Two passes",
        ({"scale_gradient": "none"},),
    ),
    "masks_differ": KnownBug(
        "The two passes draw different dropout masks: the gradients by the embeddings belong to "
        "other embeddings than those of the second pass.",
        "Keep the state of the random numbers before each micro-batch of the first pass, and "
        "restore it in the second.",
        f"{WHOLE_BATCH}, Random layers",
        (),  # it concerns one probe only, which `masks.nearest` explains
    ),
}

# What a loop may do with a NaN, with words for what is not a bug.
POLICIES = (
    (
        "A NaN in a micro-batch reaches the weights, as it does with the large batch.",
        {"nonfinite": "spreads"},
    ),
    ("A window with a NaN is left out.", {"nonfinite": "window"}),
    ("A window with a NaN is left out.", {"nonfinite": "window", "recorded_skips": False}),
    ("A micro-batch with a NaN is left out.", {"nonfinite": "microbatch"}),
)


def after_nan(known: list[Hypothesis]) -> Iterator[tuple[str, Hypothesis]]:
    """What loops may do with a NaN, each with a sentence about it; that of the bug is empty."""
    bug = "nonfinite_poisons"
    for one in known:
        for note, policy in POLICIES:
            yield note, Hypothesis(one.bugs, replace(one.rules, **policy))
        for policy in BUGS[bug].variants:
            if one.rules.reset == "all":
                yield "", Hypothesis(one.bugs | {bug}, replace(one.rules, **policy))
            else:  # it stays because nothing is ever set to zero, which is a bug of its own
                yield "A NaN stays in the sum.", Hypothesis(one.bugs, replace(one.rules, **policy))


def with_one_more(hypothesis: Hypothesis) -> Iterator[Hypothesis]:
    """The hypotheses with one bug more, of each kind that does not contradict the others."""
    plain = LoopRules()
    changed = set()
    for field in fields(LoopRules):
        if getattr(hypothesis.rules, field.name) != getattr(plain, field.name):
            changed.add(field.name)
    for name, bug in BUGS.items():
        if name in hypothesis.bugs:
            continue
        for variant in bug.variants:
            # Two rules for where windows end
            contradicts = {"window", "short_epochs"} <= changed | set(variant)
            if changed.isdisjoint(variant) and not contradicts:
                yield Hypothesis(hypothesis.bugs | {name}, replace(hypothesis.rules, **variant))

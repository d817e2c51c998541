"""Correct training loops, and loops with planted bugs, written as people write them, for the tests
of the audit.

They share nothing with `gradlab.auditing.rules` but the gradients and the names of the bugs: a loop
here keeps a list of a window's gradients, and makes one of them in the end.
"""

import itertools

import numpy as np

from gradlab.auditing.bugs import BUGS

# Bugs that share a switch of the loop below: it can have one of each row.
SWITCHES = (
    ("sum_for_mean", "divided_by_k"),
    ("tail_dropped", "tail_carried"),
    ("first_only", "last_only"),
    ("schedule_per_microbatch", "schedule_stretched", "schedule_restarts"),
    ("not_reset", "last_only"),
    ("first_only", "step_per_microbatch"),
    ("not_reset", "nonfinite_poisons"),
)
# A pair that is one bug of the list: a step for each micro-batch with a k-th of its gradient.
SAME = {("step_per_microbatch", "scaled_twice"): "step_per_microbatch"}
PAIRS = [
    pair
    for pair in itertools.combinations(BUGS, 2)
    if not any(set(pair) <= set(row) for row in SWITCHES)
]


def planted(
    *bugs,
    dtype=np.float64,
    off_by_one="window",
    step_per_microbatch="mean",
    clipping="each",
    seed=0,
    views="together",
    scale="of the loss",
):
    """A loop with these bugs, as an adapter.

    Args:
        bugs: names of bugs.
        dtype: the type of gradients, sums and weights.
        off_by_one: which count that bug concerns: "window", "schedule", or "early" and "late" for
            an update after micro-batches 0, k, 2k, ...
        step_per_microbatch: whether its gradient is a "mean", a "share" of the window's, or the
            window's so far ("running").
        clipping: whether that bug clips "each" micro-batch's gradient, the mean so far ("running"),
            or "never".
        seed: of the random masks.
        views: whether x and y have one mask ("together"), or "each" its own.
        scale: of a contrastive loss: "of the loss", or "of x", of whose embeddings it is a factor.
    """
    has = set(bugs).__contains__

    def train(problem):
        model = {name: np.array(value, dtype) for name, value in problem.weights.items()}
        optimizer = Optimizer(problem, dtype)
        size = problem.k * problem.replicas + (has("off_by_one") and off_by_one == "window")
        waiting, history, microbatches, position = [], [], 0, 0
        generator, draws = np.random.default_rng(seed), None
        for epoch in problem.epochs:
            earlier = optimizer.steps if has("schedule_restarts") else 0
            for number, microbatch in enumerate(epoch, start=1):
                microbatches += 1
                position += 1
                if problem.model == "pairs":
                    first, last = number - position, number - position + size
                    if has("off_by_one") and off_by_one in ("early", "late"):
                        last = next(
                            (
                                place + 1
                                for place in range(first, len(epoch))
                                if place % problem.k == 0 and (place or off_by_one == "early")
                            ),
                            len(epoch),
                        )
                    window = epoch[first:last]
                    drawn = None
                    if problem.masks is not None:
                        if position == 1:  # the first pass over a window
                            draws = random_masks(generator, problem, len(window), views)
                        again = draws[(position - 1) % len(draws)]
                        if has("masks_differ"):
                            [again] = random_masks(generator, problem, 1, views)
                        drawn = draws, again
                    found = second_pass(model, window, position - 1, has, drawn, scale)
                else:
                    found = problem.gradients(model, microbatch)[1]
                gradient = {name: value.astype(dtype) for name, value in found.items()}
                if has("schedule_per_microbatch"):
                    rate = problem.learning_rate(microbatches - 1)
                elif has("schedule_stretched"):
                    rate = problem.learning_rate(optimizer.steps // problem.k)
                else:
                    rate = problem.learning_rate(optimizer.steps - earlier)
                if has("off_by_one") and off_by_one == "schedule":
                    rate = problem.learning_rate(optimizer.steps + 1)
                if has("decay_per_microbatch"):
                    optimizer.decay(model, rate)
                if has("clipped_per_microbatch") and clipping == "each":
                    gradient = clipped(gradient, problem.clip_norm)
                replica, ahead = (
                    (position - 1) % problem.replicas,
                    epoch[number - position :][: problem.k * problem.replicas],
                )
                if has("last_only"):
                    waiting = [one for one in waiting if one[2] != replica]
                if not (has("first_only") and position > problem.replicas):
                    waiting.append((gradient, problem.size(microbatch), replica))
                ends = position == size
                if has("off_by_one") and off_by_one in ("early", "late"):
                    ends = (number - 1) % (problem.k * problem.replicas) == 0 and (
                        number > 1 or off_by_one == "early"
                    )
                if number == len(epoch) and not (has("tail_dropped") or has("tail_carried")):
                    ends = True
                if not (ends or has("step_per_microbatch")):
                    continue
                mean = combined(waiting, problem, has, dtype)
                if has("step_per_microbatch") and step_per_microbatch != "mean":
                    share = sum(one[1] for one in waiting) / sum(map(problem.size, ahead))
                    mean = {name: share * value for name, value in mean.items()}
                finite = all(np.isfinite(value).all() for value in mean.values())
                if finite:
                    if not has("clipped_per_microbatch"):
                        mean = clipped(mean, problem.clip_norm)
                    if not has("decay_per_microbatch"):
                        optimizer.decay(model, rate)
                    count = (
                        microbatches
                        if has("bias_correction_per_microbatch")
                        else optimizer.steps + 1
                    )
                    optimizer.step(model, mean, rate, count)
                history.append({name: value.copy() for name, value in model.items()})
                keeps = has("step_per_microbatch") and step_per_microbatch == "running" and not ends
                if not has("not_reset") and not keeps and (finite or not has("nonfinite_poisons")):
                    waiting = []
                if ends:
                    position = 0
            if has("tail_dropped"):
                waiting, position = [], 0
        return history

    train.supports = (
        "tokens",
        "clip_norm",
        "schedule",
        "momentum",
        "adam",
        "adamw",
        "replicas",
        "nonfinite",
        "contrastive",
        "dropout",
    )
    return train


def random_masks(generator, problem, count, views):
    """A mask for x and one for y, for each of so many micro-batches."""
    numbers = generator.integers(2, size=[count, 2])
    if views == "together":
        numbers[:, 1] = numbers[:, 0]
    return problem.masks[numbers]


def second_pass(model, window, number, has, drawn=None, scale="of the loss"):
    """What a micro-batch contributes to the gradient of a contrastive window, times the window's
    examples over its own, so that a mean over examples adds such parts up.

    As people write it: the embeddings of all, a loop over the rows of the logits, and the chain
    rule for the micro-batch alone.

    Args:
        model: the weights.
        window: its micro-batches.
        number: of the micro-batch in the window.
        has: says whether the loop has a bug.
        drawn: the masks of x and y of each micro-batch in the first pass, and those of this one in
            the second. None: no dropout.
        scale: as in `planted`.
    """
    inputs = window[number]
    if drawn:
        window = [(x * first, y * other) for (x, y), (first, other) in zip(window, drawn[0])]
        inputs = [each * mask for each, mask in zip(inputs, drawn[1])]
    if has("negatives_of_microbatch"):
        window, number = window[number : number + 1], 0
    x, y = (np.concatenate(each).astype(float) for each in zip(*window))
    one, other = x @ model["kernel_x"], y @ model["kernel_y"]
    temperature = np.exp(-model["log_scale"][0])
    toward_one, toward_other, toward_scale = np.zeros_like(one), np.zeros_like(other), 0.0
    starts = np.cumsum([0, *(len(each) for each, _ in window)])
    here = range(starts[number], starts[number + 1])
    for row in range(len(x)):
        first = max(start for start in starts if start <= row)
        label = row - first if has("labels_without_offset") else row
        logits = other @ one[row] / temperature
        slope = np.exp(logits - logits.max())
        slope /= slope.sum()
        slope[label] -= 1
        toward_one[row] = other.T @ slope / temperature
        toward_other += np.outer(slope, one[row]) / temperature
        toward_scale += (slope @ logits) * (row in here)
    rows = slice(here.start, here.stop)
    if scale == "of x":  # so its gradient comes with the second pass
        toward_scale = np.sum(toward_one[rows] * (inputs[0] @ model["kernel_x"]))
    if has("temperature_without_gradient"):
        toward_scale = 0.0
    parts = {
        "kernel_x": inputs[0].T @ toward_one[rows],
        "kernel_y": inputs[1].T @ toward_other[rows],
        "log_scale": np.array([toward_scale]),
    }
    return {name: value / len(here) for name, value in parts.items()}


def combined(window, problem, has, dtype):
    """One gradient of those of a window."""
    total = sum(size for _, size, _ in window)
    shares = [1 / len(window) if has("mean_of_means") else size / total for _, size, _ in window]
    factor = 1.0
    if has("sum_for_mean"):
        factor *= len(window)
    if has("divided_by_k"):
        factor *= len(window) / (problem.k * problem.replicas)
    if has("scaled_twice"):
        factor /= problem.k
    summed = {name: np.zeros_like(value) for name, value in window[0][0].items()}
    kind = np.float16 if has("low_precision_sum") else dtype
    for (gradient, *_), share in zip(window, shares):
        for name, value in gradient.items():
            with np.errstate(over="ignore"):
                summed[name] = (
                    summed[name].astype(kind) + (factor * share * value).astype(kind)
                ).astype(dtype)
    return summed


def clipped(gradient, limit):
    norm = np.sqrt(sum(float(np.sum(np.square(value))) for value in gradient.values()))
    return (
        gradient
        if not limit or norm <= limit
        else {n: value * (limit / norm) for n, value in gradient.items()}
    )


class Optimizer:
    """SGD, momentum, Adam and AdamW, with Adam's bias correction in the learning rate."""

    def __init__(self, problem, dtype):
        self.problem, self.steps = problem, 0
        self.first = {
            name: np.zeros(np.shape(value), dtype) for name, value in problem.weights.items()
        }
        self.second = {
            name: np.zeros(np.shape(value), dtype) for name, value in problem.weights.items()
        }

    def decay(self, model, rate):
        for name in model:
            model[name] = model[name] - rate * self.problem.weight_decay * model[name]

    def step(self, model, gradient, rate, count):
        self.steps += 1
        for name, value in gradient.items():
            if self.problem.optimizer == "sgd":
                change = value
            elif self.problem.optimizer == "momentum":
                self.first[name] = change = 0.9 * self.first[name] + value
            else:
                self.first[name] = 0.9 * self.first[name] + 0.1 * value
                self.second[name] = 0.999 * self.second[name] + 0.001 * value**2
                corrected = np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
                change = (
                    corrected
                    * self.first[name]
                    / (np.sqrt(self.second[name]) + 1e-8 * np.sqrt(1 - 0.999**count))
                )
            model[name] = (model[name] - rate * change).astype(model[name].dtype)

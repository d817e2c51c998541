"""audit: runs the probes through a training loop, and names the bugs that explain what it does."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from gradlab.auditing import masks
from gradlab.auditing.bugs import BUGS, CORRECT, Hypothesis, after_nan
from gradlab.auditing.matching import ROUNDING, Seen, distance, explain, first_difference, smallest
from gradlab.auditing.models import SHAPES
from gradlab.auditing.probes import BY_DEFAULT, FEATURES, PROBES, ProbeTraining
from gradlab.auditing.problem import Problem
from gradlab.auditing.report import Audit, Difference, FoundBug
from gradlab.auditing.rules import as_vector, gradients_of, trajectory


def audit(train: Callable[[Problem], list], supports: Collection[str] | None = None) -> Audit:
    """Finds out which accumulation bugs a training loop has.

    The loop is behind an adapter, a function that trains a small model as a `Problem` describes it,
    in any framework, and returns the weights after each update. The audit runs it on a dozen
    problems of a few examples each, in which each bug leaves a trace of its own, and compares the
    weights with those of the large batch and of every bug that it knows. The bugs it names are the
    keys of `gradlab.auditing.bugs.BUGS`.

    Args:
        train: a function (problem) -> the weights after each update: a list of dicts of arrays,
            with the names and the shapes of problem.weights. It may raise NotImplementedError for a
            problem that it cannot train.
        supports: the features of the loop, of "tokens", "clip_norm", "schedule", "momentum",
            "adam", "adamw", "replicas", "nonfinite", "contrastive" and "dropout"; probes of others
            are skipped. None: the attribute `supports` of train or of its module, or all but the
            last four.

    Returns:
        An `Audit`: `clean`, `findings`, `skipped` and `notes`. In a notebook it is shown as a
        table.

    Raises:
        ValueError: an unknown feature, weights that are not those of the problem, a loop that ends
            the process, or no probe that the loop trains.

    Example:
        >>> def train(problem):
        ...     weights, history = problem.weights, []
        ...     for epoch in problem.epochs:
        ...         for start in range(0, len(epoch), problem.k):
        ...             window = epoch[start : start + problem.k]
        ...             gradients = [problem.gradients(weights, microbatch)[1] for microbatch in window]
        ...             rate = problem.learning_rate(len(history)) / problem.k
        ...             weights = {name: weights[name] - rate * sum(g[name] for g in gradients) for name in weights}
        ...             history.append(weights)
        ...     return history
        >>> [finding.bug for finding in audit(train, supports=["schedule"]).findings]
        ['divided_by_k', 'mean_of_means']
    """
    if not callable(train):
        raise ValueError(
            "train must be a function (problem) -> the weights after each update. Received: "
            f"{train!r}"
        )
    module = sys.modules.get(getattr(train, "__module__", ""))
    chosen = (
        getattr(train, "supports", getattr(module, "supports", None))
        if supports is None
        else supports
    )
    run = _AuditRun(train, _features(BY_DEFAULT if chosen is None else chosen))
    for probe in PROBES:
        run.look_at(probe)
    return run.result()


def _features(supports: Collection[str]) -> set[str]:
    if isinstance(supports, str) or any(name not in FEATURES for name in supports):
        raise ValueError(
            f"supports must hold names of {', '.join(FEATURES)}. Received: {supports!r}"
        )
    return set(supports)


class _AuditRun:
    """What is known of a loop after some probes."""

    def __init__(self, train: Callable, features: set[str]):
        self._train = train
        self._features = features
        self._known: list[Hypothesis] = [CORRECT]
        self._seen: list[Seen] = []
        # For each bug, that of the first probe in which it shows
        self._evidence: dict[str, Difference] = {}
        self._more: list[FoundBug] = []
        self._skipped: dict[str, str] = {}
        self._notes: list[str] = []
        self._unknown = ""  # the probe of full windows, if nothing explains it
        self._judged = False  # whether any probe ran but that of the NaN
        self._doubtful = False  # whether nothing explains a probe that needs no feature

    def look_at(self, probe: ProbeTraining) -> None:
        """Runs one probe."""
        missing = [name for name in probe.needs if name not in self._features]
        if self._unknown:
            self._skipped[probe.name] = (
                f'what the loop does in the probe "{self._unknown}" is not known'
            )
            return
        if missing:
            self._skipped[probe.name] = f"the loop does not support {', '.join(missing)}"
            return
        has_nan = probe.name == "a NaN"
        try:
            found = weights_of(self._train, probe)
        except NotImplementedError as error:
            self._skipped[probe.name] = str(error) or "the adapter does not train it"
        except (Exception, SystemExit) as error:
            if not has_nan:  # the other probes ran, so here the loop stumbled over the NaN
                note = f'The audit was running the probe "{probe.name}".'
                if isinstance(error, SystemExit):
                    rule = "train must return, not end the process, which would end the audit before it is complete"
                    raise ValueError(
                        f"{rule}. {note} Received: SystemExit({error.code!r})"
                    ) from error
                error.add_note(note)
                raise
            self._notes.append(f"A NaN in a micro-batch raises {type(error).__name__}.")
        else:
            judge = self._judge_nan if has_nan else self._judge
            self._judged = self._judged or not has_nan
            (self._judge_masks if probe.make().masks is not None else judge)(probe, found)

    def _judge(self, probe: ProbeTraining, found: list[np.ndarray]) -> None:
        problem = probe.make()
        new = Seen(problem, found, gradients_of(problem), probe.is_exact)
        seen = [new, *self._seen]
        matching = explain(seen, self._known)
        if not matching:
            # What goes wrong elsewhere says nothing about the other probes
            if probe.name == "full windows":
                self._unknown = probe.name
            self._doubtful = self._doubtful or not probe.needs
            evidence = _evidence(probe, problem, found, self._known[0], None)
            words = (
                "from the first one"
                if evidence.update == 1
                else f"from update {evidence.update} on"
            )
            sentence = (
                f"The weights are wrong {words}, and no known bug or pair of bugs explains them."
            )
            if any(first_difference(*new, one, ROUNDING) is None for one in self._known):
                sentence = f"The weights are imprecise {words}, as with TensorFloat-32: use float32 throughout."
            self._more.append(FoundBug("unknown", sentence, evidence))
            return
        for one in matching:
            for name in one.bugs:
                self._evidence.setdefault(
                    name, _evidence(probe, problem, found, self._known[0], one)
                )
        self._known = matching
        self._seen = seen

    def _judge_masks(self, probe: ProbeTraining, found: list[np.ndarray]) -> None:
        """Whether a contrastive loop draws the same masks in both passes."""
        problem = probe.make()
        plain = replace(problem, masks=None)
        without_bug = list(trajectory(plain, CORRECT.rules))
        if self._more or all(
            first_difference(plain, without_bug, None, False, one) is not None
            for one in self._known
        ):
            self._skipped[probe.name] = "masks are audited where no other bug shows"
            return
        right = masks.nearest(problem, found, same=True)
        update = masks.first_other(problem, found, right)
        if update is None:
            return
        far = distance(problem, right, found, update)
        with_bug = masks.nearest(problem, found, same=False)
        if masks.first_other(problem, found, with_bug) is None:
            near = distance(problem, with_bug, found, update)
            bug = BUGS["masks_differ"]
            shown = Difference(probe.name, update + 1, far, near, found, right, with_bug)
            self._more.append(FoundBug("masks_differ", bug.sentence, shown, bug.fix, bug.section))
            return
        shown = Difference(probe.name, update + 1, far, None, found, right, [])
        sentence = f"The weights are wrong from update {update + 1} on, whatever masks were drawn."
        self._more.append(FoundBug("unknown", sentence, shown))

    def _judge_nan(self, probe: ProbeTraining, found: list[np.ndarray]) -> None:
        """What the loop does with a NaN, which may be right."""
        problem = probe.make()
        before = self._known[0]
        if all(np.isfinite(weights).all() for weights in trajectory(problem, before.rules)):
            self._notes.append("The loop never used the micro-batch with a NaN.")
            return
        for note, hypothesis in after_nan(self._known):
            if first_difference(problem, found, None, False, hypothesis) is not None:
                continue
            bug = "nonfinite_poisons"
            spreads = hypothesis.rules.nonfinite == "spreads"
            if bug in hypothesis.bugs or (spreads and "nonfinite" in self._features):
                self._known = [Hypothesis(one.bugs | {bug}, one.rules) for one in self._known]
                self._evidence[bug] = _evidence(probe, problem, found, before, hypothesis)
            else:
                self._notes.append(note)
            return
        self._notes.append("What the loop does with a NaN in a micro-batch is not known.")

    def result(self) -> Audit:
        """The verdict after all probes."""
        if not self._judged:
            reason = next(iter(self._skipped.values()))
            raise ValueError(
                f"train must train the model of at least one probe. Received: none; {reason}"
            )
        sets = smallest(self._known)
        if self._doubtful:  # names that fit some probes only may be wrong
            names = " or ".join(" and ".join(sorted(each)) for each in sets if each)
            notes = [f"The probes that could be explained fit {names}."] if names else []
            return Audit(tuple(self._more), self._skipped, (*self._notes, *notes))
        sure = frozenset.intersection(*sets)
        findings = [
            FoundBug(name, bug.sentence, self._evidence[name], bug.fix, bug.section)
            for name, bug in BUGS.items()
            if name in sure
        ]
        if len(sets) > 1:
            candidates = tuple(" and ".join(sorted(each - sure)) for each in sets)
            sentence = f"The weights are those of one of these, which the probes cannot tell apart: {candidates}."
            shown = self._evidence[next(iter(sets[0] - sure))]
            findings.append(FoundBug("ambiguous", sentence, shown, candidates=candidates))
        return Audit((*findings, *self._more), self._skipped, tuple(self._notes))


def _evidence(
    probe: ProbeTraining,
    problem: Problem,
    found: list[np.ndarray],
    before: Hypothesis,
    after: Hypothesis | None,
) -> Difference:
    """Where weights first differ from those of a loop as it was known before."""
    update = first_difference(problem, found, None, False, before) or 0
    right = list(trajectory(problem, CORRECT.rules))
    with_bug = list(trajectory(problem, after.rules)) if after else []
    near = None if after is None else distance(problem, with_bug, found, update)
    return Difference(
        probe.name,
        update + 1,
        distance(problem, right, found, update),
        near,
        found,
        right,
        with_bug,
    )


def weights_of(train: Callable[[Problem], Any], probe: ProbeTraining) -> list[np.ndarray]:
    """The weights after each update that an adapter gives, as vectors.

    Raises:
        ValueError: they are not those of the problem.
    """
    problem = probe.make()
    given = train(probe.make())
    rule = f'train must return a list of dicts, the weights after each update. In the probe "{probe.name}"'
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, Mapping) for each in given):
        raise ValueError(f"{rule} it returned {type(given).__name__}. Received: {given!r:.200}")
    for weights in given:
        shapes = {name: np.shape(value) for name, value in weights.items()}
        if shapes != SHAPES[problem.model]:
            raise ValueError(
                f"{rule} their shapes must be {SHAPES[problem.model]}. Received: {shapes}"
            )
    if any(
        np.may_share_memory(one[name], other[name])
        for one, other in pairwise(given)
        for name in one
    ):
        raise ValueError(
            f"{rule} each must have arrays of its own: copy them. Received: one array in two of "
            "them"
        )
    found = [as_vector(problem, weights) for weights in given]
    start = as_vector(problem, problem.weights)
    expected = sum(-(-len(epoch) // (problem.k * problem.replicas)) for epoch in problem.epochs)
    if len(found) == expected + 1 and np.allclose(found[0], start, rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"{rule} the initial weights must not be among them. Received: them as the first ones"
        )
    return found

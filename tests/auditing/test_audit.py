"""The audit: every planted bug is named, alone and in pairs; right loops are clean; what cannot be
known is said."""

import dataclasses
import functools
import itertools
import sys

import numpy as np
import pytest
from planted_loops import PAIRS, SAME, planted

import gradlab
from gradlab.auditing import audit as audit_module
from gradlab.auditing import matching
from gradlab.auditing.bugs import BUGS, CORRECT
from gradlab.auditing.matching import TOLERANCE, first_difference
from gradlab.auditing.models import SHAPES, loss_and_gradients
from gradlab.auditing.probes import FEATURES, PROBES, ProbeTraining
from gradlab.auditing.problem import Problem, initial_weights
from gradlab.auditing.rules import trajectory

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


def named(audit):
    """The names that an audit is sure of."""
    return {finding.bug for finding in audit.findings} - {"ambiguous"}


def possible(audit):
    """The sets of names that an audit allows."""
    sure = named(audit)
    candidates = [finding.candidates for finding in audit.findings if finding.bug == "ambiguous"]
    return [sure | set(each.split(" and ")) for each in (candidates[0] if candidates else ())] or [
        sure
    ]


def behavior(train):
    """The weights in all probes."""
    with np.errstate(all="ignore"):
        return [audit_module.weights_of(train, probe) for probe in PROBES]


def same(one, other):
    """Whether two loops behave alike in all probes, as far as the audit can see."""

    def close(a, b, start):
        finite = np.isfinite(a)
        way = np.linalg.norm((a - start)[finite])
        return (
            np.array_equal(finite, np.isfinite(b))
            and np.linalg.norm((a - b)[finite]) <= TOLERANCE * way
        )

    starts = [
        audit_module.as_vector(problem, problem.weights)
        for problem in (probe.make() for probe in PROBES)
    ]
    return all(
        len(a) == len(b) and all(close(*pair, start) for pair in zip(a, b))
        for a, b, start in zip(one, other, starts)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_right_loop_is_clean(dtype):
    audit = gradlab.audit(planted(dtype=dtype))
    assert audit.clean and not audit.skipped
    assert audit.notes == ("A window with a NaN is left out.",)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(name):
    audit = gradlab.audit(planted(name))
    assert named(audit) == {name}, audit
    [finding] = audit.findings
    assert finding.evidence.distance > 1e-3 or np.isnan(finding.evidence.distance), finding
    near = finding.evidence.distance_with_bug
    assert near < 5e-3 or np.isnan(near), finding


@pytest.mark.parametrize(
    "name, how",
    [("off_by_one", {"off_by_one": kind}) for kind in ("schedule", "early", "late")]
    + [("step_per_microbatch", {"step_per_microbatch": kind}) for kind in ("share", "running")],
)
def test_other_forms_of_a_bug_are_named_too(name, how):
    assert named(gradlab.audit(planted(name, **how))) == {name}


def test_a_gradient_that_is_never_set_to_zero_is_named():
    """As in PyTorch without zero_grad: each loss is divided by its own window, and gradients add up
    for good."""

    def train(problem):
        weights, history, gradient = problem.weights, [], dict.fromkeys(problem.weights, 0)
        for epoch in problem.epochs:
            for start in range(0, len(epoch), problem.k):
                window = epoch[start : start + problem.k]
                total = sum(map(problem.size, window))
                for one in window:
                    found = problem.gradients(weights, one)[1]
                    gradient = {
                        n: gradient[n] + found[n] * problem.size(one) / total for n in weights
                    }
                rate = problem.learning_rate(len(history))
                weights = {n: weights[n] - rate * gradient[n] for n in weights}
                history.append(weights)
        return history

    assert named(gradlab.audit(train, supports=["schedule"])) == {"not_reset"}


def test_the_usual_loop_in_pytorch_that_forgets_the_tail():
    """Losses are divided by k, an update follows every k-th micro-batch of an epoch, and what is
    left stays."""

    def train(problem):
        weights, history, gradient = problem.weights, [], dict.fromkeys(problem.weights, 0)
        for epoch in problem.epochs:
            for number, one in enumerate(epoch):
                found = problem.gradients(weights, one)[1]
                gradient = {n: gradient[n] + found[n] / problem.k for n in weights}
                if (number + 1) % problem.k == 0:
                    rate = problem.learning_rate(len(history))
                    weights, gradient = (
                        {n: weights[n] - rate * gradient[n] for n in weights},
                        dict.fromkeys(weights, 0),
                    )
                    history.append(weights)
        return history

    assert named(gradlab.audit(train, supports=["schedule"])) == {"tail_carried", "mean_of_means"}


def test_a_loop_that_never_clips_is_not_given_a_name():
    def train(problem):
        return planted()(dataclasses.replace(problem, clip_norm=None))

    assert named(gradlab.audit(train)) == {"unknown"}


def test_imprecise_arithmetic_is_no_sum_in_half_precision():
    """As with TensorFloat-32, whose numbers have 10 bits: the first probe's numbers need no
    more."""

    def train(problem):
        def rounded(weights, microbatch):
            loss, gradients = Problem.gradients(problem, weights, microbatch)
            return loss, {
                name: value.astype(np.float16).astype(float) for name, value in gradients.items()
            }

        inner = dataclasses.replace(problem)
        object.__setattr__(inner, "gradients", rounded)
        return planted()(inner)

    audit = gradlab.audit(train)
    assert named(audit) <= {"unknown"} and all(
        "TensorFloat-32" in one.sentence for one in audit.findings
    ), audit


@pytest.fixture
def remembered_trajectories(monkeypatch):
    """Computes the weights that each hypothesis gives in each probe once for all audits of a test.

    An audit of two bugs tries more than a thousand hypotheses, the same ones every time.
    """
    first = {}
    complete = {}

    def remembered(problem, rules, gradients=None):
        key = (id(problem), rules)  # the fixed probes below keep each problem alive
        if key not in first:
            first[key] = list(itertools.islice(trajectory(problem, rules, gradients), 1))
        yield from first[key]  # nearly all hypotheses are ruled out by the first update
        if key not in complete:
            complete[key] = list(trajectory(problem, rules, gradients))
        yield from complete[key][1:]

    fixed = tuple(probe._replace(make=functools.cache(probe.make)) for probe in PROBES)
    monkeypatch.setattr(audit_module, "PROBES", fixed)
    monkeypatch.setattr(audit_module, "trajectory", remembered)
    monkeypatch.setattr(matching, "trajectory", remembered)


@pytest.mark.slow
def test_a_pair_of_bugs_is_named(remembered_trajectories):
    """Both names, or the one bug that hides the other completely, or several candidates of which
    they are one."""
    alone = {name: behavior(planted(name)) for name in BUGS}
    wrong = []
    for pair in PAIRS:
        audit = gradlab.audit(planted(*pair))
        together = behavior(planted(*pair))
        expected = [{name} for name in pair if same(together, alone[name])] or [set(pair)]
        expected = [{SAME[pair]}] if pair in SAME else expected
        if "masks_differ" in pair:  # looked for where the other one does not show
            expected = [set(pair) - {"masks_differ"}, set(pair)]
        is_possible = any(each in possible(audit) for each in expected)
        if not is_possible or not named(audit) <= set().union(*expected):
            wrong.append(f"{' and '.join(pair)}: {audit}")
    assert not wrong, "\n".join(wrong)


def random_problem(generator):
    model = generator.choice(list(SHAPES))
    k, rows = int(generator.integers(2, 6)), int(generator.integers(2, 6))
    epochs = []
    for _ in range(1 if model == "pairs" else generator.integers(1, 4)):
        sizes = [rows] * int(generator.integers(1, 3 * k)) + [int(generator.integers(1, rows + 1))]
        epochs.append([random_microbatch(generator, model, size) for size in sizes])
    optimizer = str(generator.choice(OPTIMIZERS))
    rates = generator.uniform(0.01, 0.1, 100)
    return Problem(
        str(model), initial_weights(str(model), int(generator.integers(1000))), epochs, k, optimizer,
        learning_rate=lambda update: float(rates[update]),
        clip_norm=float(generator.uniform(0.3, 3)) if generator.random() < 0.5 else None,
        weight_decay=0.1 if optimizer == "adamw" else 0.0,
        average_over="tokens" if model == "tokens" else "examples",
    )  # fmt: skip


def random_microbatch(generator, model, size):
    if model == "tokens":
        lengths = generator.integers(1, 6, size)
        mask = (np.arange(5) < lengths[:, np.newaxis]).astype(float)
        return generator.integers(0, 7, [size, 5]), generator.integers(0, 7, [size, 5]), mask
    if model == "pairs":
        return generator.normal(size=[size, 4]), generator.normal(size=[size, 4])
    x = (
        generator.integers(0, 9, [size, 5])
        if model == "embedding"
        else generator.normal(size=[size, 4])
    )
    y = (
        generator.integers(0, 3, size)
        if model == "two_layers"
        else generator.normal(size=[size, 1])
    )
    return x, y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hundred_random_trainings_of_right_loops_raise_no_alarm(dtype):
    generator = np.random.default_rng(0 if dtype is np.float32 else 1)
    for _ in range(100):
        problem = random_problem(generator)
        seen = audit_module._AuditRun(planted(dtype=dtype), set(FEATURES))
        seen.look_at(ProbeTraining("a random training", (), lambda: problem))  # noqa: B023
        audit = seen.result()
        assert audit.clean, (problem, audit)


def random_contrastive_problem(generator, masked):
    k = 2 if masked else int(generator.integers(2, 4))  # the draws of a window are 16 then
    rows = int(generator.integers(2, 5))
    sizes = [rows] * int(generator.integers(1, 3 * k)) + [int(generator.integers(2, rows + 1))]
    rates = generator.uniform(0.01, 0.2, 100)
    return Problem(
        "pairs",
        initial_weights("pairs", int(generator.integers(1000))),
        [[random_microbatch(generator, "pairs", size) for size in sizes]],
        k,
        learning_rate=lambda update: float(rates[update]),
        masks=generator.uniform(0, 2, [2, 4]) if masked else None,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_hundred_random_contrastive_loops_raise_no_alarm_unless_they_have_a_bug(masked):
    """The bug is named in nearly all of them: where it shows."""
    generator = np.random.default_rng(4 + masked)
    wrong = "masks_differ" if masked else "negatives_of_microbatch"
    blamed = 0
    for number in range(100):
        problem = random_contrastive_problem(generator, masked)
        for bugs in [(), (wrong,)]:
            seen = audit_module._AuditRun(planted(*bugs, seed=number), set(FEATURES))
            seen.look_at(ProbeTraining("random pairs", (), lambda: problem))  # noqa: B023
            found = named(seen.result())
            assert found <= set(bugs), (number, bugs, problem, seen.result())
            blamed += found == {wrong}
    assert blamed >= 80


@pytest.mark.parametrize("views", ["together", "each"])
@pytest.mark.parametrize("scale", ["of the loss", "of x"])
def test_masks_of_each_view_and_a_scale_in_the_model(views, scale):
    how = {"views": views, "scale": scale}
    assert gradlab.audit(planted(**how)).clean
    assert named(gradlab.audit(planted("masks_differ", **how))) == {"masks_differ"}


def test_a_contrastive_loop_that_makes_no_updates_is_not_clean():
    def train(problem):
        return [] if problem.masks is not None else planted()(problem)

    [finding] = gradlab.audit(train, supports=FEATURES).findings
    assert finding.bug == "unknown"
    assert "makes 0 updates, and the large batch 10" in str(finding.evidence)


def test_the_usual_contrastive_loop_that_accumulates_losses_is_named():
    """Each loss over its own negatives is divided by k, as in PyTorch."""

    def train(problem):
        if problem.model != "pairs":
            raise NotImplementedError
        weights, history = problem.weights, []
        for start in range(0, len(problem.epochs[0]), problem.k):
            window = problem.epochs[0][start : start + problem.k]
            gradients = [problem.gradients(weights, one)[1] for one in window]
            rate = problem.learning_rate(len(history)) / problem.k
            weights = {n: weights[n] - rate * sum(g[n] for g in gradients) for n in weights}
            history.append(weights)
        return history

    audit = gradlab.audit(train, supports=["contrastive"])
    assert named(audit) == {"negatives_of_microbatch", "divided_by_k", "mean_of_means"}, audit


def test_pairs_of_several_epochs_are_refused():
    problem = random_contrastive_problem(np.random.default_rng(0), masked=False)
    twice = dataclasses.replace(problem, epochs=problem.epochs * 2)
    with pytest.raises(ValueError, match='^epochs of "pairs" must be one. Received: 2 epochs$'):
        list(trajectory(twice, CORRECT.rules))


def test_other_gradients_beside_masks_are_not_blamed_on_them():
    def train(problem):
        history = planted()(problem)
        if problem.masks is None:
            return history
        return [{name: value * 1.01 for name, value in each.items()} for each in history]

    audit = gradlab.audit(train, supports=FEATURES)
    assert named(audit) == {"unknown"} and "whatever masks were drawn" in audit.findings[0].sentence


def test_random_trainings_tell_planted_bugs_from_right_loops():
    """The same trainings as above have something to find, if there is a bug that concerns them."""
    generator, caught = np.random.default_rng(2), 0
    for number in range(50):
        problem = random_problem(generator)
        found = planted("sum_for_mean" if number % 2 else "mean_of_means")(problem)
        vectors = [audit_module.as_vector(problem, weights) for weights in found]
        caught += first_difference(problem, vectors, None, False, CORRECT) is not None
    assert caught >= 25


@pytest.mark.parametrize("model", SHAPES)
def test_gradients_by_hand_are_those_of_differences(model):
    generator = np.random.default_rng(3)
    weights, microbatch = initial_weights(model, 5), random_microbatch(generator, model, 4)
    loss, gradients = loss_and_gradients(model, weights, microbatch)
    for name, gradient in gradients.items():
        for place in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {each: value.copy() for each, value in weights.items()}
                moved[name][place] += step
                ends.append(loss_and_gradients(model, moved, microbatch)[0])
            np.testing.assert_allclose(
                gradient[place], (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-8
            )
    assert np.isfinite(loss)


def test_a_bug_that_is_not_known_is_not_given_a_name():
    def train(problem):
        history = planted()(problem)
        return [{name: 1.1 * value for name, value in weights.items()} for weights in history]

    audit = gradlab.audit(train)
    finding = audit.findings[-1]
    assert (
        named(audit) == {"unknown"}
        and "no known bug or pair of bugs explains them" in finding.sentence
    )
    assert finding.evidence.update == 1 and not finding.fix and not finding.link
    assert set(audit.skipped) == {probe.name for probe in PROBES[2:]}


@pytest.mark.parametrize(
    ("rate_goes_on", "bugs"), [(True, {"unknown"}), (False, {"schedule_restarts", "unknown"})]
)
def test_a_loop_that_begins_anew_in_each_epoch_is_not_clean(rate_goes_on, bugs):
    """Its optimizer forgets the averages, and its schedule the updates, of the epochs before."""

    def train(problem):
        history = []
        for epoch in problem.epochs:
            made = len(history) if rate_goes_on else 0
            history += planted()(
                dataclasses.replace(
                    problem,
                    weights=history[-1] if history else problem.weights,
                    epochs=[epoch],
                    learning_rate=lambda update, made=made: problem.learning_rate(made + update),
                )
            )
        return history

    audit = gradlab.audit(train, supports=["schedule", "momentum", "adam"])
    assert named(audit) == bugs
    unknown = {one.evidence.probe for one in audit.findings if one.bug == "unknown"}
    assert unknown == {"momentum", "Adam"}


def test_a_schedule_that_counts_the_micro_batches_of_an_epoch_is_named():
    def train(problem):
        weights, history = problem.weights, []
        for epoch in problem.epochs:
            for start in range(0, len(epoch), problem.k):
                window = epoch[start : start + problem.k]
                total = sum(map(problem.size, window))
                parts = [(problem.gradients(weights, one)[1], problem.size(one)) for one in window]
                rate = problem.learning_rate(start + len(window) - 1)
                weights = {
                    name: weights[name]
                    - rate * sum(part[name] * size for part, size in parts) / total
                    for name in weights
                }
                history.append(weights)
        return history

    audit = gradlab.audit(train, supports=["schedule", "tokens"])
    assert named(audit) == {"schedule_per_microbatch"}


def test_a_feature_that_goes_wrong_in_its_own_way_does_not_end_the_audit():
    def train(problem):
        if problem.clip_norm:
            problem = dataclasses.replace(problem, clip_norm=problem.clip_norm / 3)
        return planted("bias_correction_per_microbatch")(problem)

    audit = gradlab.audit(train)
    assert named(audit) == {"unknown", "bias_correction_per_microbatch"}
    assert "clipping" in str(next(one for one in audit.findings if one.bug == "unknown").evidence)


def test_what_a_loop_does_not_support_is_skipped_and_said():
    audit = gradlab.audit(planted("clipped_per_microbatch"), supports=["tokens"])
    assert audit.clean and audit.skipped["clipping"] == "the loop does not support clip_norm"
    assert "texts of different lengths" not in audit.skipped

    def refusing(problem):
        if problem.model == "embedding":
            raise NotImplementedError("no embeddings here")
        return planted()(problem)

    assert gradlab.audit(refusing).skipped["embeddings"] == "no embeddings here"


@pytest.mark.parametrize(
    "policy, note",
    [
        ("spreads", "A NaN in a micro-batch reaches the weights, as it does with the large batch."),
        ("raises", "A NaN in a micro-batch raises FloatingPointError."),
        ("exits", "A NaN in a micro-batch raises SystemExit."),
    ],
)
def test_what_a_loop_does_with_a_nan_is_a_note(policy, note):
    def train(problem):
        if all(np.isfinite(x).all() for epoch in problem.epochs for x, *_ in epoch):
            return planted()(problem)
        if policy == "raises":
            raise FloatingPointError("the loss is NaN")
        if policy == "exits":
            sys.exit(1)
        history = planted()(problem)
        return history[:1] + [
            {name: value * np.nan for name, value in each.items()} for each in history[1:]
        ]

    audit = gradlab.audit(train, supports=())
    assert audit.clean and audit.notes == (note,)
    if policy == "spreads":  # a loop that says that it leaves out what is not finite must do so
        assert named(gradlab.audit(train, supports=["nonfinite"])) == {"nonfinite_poisons"}


def test_an_error_of_the_loop_names_the_probe():
    def train(problem):
        if problem.optimizer == "adam":
            raise KeyError("beta")
        return planted()(problem)

    with pytest.raises(KeyError) as caught:
        gradlab.audit(train)
    assert caught.value.__notes__ == ['The audit was running the probe "Adam".']


@pytest.mark.parametrize("code", [0, None, 3, "stopped"])
def test_a_loop_that_ends_the_process_is_not_clean(code):
    def train(problem):
        if problem.optimizer == "adam":
            raise SystemExit(code)
        return planted()(problem)

    sentence = (
        "train must return, not end the process, which would end the audit before it is complete. "
        f'The audit was running the probe "Adam". Received: SystemExit\\({code!r}\\)'
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        gradlab.audit(train)


def refuses(problem):
    raise NotImplementedError


@pytest.mark.parametrize(
    "train, supports, sentence",
    [
        (3, None, "train must be a function .* Received: 3"),
        (
            planted(),
            "tokens",
            "supports must hold names of tokens, clip_norm, .* Received: 'tokens'",
        ),
        (planted(), ["token"], "supports must hold names of .* Received: \\['token'\\]"),
        (
            lambda problem: None,
            None,
            'In the probe "a long window" it returned NoneType. Received: None',
        ),
        (
            lambda problem: [{"kernel": np.zeros([4, 1])}],
            None,
            "their shapes must be .* Received: {'kernel': \\(4, 1\\)}",
        ),
        (
            lambda problem: [problem.weights] * 3,
            None,
            "each must have arrays of its own: copy them",
        ),
        (
            lambda problem: [
                {n: value[:] for n, value in problem.weights.items()} for _ in range(3)
            ],
            None,
            "each must have arrays of its own: copy them",
        ),
        (
            refuses,
            None,
            "train must train the model of at least one probe. Received: none; the adapter does "
            "not train it",
        ),
        (
            lambda problem: [problem.weights, *planted()(problem)],
            None,
            "the initial weights must not be among them. Received: them as the first ones",
        ),
    ],
)
def test_bad_input_is_one_sentence(train, supports, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        gradlab.audit(train, supports)
    assert "\n" not in str(caught.value)

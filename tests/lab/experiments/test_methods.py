"""The five methods: each makes the large batch's update, and the check of that fails on every
planted bug."""

import functools
import itertools

import numpy as np
import pytest
import reference
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gradlab import static_graph
from gradlab import towers as gradlab_towers
from gradlab.accumulator import GradientAccumulator
from gradlab.lab.experiments import methods, models, optimizers
from gradlab.lab.experiments.methods import compiled
from gradlab.window import Window

OPTIMIZERS = optimizers.OPTIMIZERS
# (method, towers)
WAYS = [("large_batch", 1), ("microbatched", 1)] + [
    (name, towers) for name in ("towers", "placeholders", "variables") for towers in (1, 2, 3)
]
# The (optimizer, clip_norm) that are tried with each way. The number of towers concerns the average
# only, whatever gets it, so most optimizers are tried with three towers.
HALF = [("sgd", None), ("momentum", 0.25), ("adam", None), ("adamw", 0.25)]
OTHER_HALF = [("sgd", 0.25), ("momentum", None), ("adam", 0.25), ("adamw", None)]
CELLS = {
    ("large_batch", 1): HALF,
    ("microbatched", 1): OTHER_HALF,
    ("towers", 3): HALF,
    ("placeholders", 3): OTHER_HALF,
    ("variables", 3): HALF,
    **{(name, 2): [("adam", 0.25)] for name in ("towers", "placeholders", "variables")},
    **{
        (name, 1): [("sgd", None), ("adamw", 0.25)]
        for name in ("towers", "placeholders", "variables")
    },
}
SCHEDULE = (0.125, 0.0625, 0.25, 0.03125)  # the learning rate of each update; exact in float32
# That of a wrong count
COUNTED = [SCHEDULE[min(3, micro_batches)] for micro_batches in (0, 3, 5, 6)]


def _logits(w, x, dropout_seed):
    hidden = tf.tanh(tf.matmul(x, w["hidden/kernel"]) + w["hidden/bias"])
    return tf.matmul(hidden, w["logits/kernel"]) + w["logits/bias"]


TINY = models.Model("tiny", (4,), reference.SHAPES, _logits)


def build(name, towers, optimizer, clip_norm=None, dtype="float64"):
    config = optimizers.OptimizerConfig(optimizer, clip_norm=clip_norm, **reference.HYPERPARAMETERS)
    return methods.build(name, TINY, config, towers=towers, dtype=dtype)


built = functools.lru_cache(maxsize=None)(build)


def distance(ours: dict, theirs: dict) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of its
    variable."""
    return max(
        np.abs(np.asarray(ours[name], np.float64) - value).max() / np.abs(value).max()
        for name, value in theirs.items()
    )


def loss_of(record) -> float:
    """The mean loss of a window."""
    return float(np.average(record.losses, weights=record.weights))


def check(method, optimizer, clip_norm=None, schedule=SCHEDULE, tolerance=1e-12):
    """Fails unless the method follows the reference over four ragged windows with weights, clipping
    and a schedule."""
    start = reference.initial_weights()
    expected = reference.Trainer(optimizer, start, clip_norm)
    method.reset(start)
    for number, (examples, rate) in enumerate(zip((11, 8, 3, 10), SCHEDULE)):
        x, labels = reference.batch(examples, seed=number)
        weights = np.random.default_rng(number).uniform(0.5, 2, examples)
        loss = expected.update(x, labels, weights, rate)
        record = method.update(x, labels, 4, schedule[number], weights)
        assert abs(loss_of(record) - loss) < tolerance * 10
        assert abs(record.weights.sum() - weights.sum()) < tolerance * 100
    assert distance(method.weights(), expected.w) < tolerance


def test_the_cells_pair_every_optimizer_with_both_kinds_of_clipping():
    """Once for Keras' optimizers and once for those of the static graphs."""
    for names in (("large_batch", "microbatched"), ("towers", "placeholders", "variables")):
        paired = {cell for (name, _), cells in CELLS.items() if name in names for cell in cells}
        assert paired == set(itertools.product(OPTIMIZERS, (None, 0.25)))


@pytest.mark.parametrize(("name", "towers"), WAYS)
def test_every_method_makes_the_update_of_the_numpy_reference(name, towers):
    """Twice: `reset` restores the initial state of the optimizer too."""
    for optimizer, clip_norm in CELLS[name, towers]:
        method = built(name, towers, optimizer, clip_norm)
        check(method, optimizer, clip_norm)
        check(method, optimizer, clip_norm)
        with pytest.raises(AssertionError):
            check(method, optimizer, clip_norm, schedule=COUNTED)


def test_these_checks_involve_clipping():
    with pytest.raises(AssertionError):
        check(built("variables", 1, "sgd", 0.25), "sgd", clip_norm=None)


# Each way has one optimizer and one type here, since every other combination is another graph to
# build.
KINDS = [
    (name_and_towers, *kind)
    for name_and_towers, kind in zip(
        WAYS[1:],
        itertools.cycle(
            [("adam", "float64", 1e-12), ("sgd", "float64", 1e-12), ("adamw", "float32", 1e-5)]
        ),
    )
]


@pytest.mark.slow
@given(
    kind=st.sampled_from(KINDS),
    microbatch_size=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_method_makes_the_update_of_the_large_batch(
    kind, microbatch_size, sizes, weighted, seed
):
    (name, towers), optimizer, dtype, tolerance = kind
    ours = built(name, towers, optimizer, 0.5, dtype)
    theirs = built("large_batch", 1, optimizer, 0.5, dtype)
    generator = np.random.default_rng(seed)
    start = reference.initial_weights(seed)
    ours.reset(start)
    theirs.reset(start)
    for size in sizes:
        x, labels = reference.batch(size, seed)
        weights = generator.uniform(0, 2, size) if weighted else None
        record = ours.update(x, labels, microbatch_size, 0.125, weights)
        whole = theirs.update(x, labels, size, 0.125, weights)
        assert abs(loss_of(record) - loss_of(whole)) < tolerance * 10
    assert distance(ours.weights(), theirs.weights()) < tolerance


# ---- planted bugs: the check must fail on each of them ----


def _sum_for_mean(monkeypatch):
    mean = GradientAccumulator.mean
    monkeypatch.setattr(
        GradientAccumulator, "mean", lambda self: [g * self.weight for g in mean(self)]
    )


def _sum_for_mean_over_towers(monkeypatch):
    average = gradlab_towers.average_gradients
    monkeypatch.setattr(
        gradlab_towers,
        "average_gradients",
        lambda g, w: [(m * len(g), v) for m, v in average(g, w)],
    )


def _sum_for_mean_on_the_host(monkeypatch):
    average = static_graph.average_on_host
    monkeypatch.setattr(
        static_graph, "average_on_host", lambda g, w: [mean * len(g) for mean in average(g, w)]
    )


def _divide_by_k(monkeypatch):
    add = GradientAccumulator.add
    monkeypatch.setattr(
        GradientAccumulator, "add", lambda self, gradients, weight: add(self, gradients, 1.0)
    )


def _divide_by_k_on_the_host(monkeypatch):
    average = static_graph.average_on_host
    monkeypatch.setattr(static_graph, "average_on_host", lambda g, w: average(g, np.ones(len(w))))


def _towers_counted_equal(monkeypatch):
    average = gradlab_towers.average_gradients
    monkeypatch.setattr(gradlab_towers, "average_gradients", lambda g, w: average(g))


def _micro_batches_counted_equal(monkeypatch):
    def window_gradients(loss, variables, batch, weights, microbatch_size, **options):
        results = []
        for step in range(3):  # the check's windows have at most three micro-batches of four
            rows = slice(4 * step, 4 * step + 4)
            with tf.GradientTape() as tape:
                weight = tf.reduce_sum(weights[rows])
                mean = tf.math.divide_no_nan(
                    tf.reduce_sum(loss((batch[0][rows], batch[1][rows]), step) * weights[rows]),
                    weight,
                )
            results.append((tape.gradient(mean, variables), mean, weight))
        count = tf.cast(-(-tf.shape(weights)[0] // 4), weights.dtype)
        gradients = [tf.add_n(column) / count for column in zip(*(g for g, *_ in results))]
        weights = tf.stack([w for *_, w in results])
        return Window(
            gradients, tf.stack([m for _, m, _ in results]), weights, tf.zeros_like(weights)
        )

    monkeypatch.setattr(compiled, "window_gradients", window_gradients)


def _drop_the_tail(monkeypatch):
    for kind in (methods.CompiledMethod, methods.StaticGraphMethod):
        update = kind.update

        def dropping(self, x, labels, b, rate, weights, update=update):
            whole = max(len(x) // b * b, 1)
            return update(self, x[:whole], labels[:whole], b, rate, weights[:whole])

        monkeypatch.setattr(kind, "update", dropping)


def _clip_each_micro_batch(monkeypatch):
    optimizer_of = optimizers.static_graph_optimizer

    def clipping_optimizer_of(config):
        def build(learning_rate):
            optimizer = optimizer_of(config)(learning_rate)
            compute = optimizer.compute_gradients

            def compute_gradients(loss, variables):
                gradients, variables = zip(*compute(loss, variables))
                if config.clip_norm is not None:
                    gradients, _ = tf.clip_by_global_norm(gradients, config.clip_norm)
                return list(zip(gradients, variables))

            optimizer.compute_gradients = compute_gradients
            return optimizer

        return build

    monkeypatch.setattr(optimizers, "static_graph_optimizer", clipping_optimizer_of)


def _stale_accumulator(monkeypatch):
    monkeypatch.setattr(GradientAccumulator, "zero", lambda self: tf.no_op())


PLANTS = [
    (_sum_for_mean, "variables", 1),
    (_sum_for_mean, "towers", 2),
    (_sum_for_mean_over_towers, "towers", 2),
    (_sum_for_mean_on_the_host, "placeholders", 1),
    (_divide_by_k, "variables", 1),
    (_divide_by_k_on_the_host, "placeholders", 1),
    (_towers_counted_equal, "towers", 3),
    (_micro_batches_counted_equal, "microbatched", 1),
    (_drop_the_tail, "microbatched", 1),
    (_drop_the_tail, "variables", 1),
    (_clip_each_micro_batch, "variables", 1),
    (_clip_each_micro_batch, "placeholders", 1),
    (_stale_accumulator, "variables", 1),
]


@pytest.mark.parametrize(("plant", "name", "towers"), PLANTS)
def test_a_planted_bug_is_caught(plant, name, towers, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        # Clipping hides a wrong scale; without clipping its wrong place has no effect
        for clip_norm in (None, 0.25):
            check(build(name, towers, "sgd", clip_norm), "sgd", clip_norm)


# ---- the rest of the protocol ----


@pytest.mark.parametrize(
    ("name", "towers"),
    [
        ("large_batch", 1),
        ("microbatched", 1),
        ("variables", 1),
        ("variables", 3),
        ("placeholders", 2),
        ("towers", 2),  # two runs in a window
        ("towers", 3),  # one run
    ],
)
def test_losses_and_norms_are_those_of_the_micro_batches(name, towers):
    method = built(name, towers, "sgd")
    start = reference.initial_weights()
    method.reset(start)
    x, labels = reference.batch(10)
    record = method.update(x, labels, 4, 0.125)
    if name == "large_batch":
        expected = [10]
    elif towers == 1:
        expected = [4, 4, 2]
    else:
        # A run takes up to towers * 4 examples and splits them as equally as possible.
        expected = [4, 4, 1, 1] if towers == 2 else [3, 3, 4]
    assert record.weights.tolist() == expected
    ends = np.cumsum(expected)
    windows = zip(
        (*record.losses, loss_of(record)), (*record.gradient_norms, record.window_gradient_norm)
    )
    for (loss, norm), begin, end in zip(windows, (*(ends - expected), 0), (*ends, 10)):
        batch = x[begin:end], labels[begin:end], np.ones(end - begin)
        expected_loss, gradients = reference.loss_and_gradients(start, *batch)
        assert abs(loss - expected_loss) < 1e-12
        assert norm == pytest.approx(
            np.sqrt(sum((g**2).sum() for g in gradients.values())), rel=1e-12
        )


@pytest.mark.parametrize("name", ["large_batch", "microbatched"])
def test_the_compiled_methods_are_traced_once_for_any_size(name):
    traced = []
    model = models.Model(
        "tiny", (4,), reference.SHAPES, lambda *inputs: traced.append(1) or _logits(*inputs)
    )
    method = methods.build(name, model, optimizers.OptimizerConfig("adam"), dtype="float64")
    method.reset(reference.initial_weights())
    before = len(traced)
    assert before > 0
    for size, microbatch_size in ((10, 4), (7, 2), (64, 1), (1, 5)):
        method.update(*reference.batch(size), microbatch_size, 0.125)
    assert len(traced) == before


def test_micro_batches_in_flight_change_no_bit():
    """The sums are passed from one micro-batch to the next, so the order of the additions is always
    the same."""
    model, found = models.lenet(), []
    rng = np.random.default_rng(0)
    x, labels = rng.random([50, 28, 28, 1], np.float32), rng.integers(0, 10, 50)
    for in_flight in (1, 3):
        method = methods.Microbatched(
            model, optimizers.OptimizerConfig("adam"), in_flight=in_flight
        )
        method.reset(model.initial_weights(0))
        for number in range(3):
            method.update(x, labels, 4, 1e-3, dropout_seed=(0, 13 * number))
        found.append(method.weights())
    for other in found[1:]:
        for name, value in found[0].items():
            np.testing.assert_array_equal(value, other[name])


def test_methods_with_the_same_seeds_drop_the_same_units():
    """The masks are drawn per micro-batch, so the large batch drops other units; the other methods
    agree."""
    model, config = models.lenet(), optimizers.OptimizerConfig("sgd")
    generator = np.random.default_rng(0)
    x, labels = generator.random((7, 28, 28, 1), np.float32), generator.integers(0, 10, 7)
    weights = {}
    for name in ("large_batch", "microbatched", "variables", "placeholders", "towers"):
        method = methods.build(name, model, config)
        method.reset(model.initial_weights(0))
        method.update(x, labels, 3, 0.125, dropout_seed=(5, 0))
        weights[name] = method.weights()
    for name in ("variables", "placeholders", "towers"):
        assert distance(weights[name], weights["microbatched"]) < 1e-5
    assert distance(weights["large_batch"], weights["microbatched"]) > 1e-3

    weights = {}
    for name in ("microbatched", "towers"):
        method = methods.build(name, model, config, **({"towers": 3} if name == "towers" else {}))
        method.reset(model.initial_weights(0))
        method.update(x[:6], labels[:6], 2, 0.125, dropout_seed=(5, 0))
        weights[name] = method.weights()
    # Each tower draws the masks of its micro-batch, not those of the first one.
    assert distance(weights["towers"], weights["microbatched"]) < 1e-5


X, LABELS = reference.batch(6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(microbatch_size=0), "microbatch_size must be a positive integer. Received: 0"),
        (dict(microbatch_size=-1), "microbatch_size must be a positive integer. Received: -1"),
        (dict(microbatch_size=2.5), "microbatch_size must be a positive integer. Received: 2.5"),
        (dict(microbatch_size=True), "microbatch_size must be a positive integer. Received: True"),
        (
            dict(features=X[:, :3]),
            r"features must have the shape \(examples, 4\). Received: \(6, 3\)",
        ),
        (dict(labels=LABELS[:5]), "same number of examples, at least one. Received: 6, 5, 5"),
        (
            dict(features=X[:0], labels=LABELS[:0]),
            "same number of examples, at least one. Received: 0, 0, 0",
        ),
        (dict(labels=LABELS + 1), "labels must be classes from 0 to 2. Received: 3"),
        (dict(labels=LABELS + 0.5), "labels must be integers. Received: float64"),
        (dict(weights=np.zeros(6)), "weights must be finite, 0 or more, and not all 0"),
        (dict(weights=[1, 1, 1, 1, 1, -1]), "weights must be finite, 0 or more, and not all 0"),
    ],
)
@pytest.mark.parametrize("name", ["microbatched", "variables"])
def test_invalid_input_raises_an_error_that_names_the_value(name, arguments, sentence):
    good = dict(features=X, labels=LABELS, microbatch_size=2, learning_rate=0.1)
    with pytest.raises(ValueError, match=sentence):
        built(name, 1, "sgd").update(**good | arguments)


def test_unknown_names_list_the_known():
    config = optimizers.OptimizerConfig()
    with pytest.raises(
        ValueError, match="method must be one of large_batch, towers, .* Received: 'magic'"
    ):
        methods.build("magic", TINY, config)
    with pytest.raises(
        ValueError, match="optimizer must be one of sgd, momentum, adam, adamw. Received: 'lion'"
    ):
        optimizers.OptimizerConfig("lion")
    with pytest.raises(
        ValueError, match='towers must be 1 for method "microbatched".* Received: 2'
    ):
        methods.build("microbatched", TINY, config, towers=2)
    with pytest.raises(
        ValueError, match=r"towers must be at most 3, .*setup\(towers=9\).* Received: 9"
    ):
        methods.build("towers", TINY, config, towers=9)
    with pytest.raises(ValueError, match="clip_norm must be a finite number above 0. Received: 0"):
        optimizers.OptimizerConfig(clip_norm=0)

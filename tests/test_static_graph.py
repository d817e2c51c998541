"""The three classic static graphs: their names, devices, variables and updates."""

import functools

import numpy as np
import pytest
import reference
import tensorflow as tf

from gradlab import static_graph
from gradlab.lab.experiments import models, optimizers

v1 = tf.compat.v1
TOWERS = 3
BUILDERS = [static_graph.tower_graph, static_graph.placeholder_graph, static_graph.variable_graph]


def lenet_loss(features, labels, dropout_seed):
    model = models.lenet()
    weights = {
        name: v1.get_variable(name, shape, initializer=tf.zeros_initializer())
        for name, shape in model.shapes.items()
    }
    return model.losses(weights, features, labels, dropout_seed)


@functools.cache
def lenet_graph(builder):
    adam = optimizers.static_graph_optimizer(optimizers.OptimizerConfig("adam"))
    return builder(lenet_loss, adam, (28, 28, 1), towers=TOWERS)


@pytest.fixture(params=BUILDERS, ids=lambda builder: builder.__name__)
def built(request):
    return lenet_graph(request.param)


def ancestors(operation) -> set:
    """All operations that must run before an operation."""
    found, left = set(), [operation]
    while left:
        for before in [tensor.op for tensor in left[0].inputs] + left[0].control_inputs:
            if before not in found:
                found.add(before)
                left.append(before)
        left.pop(0)
    return found


def test_every_tower_has_a_scope_and_a_device(built):
    for i, tower in enumerate(built.towers):
        assert (tower.name, tower.device) == (f"tower_{i}", f"/device:CPU:{i}")
        operations = [
            op for op in built.graph.get_operations() if op.name.startswith(f"{tower.name}/")
        ]
        assert len(operations) > 200
        for operation in operations:
            # A variable is read on its own device, so TensorFlow assigns none to the operation that
            # reads it.
            expected = "" if operation.type == "ReadVariableOp" else tower.device
            assert operation.device == expected, operation.name
        assert any("/gradients/" in operation.name for operation in operations)
        assert tower.loss.op.name.startswith(f"{tower.name}/mean_loss")
        for gradient, variable in tower.gradients:
            assert gradient.op.name.startswith(f"{tower.name}/gradients/")
            assert gradient.shape == variable.shape
    per_tower = [
        sum(op.name.startswith(f"tower_{i}/") for op in built.graph.get_operations())
        for i in range(TOWERS)
    ]
    assert len(set(per_tower)) == 1


def test_the_names_to_feed_and_to_run(built):
    names = {operation.name for operation in built.graph.get_operations()}
    assert {
        "features",
        "labels",
        "weights",
        "dropout_seed",
        "learning_rate",
        "global_step",
        "train",
    } <= names
    assert any(name.startswith("average/") for name in names)
    if isinstance(built, static_graph.PlaceholderGraph):
        assert [placeholder.op.name for placeholder in built.gradient_placeholders] == [
            f"gradient/{name}" for name in models.lenet().shapes
        ]
    if isinstance(built, static_graph.VariableGraph):
        assert built.zero_ops.name.startswith("zero/")
        assert built.accum_ops.name.startswith("accumulate/")
        assert built.train_step.name == "train_step"


def test_variables_are_shared_not_copied(built):
    with built.graph.as_default():
        assert [variable.name for variable in v1.trainable_variables()] == [
            f"{n}:0" for n in models.lenet().shapes
        ]
        everything = v1.global_variables()
    handles = [
        operation for operation in built.graph.get_operations() if operation.type == "VarHandleOp"
    ]
    assert {handle.device for handle in handles} == {"/device:CPU:0"}
    # Each variable with two slots of Adam; two powers; the step. Accumulators: a sum per variable,
    # and the weight.
    expected = 10 * 3 + 2 + 1 + (11 if isinstance(built, static_graph.VariableGraph) else 0)
    assert len(everything) == len(handles) == expected
    for tower in built.towers:
        assert [variable for _, variable in tower.gradients] == built.variables


def test_no_gradient_is_applied_before_the_last_tower_has_computed_its_own(built):
    for gradient, _ in built.average:
        before = ancestors(gradient.op)
        assert all(
            any(op.name.startswith(f"{tower.name}/") for op in before) for tower in built.towers
        )
    applying = [op for op in built.graph.get_operations() if op.type == "ResourceApplyAdam"]
    updates = 2 if isinstance(built, static_graph.VariableGraph) else 1  # train_op and train_step
    assert len(applying) == 10 * updates


def test_the_summary_of_the_last_tower_is_kept(built):
    with static_graph.session(built.graph) as session:
        session.run(built.init_op)
        feed = built.inputs.feed(np.zeros((3, 28, 28, 1)), [1, 2, 3])
        summary = v1.Summary.FromString(session.run(built.summary, feed))
    assert [value.tag for value in summary.value] == ["tower_2/loss"]
    assert summary.value[0].simple_value == pytest.approx(np.log(10))


def test_weights_do_not_change_by_a_single_bit_between_updates():
    generator = np.random.default_rng(0)
    x, labels = generator.random((6, 28, 28, 1), np.float32), generator.integers(0, 10, 6)
    start = models.lenet().initial_weights(0)
    for builder in BUILDERS[1:]:
        built = lenet_graph(builder)
        feed = built.inputs.feed(x, labels)
        rate = {built.inputs.learning_rate: 1e-3}
        with static_graph.session(built.graph) as session:
            session.run(built.init_op)
            for variable in built.variables:
                session.run(
                    variable.initializer,
                    {variable.initializer.inputs[1]: start[variable.name[:-2]]},
                )
            for update in (1, 2):
                before = [value.tobytes() for value in session.run(built.variables)]
                if builder is static_graph.placeholder_graph:
                    runs = [session.run(built.gradients, feed) for _ in range(3)]
                    means = static_graph.average_on_host(runs, [6, 6, 6])
                    apply, apply_feed = (
                        built.train_op,
                        dict(zip(built.gradient_placeholders, means)),
                    )
                else:
                    session.run(built.zero_ops)
                    for _ in range(3):
                        session.run(built.accum_ops, feed)
                    apply, apply_feed = built.train_step, {}
                assert [value.tobytes() for value in session.run(built.variables)] == before
                assert session.run(built.global_step) == update - 1
                session.run(apply, apply_feed | rate)
                after = [value.tobytes() for value in session.run(built.variables)]
                assert all(a != b for a, b in zip(after, before))
                assert session.run(built.global_step) == update


# ---- gradients of every kind through each graph, with one tower and with several unequal ones ----


def mixed_loss(dtype):
    """A table whose gradient is sparse, a scale whose gradient is dense, and a variable that the
    loss ignores."""

    def loss(features, labels, dropout_seed):
        table = v1.get_variable("table", [4], dtype, tf.ones_initializer())
        scale = v1.get_variable("scale", [], dtype, tf.ones_initializer())
        v1.get_variable("unused", [2], dtype, tf.ones_initializer())
        return tf.gather(table, labels) * scale * features

    return loss


def apply_once(builder, towers, dtype, features, labels):
    """The variables after one step of gradient descent with the rate 1, from two micro-batches if
    the graph can."""
    built = builder(
        mixed_loss(dtype), v1.train.GradientDescentOptimizer, (), towers=towers, dtype=dtype
    )
    kinds = {variable.name: type(gradient) for gradient, variable in built.towers[0].gradients}
    assert kinds["table:0"] is tf.IndexedSlices and kinds["unused:0"] is type(None)
    rate = {built.inputs.learning_rate: 1.0}
    feeds = [
        built.inputs.feed(features[rows], labels[rows]) for rows in (slice(0, 5), slice(5, None))
    ]
    with static_graph.session(built.graph) as session:
        session.run(built.init_op)
        if builder is static_graph.tower_graph:
            session.run(built.train_op, built.inputs.feed(features, labels) | rate)
        elif builder is static_graph.placeholder_graph:
            runs = [session.run([built.gradients, built.weight], feed) for feed in feeds]
            means = static_graph.average_on_host([g for g, _ in runs], [w for _, w in runs])
            # They are on the host
            assert all(isinstance(mean, np.ndarray | np.generic) for mean in means)
            session.run(built.train_op, dict(zip(built.gradient_placeholders, means)) | rate)
        else:
            session.run(built.zero_ops)
            for feed in feeds:
                session.run(built.accum_ops, feed)
            session.run(built.train_step, rate)
        return {
            v.name[:-2]: np.asarray(value, np.float64)
            for v, value in zip(built.variables, session.run(built.variables))
        }


@pytest.mark.parametrize(
    ("dtype", "towers"), [("float32", 1), ("float32", 2), ("bfloat16", 3), ("float16", 3)]
)
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_sparse_missing_and_half_precision_gradients(builder, dtype, towers):
    features, labels = np.array([1.0, 2, 3, 4, 5, 6, 7, 8]), np.array([0, 2, 2, 0, 3, 3, 3, 0])
    after = apply_once(builder, towers, dtype, features, labels)
    table_gradient = np.bincount(labels, features, 4) / 8
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    np.testing.assert_allclose(after["table"], 1 - table_gradient, atol=tolerance)
    np.testing.assert_allclose(after["scale"], 1 - features.mean(), atol=tolerance)
    assert after["unused"].tolist() == [1, 1]


def test_half_precision_variables_have_float32_accumulators_and_placeholders():
    loss, descent = mixed_loss("bfloat16"), v1.train.GradientDescentOptimizer
    built = static_graph.variable_graph(loss, descent, (), dtype="bfloat16")
    assert {variable.dtype for variable in built.accumulator.variables} == {tf.float32}
    built = static_graph.placeholder_graph(loss, descent, (), dtype="bfloat16")
    assert {placeholder.dtype for placeholder in built.gradient_placeholders} == {tf.float32}


def test_fewer_examples_than_towers():
    """Towers without an example of their own have the weight 0."""
    built = lenet_graph(static_graph.tower_graph)
    with static_graph.session(built.graph) as session:
        session.run(built.init_op)
        feed = built.inputs.feed(np.ones((1, 28, 28, 1)), [3])
        weights, gradients = session.run(
            [[t.weight for t in built.towers], [g for g, _ in built.average]], feed
        )
    assert weights == [0, 0, 1]
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_invalid_losses_raise_an_error_with_the_rule_and_the_value():
    descent = v1.train.GradientDescentOptimizer

    def without_variables(features, labels, dropout_seed):
        return features

    def of_one_number(features, labels, dropout_seed):
        return tf.reduce_mean(
            features * v1.get_variable("w", [], initializer=tf.ones_initializer())
        )

    for builder in BUILDERS:
        with pytest.raises(
            ValueError,
            match=r"loss must create its variables .* Received: a loss without variables",
        ):
            builder(without_variables, descent, ())
        with pytest.raises(
            ValueError, match=r"one number per example, shape \(examples,\). Received: \(\)"
        ):
            builder(of_one_number, descent, ())
        with pytest.raises(ValueError, match=r"towers must be at most 3, .* Received: 4"):
            builder(mixed_loss("float32"), descent, (), towers=4)


def test_an_average_of_nothing_on_the_host_is_refused():
    with pytest.raises(
        ValueError,
        match=r"gradients with a weight above 0. Received: 0 micro-batches of weights \[\]",
    ):
        static_graph.average_on_host([], [])
    with pytest.raises(ValueError, match=r"Received: 1 micro-batches of weights \[0\]"):
        static_graph.average_on_host([[np.ones(2)]], [0])


def test_the_mean_gradient_is_that_of_the_reference():
    """Three towers with 3, 4 and 4 examples, against gradients written by hand."""
    start, (x, labels) = reference.initial_weights(), reference.batch(11)

    def loss(features, labels, dropout_seed):
        w = {
            n: v1.get_variable(n, v.shape, "float64", tf.constant_initializer(v))
            for n, v in start.items()
        }
        hidden = tf.tanh(features @ w["hidden/kernel"] + w["hidden/bias"])
        logits = hidden @ w["logits/kernel"] + w["logits/bias"]
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)

    built = static_graph.tower_graph(
        loss, v1.train.GradientDescentOptimizer, (4,), towers=3, dtype="float64"
    )
    with static_graph.session(built.graph) as session:
        session.run(built.init_op)
        weights, found = session.run(
            [[t.weight for t in built.towers], [g for g, _ in built.average]],
            built.inputs.feed(x, labels),
        )
    assert weights == [3, 4, 4]
    expected = reference.loss_and_gradients(start, x, labels, np.ones(11))[1]
    for gradient, variable in zip(found, built.variables):
        np.testing.assert_allclose(gradient, expected[variable.name[:-2]], rtol=1e-12, atol=1e-16)

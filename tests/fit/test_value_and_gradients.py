"""value_and_gradients against a tape over the whole batch: train steps and loops of one's own."""

import itertools
from collections import namedtuple

import keras
import large_batch
import numpy as np
import pytest
import tensorflow as tf
from large_batch import OPTIMIZERS

import gradlab
from gradlab.fit import value_and_gradients

layers = keras.layers
Named = namedtuple("Named", ["total", "error"])


def tape(loss, variables, data):
    """The reference: the loss of the whole batch, or a tuple of which the first counts, and its
    gradients."""
    with tf.GradientTape() as recording:
        found = loss(*data)
        first = found[0] if isinstance(found, tuple) else found
    return found, recording.gradient(first, [variable.value for variable in variables])


def assert_close(found, expected, tolerance=1e-12):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            other = other if isinstance(other, float) else np.asarray(tf.convert_to_tensor(other))
            np.testing.assert_allclose(
                one, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max())
            )


def network(width=3):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), layers.Dense(width)])


def rows(examples, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=[examples, *shape]).astype(keras.config.floatx())


SIZES = [
    *((True, size, in_flight) for size, in_flight in ((1, 1), (3, 2), (8, 1))),
    *((False, size, in_flight) for size, in_flight in ((1, 1), (3, 1), (8, 2), (19, 1), (50, 2))),
]


@pytest.mark.parametrize("compiled, size, in_flight", SIZES)
def test_values_and_gradients_are_those_of_the_whole_batch(compiled, size, in_flight, float64):
    """One function serves batches that are smaller than a micro-batch, of one, and of several with
    and without rest."""
    model = network()
    apart = tf.Variable(0.5, dtype=tf.float64)
    unused = tf.Variable(1.0, dtype=tf.float64)
    variables = {"model": model.trainable_variables, "apart": apart, "unused": [unused]}

    def loss(x, y, missing):
        assert missing is None
        errors = tf.reduce_sum((model(x) * apart - y) ** 2, axis=1)
        return {"errors": errors, "loss": tf.reduce_mean(errors), "size": tf.reduce_mean(tf.abs(y))}

    def step(x, y):
        return gradlab.value_and_gradients(loss, variables, (x, y, None), size, in_flight=in_flight)

    if compiled:
        step = tf.function(
            step, input_signature=[tf.TensorSpec([None, n], tf.float64) for n in (4, 3)]
        )
    for examples in (19, 1, 2, 8, 16) if compiled else (19,):
        x, y = rows(examples, 4), rows(examples, 3, seed=1)
        found, gradients = step(tf.constant(x), tf.constant(y))
        with tf.GradientTape() as recording:
            expected = loss(x, y, None)
        flat = [v.value for v in model.trainable_variables] + [apart, unused]
        reference = recording.gradient(expected["loss"], flat)
        assert list(found) == ["errors", "loss", "size"] and found["errors"].shape == examples
        assert_close(found, expected)
        assert gradients.keys() == variables.keys() and gradients["unused"] == [None]
        assert_close([*gradients["model"], gradients["apart"], None], reference)


def test_a_sum_and_a_tuple(float64):
    """A tape that differentiates a vector differentiates its sum."""
    model, x = network(), rows(11, 4)
    variables = model.trainable_variables

    def losses(x):
        return tf.reduce_sum(model(x) ** 2, axis=1), tf.size(x)

    step = tf.function(
        lambda x: gradlab.value_and_gradients(losses, variables, x, 4, reduction="sum")
    )
    found, gradients = step(x)
    with tf.GradientTape() as recording:
        expected, _ = losses(x)
    assert_close(gradients, recording.gradient(expected, [v.value for v in variables]))
    assert isinstance(found, tuple) and int(found[1]) == 44 and found[1].dtype == tf.int32
    assert_close(found[0], expected)


def test_autograph_has_nothing_to_say(capfd):
    x, w = tf.ones([4]), tf.Variable(2.0)
    tf.function(lambda: gradlab.value_and_gradients(lambda x: tf.reduce_mean(w * x), w, x, 3))()
    assert "AutoGraph" not in "".join(capfd.readouterr())


def test_named_tuples_single_variables_and_single_arguments(float64):
    w = tf.Variable(2.0, dtype=tf.float64)

    def loss(batch):
        return Named(tf.reduce_mean((w * batch["x"]) ** 2), tf.reduce_mean(batch["x"]))

    found, gradient = gradlab.value_and_gradients(
        loss, w, {"x": tf.constant([1.0, 2.0, 4.0], tf.float64)}, 2
    )
    assert isinstance(found, Named)
    assert_close([*found, gradient], [28.0, 7 / 3, 28.0])


class VAE(keras.Model):
    """A variational autoencoder with the train_step that is usual, and with gradlab's call in
    it."""

    def __init__(self, microbatch_size=None):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.built = True
        self.encoder = keras.Sequential([keras.Input([4]), layers.Dense(4)])
        self.decoder = keras.Sequential(
            [keras.Input([2]), layers.Dense(6, "tanh"), layers.Dense(4)]
        )
        self.trackers = {
            name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "kl")
        }
        self.size = microbatch_size

    @property
    def metrics(self):
        return list(self.trackers.values())

    def losses_of(self, x, noise):
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
        reconstruction = tf.reduce_mean(tf.reduce_sum((x - decoded) ** 2, axis=1))
        kl = -0.5 * tf.reduce_mean(
            tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), axis=1)
        )
        return {"loss": reconstruction + kl, "reconstruction": reconstruction, "kl": kl}

    def train_step(self, data):
        if self.size is None:
            with tf.GradientTape() as recording:
                found = self.losses_of(*data)
            gradients = recording.gradient(
                found["loss"], [v.value for v in self.trainable_variables]
            )
        else:
            found, gradients = gradlab.value_and_gradients(
                self.losses_of, self.trainable_variables, data, self.size
            )
        self.optimizer.apply(gradients, self.trainable_variables)
        for name, value in found.items():
            self.trackers[name].update_state(value, sample_weight=tf.shape(data[0])[0])
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def test_a_variational_autoencoder_in_fit(float64):
    x, noise = rows(19, 4), rows(19, 2, seed=1)
    found = []
    for size in (None, 3):
        model = VAE(size)
        model.compile(OPTIMIZERS["adamw"](global_clipnorm=0.5), run_eagerly=size is None)
        history = model.fit(x, noise, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        assert int(model.optimizer.iterations) == 6
        found.append((model.get_weights(), history))
    (expected, history), (weights, seen) = found
    assert_close(weights, expected)
    for name, values in history.items():
        np.testing.assert_allclose(seen[name], values, rtol=1e-6)  # metrics are kept in float32


class GAN(keras.Model):
    """Two networks with an optimizer each; the critic's loss has a gradient penalty, a tape inside
    of the loss."""

    def __init__(self, microbatch_size=None):
        super().__init__()
        keras.utils.set_random_seed(2)
        self.built = True
        self.generator = keras.Sequential(
            [keras.Input([2]), layers.Dense(5, "tanh"), layers.Dense(4)]
        )
        self.critic = keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), layers.Dense(1)])
        self.of_critic, self.of_generator = (
            keras.optimizers.Adam(0.03125, epsilon=2.0**-10) for _ in range(2)
        )
        self.size = microbatch_size

    def critic_loss(self, real, latent):
        made = self.generator(latent)
        with tf.GradientTape() as inner:
            between = (real + made) / 2
            inner.watch(between)
            judged = self.critic(between)
        penalty = tf.reduce_mean((tf.norm(inner.gradient(judged, between), axis=1) - 1) ** 2)
        return tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(real)) + 10 * penalty

    def generator_loss(self, latent):
        return -tf.reduce_mean(self.critic(self.generator(latent)))

    def gradients(self, loss, variables, data):
        if self.size is not None:
            return gradlab.value_and_gradients(loss, variables, data, self.size)
        with tf.GradientTape() as recording:
            value = loss(*data)
        return value, recording.gradient(value, [v.value for v in variables])

    def train_step(self, data):
        real, latent = data
        variables = self.critic.trainable_variables
        critic_loss, gradients = self.gradients(self.critic_loss, variables, (real, latent))
        self.of_critic.apply(gradients, variables)
        variables = self.generator.trainable_variables
        generator_loss, gradients = self.gradients(self.generator_loss, variables, (latent,))
        self.of_generator.apply(gradients, variables)
        return {"critic": critic_loss, "generator": generator_loss}


def test_two_optimizers_and_a_gradient_penalty(float64):
    real, latent = rows(12, 4), rows(12, 2, seed=1)
    found = []
    for size in (None, 5):
        model = GAN(size)
        model.compile(run_eagerly=size is None)
        history = model.fit(real, latent, batch_size=12, epochs=3, shuffle=False, verbose=0).history
        found.append((model.get_weights(), history["critic"], history["generator"]))
    assert_close(found[1], found[0], 1e-11)


@pytest.mark.slow
def test_on_two_devices_each_replica_computes_its_own(float64, two_devices):
    x, noise = rows(12, 4), rows(12, 2, seed=1)
    found = []
    for size in (None, 3):
        with two_devices.scope():
            model = VAE(size)
            model.compile(OPTIMIZERS["sgd"]())
        model.fit(x, noise, batch_size=8, epochs=1, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_close(found[1], found[0])


def test_a_scaled_loss_is_differentiated_and_the_loss_is_returned():
    model, x = network(), rows(7, 4)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024)
    optimizer.build(model.trainable_variables)

    def loss(x):
        value = tf.reduce_mean(model(x) ** 2)
        return optimizer.scale_loss(value), value

    found, gradients = tf.function(
        lambda x: gradlab.value_and_gradients(loss, model.trainable_variables, x, 2)
    )(x)
    expected, reference = tape(lambda x: loss(x), model.trainable_variables, (x,))
    assert_close([*found, *gradients], [*expected, *reference], 1e-5)


def test_regularization_counts_once(float64):
    model = keras.Sequential([keras.Input([4]), layers.Dense(3, kernel_regularizer="l2")])

    def loss(x):
        return tf.reduce_mean(model(x) ** 2) + sum(model.losses)

    found, gradients = tf.function(
        lambda x: gradlab.value_and_gradients(loss, model.trainable_variables, x, 2)
    )(rows(7, 4))
    expected, reference = tape(loss, model.trainable_variables, (rows(7, 4),))
    assert_close([found, *gradients], [expected, *reference])


def test_a_sparse_gradient_is_that_of_the_dense_variable(float64):
    table = keras.Sequential([keras.Input([3], dtype="int32"), layers.Embedding(5, 2)])
    ids = np.array([[0, 1, 1], [4, 1, 0], [2, 2, 2], [0, 0, 4]])

    def loss(ids):
        return tf.reduce_mean(tf.reduce_sum(table(ids) ** 2, axis=[1, 2]))

    _, (gradient,) = tf.function(
        lambda: gradlab.value_and_gradients(loss, table.trainable_variables, ids, 3)
    )()
    _, (reference,) = tape(loss, table.trainable_variables, (ids,))
    assert isinstance(gradient, tf.Tensor)
    assert_close(gradient, tf.convert_to_tensor(reference))


def test_moving_averages_and_counters_move_once(float64):
    """Batch normalization of the inputs has the statistics of the whole window; a spectral norm is
    iterated once."""

    def moved(step):
        keras.utils.set_random_seed(0)
        normalize = layers.BatchNormalization(momentum=0.75)
        norm = layers.SpectralNormalization(layers.Dense(3))
        model = keras.Sequential([keras.Input([4]), normalize, norm])
        loss = lambda x: tf.reduce_mean(model(x, training=True) ** 2)  # noqa: E731
        tf.function(lambda x: step(loss, model.trainable_variables, x))(rows(10, 4) + 3)
        return [normalize.moving_mean, normalize.moving_variance, *norm.non_trainable_variables]

    expected = moved(lambda loss, variables, x: loss(x))
    with pytest.warns(UserWarning, match="normalizes each micro-batch by its own statistics"):
        found = moved(lambda loss, variables, x: gradlab.value_and_gradients(loss, variables, x, 3))
    assert_close(found, expected)


def test_layers_draw_other_masks_for_each_micro_batch_and_step():
    dropout = layers.Dropout(0.5, seed=1)
    w = tf.Variable(1.0)

    def losses(x):
        kept = dropout(x, training=True) * w
        return {"loss": tf.reduce_mean(kept), "kept": kept}

    step = tf.function(lambda x: gradlab.value_and_gradients(losses, w, x, 50)[0]["kept"])
    one, other = step(tf.ones([100])).numpy(), step(tf.ones([100])).numpy()
    assert (one[:50] != one[50:]).any() and (one != other).any()
    plain = layers.Dropout(0.5, seed=1)
    np.testing.assert_array_equal(one[:50], plain(tf.ones([50]), training=True))


def test_ragged_texts_and_unknown_lengths(float64):
    table = tf.Variable(tf.reshape(tf.range(10.0, dtype=tf.float64), [5, 2]))
    texts = tf.ragged.constant([[1, 2], [3], [0, 4, 4], [2]])

    def loss(texts):
        embedded = tf.ragged.map_flat_values(lambda tokens: tf.gather(table, tokens), texts)
        lengths = tf.cast(texts.row_lengths(), tf.float64)
        return {
            "loss": tf.reduce_mean(lengths * tf.reduce_sum(embedded**2, axis=[1, 2])),
            "length": tf.reduce_mean(lengths),
        }

    step = tf.function(lambda texts: gradlab.value_and_gradients(loss, table, texts, 3))
    found, gradient = step(texts)
    with tf.GradientTape() as recording:
        expected = loss(texts)
    assert_close(found, expected)
    assert_close([gradient], [tf.convert_to_tensor(recording.gradient(expected["loss"], table))])
    assert float(found["length"]) == 7 / 4


def counter_loss():
    seen = tf.Variable(0.0)

    def loss(x):
        seen.assign_add(tf.reduce_sum(x))
        return tf.reduce_mean(x)

    return loss


def metric_loss():
    mean = keras.metrics.Mean(name="mean_of_x")

    def loss(x):
        mean.update_state(x)
        return tf.reduce_mean(x)

    return loss


def unbuilt_loss():
    layer = layers.Dense(2, name="not_built")
    return lambda x: tf.reduce_mean(layer(x[:, tf.newaxis]))


REFUSED = {
    "a size of 0": (
        dict(microbatch_size=0),
        "microbatch_size must be a positive integer. Received: 0",
    ),
    "none in flight": (dict(in_flight=0), "in_flight must be a positive integer. Received: 0"),
    "a reduction": (dict(reduction="max"), "reduction must be one of mean, sum. Received: 'max'"),
    "no variables": (dict(variables=[]), "variables must hold at least one variable. Received: []"),
    "no data": (dict(data=()), "data must hold at least one tensor. Received: ()"),
    "a vector": (
        dict(loss=lambda x: x**2),
        'loss must be a scalar if the reduction is "mean"; a tape differentiates the sum of '
        'losses of several examples, for which the reduction is "sum". Received: loss of shape '
        "(None,)",
    ),
    "a fixed size": (
        dict(loss=lambda x: {"loss": tf.reduce_mean(x), "two": tf.ones([2])}),
        "Each entry that loss returns must be a scalar, or have a row for each example. Received: "
        "two of shape (2,)",
    ),
    "an integer": (
        dict(loss=lambda x: tf.size(x)),
        "loss must be a floating-point number. Received: int32",
    ),
    "nothing": (
        dict(loss=lambda x: None),
        "loss must return a tensor, or a dict, list or tuple of tensors. Received: None",
    ),
    "a metric": (
        dict(loss=metric_loss),
        "loss must not assign variables from the examples, such as those of metrics: return the "
        "values, and update the metrics afterwards. Received: mean_of_x/total",
    ),
    "a counter": (
        dict(loss=counter_loss),
        "loss must not assign variables from the examples, such as those of metrics: return the "
        "values, and update the metrics afterwards. Received: AssignAddVariableOp",
    ),
    "a layer that is not built": (
        dict(loss=unbuilt_loss),
        "loss must not create variables: build the model before the first step. Received: "
        "not_built/kernel, not_built/bias",
    ),
    "lengths": (
        dict(
            data=(tf.ones([3]), tf.ones([2])),
            loss=lambda x, y: tf.reduce_mean(x) * tf.reduce_mean(y),
        ),
        "All tensors of a batch must have the same number of examples. Received: 3, 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_before_anything_is_computed(name):
    given, sentence = REFUSED[name]
    arguments = dict(
        loss=lambda x: tf.reduce_mean(x), variables=[tf.Variable(1.0)], data=tf.ones([3])
    )
    arguments |= dict(microbatch_size=2) | given
    if name in ("a metric", "a counter", "a layer that is not built"):
        arguments["loss"] = arguments["loss"]()
    with pytest.raises(ValueError) as error:
        tf.function(lambda: gradlab.value_and_gradients(**arguments), autograph=False)()
    assert sentence in str(error.value) and str(error.value).startswith(sentence[:20])


w = tf.Variable(2.0)
WRONG_SCALARS = {
    "a sum where a mean was promised": (lambda x: tf.reduce_sum((w * x) ** 2), "mean"),
    "a mean where a sum was promised": (lambda x: tf.reduce_mean((w * x) ** 2), "sum"),
    "a product of means": (lambda x: tf.reduce_mean(w * x) * tf.reduce_mean(x), "mean"),
    "a weighted mean": (lambda x: tf.reduce_sum(w * x * x) / tf.reduce_sum(x), "mean"),
    "another entry": (lambda x: {"loss": tf.reduce_mean(w * x), "most": tf.reduce_max(x)}, "mean"),
    "a noisy sum": (
        lambda x: tf.reduce_sum(w * (x + 0.01 * tf.random.normal(tf.shape(x)))),
        "mean",
    ),
    "a noisy mean": (
        lambda x: tf.reduce_mean(w * (x + 0.01 * tf.random.normal(tf.shape(x)))),
        "sum",
    ),
}


# The others have the same graph
COMPILED = ("a sum where a mean was promised", "another entry", "a noisy mean")
BOTH_WAYS = [(name, False) for name in WRONG_SCALARS] + [(name, True) for name in COMPILED]


@pytest.mark.parametrize("name, compiled", BOTH_WAYS)
def test_a_scalar_that_is_not_what_the_reduction_says_is_refused(name, compiled):
    loss, reduction = WRONG_SCALARS[name]
    step = lambda x: gradlab.value_and_gradients(loss, w, x, 4, reduction)  # noqa: E731
    entry = "most" if name == "another entry" else "loss"
    rule = f"{entry} must be a {reduction} over the examples, as the reduction says, but"
    with pytest.raises(tf.errors.InvalidArgumentError, match=rule):
        (tf.function(step) if compiled else step)(tf.constant([1.0, 2.0, 4.0, 5.0, 6.0]))


def test_xla_which_drops_errors_gives_no_wrong_number():
    wrong = tf.function(
        lambda x: gradlab.value_and_gradients(lambda x: tf.reduce_sum(w * x), w, x, 2),
        jit_compile=True,
    )
    right = tf.function(
        lambda x: gradlab.value_and_gradients(lambda x: tf.reduce_mean(w * x), w, x, 2),
        jit_compile=True,
    )
    x = tf.constant([1.0, 2.0, 4.0, 5.0, 8.0])
    for _ in range(2):
        assert np.isnan(wrong(x)).all()
        np.testing.assert_allclose(right(x), [8.0, 4.0], rtol=1e-6)


def test_noisy_means_pass_and_the_check_runs_once():
    calls = tf.Variable(0)

    def loss(x):
        tf.numpy_function(lambda: np.int32(calls.assign_add(1)), [], tf.int32)
        return tf.reduce_mean(w * (x + 0.3 * tf.random.normal(tf.shape(x))))

    step = tf.function(lambda x: gradlab.value_and_gradients(loss, w, x, 2)[0])
    found = []
    for _ in range(3):
        step(tf.ones([4]))
        found.append(int(calls))
    # Two micro-batches each; the first call also checks
    assert np.diff(found).tolist() == [2, 2] and found[0] > 2


def test_the_check_sees_a_planted_bug(monkeypatch, float64):
    """Shares that ignore the ragged tail: the comparison with the tape fails."""
    forward = value_and_gradients._LossPasses.forward

    def wrong(self, microbatch, number, carried):
        result = forward(self, microbatch, number, carried)
        return result._replace(share=tf.constant(1 / 3, tf.float64))

    monkeypatch.setattr(value_and_gradients._LossPasses, "forward", wrong)
    model, x = network(), rows(7, 4)
    loss = lambda x: tf.reduce_mean(model(x) ** 2)  # noqa: E731
    _, gradients = tf.function(
        lambda: gradlab.value_and_gradients(loss, model.trainable_variables, x, 3)
    )()
    _, reference = tape(loss, model.trainable_variables, (x,))
    with pytest.raises(AssertionError):
        assert_close(gradients, reference)


@pytest.mark.parametrize("size", [1, 3])
def test_batch_normalization_does_not_hide_a_sum(size, float64):
    """Halves of a batch have other statistics; two copies of a batch have the same."""
    losses = {"mean": tf.reduce_mean, "sum": tf.reduce_sum}
    for said, (kind, reduce) in itertools.product(losses, losses.items()):
        model = keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(2)])
        loss = lambda x, model=model, reduce=reduce: reduce((model(x, training=True) - 1) ** 2)  # noqa: E731

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float64)])
        def step(x, loss=loss, model=model, said=said):
            return gradlab.value_and_gradients(loss, model.trainable_variables, x, size, said)

        with pytest.warns(UserWarning, match="normalizes each micro-batch"):
            step.get_concrete_function()
        for examples in (1, 2, 7):  # the check looks at three calls
            x = 2 + rows(examples, 4)
            if kind == said:
                assert np.isfinite(step(x)[0]), (kind, examples)
                continue
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=f"loss must be a {said} over the examples"
            ):
                step(x)
                pytest.fail(f"A {kind} of {examples} examples passed as a {said}")


def test_microbatched_names_the_call():
    with pytest.raises(ValueError, match="gradlab.value_and_gradients") as error:
        gradlab.microbatched(VAE(), 2)
    assert (
        "Three lines of it change: `with tf.GradientTape() as tape:` becomes `def loss(*data):`"
        in str(error.value)
    )
    assert str(error.value).endswith("microbatch_size)`. Received: VAE.train_step")


def test_it_is_the_large_batch_of_every_family(float64):
    """The families of models that `microbatched` is held against, with Keras' own losses.

    Tracing is tested elsewhere, but for a loop in the model, whose gradient is then a loop inside
    of the loop.
    """
    for family in ("dense", "convolutional", "embedding", "shared", "recurrent", "Subclassed"):
        model = large_batch.build(family)
        x, y = large_batch.data(family, 11)
        of_batch = large_batch.loss(family)["loss"]

        def loss(x, y, model=model, of_batch=of_batch):
            return of_batch(y, model(x)) + sum(
                v.regularizer(v) for v in model.trainable_variables if v.regularizer
            )

        def step(x, y, loss=loss, model=model):
            return gradlab.value_and_gradients(loss, model.trainable_variables, (x, y), 4)

        found, gradients = (tf.function(step) if family == "recurrent" else step)(x, y)
        expected, reference = tape(loss, model.trainable_variables, (x, y))
        assert_close(found, expected)
        assert_close(gradients, [None if g is None else tf.convert_to_tensor(g) for g in reference])


NOT_MEANS = {
    "Sqrt": lambda errors: tf.sqrt(tf.reduce_mean(errors)),
    "Exp": lambda errors: 2 * tf.exp(tf.reduce_mean(errors)) + 1,  # a perplexity
    "Square": lambda errors: tf.reduce_mean(errors) + 0.1 * tf.square(tf.reduce_sum(errors)),
}


@pytest.mark.parametrize("op", NOT_MEANS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_function_of_a_mean_is_refused_when_fit_traces_the_step(op, reduction):
    dense = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

    def loss(x):
        return {"loss": NOT_MEANS[op](dense(x) ** 2)}

    class Steps(keras.Model):
        def call(self, x):
            return dense(x)

        def train_step(self, x):
            return gradlab.value_and_gradients(loss, dense.trainable_variables, (x,), 3, reduction)[
                0
            ]

    model = Steps()
    model.compile()
    with pytest.raises(
        ValueError,
        match=f"^loss must be a {reduction} over the examples.* Received: {op} of a number",
    ):
        model.fit(np.ones([8, 4], "float32"), batch_size=8, verbose=0)


def test_a_function_of_a_number_that_is_no_mean_of_examples_is_allowed(float64):
    dense = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    scale = tf.Variable(0.3, dtype=tf.float64)
    x = np.random.default_rng(0).normal(size=(7, 4))

    def loss(x):
        return (
            tf.exp(-scale) * tf.reduce_mean(tf.sqrt(tf.reduce_sum(dense(x) ** 2, -1) + 1))
            + scale**2
        )

    with tf.GradientTape() as tape:
        expected = loss(tf.constant(x))
    found, gradient = gradlab.value_and_gradients(loss, scale, (x,), 3)
    np.testing.assert_allclose(
        [found, gradient], [expected, tape.gradient(expected, scale)], rtol=1e-12
    )

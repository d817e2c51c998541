"""The training of a page without a kernel, in a real Chromium: its updates beside TensorFlow's, and
the numbers that it draws beside those of Python."""

import base64
import zlib

import numpy as np
import pytest
import tensorflow as tf
from lab_page import new_page

from gradlab.lab.experiments import datasets, models
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.optimizers import OptimizerConfig, keras_optimizer
from gradlab.lab.experiments.progress import Update
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures.curves import Point
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows
from gradlab.lab.widget.js_bundle import module
from gradlab.lab.widget.offline import digits

pytestmark = pytest.mark.browser

MODEL = models.build("dense")
UPDATES = 50
WINDOW = 13  # with b = 4 the last micro-batch has a single example
TRAIN = """async ([source, packed, weights, windows, settings]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const digits = module.unpacked(await module.inflated(bytes(packed)));
    const training = new module.Training(digits, settings, new Float32Array(bytes(weights).buffer));
    const found = windows.map((window) => training.update(Uint32Array.from(window)));
    const accuracy = training.accuracy(4000, 5000);
    return {weights: Array.from(training.weights), found, accuracy};
}"""
ROWS = """async ([source, seeds, settings]) => {
    const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    seeds.flat().forEach((update) => { update.accuracy ??= NaN; });
    return {
        columns: module.COLUMNS,
        rows: Array.from(module.rowsOf(seeds, settings), (value) => Number.isNaN(value) ? null : value),
        dots: Array.from(module.dotsOf(seeds[0], settings)),
        point: module.pointOf(seeds, settings),
    };
}"""


@pytest.fixture(scope="module")
def blank(browser):
    page = new_page(browser)
    yield page
    page.context.close()


def images_and_classes():
    """What the page carries, from the data set."""
    mnist = datasets.load("mnist")
    images = np.concatenate([mnist.train_images[:4000], mnist.test_images[:1000]])
    classes = np.concatenate([mnist.train_labels[:4000], mnist.test_labels[:1000]])
    return (np.rint(15 * images) / 15).astype(np.float32), classes


def trained_by_tensorflow(optimizer, rate, windows):
    """The weights before and after updates with the gradient of the mean loss of each window."""
    images, classes = images_and_classes()
    variables = {name: tf.Variable(value) for name, value in MODEL.initial_weights(0).items()}
    rule = keras_optimizer(OptimizerConfig(optimizer))
    rule.learning_rate = rate
    rule.build(list(variables.values()))

    @tf.function
    def update(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(MODEL.losses(variables, x, y))
        gradients = tape.gradient(loss, list(variables.values()))
        rule.apply(gradients, list(variables.values()))
        return loss, tf.linalg.global_norm(gradients)

    found = [update(images[window], classes[window]) for window in windows]
    return variables, np.array(found), (images, classes)


def flat(weights):
    return np.concatenate([np.asarray(value).ravel() for value in weights.values()])


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("sgd", 0.1), ("momentum", 0.05), ("adam", 1e-3), ("adamw", 1e-3)]
)
def test_updates_are_those_of_tensorflow(blank, optimizer, rate):
    windows = np.random.default_rng(0).integers(4000, size=[UPDATES, WINDOW])
    before = MODEL.initial_weights(0)
    after, found, (images, classes) = trained_by_tensorflow(optimizer, rate, windows)
    seen = blank.evaluate(
        TRAIN,
        [
            module("offline/digits", "offline/training"),
            base64.b64encode(digits.PACKED.read_bytes()).decode(),
            base64.b64encode(flat(before).tobytes()).decode(),
            windows.tolist(),
            {"b": 4, "learningRate": rate, "optimizer": optimizer},
        ],
    )
    # Adam amplifies the rounding of float32 where slopes nearly cancel: single weights of
    # TensorFlow itself differ by 1.5e-5 from those that it computes in float64.
    update = np.linalg.norm(flat(after) - flat(before))
    assert np.linalg.norm(np.float32(seen["weights"]) - flat(after)) < 1e-5 * update
    sizes = np.array([4, 4, 4, 1])
    losses = [np.average(each["losses"], weights=sizes) for each in seen["found"]]
    np.testing.assert_allclose(losses, found[:, 0], rtol=1e-5)
    np.testing.assert_allclose([each["norm"] for each in seen["found"]], found[:, 1], rtol=1e-4)
    logits = MODEL.logits(after, images[4000:], None).numpy()
    assert seen["accuracy"] == (logits.argmax(axis=1) == classes[4000:]).mean()
    # The norms of micro-batches, at the first weights
    for part, norm in zip(np.split(windows[0], [4, 8, 12]), seen["found"][0]["norms"]):
        variables = {name: tf.Variable(value) for name, value in before.items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(MODEL.losses(variables, images[part], classes[part]))
        gradients = tape.gradient(loss, list(variables.values()))
        assert norm == pytest.approx(float(tf.linalg.global_norm(gradients)), rel=1e-5)


@pytest.mark.parametrize("k", [1, 2, 12])
def test_the_numbers_that_are_drawn_are_those_of_python(blank, k):
    rng = np.random.default_rng(k)
    experiment = Experiment(
        model="dense",
        microbatch_size=20,
        accumulation_steps=k,
        updates=30,
        seeds=3,
    )
    seeds = [
        [
            {
                "losses": rng.lognormal(size=k).tolist(),
                "norms": rng.lognormal(2, size=k).tolist(),
                "norm": float(rng.lognormal(1)),
                "milliseconds": float(rng.lognormal()),
                "accuracy": float(rng.random()) if update % 10 == 9 else None,
            }
            for update in range(length)
        ]
        for length in (30, 30, 24)  # the third is still under way
    ]
    result = Result.join(
        experiment,
        [
            Result.of_updates(experiment, seed, made, "stopped", np.nan, {})
            for seed, made in enumerate(
                [[_update(n, each, k) for n, each in enumerate(s)] for s in seeds]
            )
        ],
    )
    seen = blank.evaluate(ROWS, [module("offline/run_rows"), seeds, {"k": k, "b": 20}])
    expected = ChartRows.of(result)
    rows = np.array(seen["rows"], np.float64).reshape(30, -1)
    for place, column in enumerate(seen["columns"]):
        wanted = expected.rows(0)[:, COLUMNS.index(column)]
        np.testing.assert_allclose(rows[:, place], wanted, rtol=1e-5, err_msg=column)
    np.testing.assert_allclose(seen["dots"], expected.dots(0).ravel(), rtol=1e-6)
    point = Point.of(result)
    for name in ("window", "law", "microbatch", "milliseconds"):
        assert seen["point"][name] == pytest.approx(getattr(point, name), rel=1e-9), name


def _update(number, made, k):
    return Update(
        number=number + 1,
        losses=tuple(made["losses"]),
        gradient_norms=tuple(made["norms"]),
        window_gradient_norm=made["norm"],
        weights=(20,) * k,
        accuracy=made["accuracy"],
        seconds=made["milliseconds"] / 1000,
        progress=0.5,
    )


def test_the_page_carries_the_digits_of_the_data_set():
    assert zlib.decompress(digits.pack()) == zlib.decompress(digits.PACKED.read_bytes())

"""Several seeds of one experiment in one computation: the seeds are a leading axis of every tensor.

Small matrix products cost more to start than to compute. Ten networks that differ only in their seed are therefore
trained as one batched product, which is far quicker than ten trainings, and gives the same losses but for rounding.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.training import Budget, Stop, Update, accuracy_measure, borrowed, windows
from gradlab.window import squared_norm


def can_run_together(experiment: Experiment) -> bool:
    """Whether the experiment's seeds can be trained as one: a dense model, one compiled function, no stop-watch."""
    dense = models.build(experiment.model).takes_seeds
    compiled = not methods.takes_towers(experiment.method)
    return dense and compiled and experiment.seconds is None and len(experiment.seed_numbers) > 1


def train_together(experiment: Experiment, stop: Stop | None = None) -> Iterator[list[tuple[int, Update]]]:
    """Trains all the experiment's seeds at once, and yields for each update a list of (seed, its update).

    A seed whose loss is no longer finite is no longer yielded; the others go on. Each update's seconds are those of all
    the seeds together.
    """
    data = datasets.load(experiment.dataset)
    model = models.build(experiment.model, data.train_images.shape[1:])
    seeds = experiment.seed_numbers
    test_accuracy = accuracy_measure(experiment.dataset, experiment.model)
    budgets = {i: Budget(experiment) for i in range(len(seeds))}
    kind = "together", len(seeds), experiment.model, experiment.dataset, experiment.optimizer
    with (
        borrowed(kind, lambda: _Together(model, len(seeds), experiment.optimizer)) as trainer,
        (stop or Stop()).calling(trainer.cancel),
    ):
        trainer.reset([model.initial_weights(seed) for seed in seeds])
        if stop is not None and stop.is_set():
            return
        for rows in zip(*(windows(experiment, seed) for seed in seeds)):
            began = time.perf_counter()
            whole = experiment.method == "large_batch"
            size = len(rows[0]) if whole else experiment.microbatch_size
            try:
                results = trainer.update(
                    data.train_images, data.train_labels, np.array(rows), size, experiment.learning_rate
                )
            except methods.Cancelled:
                return
            seconds = time.perf_counter() - began
            made = [
                (i, budget.update(results[i], seconds, lambda i=i: test_accuracy(trainer.weights(i))))
                for i, budget in budgets.items()
            ]
            yield [(seeds[i], update) for i, update in made]
            budgets = {i: budgets[i] for i, update in made if not (update.diverged or budgets[i].used_up)}
            if not budgets:
                return


class _Together:
    """The weights of all seeds, and an update of them all as one compiled function."""

    def __init__(self, model: models.Model, seeds: int, optimizer: str):
        self._model = model
        self._variables = {}
        for name, shape in model.shapes.items():
            # A bias is added to all examples of its seed.
            shape = (1, *shape) if name.endswith("bias") else shape
            self._variables[name] = tf.Variable(tf.zeros([seeds, *shape]), name=name)
        self._optimizer = optimizers.keras_optimizer(optimizers.OptimizerConfig(optimizer))
        self._optimizer.build(list(self._variables.values()))
        with tf.device("/CPU:0"):
            self._cancelled = tf.Variable(False)
        self._compiled = tf.function(
            self._update,
            autograph=False,
            input_signature=[
                tf.TensorSpec([seeds, None, *model.input_shape]),
                tf.TensorSpec([seeds, None], tf.int32),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.float64),
            ],
        ).get_concrete_function()  # as in `methods`: traced now, and called without matching its arguments anew

    def reset(self, initial: Sequence[dict]) -> None:
        """Begins anew: each seed gets its weights, the optimizer forgets."""
        self._cancelled.assign(False)
        for name, variable in self._variables.items():
            variable.assign(np.stack([weights[name] for weights in initial]).reshape(variable.shape))
        for variable in self._optimizer.variables:
            variable.assign(np.zeros(variable.shape))

    def cancel(self) -> None:
        self._cancelled.assign(True)

    def weights(self, index: int) -> dict[str, np.ndarray]:
        """One seed's weights."""
        return {name: self._variables[name][index].numpy().reshape(shape) for name, shape in self._model.shapes.items()}

    def update(self, images, labels, rows, microbatch_size: int, learning_rate: float) -> list[methods.Microbatches]:
        """An update of each seed with its rows, shape (seeds, examples)."""
        arguments = images[rows], labels[rows], np.int32(microbatch_size), np.float64(learning_rate)
        found = self._compiled(*map(tf.convert_to_tensor, arguments))
        *seen, window_norms, cancelled = (value.numpy() for value in found)
        if cancelled:
            raise methods.Cancelled
        losses, weights, norms = seen
        return [methods.Microbatches(losses[i], weights, norms[i], window_norms[i]) for i in range(len(rows))]

    def _update(self, images, labels, size, learning_rate):
        examples = tf.shape(labels)[1]
        steps = -(-examples // size)
        variables = list(self._variables.values())

        def body(step, sums, arrays):
            rows = slice(step * size, tf.minimum((step + 1) * size, examples))
            with tf.GradientTape() as tape:
                each = self._model.losses(self._variables, images[:, rows], labels[:, rows])
            gradients = tape.gradient(each, variables)  # of its sum: no seed's loss depends on another seed's weights
            losses = tf.reduce_sum(each, axis=1)
            weight = tf.cast(tf.shape(each)[1], tf.float32)
            sums = [total + gradient for total, gradient in zip(sums, gradients)]
            seen = losses / weight, weight, _squared_norms(gradients) / weight**2
            return step + 1, sums, [array.write(step, value) for array, value in zip(arrays, seen)]

        seeds = [images.shape[0]]
        arrays = [tf.TensorArray(tf.float32, steps, element_shape=shape) for shape in (seeds, [], seeds)]
        _, sums, arrays = tf.while_loop(
            lambda step, *_: (step < steps) & ~self._cancelled.read_value(),
            body,
            (tf.constant(0), [tf.zeros_like(variable) for variable in variables], arrays),
            parallel_iterations=2,  # these networks are small: two micro-batches at once fit, and use two cores
        )
        mean = [total / tf.cast(examples, tf.float32) for total in sums]
        self._optimizer.learning_rate = learning_rate
        self._optimizer.apply(mean, variables)
        losses, weights, norms = (array.stack() for array in arrays)
        window_norms = _squared_norms(mean)
        with tf.control_dependencies([window_norms]):
            cancelled = self._cancelled.read_value()
        return tf.transpose(losses), weights, tf.transpose(norms), window_norms, cancelled


def _squared_norms(gradients):
    """Each seed's squared norm over all its gradients, shape (seeds,)."""
    seeds = range(gradients[0].shape[0])
    return tf.stack([squared_norm([gradient[i] for gradient in gradients], tf.float32) for i in seeds])

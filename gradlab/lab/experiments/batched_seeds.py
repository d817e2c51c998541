"""Several seeds of one experiment trained in one computation: every tensor has a leading axis, the
seeds.

Small matrix products take longer to start than to compute. Networks that differ only in their seed
are therefore trained as one batched product. That is much faster than one training after the other,
and the losses are the same up to rounding error.
"""

import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from gradlab import window
from gradlab.averaging import divide, mean_norms, squared_norm
from gradlab.fit.records import WindowRecord
from gradlab.lab.experiments import datasets, methods, models, optimizers
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.methods.compiled import CompiledUpdate
from gradlab.lab.experiments.progress import Stop, Update
from gradlab.lab.experiments.training import Budget, accuracy_measure, borrowed, window_rows


def train_together(
    experiment: Experiment, stop: Stop | None = None
) -> Iterator[list[tuple[int, Update]]]:
    """Trains all seeds of an experiment together.

    Args:
        experiment: what to train.
        stop: ends the training when it is set.

    Yields:
        For each update, a list of (seed, its update). A seed whose loss or gradient is no longer
        finite is not yielded again; the others go on. The seconds of an update are those of all
        seeds together.
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

        def accuracy(index: int) -> tf.Tensor:
            return test_accuracy(trainer.weights(index))

        trainer.reset([model.initial_weights(seed) for seed in seeds])
        if stop is not None and stop.is_set():
            return
        for rows in zip(*(window_rows(experiment, seed) for seed in seeds)):
            began = time.perf_counter()
            whole = experiment.method == "large_batch"
            size = len(rows[0]) if whole else experiment.microbatch_size
            try:
                records = trainer.update(
                    data.train_images,
                    data.train_labels,
                    np.array(rows),
                    size,
                    experiment.learning_rate,
                )
            except methods.Cancelled:
                return
            seconds = time.perf_counter() - began
            made = [
                (i, budget.update(records[i], seconds, functools.partial(accuracy, i)))
                for i, budget in budgets.items()
            ]
            yield [(seeds[i], update) for i, update in made]
            budgets = {
                i: budgets[i] for i, update in made if not (update.diverged or budgets[i].used_up)
            }
            if not budgets:
                return


class _Together(CompiledUpdate):
    """The weights of all seeds, and an update of all of them as one compiled function."""

    def __init__(self, model: models.Model, seeds: int, optimizer: str):
        self._model = model
        self._seeds = seeds
        shapes = {
            # The axis of length 1 stretches over the examples of the seed.
            name: (seeds, 1, *shape) if name.endswith("bias") else (seeds, *shape)
            for name, shape in model.shapes.items()
        }
        images = tf.TensorSpec([seeds, None, *model.input_shape], tf.float32)
        labels = tf.TensorSpec([seeds, None], tf.int32)
        super().__init__(shapes, optimizers.OptimizerConfig(optimizer), [images, labels], "float32")

    def reset(self, initial: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Sets the weights of each seed, and the optimizer to its initial state."""
        stacked = {
            name: np.stack([weights[name] for weights in initial]) for name in self._variables
        }
        self._reset(
            {
                name: stacked[name].reshape(variable.shape)
                for name, variable in self._variables.items()
            }
        )

    def weights(self, index: int) -> dict[str, np.ndarray]:
        """The current weights of one seed."""
        return {
            name: self._variables[name][index].numpy().reshape(shape)
            for name, shape in self._model.shapes.items()
        }

    def update(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        rows: np.ndarray,
        microbatch_size: int,
        learning_rate: float,
    ) -> list[WindowRecord]:
        """Makes one update of each seed with its own rows of the data, shape (seeds, examples)."""
        losses, weights, norms, window_norms = self._call(
            images[rows], labels[rows], microbatch_size=microbatch_size, learning_rate=learning_rate
        )
        return [
            WindowRecord(losses[i], weights, norms[i], float(window_norms[i]))
            for i in range(self._seeds)
        ]

    def _window(self, *batch_and_size):
        images, labels, microbatch_size = batch_and_size
        variables = list(self._variables.values())

        def forward(microbatch, number, state):
            # The gradient of the sum over all seeds is each seed's own: its loss depends on no
            # other seed's weights.
            losses = self._model.losses(self._variables, *microbatch)
            examples = tf.cast(tf.shape(losses)[1], tf.float32)
            return window.Microbatch(
                tf.reduce_sum(losses, axis=1) / examples, examples, examples=(losses, None)
            )

        sums = window.accumulate(
            forward,
            variables,
            (images, labels),
            microbatch_size,
            record=lambda loss, gradients: _squared_norms(gradients),
            loop=window.Loop(
                # These networks are small: two micro-batches fit in memory and use two cores
                in_flight=2,
                loss_shape=(self._seeds,),
                axis=1,
                stopped=self._cancelled.read_value,
            ),
        )
        gradients = divide(sums.gradients, sums.weight, variables)
        norms = mean_norms(sums.records, sums.weights[:, tf.newaxis])
        return window.Window(
            gradients, tf.transpose(sums.losses), sums.weights, tf.transpose(norms)
        )

    def _norm(self, gradients):
        """The norm of each seed's mean gradient, shape (seeds,)."""
        return tf.sqrt(_squared_norms(gradients))


def _squared_norms(gradients: list) -> tf.Tensor:
    """The squared norm of each seed's gradient over all its variables, shape (seeds,)."""
    seeds = range(gradients[0].shape[0])
    return tf.stack(
        [squared_norm([gradient[i] for gradient in gradients], tf.float32) for i in seeds]
    )

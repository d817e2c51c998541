"""The result of an experiment: arrays with named axes that can be saved, loaded and compared."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.lab.experiments import result_file
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.progress import Update
from gradlab.lab.experiments.summary import spread
from gradlab.measure.noise_scale import NoiseScale, gradient_noise_scale

if TYPE_CHECKING:
    import pandas

# The axes of each array. Where a seed had fewer updates than another, or an update fewer
# micro-batches, the missing entries are NaN (0 in weights).
AXES = {
    "losses": ("seed", "update", "microbatch"),
    "weights": ("seed", "update", "microbatch"),
    "gradient_norms": ("seed", "update", "microbatch"),
    "window_gradient_norms": ("seed", "update"),
    "accuracies": ("seed", "update"),
    "update_seconds": ("seed", "update"),
    "peak_memory_bytes": ("seed",),
}
# The attribute of `Update` that each array collects. == compares these arrays, except for the
# times, which no two runs share.
COLLECTED = {
    "losses": "losses",
    "weights": "weights",
    "gradient_norms": "gradient_norms",
    "window_gradient_norms": "window_gradient_norm",
    "accuracies": "accuracy",
    "update_seconds": "seconds",
}
# The columns of `Result.to_frame`, and the attribute of `Result` that each one shows.
COLUMNS = {
    "loss": "losses",
    "weight": "weights",
    "gradient_norm": "gradient_norms",
    "window_loss": "window_losses",
    "window_gradient_norm": "window_gradient_norms",
    "accuracy": "accuracies",
    "update_seconds": "update_seconds",
    "peak_memory_bytes": "peak_memory_bytes",
}
ENDINGS = ("finished", "diverged", "stopped")


@dataclass(frozen=True, eq=False)
class Result:
    """The result of an experiment.

    Two results are equal when the same experiment gave bitwise identical numbers. Times, memory and
    environments are not compared.

    Attributes:
        experiment: the experiment that was run.
        seeds: the seeds that were trained, in order.
        endings: for each seed "finished", "diverged" (its last loss or gradient is not finite) or
            "stopped".
        losses: the mean loss of each micro-batch, in nats, shape (seed, update, micro-batch).
        weights: the number of examples in each micro-batch, 0 where there was none; same shape.
        gradient_norms: the norm of each micro-batch's gradient; same shape.
        window_gradient_norms: the norm of the window's mean gradient, shape (seed, update).
        accuracies: the fraction of test images classified correctly after an update, shape (seed,
            update); NaN where it was not measured.
        update_seconds: the duration of each update, shape (seed, update). Seeds that were trained
            together have the same values.
        peak_memory_bytes: the most memory that the process held while a seed was trained (on a GPU:
            that TensorFlow held there), shape (seed,); NaN where it cannot be read.
        environments: for each seed a description of where it was trained: versions, device,
            processor, commit, date, and how many seeds were trained together.
    """

    experiment: Experiment
    seeds: tuple[int, ...]
    endings: tuple[str, ...]
    losses: np.ndarray
    weights: np.ndarray
    gradient_norms: np.ndarray
    window_gradient_norms: np.ndarray
    accuracies: np.ndarray
    update_seconds: np.ndarray
    peak_memory_bytes: np.ndarray
    environments: tuple[dict, ...]

    @classmethod
    def of_updates(
        cls,
        experiment: Experiment,
        seed: int,
        updates: Sequence[Update],
        ending: str,
        peak_memory_bytes: float,
        environment: dict,
    ) -> "Result":
        """Make the result of one seed from its updates. The arguments are the attributes of
        `Result` for that seed."""
        microbatches = max((len(update.losses) for update in updates), default=0)
        arrays = {}
        for name, attribute in COLLECTED.items():
            values = [getattr(update, attribute) for update in updates]
            rows = (
                _rows(values, microbatches, _filler(name)) if "microbatch" in AXES[name] else values
            )
            arrays[name] = np.array([rows], np.float64)  # an accuracy of None becomes NaN
        return cls(
            experiment=experiment,
            seeds=(seed,),
            endings=(ending,),
            peak_memory_bytes=np.array([peak_memory_bytes], np.float64),
            environments=(environment,),
            **arrays,
        )

    @classmethod
    def join(cls, experiment: Experiment, results: Sequence["Result"]) -> "Result":
        """Join the results of an experiment's seeds that were trained separately."""
        joined: dict[str, Any] = {}
        for name, axes in AXES.items():
            arrays = [getattr(result, name) for result in results]
            shape = [max(array.shape[axis] for array in arrays) for axis in range(1, len(axes))]
            joined[name] = np.concatenate(
                [_padded(array, shape, _filler(name)) for array in arrays]
            )
        for name in ("seeds", "endings", "environments"):
            joined[name] = tuple(value for result in results for value in getattr(result, name))
        return cls(experiment=experiment, **joined)

    @property
    def updates(self) -> np.ndarray:
        """The number of updates of each seed, shape (seed,)."""
        return (self.weights.sum(axis=2) > 0).sum(axis=1)

    @property
    def sound_updates(self) -> np.ndarray:
        """The number of updates of each seed whose loss and gradients are finite, shape (seed,)."""
        return self.updates - (np.array(self.endings) == "diverged")

    @property
    def window_losses(self) -> np.ndarray:
        """The loss of each window: the large batch's loss, in nats, shape (seed, update); NaN where
        there was none."""
        with np.errstate(invalid="ignore"):
            return np.where(self.weights > 0, self.losses * self.weights, 0).sum(
                axis=2
            ) / self.weights.sum(axis=2)

    @property
    def examples(self) -> np.ndarray:
        """The number of examples up to and including each update, shape (seed, update)."""
        return self.weights.sum(axis=2).cumsum(axis=1)

    @property
    def last_accuracies(self) -> np.ndarray:
        """The test accuracy after each seed's last update, shape (seed,)."""
        return np.array(
            [values[max(updates - 1, 0)] for values, updates in zip(self.accuracies, self.updates)]
        )

    @property
    def best_accuracies(self) -> np.ndarray:
        """The best of each seed's measured test accuracies, shape (seed,).

        The more often the accuracy was measured, the higher its maximum is by chance alone.
        """
        return np.fmax.reduce(self.accuracies, axis=1, initial=np.nan)

    def noise_scale(self, smoothing: float = 0.99) -> list[NoiseScale]:
        """Compute the gradient noise scale of each seed that finished, from its gradient norms.

        Args:
            smoothing: of the running means: see `gradlab.gradient_noise_scale`.
        """
        return [
            gradient_noise_scale(norms[:n], window_norms[:n], weights[:n], smoothing)
            for norms, window_norms, weights, n, ending in zip(
                self.gradient_norms,
                self.window_gradient_norms,
                self.weights,
                self.updates,
                self.endings,
            )
            if ending == "finished"
        ]

    def summary(self) -> dict[str, Any]:
        """Return the result in a few numbers that can be written as JSON.

        Returns:
            A dictionary: "experiment" holds its fields and "endings" a list with one ending per
            seed. "last_accuracy_percent", "best_accuracy_percent", "last_loss_nats" and
            "gradient_noise_scale_examples" are [mean, standard deviation] over seeds, or None where
            there is no finite value. "median_update_milliseconds" is a number.
        """
        scales = [scale.value for scale in self.noise_scale()] if self.losses.shape[2] > 1 else []
        return {
            "experiment": json.loads(self.experiment.to_json()),
            "endings": list(self.endings),
            "last_accuracy_percent": spread(100 * self.last_accuracies),
            "best_accuracy_percent": spread(100 * self.best_accuracies),
            "last_loss_nats": spread(
                [loss[max(n - 1, 0)] for loss, n in zip(self.window_losses, self.updates)]
            ),
            "median_update_milliseconds": round(1000 * float(np.nanmedian(self.update_seconds)), 2),
            "gradient_noise_scale_examples": spread(scales),
        }

    def to_frame(self) -> "pandas.DataFrame":
        """Return a pandas.DataFrame with one row for each (seed, update, micro-batch).

        Updates are numbered from 1, micro-batches from 0. Values of a whole update or seed are
        repeated in each of its rows.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            message = 'Result.to_frame needs the extra "lab": pip install "gradlab[lab]". Received: no module pandas'
            raise ModuleNotFoundError(message, name=error.name) from None

        rows = np.nonzero(self.weights)
        columns = {
            "seed": np.array(self.seeds, int)[rows[0]],
            "update": rows[1] + 1,
            "microbatch": rows[2],
        }
        for column, attribute in COLUMNS.items():
            array = getattr(self, attribute)
            # The axes of every array are the first ones of `weights`
            columns[column] = array[rows[: array.ndim]]
        return pandas.DataFrame(columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        same = (self.experiment, self.seeds, self.endings) == (
            other.experiment,
            other.seeds,
            other.endings,
        )
        pairs = [
            (getattr(self, name), getattr(other, name))
            for name in COLLECTED
            if name != "update_seconds"
        ]
        return same and all(
            ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
            for ours, theirs in pairs
        )

    __hash__ = None  # type: ignore[assignment]  # arrays can be changed, so results cannot be keys

    def __repr__(self) -> str:
        e = self.experiment
        counts = ", ".join(
            f"{self.endings.count(name)} {name}" for name in ENDINGS if name in self.endings
        )
        what = f"{e.method}, {e.model} on {e.dataset}, k = {e.accumulation_steps}, b = {e.microbatch_size}"
        return f"Result: {what}; {counts}"

    def save(self, path: str | os.PathLike) -> None:
        """Write the result to one file: a zip archive with result.json and one .npy file per array,
        without pickles.

        The file appears only when it is complete. Until then, a file that was there before stays as
        it is.

        Raises:
            OSError: the file could not be written; the message says which result was not saved.
        """
        description = {
            "experiment": json.loads(self.experiment.to_json()),
            "seeds": self.seeds,
            "endings": self.endings,
            "environments": self.environments,
        }
        try:
            result_file.write(path, description, {name: getattr(self, name) for name in AXES})
        except OSError as error:
            kept = "; the previous file is unchanged" if os.path.exists(path) else ""
            raise OSError(
                error.errno, f"{self!r} was not saved ({error.strerror}){kept}", str(path)
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Result":
        """Read a result that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or does not contain a result of this format.
        """
        description, arrays = result_file.read(path, AXES)
        try:
            return cls(
                experiment=Experiment.from_fields(description["experiment"]),
                seeds=tuple(description["seeds"]),
                endings=tuple(description["endings"]),
                environments=tuple(description["environments"]),
                **arrays,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise result_file.UnreadableResult(path, f"which is damaged ({error})") from None


def _filler(name: str) -> float:
    return 0.0 if name == "weights" else np.nan


def _rows(values: Sequence[Sequence[float]], length: int, filler: float) -> np.ndarray:
    """Stack sequences of different lengths as the rows of one array."""
    array = np.full([len(values), length], filler, np.float64)
    for row, value in zip(array, values):
        row[: len(value)] = value
    return array


def _padded(array: np.ndarray, shape: Sequence[int], filler: float) -> np.ndarray:
    """Pad all axes but the first to `shape`."""
    widths = [(0, 0)] + [(0, wanted - there) for wanted, there in zip(shape, array.shape[1:])]
    return np.pad(array, widths, constant_values=filler)

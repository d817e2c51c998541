"""A result: what an experiment's trainings gave, as arrays with named axes, to be saved, loaded and compared."""

import contextlib
import io
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.training import Update
from gradlab.measure.noise_scale import NoiseScale, gradient_noise_scale

FORMAT = 1  # of a saved result; another one is not read

# What each array's axes are. Where a seed had fewer updates than another, or an update fewer micro-batches, the rest is
# NaN (in weights 0).
AXES = {
    "losses": ("seed", "update", "microbatch"),
    "weights": ("seed", "update", "microbatch"),
    "gradient_norms": ("seed", "update", "microbatch"),
    "window_gradient_norms": ("seed", "update"),
    "accuracies": ("seed", "update"),
    "update_seconds": ("seed", "update"),
    "peak_memory_bytes": ("seed",),
}
# What was computed; the rest is how long it took and what it needed, which no two runs share.
NUMBERS = ("losses", "weights", "gradient_norms", "window_gradient_norms", "accuracies")
ENDINGS = ("finished", "diverged", "stopped")


@dataclass(frozen=True, eq=False)
class Result:
    """What an experiment gave.

    Two results are equal when the same experiment gave the same numbers, to the bit; times, memory and environments are
    not compared.

    Attributes:
        experiment: what was run.
        seeds: the seeds that were trained, in order.
        endings: for each seed "finished", "diverged" (its last loss or gradient is not finite) or "stopped".
        losses: the mean loss of each micro-batch, in nats, shape (seed, update, micro-batch).
        weights: the examples of each micro-batch, 0 where there was none; of that shape.
        gradient_norms: the norm of each micro-batch's gradient; of that shape.
        window_gradient_norms: the norm of the window's mean gradient, shape (seed, update).
        accuracies: the share of the test images recognised after an update, NaN where it was not measured; of that
            shape.
        update_seconds: what an update took; of that shape. Seeds that ran together share one figure.
        peak_memory_bytes: the most that the process (on a GPU: TensorFlow there) held while a seed was trained, shape
            (seed,); NaN where it cannot be read.
        environments: for each seed where it was trained: versions, device, processor, commit, date, seeds together.
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
        cls, experiment: Experiment, seed: int, updates: Sequence[Update], ending: str, peak: float, environment: dict
    ) -> "Result":
        """The result of one seed's training."""
        microbatches = max((len(update.losses) for update in updates), default=0)

        def each(values, filler=np.nan):
            array = np.full([1, len(updates), microbatches], filler, np.float64)
            for row, value in zip(array[0], values):
                row[: len(value)] = value
            return array

        return cls(
            experiment=experiment,
            seeds=(seed,),
            endings=(ending,),
            losses=each(update.losses for update in updates),
            weights=each((update.weights for update in updates), filler=0),
            gradient_norms=each(update.gradient_norms for update in updates),
            window_gradient_norms=np.array([[update.window_gradient_norm for update in updates]], np.float64),
            accuracies=np.array([[update.accuracy for update in updates]], np.float64),  # None becomes NaN
            update_seconds=np.array([[update.seconds for update in updates]], np.float64),
            peak_memory_bytes=np.array([peak], np.float64),
            environments=(environment,),
        )

    @classmethod
    def join(cls, experiment: Experiment, parts: Sequence["Result"]) -> "Result":
        """The result of an experiment whose seeds were trained apart."""
        joined = {}
        for name, axes in AXES.items():
            arrays = [getattr(part, name) for part in parts]
            shape = [max(array.shape[axis] for array in arrays) for axis in range(1, len(axes))]
            filler = 0 if name == "weights" else np.nan
            joined[name] = np.concatenate([_padded(array, shape, filler) for array in arrays])
        for name in ("seeds", "endings", "environments"):
            joined[name] = tuple(value for part in parts for value in getattr(part, name))
        return cls(experiment=experiment, **joined)

    @property
    def updates(self) -> np.ndarray:
        """How many updates each seed had, shape (seed,)."""
        return (self.weights.sum(axis=2) > 0).sum(axis=1)

    @property
    def sound_updates(self) -> np.ndarray:
        """How many updates each seed had before its loss or gradient was no longer finite, shape (seed,)."""
        return self.updates - (np.array(self.endings) == "diverged")

    @property
    def window_losses(self) -> np.ndarray:
        """The large batch's loss of each update, in nats, shape (seed, update); NaN where there was none."""
        with np.errstate(invalid="ignore"):
            return np.where(self.weights > 0, self.losses * self.weights, 0).sum(axis=2) / self.weights.sum(axis=2)

    @property
    def examples(self) -> np.ndarray:
        """The examples seen up to and with each update, shape (seed, update)."""
        return self.weights.sum(axis=2).cumsum(axis=1)

    @property
    def last_accuracies(self) -> np.ndarray:
        """The test accuracy after each seed's last update, shape (seed,)."""
        return np.array([values[max(updates - 1, 0)] for values, updates in zip(self.accuracies, self.updates)])

    @property
    def best_accuracies(self) -> np.ndarray:
        """The best of each seed's measured test accuracies, shape (seed,): the more looks, the better it looks."""
        return np.fmax.reduce(self.accuracies, axis=1, initial=np.nan)

    def noise_scale(self, smoothing: float = 0.99) -> list[NoiseScale]:
        """The gradient noise scale from the norms of each run that finished: see `gradlab.gradient_noise_scale`."""
        return [
            gradient_noise_scale(norms[:n], window_norms[:n], weights[:n], smoothing)
            for norms, window_norms, weights, n, ending in zip(
                self.gradient_norms, self.window_gradient_norms, self.weights, self.updates, self.endings
            )
            if ending == "finished"
        ]

    def summary(self) -> dict:
        """The result in a few numbers, for JSON: accuracies in percent, None where there is nothing to say."""

        def spread(values) -> list[float] | None:  # mean and standard deviation over seeds
            values = np.asarray(values, np.float64)
            values = values[np.isfinite(values)]
            return (
                [round(float(values.mean()), 3), round(float(values.std(ddof=min(1, len(values) - 1))), 3)]
                if len(values)
                else None
            )

        scales = [scale.value for scale in self.noise_scale()] if self.losses.shape[2] > 1 else []
        return {
            "experiment": json.loads(self.experiment.to_json()),
            "endings": list(self.endings),
            "last_accuracy_percent": spread(100 * self.last_accuracies),
            "best_accuracy_percent": spread(100 * self.best_accuracies),
            "last_loss_nats": spread([loss[max(n - 1, 0)] for loss, n in zip(self.window_losses, self.updates)]),
            "median_update_milliseconds": round(1000 * float(np.nanmedian(self.update_seconds)), 2),
            "gradient_noise_scale_examples": spread(scales),
        }

    def to_frame(self):
        """The result as a pandas.DataFrame, a row a (seed, update, micro-batch), numbered from 0 but for updates (1).

        What belongs to a whole update or seed is repeated in each of its rows.
        """
        import pandas as pd

        seed, update, microbatch = np.nonzero(self.weights)
        return pd.DataFrame(
            {
                "seed": np.array(self.seeds, int)[seed],
                "update": update + 1,
                "microbatch": microbatch,
                "loss": self.losses[seed, update, microbatch],
                "weight": self.weights[seed, update, microbatch],
                "gradient_norm": self.gradient_norms[seed, update, microbatch],
                "window_loss": self.window_losses[seed, update],
                "window_gradient_norm": self.window_gradient_norms[seed, update],
                "accuracy": self.accuracies[seed, update],
                "update_seconds": self.update_seconds[seed, update],
                "peak_memory_bytes": self.peak_memory_bytes[seed],
            }
        )

    def __eq__(self, other) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        same = (self.experiment, self.seeds, self.endings) == (other.experiment, other.seeds, other.endings)
        pairs = [(getattr(self, name), getattr(other, name)) for name in NUMBERS]
        return same and all(ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)

    __hash__ = None

    def __repr__(self) -> str:
        e = self.experiment
        counts = ", ".join(f"{self.endings.count(name)} {name}" for name in ENDINGS if name in self.endings)
        what = f"{e.method}, {e.model} on {e.dataset}, k = {e.accumulation_steps}, b = {e.microbatch_size}"
        return f"Result: {what}; {counts}"

    def save(self, path) -> None:
        """Writes the result to one file: a zip archive with result.json and an .npy file an array, without pickles.

        The file is there as a whole or not at all; one that was there before stays until then.

        Raises:
            OSError: it could not be written; the message says what was not saved.
        """
        path = pathlib.Path(path)
        about = {
            "format": FORMAT,
            "experiment": json.loads(self.experiment.to_json()),
            "seeds": self.seeds,
            "endings": self.endings,
            "environments": self.environments,
        }
        try:
            with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("result.json", json.dumps(about, indent=1))
                for name in AXES:
                    content = io.BytesIO()
                    np.save(content, getattr(self, name), allow_pickle=False)
                    archive.writestr(f"{name}.npy", content.getvalue())
        except OSError as error:
            kept = "; the file that was there before is unchanged" if path.exists() else ""
            raise OSError(error.errno, f"{self!r} was not saved ({error.strerror}){kept}", str(path)) from None

    @classmethod
    def load(cls, path) -> "Result":
        """Reads a result that `save` wrote.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is damaged, or no result of this format.
        """
        path = pathlib.Path(path)
        content = path.read_bytes()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                about = json.loads(archive["result.json"])
                if about.pop("format") != FORMAT:
                    raise ValueError("another format")
                arrays = {name: archive[name] for name in AXES}
            made = {name: tuple(about[name]) for name in ("seeds", "endings", "environments")}
            result = cls(experiment=Experiment.from_fields(about["experiment"]), **made, **arrays)
            _check_shapes(result)
        except Exception as error:  # a damaged archive fails in many ways
            raise ValueError(
                f"a result must be a file that Result.save wrote, whole. Received: {path} "
                f"({type(error).__name__}: {error})"
            ) from None
        return result


assert set(AXES) < {field.name for field in fields(Result)}


@contextlib.contextmanager
def replacing(path: pathlib.Path):
    """A file to write to that takes path's place when all is written, and leaves no trace when that fails."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
        os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _padded(array: np.ndarray, shape: Sequence[int], filler) -> np.ndarray:
    widths = [(0, 0)] + [(0, wanted - there) for wanted, there in zip(shape, array.shape[1:])]
    return np.pad(array, widths, constant_values=filler)


def _check_shapes(result: Result) -> None:
    sizes = {"seed": len(result.seeds)}
    for name, axes in AXES.items():
        array = getattr(result, name)
        if array.dtype != np.float64 or array.ndim != len(axes):
            raise ValueError(f"{name} is not of its type")
        for axis, size in zip(axes, array.shape):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name} has {size} along {axis}")

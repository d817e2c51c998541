"""A folder that keeps the results of finished jobs, so that a repeated sweep does not train them
again."""

import hashlib
import json
import os
import pathlib
import warnings
from importlib.metadata import version

import gradlab
from gradlab.lab.experiments import environment
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.experiments.result_file import FORMAT

# Increase this number when a change to the training code gives the same experiment other numbers.
# The key of every file contains it, so the results of the old code are no longer used.
TRAINING = 3


class Cache:
    """A folder of results, one file for each job.

    A file's name contains a hash of the job, of the versions of gradlab and TensorFlow and of the
    device, so a result is used only where training would give it again.

    Problems with files are warnings, not errors: a result that cannot be read is computed again,
    and one that cannot be written is still returned to the caller.
    """

    def __init__(self, folder: str | os.PathLike | None = None) -> None:
        """Create the folder if it does not exist.

        Args:
            folder: where to keep the files. None: $GRADLAB_CACHE, or .cache/gradlab in the home
                directory.

        Raises:
            OSError: the folder does not exist and cannot be created.
        """
        folder = (
            folder or os.environ.get("GRADLAB_CACHE") or pathlib.Path.home() / ".cache" / "gradlab"
        )
        self.folder = pathlib.Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"the cache must be a folder that exists or can be created ({error.strerror})"
            raise OSError(error.errno, rule, str(self.folder)) from None

    def path(self, job: Experiment) -> pathlib.Path:
        """Return the path of the job's file, whether or not it exists."""
        key = [
            FORMAT,
            TRAINING,
            gradlab.__version__,
            version("tensorflow"),
            environment.device(),
            job.to_json(),
        ]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        return (
            self.folder
            / f"{job.method}-{job.model}-{job.accumulation_steps}x{job.microbatch_size}-{digest}.npz"
        )

    def read(self, job: Experiment) -> Result | None:
        """Return the job's result, or None if it must be computed."""
        try:
            result = Result.load(self.path(job))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(
                f"a cached run cannot be read and is trained again: {error}", stacklevel=3
            )
            return None
        return result if result.experiment == job else None

    def write(self, result: Result) -> None:
        """Keep the result of a job."""
        try:
            result.save(self.path(result.experiment))
        except OSError as error:
            warnings.warn(
                f"a finished run could not be cached; the sweep continues: {error}", stacklevel=3
            )

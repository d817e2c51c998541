"""Checkpoints of a training loop: everything that the next update depends on, written completely or
not at all."""

import contextlib
import json
import os
import re
import shutil
import socket
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import keras
import numpy as np

from gradlab.fit.run.settings import FIXED, Change, differences

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

KEPT = 2  # checkpoints
FINISHED = re.compile(r"checkpoint-(\d+)\.npz")
UNFINISHED = re.compile(r"checkpoint-(\d+)\.npz\.part")
EARLIER_FORMAT = re.compile(r"ckpt-(\d+)\.index")  # TensorFlow's, which gradlab wrote before
LOCK = "lock"
# What reading a damaged file raises.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class Position(NamedTuple):
    """How far a training run is.

    Attributes:
        windows: the number of windows trained on.
        epoch: the epoch, counted from 0.
        examples: how many examples of that epoch were used.
    """

    windows: int = 0
    epoch: int = 0
    examples: int = 0


class Checkpoints:
    """The latest states of a training run, in a directory.

    Each state is one file, in NumPy's format. It is written under another name, forced to the disk,
    and then renamed. So a process that is killed while it writes leaves the previous checkpoint
    intact.

    Use it as a context: it locks the directory, so that only one training run writes there.

    Args:
        directory: the directory, created if it is missing. All workers must see the same one.
        variables: the Keras variables to save: those of the model and of the optimizer.
        settings: the settings of this training run, from `settings_of`. A checkpoint contains them.
        learning_rate: the variable that holds the learning rate, one of the variables; None if
            there is none.
        writes: whether this process writes. One of several workers writes, and all of them read.

    Raises:
        ValueError: directory is not a path. On entering the context: no files can be written there,
            it has no room for two checkpoints, or another process uses it.

    Attributes:
        directory: the absolute path of the directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        variables: list,
        settings: dict,
        learning_rate: keras.Variable | None = None,
        writes: bool = True,
    ):
        self.directory = _checked(directory)
        self._variables = variables
        self._settings = json.loads(json.dumps(settings))  # as they are read from a file
        self._learning_rate = learning_rate
        self._writes = writes
        self._lock: Any = None

    def __enter__(self) -> "Checkpoints":
        if not self._writes:
            return self
        try:
            with self._as_one_sentence(ValueError):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock_directory()
                self._remove(UNFINISHED, keep=0)
                self._check_room()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlock()

    def begin(self, allow_changes: bool = False) -> Position:
        """Restores the latest state. If there is none, saves the present one.

        Args:
            allow_changes: whether a run with other settings may have written the checkpoint. The
                settings of this run are then used, its learning rate included.

        Returns:
            How far the training run is.

        Raises:
            ValueError: the checkpoint is damaged, or another training run wrote it.
            OSError: no checkpoint can be written.
        """
        with self._as_one_sentence(ValueError):
            files = self._files(FINISHED)
            earlier = self._files(EARLIER_FORMAT)
        if files:
            return self._restore(files[-1], allow_changes)
        if earlier:
            raise ValueError(
                "checkpoint_dir must hold checkpoints of this version of gradlab, or none. "
                f"Received: {self.directory}, with TensorFlow's files of an earlier version "
                f"({earlier[-1].name})"
            )
        self.save(Position())
        return Position()

    def save(self, position: Position) -> None:
        """Saves the variables and the position.

        Raises:
            OSError: the checkpoint could not be written. The last complete one is still there.
        """
        if not self._writes:
            return
        file = self.directory / f"checkpoint-{position.windows}.npz"
        unfinished = file.with_name(f"{file.name}.part")
        with self._as_one_sentence(OSError):
            # Before the new one is written, so that there are never more than KEPT on the disk.
            self._remove(FINISHED, keep=KEPT - 1)
            try:
                with unfinished.open("wb") as stream:
                    self._write(stream, position)
                    stream.flush()
                    os.fsync(stream.fileno())
                unfinished.replace(file)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise

    def _restore(self, file: Path, allow_changes: bool) -> Position:
        settings, position, values = _read(file)
        changes = self._changes(settings, values)
        self._check(changes, values, allow_changes)
        keeps_rate = any(change.setting == "learning_rate" for change in changes)
        for variable, value in zip(self._variables, values):
            if not (keeps_rate and variable is self._learning_rate):
                variable.assign(value.view(_dtype_of(variable)))
        if not changes:  # the rate at which the first run began, which later ones will ask for
            self._settings = settings
        return position

    def _changes(self, settings: dict, values: list[np.ndarray]) -> list[Change]:
        """The settings of this run that differ from those of a checkpoint."""
        changes = differences(settings, self._settings)
        places = [
            i for i, variable in enumerate(self._variables) if variable is self._learning_rate
        ]
        if len(values) == len(self._variables) and places:
            # The program may have changed the rate while training. A second call in the same
            # program begins with that.
            saved = values[places[0]].view(_dtype_of(self._variables[places[0]]))
            if float(saved) == self._settings.get("learning_rate"):
                changes = [change for change in changes if change.setting != "learning_rate"]
        return changes

    def _check(self, changes: list[Change], values: list[np.ndarray], allow_changes: bool) -> None:
        """Raises ValueError unless this run may continue from a checkpoint with these changes and
        these values."""
        fixed = [change for change in changes if change.setting in FIXED]
        rule = "checkpoint_dir must hold checkpoints of this model and optimizer, or none"
        if [value.shape for value in values] != [
            tuple(variable.shape) for variable in self._variables
        ]:
            found = f": {_listed(fixed)}" if fixed else ""
            raise ValueError(
                f"{rule}. Received: {self.directory}, whose variables differ in number or "
                f"shape{found}"
            )
        if fixed:
            raise ValueError(f"{rule}. Received: {self.directory}, with {_listed(fixed)}")
        if changes and not allow_changes:
            raise ValueError(
                "checkpoint_dir must hold checkpoints of a run with the same settings, or none, "
                f"unless allow_changes=True. Received: {self.directory}, with {_listed(changes)}"
            )

    def _write(self, stream: Any, position: Position) -> None:
        """Writes the arrays one after the other, which takes the memory of the largest one."""
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in self._arrays(position):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    def _arrays(self, position: Position) -> Iterator[tuple[str, np.ndarray]]:
        yield "settings", np.array(json.dumps(self._settings))
        yield "position", np.array(position, np.int64)
        for number, variable in enumerate(self._variables):
            array = np.asarray(variable.numpy())
            # As bytes: NumPy's format has no name for types such as bfloat16. The settings have the
            # types.
            yield f"variable_{number}", array.view(f"V{array.dtype.itemsize}")

    def _files(self, pattern: re.Pattern) -> list[Path]:
        """The files of the directory whose names match, the newest last."""
        if not self.directory.exists():
            return []
        found = [(pattern.fullmatch(file.name), file) for file in self.directory.iterdir()]
        numbered = [(int(match[1]), file) for match, file in found if match]
        return [file for _, file in sorted(numbered)]

    def _remove(self, pattern: re.Pattern, keep: int) -> None:
        """Removes the files whose names match, except the newest ones."""
        files = self._files(pattern)
        for file in files[: max(0, len(files) - keep)]:
            file.unlink()

    def _check_room(self) -> None:
        """Raises ValueError unless two checkpoints fit on the disk, including those that are
        there."""
        size = sum(
            int(np.prod(variable.shape)) * _dtype_of(variable).itemsize
            for variable in self._variables
        )
        missing = size * max(0, KEPT - len(self._files(FINISHED)))
        free = shutil.disk_usage(self.directory).free
        if free < missing:
            raise ValueError(
                f"checkpoint_dir must have room for two checkpoints, {_mebibytes(missing)} more. "
                f"Received: {self.directory}, with {_mebibytes(free)} left"
            )

    def _lock_directory(self) -> None:
        """Locks the directory. The system releases the lock when the process ends, for whatever
        reason."""
        self._lock = (self.directory / LOCK).open("a+")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            raise ValueError(
                "checkpoint_dir must be used by one training run at a time. Received: "
                f"{self.directory}, which is in use by {owner}"
            ) from None
        except OSError:  # some network file systems have no locks
            return
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def _unlock(self) -> None:
        # Closing the file would not release the lock if a process that was forked meanwhile still
        # has it open.
        if self._lock is None:
            return
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()
        self._lock = None

    @contextlib.contextmanager
    def _as_one_sentence(self, kind: type[Exception]) -> Iterator[None]:
        """Turns an error of the file system into one of this kind that names the argument and the
        directory."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise kind(
                "checkpoint_dir must be a directory in which files can be written. Received: "
                f"{self.directory} ({reason}){self._still_there()}"
            ) from None

    def _still_there(self) -> str:
        try:
            files = self._files(FINISHED)
        except OSError:
            return ""
        return f"; the last complete checkpoint is {files[-1].name}" if files else ""


def _checked(directory: str | os.PathLike) -> Path:
    """The absolute path of the directory.

    Raises:
        ValueError: it is not a path.
    """
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(
            f"checkpoint_dir must be the path of a directory, or None. Received: {directory!r}"
        )
    return Path(path).absolute()


def _read(file: Path) -> tuple[dict, Position, list[np.ndarray]]:
    """The settings, the position and the values, as bytes, of a checkpoint.

    Raises:
        ValueError: the file is not a complete checkpoint.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            settings = json.loads(str(arrays["settings"]))
            position = Position(*(int(number) for number in arrays["position"]))
            values = [arrays[f"variable_{number}"] for number in range(len(arrays.files) - 2)]
    except UNREADABLE as error:
        raise ValueError(
            f"checkpoint_dir must hold complete checkpoints. Received: {file}, which cannot be "
            f"read ({error}); without this file, training continues from the checkpoint before it"
        ) from None
    return settings, position, values


def _dtype_of(variable: keras.Variable) -> np.dtype:
    return np.dtype(variable.value.dtype.as_numpy_dtype)


def _listed(changes: list[Change]) -> str:
    """The first changes, as text."""
    more = len(changes) - 3
    return "; ".join(map(str, changes[:3])) + (f"; and {more} more differences" if more > 0 else "")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

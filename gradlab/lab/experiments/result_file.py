"""The file format of results: a zip archive with one JSON description and one .npy file for each
array.

The archive contains no pickles, so opening a file from someone else cannot run code.
"""

import contextlib
import io
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

FORMAT = 1  # files with another number are refused
DESCRIPTION = "result.json"  # the name of the description in the archive

Axes = Mapping[str, tuple[str, ...]]


class UnreadableResult(ValueError):
    """The error for a file that does not contain a whole result.

    Attributes:
        path: the file.
        reason: what is wrong, as the rest of a sentence: "which is damaged (...)".
    """

    def __init__(self, path: str | os.PathLike, reason: str) -> None:
        super().__init__(
            f"a result must be an intact file that Result.save wrote. Received: {path}, {reason}"
        )
        self.path = path
        self.reason = reason


def write(
    path: str | os.PathLike, description: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a description and arrays to one file, or leave the path as it was.

    Raises:
        OSError: the file could not be written.
    """
    with (
        replacing(pathlib.Path(path)) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        archive.writestr(DESCRIPTION, json.dumps({"format": FORMAT, **description}, indent=1))
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            archive.writestr(f"{name}.npy", content.getvalue())


def read(path: str | os.PathLike, axes: Axes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the description and the arrays that `write` wrote.

    Args:
        path: the file.
        axes: the names of the arrays and of their axes. Axes of the same name must have the same
            length, and the axis "seed" must have one entry for each of the description's "seeds".

    Raises:
        OSError: there is no such file, or it cannot be opened.
        UnreadableResult: the file is damaged, or does not contain a result of this format.
    """
    content = pathlib.Path(path).read_bytes()
    if not content.startswith(b"PK"):  # every zip archive begins with these two bytes
        raise UnreadableResult(
            path, "which is a file of another kind" if content else "which is empty"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if DESCRIPTION not in archive.namelist():
                raise UnreadableResult(path, "which is a file of another kind")
            description = json.loads(archive.read(DESCRIPTION))
            if description.pop("format") != FORMAT:
                raise UnreadableResult(
                    path, f"whose format is not the format {FORMAT} of this version of gradlab"
                )
            arrays = {name: _array(archive.read(f"{name}.npy")) for name in axes}
        _check_shapes(arrays, axes, seeds=len(description["seeds"]))
    except UnreadableResult:
        raise
    # Zipfile, json and NumPy raise many types of errors for damaged content
    except Exception as error:
        raise UnreadableResult(
            path, f"which is damaged ({type(error).__name__}: {error})"
        ) from None
    return description, arrays


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends, and is deleted when the block
    fails.

    Other processes therefore see the old file or the whole new one, never a part.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _array(content: bytes) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _check_shapes(arrays: Mapping[str, np.ndarray], axes: Axes, seeds: int) -> None:
    sizes = {"seed": seeds}
    for name, array in arrays.items():
        if array.dtype != np.float64 or array.ndim != len(axes[name]):
            raise ValueError(f"{name} has the type {array.dtype} and {array.ndim} axes")
        for axis, size in zip(axes[name], array.shape):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{name} has {size} entries along the axis {axis}, in place of {sizes[axis]}"
                )

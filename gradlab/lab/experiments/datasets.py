"""The data sets: MNIST and a text are part of gradlab, Keras downloads the others."""

import functools
import gzip
import hashlib
import io
import pathlib
import threading
from dataclasses import dataclass

import numpy as np

from gradlab import _checks

HELD_OUT_SHARE = 0.1  # the last part of a text
VALIDATION = 5_000  # the last examples of each published training set are the validation set
# The number of the other training examples, by data set.
TRAINING_EXAMPLES = {"mnist": 55_000, "fashion_mnist": 55_000, "cifar10": 45_000}

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]  # the folder of the package gradlab


@dataclass(frozen=True)
class Dataset:
    """Images and their classes, split into training, validation and test set.

    Attributes:
        name: "mnist", "fashion_mnist" or "cifar10".
        train_images, validation_images, test_images: float32 from 0 to 1, shape (examples, height,
            width, channels).
        train_labels, validation_labels, test_labels: the classes, int32 from 0 to 9, shape
            (examples,).
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    validation_images: np.ndarray
    validation_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Text:
    """A text as the numbers of its characters.

    Attributes:
        characters: all different characters; the place of each is its number.
        train, held_out: the numbers of the first 90% and of the last 10% of the text, int32, shape
            (characters,).
    """

    characters: str
    train: np.ndarray
    held_out: np.ndarray

    def read(self, numbers: np.ndarray) -> str:
        """The characters with these numbers, as a string."""
        return "".join(self.characters[number] for number in numbers)


@functools.lru_cache(maxsize=2)
def load(name: str = "mnist") -> Dataset:
    """Loads a data set. The last 5,000 training examples become the validation set.

    The two most recently used data sets stay in memory, so loading one of them again is immediate.

    Args:
        name: "mnist" is part of gradlab and needs no network. "fashion_mnist" and "cifar10" are
            downloaded by keras.datasets the first time and kept in its cache.

    Returns:
        A `Dataset` of read-only arrays.

    Raises:
        ValueError: an unknown name, or a data file that differs from its checksum.
        OSError: the data cannot be read or downloaded.

    Example:
        >>> mnist = load("mnist")
        >>> mnist.train_images.shape, mnist.test_labels.shape
        ((55000, 28, 28, 1), (10000,))
    """
    _checks.one_of("dataset", name, TRAINING_EXAMPLES)
    train_images, train_labels, test_images, test_labels = (
        _mnist() if name == "mnist" else _from_keras(name)
    )
    train_images = _as_unit_floats(train_images)
    test_images = _as_unit_floats(test_images)
    train_labels = _as_classes(train_labels)
    test_labels = _as_classes(test_labels)
    return Dataset(
        name,
        train_images[:-VALIDATION],
        train_labels[:-VALIDATION],
        train_images[-VALIDATION:],
        train_labels[-VALIDATION:],
        test_images,
        test_labels,
    )


@functools.cache
def shakespeare() -> Text:
    """Loads scenes from Shakespeare's plays, which are part of gradlab: 1,115,394 characters, 65
    different ones.

    Raises:
        ValueError: the data file differs from its checksum.
        OSError: the data file cannot be read.

    Example:
        >>> text = shakespeare()
        >>> text.read(text.train[:14]), len(text.characters), len(text.held_out)
        ('First Citizen:', 65, 111540)
    """
    content = gzip.decompress(read_verified(data_folder() / "shakespeare.txt.gz"))
    codes, numbers = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    numbers = numbers.astype(np.int32)
    numbers.setflags(write=False)
    first = int((1 - HELD_OUT_SHARE) * len(numbers))
    return Text(bytes(codes).decode("ascii"), numbers[:first], numbers[first:])


def data_folder() -> pathlib.Path:
    """The folder of gradlab's own data: gradlab/data in an installed package, data/ in a
    checkout."""
    inside = _PACKAGE / "data"
    return inside if inside.is_dir() else _PACKAGE.parent / "data"


def read_verified(path: pathlib.Path) -> bytes:
    """Reads a data file and compares its SHA-256 with the one in checksums.txt in the same folder.

    Args:
        path: the data file.

    Returns:
        The content of the file.

    Raises:
        ValueError: the file is truncated, altered or not listed.
        FileNotFoundError: the file or checksums.txt is missing.
    """
    remedy = "restore it with: git checkout -- data, or install gradlab again"
    listed = path.with_name("checksums.txt")
    for file in (path, listed):
        if not file.is_file():
            raise FileNotFoundError(
                f"gradlab's data file {file.name} is missing from {file.parent}; {remedy}"
            )
    known: dict[str, str] = dict(
        line.split()[::-1] for line in listed.read_text().splitlines() if line.strip()
    )
    if path.name not in known:
        raise ValueError(
            f"{path.name} must be listed in {listed.name}. Received: "
            f"{', '.join(known) or 'an empty list'}"
        )
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != known[path.name]:
        raise ValueError(
            f"{path.name} must have the SHA-256 {known[path.name]} (it is truncated or altered; "
            f"{remedy}). Received: {found}"
        )
    return content


def _mnist() -> tuple[np.ndarray, ...]:
    content = read_verified(data_folder() / "mnist.npz")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return tuple(arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))


def _from_keras(name: str) -> tuple[np.ndarray, ...]:
    import keras

    if threading.current_thread() is not threading.main_thread():
        # The lab trains in threads, whose output JupyterLab shows as a fault. This setting holds
        # for the thread alone.
        keras.config.disable_interactive_logging()
    try:
        (train_images, train_labels), (test_images, test_labels) = getattr(
            keras.datasets, name
        ).load_data()
    except Exception as error:  # Keras raises a bare Exception when a download fails
        raise OSError(
            f'{name} must be downloaded the first time, and that failed; "mnist" needs no network. '
            f"Received: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None
    return train_images, train_labels, test_images, test_labels


def _as_unit_floats(images: np.ndarray) -> np.ndarray:
    images = images.astype(np.float32) / np.float32(255)
    images = images if images.ndim == 4 else images[..., np.newaxis]
    images.setflags(write=False)
    return images


def _as_classes(labels: np.ndarray) -> np.ndarray:
    labels = labels.reshape(-1).astype(np.int32)
    labels.setflags(write=False)
    return labels

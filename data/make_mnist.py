"""Make mnist.npz and its line of checksums.txt from the four original IDX files of MNIST.

    python data/make_mnist.py FOLDER

FOLDER holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
t10k-labels-idx1-ubyte, as published (README.md beside this file says where they can be had). Each
is checked against its published SHA-256 first.
"""

import hashlib
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent

# name in mnist.npz: (file, SHA-256 of the file, shape). IDX is a header of 4 bytes a word, then the
# bytes of the array.
SOURCES = {
    "x_train": (
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        (60_000, 28, 28),
    ),
    "y_train": (
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        (60_000,),
    ),
    "x_test": (
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        (10_000, 28, 28),
    ),
    "y_test": (
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        (10_000,),
    ),
}


def read_idx(path: pathlib.Path, sha256: str, shape: tuple[int, ...]) -> np.ndarray:
    """The uint8 array in an IDX file, or a ValueError that names the file."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} must have the SHA-256 {sha256}. Received: {found}")
    words = np.frombuffer(content, dtype=">u4", count=1 + len(shape))
    if tuple(words[1:]) != shape:
        raise ValueError(
            f"{path.name} must hold an array of shape {shape}. Received: {tuple(words[1:])}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=4 * len(words)).reshape(shape)


def main(folder: str) -> None:
    arrays = {
        name: read_idx(pathlib.Path(folder) / file, sha, shape)
        for name, (file, sha, shape) in SOURCES.items()
    }
    target = HERE / "mnist.npz"
    np.savez_compressed(target, **arrays)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    checksums = HERE / "checksums.txt"
    known = checksums.read_text().splitlines() if checksums.exists() else []
    others = [line for line in known if target.name not in line]
    checksums.write_text("\n".join([f"{digest}  {target.name}", *others, ""]))
    print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB, SHA-256 {digest}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python data/make_mnist.py FOLDER    (the folder with the four IDX files)")
    main(sys.argv[1])

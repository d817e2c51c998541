"""The digits that a page carries: python -m gradlab.lab.widget.offline.digits"""

import pathlib
import zlib

import numpy as np

from gradlab.lab.experiments import datasets

TRAINING = 4000  # the first training images of MNIST
TEST = 1000  # the first test images
SHADES = 15  # the largest gray level: two pixels fit in a byte

PACKED = pathlib.Path(__file__).parent / "digits.bin"


def levels(images: np.ndarray) -> np.ndarray:
    """Images, from 0 to 1, as gray levels from 0 to `SHADES`: uint8, shape (examples, 784)."""
    return np.rint(SHADES * images.reshape(len(images), -1)).astype(np.uint8)


def pack() -> bytes:
    """The digits as training.js unpacks them, compressed by deflate.

    First the class of each example, a byte each; then the gray levels, two pixels in a byte. The
    training examples come first.
    """
    mnist = datasets.load("mnist")
    classes = np.concatenate([mnist.train_labels[:TRAINING], mnist.test_labels[:TEST]])
    pixels = levels(np.concatenate([mnist.train_images[:TRAINING], mnist.test_images[:TEST]]))
    pairs = pixels[:, 0::2] << 4 | pixels[:, 1::2]
    return zlib.compress(classes.astype(np.uint8).tobytes() + pairs.tobytes(), level=9)


if __name__ == "__main__":
    PACKED.write_bytes(pack())

"""The bundled data: its content, its folder, and the refusal of a damaged file."""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from paths import ROOT

from gradlab.lab.experiments import datasets

sys.path.insert(0, str(ROOT / "data"))
import make_mnist


def test_mnist_is_split_and_scaled():
    mnist = datasets.load("mnist")
    assert mnist.train_images.shape == (55_000, 28, 28, 1)
    assert mnist.validation_images.shape == (5_000, 28, 28, 1)
    assert mnist.test_images.shape == (10_000, 28, 28, 1)
    for split in ("train", "validation", "test"):
        images, labels = getattr(mnist, f"{split}_images"), getattr(mnist, f"{split}_labels")
        assert images.dtype == np.float32 and labels.dtype == np.int32
        assert images.min() == 0 and images.max() == 1
        assert set(labels) == set(range(10)) and labels.shape == images.shape[:1]
        assert not images.flags.writeable and not labels.flags.writeable
    assert datasets.load("mnist") is mnist


def test_the_last_5000_training_images_are_for_validation():
    mnist = datasets.load("mnist")
    with np.load(datasets.data_folder() / "mnist.npz", allow_pickle=False) as arrays:
        labels = arrays["y_train"]
    np.testing.assert_array_equal(mnist.train_labels, labels[:55_000])
    np.testing.assert_array_equal(mnist.validation_labels, labels[55_000:])


def test_mnist_is_the_published_one():
    """The four IDX files, written again from the arrays, have the published SHA-256."""
    with np.load(datasets.data_folder() / "mnist.npz", allow_pickle=False) as arrays:
        for name, (_, sha256, shape) in make_mnist.SOURCES.items():
            array = arrays[name]
            assert array.shape == shape and array.dtype == np.uint8
            header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
            assert hashlib.sha256(header + array.tobytes()).hexdigest() == sha256


def test_the_script_reads_idx_and_checks_it(tmp_path):
    array = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    content = struct.pack(">4I", 0x0803, 1, 2, 3) + array.tobytes()
    path = tmp_path / "some-idx3-ubyte"
    path.write_bytes(content)
    good = hashlib.sha256(content).hexdigest()
    np.testing.assert_array_equal(make_mnist.read_idx(path, good, (1, 2, 3)), array)
    with pytest.raises(ValueError, match="some-idx3-ubyte must have the SHA-256 00. Received: "):
        make_mnist.read_idx(path, "00", (1, 2, 3))
    with pytest.raises(
        ValueError, match=r"some-idx3-ubyte must hold an array of shape \(2, 1, 3\)"
    ):
        make_mnist.read_idx(path, good, (2, 1, 3))


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(datasets.data_folder(), tmp_path / "data")
    return tmp_path / "data" / "mnist.npz"


def test_a_good_copy_is_read(copy):
    assert len(datasets.read_verified(copy)) == copy.stat().st_size


def test_a_truncated_or_altered_file_is_refused_by_name(copy):
    content = copy.read_bytes()
    altered = bytearray(content)
    altered[len(altered) // 2] ^= 1
    for bad in (content[:-1], content[:1000], b"", bytes(altered)):
        copy.write_bytes(bad)
        with pytest.raises(
            ValueError, match=r"mnist.npz must have the SHA-256 .*truncated or altered.* Received: "
        ):
            datasets.read_verified(copy)


def test_a_missing_or_unlisted_file_is_named(copy):
    other = copy.with_name("other.npz")
    other.write_bytes(b"")
    with pytest.raises(
        ValueError, match="other.npz must be listed in checksums.txt. Received: mnist.npz"
    ):
        datasets.read_verified(other)
    copy.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"data file mnist.npz is missing from .*git checkout"
    ):
        datasets.read_verified(copy)


def test_load_uses_the_check(copy, monkeypatch):
    monkeypatch.setattr(datasets, "data_folder", lambda: copy.parent)
    copy.write_bytes(copy.read_bytes()[:-1])
    datasets.load.cache_clear()
    try:
        with pytest.raises(ValueError, match="mnist.npz must have the SHA-256"):
            datasets.load("mnist")
    finally:
        datasets.load.cache_clear()


@pytest.mark.parametrize(
    ("name", "shape", "examples"),
    [("fashion_mnist", (28, 28), 60_000), ("cifar10", (32, 32, 3), 50_000)],
)
def test_the_other_data_sets_come_from_keras(name, shape, examples, monkeypatch):
    """Arrays of the shapes that Keras returns, without the download."""
    labels = np.arange(examples) % 10
    train = (
        np.zeros((examples, *shape), np.uint8),
        labels.reshape(-1, 1) if name == "cifar10" else labels,
    )
    test = np.full((10, *shape), 255, np.uint8), labels[:10]
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: (train, test))
    datasets.load.cache_clear()
    data = datasets.load(name)
    assert data.train_images.shape == (
        datasets.TRAINING_EXAMPLES[name],
        *shape[:2],
        3 if name == "cifar10" else 1,
    )
    assert data.test_images.min() == 1 and data.train_labels.ndim == 1
    datasets.load.cache_clear()


def test_a_failed_download_raises_an_error_that_names_mnist(monkeypatch):
    def fails():
        raise Exception(
            "URL fetch failure on https://example.org/data.gz: None -- [Errno -2] unknown name"
        )

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fails)
    with pytest.raises(
        OSError,
        match=r'cifar10 must be downloaded .* failed; "mnist" needs no network. Received: URL',
    ):
        datasets.load("cifar10")


def test_a_download_in_a_thread_prints_nothing(monkeypatch, capsys):
    """The lab trains in threads, and JupyterLab shows what a thread prints as a fault."""

    def fails():
        keras.utils.get_file(origin="file:///nowhere/data.gz", cache_dir=folder)

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fails)
    for in_thread, printed in ((False, "Downloading data"), (True, "")):
        with (
            tempfile.TemporaryDirectory() as folder,
            ThreadPoolExecutor() as pool,
            pytest.raises(OSError),
        ):
            pool.submit(datasets.load, "cifar10").result() if in_thread else datasets.load(
                "cifar10"
            )
        assert capsys.readouterr().out[:16] == printed


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError,
        match="dataset must be one of mnist, fashion_mnist, cifar10. Received: 'imagenet'",
    ):
        datasets.load("imagenet")


@pytest.mark.slow
def test_a_wheel_outside_the_checkout_finds_its_data(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for folder in ("gradlab", "data", "notebooks"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source],
        check=True,
        timeout=120,
    )
    [wheel] = wheels.glob("gradlab-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        timeout=120,
    )
    program = (
        "from gradlab.lab.experiments import datasets; print(datasets.data_folder(), "
        "len(datasets.load().train_labels))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"{site / 'gradlab' / 'data'} 55000\n"

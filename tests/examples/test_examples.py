"""Twelve programs in the manner of Keras' guides, each as it is and with one line that prepares the
model."""

import importlib

import keras
import numpy as np
import pytest
from plain_and_microbatched import assert_equal, train

PROGRAMS = (
    "autoencoder", "captcha", "convnet", "forecasting", "imbalanced_classes", "miniature_gpt", "siamese",
    "structured_data", "text_transformer", "translation", "u_net", "vision_transformer",
)  # fmt: skip
# Sizes that do not divide the batches, where 3 does.
SIZES = {"captcha": 4, "miniature_gpt": 4, "structured_data": 2}
QUICK = ("convnet", "structured_data", "text_transformer")


def program(name, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    return importlib.import_module(name)


def saved(module, folder):
    """The program's run, and the weights of the trained model after it was saved and loaded."""

    def run(model):
        file = folder / f"{len(list(folder.iterdir()))}.keras"
        results = {key: np.array(value) for key, value in module.run(model).items()}
        model.save(file)
        loaded = keras.models.load_model(file, custom_objects=vars(module))
        assert type(loaded) is type(model)
        return results | {f"loaded {i}": w.numpy() for i, w in enumerate(loaded.weights)}

    return run


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in PROGRAMS
        if name != "u_net"
    ],
)
def test_one_line_changes_nothing(name, tmp_path, monkeypatch):
    module = program(name, monkeypatch)
    run, added = saved(module, tmp_path), getattr(module, "BATCH_LOSSES", None)
    plain, _ = assert_equal(module.build, run, SIZES.get(name, 3), rtol=2e-4, batch_losses=added)
    assert any(key.startswith("optimizer") for key in plain) and {"loss", "score"} & set(plain)


@pytest.mark.slow
def test_batch_normalization_is_equal_in_one_micro_batch_and_named_otherwise(tmp_path, monkeypatch):
    module = program("u_net", monkeypatch)
    with pytest.warns(UserWarning, match="normalizes each micro-batch by its own statistics"):
        assert_equal(module.build, saved(module, tmp_path), 8, rtol=2e-4)
    with pytest.warns(UserWarning, match="normalizes each micro-batch by its own statistics"):
        small = train(module.build, saved(module, tmp_path), 3)
    assert np.isfinite(small["loss"]).all() and small["loss"][-1] < small["loss"][0]

"""A convnet that classifies small images, with validation, early stopping and a checkpoint of the
best model."""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
labels = rng.integers(0, 3, 40)
images = rng.normal(size=(40, 12, 12, 1)).astype("float32") + labels[:, None, None, None]


def build():
    return keras.Sequential([
        keras.Input([12, 12, 1]),
        layers.Rescaling(0.5),
        layers.Conv2D(4, 3, activation="relu"),
        layers.GroupNormalization(2),
        layers.MaxPooling2D(),
        layers.SeparableConv2D(6, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, "softmax", kernel_regularizer="l2"),
    ])  # fmt: skip


def run(model):
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    stop = keras.callbacks.EarlyStopping(patience=1, min_delta=0.05, restore_best_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "best.keras"
        best = keras.callbacks.ModelCheckpoint(file, monitor="val_loss", save_best_only=True)
        fitted = model.fit(
            images,
            labels,
            10,
            epochs=4,
            validation_split=0.25,
            shuffle=False,
            callbacks=[stop, best],
            verbose=0,
        )
        kept = keras.models.load_model(file).evaluate(images, labels, verbose=0)
    return fitted.history | {
        "predicted": model.predict(images, batch_size=16, verbose=0),
        "best": kept,
    }

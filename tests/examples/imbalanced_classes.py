"""Few positives among many negatives: class weights and six metrics that count."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(6)
features = rng.normal(size=(50, 6)).astype("float32")
labels = (features[:, :1] > 1).astype("uint8")


def build():
    return keras.Sequential([keras.Input([6]), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")])


def run(model):
    kinds = (
        "FalseNegatives",
        "FalsePositives",
        "TrueNegatives",
        "TruePositives",
        "Precision",
        "Recall",
    )
    metrics = [getattr(keras.metrics, kind)(name=kind) for kind in kinds]
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics)
    weights = {0: 0.6, 1: 3.0}
    fitted = model.fit(features, labels, 16, epochs=3, class_weight=weights, shuffle=False, verbose=0,
                       validation_data=(features, labels))  # fmt: skip
    return fitted.history

"""Rows of a table as a dict of columns, with preprocessing layers in the model: numbers, buckets
and strings."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(5)
table = {
    "age": rng.uniform(20, 80, (26, 1)).astype("float32"),
    "income": rng.normal(3, 2, (26, 1)).astype("float32"),
    "city": rng.choice(["Bern", "Rome", "Oslo"], (26, 1)),
}
labels = rng.integers(0, 2, (26, 1)).astype("float32")


def rows():
    columns = {name: tf.constant(column) for name, column in table.items()}
    return tf.data.Dataset.from_tensor_slices((columns, labels)).batch(9)


def build():
    inputs = {
        name: keras.Input([1], name=name, dtype="string" if name == "city" else "float32")
        for name in table
    }
    scale = layers.Normalization()
    scale.adapt(table["income"])
    city = layers.StringLookup(vocabulary=["Bern", "Oslo", "Rome"], output_mode="one_hot")(
        inputs["city"]
    )
    ages = layers.Discretization([30.0, 50.0], output_mode="one_hot")(inputs["age"])
    joined = layers.Concatenate()([city, ages, scale(inputs["income"])])
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Dense(4, "relu")(joined)))


def run(model):
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    fitted = model.fit(rows(), epochs=3, validation_data=rows(), verbose=0)
    return fitted.history | {"predicted": model.predict(rows(), verbose=0)}

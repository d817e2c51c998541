"""The networks as Keras models."""

import keras

from benchmarks.networks import EPSILON, Network


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position of a text."""

    supports_masking = True  # passes on which tokens are padding

    def build(self, input_shape):
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, x):
        return x + self.vectors


LAYERS = {
    "conv": lambda filters, size, padding: keras.layers.Conv2D(filters, size, padding=padding),
    "pool": keras.layers.MaxPooling2D,
    "flatten": keras.layers.Flatten,
    "dense": keras.layers.Dense,
    "relu": keras.layers.ReLU,
    "dropout": keras.layers.Dropout,
    "group norm": lambda groups: keras.layers.GroupNormalization(groups, epsilon=EPSILON),
    "mean of pixels": keras.layers.GlobalAveragePooling2D,
    # The embedding masks token 0, and Keras passes the mask on to attention and to the mean.
    "embedding": lambda tokens, width: keras.layers.Embedding(tokens, width, mask_zero=True),
    "positions": Positions,
    "layer norm": lambda: keras.layers.LayerNormalization(epsilon=EPSILON),
    "mean of tokens": keras.layers.GlobalAveragePooling1D,
}


def keras_model(network: Network) -> keras.Model:
    """Builds the network from Keras layers."""
    inputs = keras.Input(network.input_shape, dtype="int32" if network.reads_tokens else None)
    return keras.Model(inputs, _outputs(network.layers, inputs))


def _outputs(layers: tuple[tuple, ...], x: keras.KerasTensor) -> keras.KerasTensor:
    for name, *sizes in layers:
        if name == "residual":
            x = keras.layers.Add()([x, _outputs(sizes[0], x)])
        elif name == "attention":
            x = keras.layers.MultiHeadAttention(*sizes)(x, x)
        else:
            x = LAYERS[name](*sizes)(x)
    return x

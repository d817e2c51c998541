"""An LSTM that forecasts a series, from a dataset of windows, with a learning rate that is reduced
on a plateau."""

import keras
import numpy as np
from keras import layers

series = np.sin(np.arange(80) / 5).astype("float32")[:, None] * [1.0, 0.5]


def windows():
    return keras.utils.timeseries_dataset_from_array(series[:-6], series[6:, 0], 6, batch_size=14)


def build():
    return keras.Sequential([keras.Input([6, 2]), layers.LSTM(5), layers.Dense(1)])


def run(model):
    model.compile(keras.optimizers.RMSprop(0.01), "mae", metrics=["mse"])
    slower = keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, factor=0.5, min_delta=10.0)
    fitted = model.fit(
        windows(), epochs=3, validation_data=windows(), callbacks=[slower], verbose=0
    )
    return fitted.history

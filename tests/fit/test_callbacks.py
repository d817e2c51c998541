"""Keras' callbacks in the `fit` of a prepared model: what they see and do is what they see and do with the
large batch."""

import keras
import numpy as np
import pytest

import gradlab

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[22, 4]), RNG.normal(size=[22, 2])
HELD_OUT = RNG.normal(size=[9, 4]), RNG.normal(size=[9, 2])


class Logger(keras.callbacks.Callback):
    """What a callback that sends each log to a service sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, when, number, logs):
        self.seen.append((when, number, {name: float(value) for name, value in logs.items()}))

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch", batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self._note("test batch", batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch", epoch, logs)


def saved(folder):
    """The weights of the files that a training left, by name."""
    return {
        file.name: keras.models.load_model(file, compile=False).get_weights()
        for file in sorted(folder.glob("*.keras"))
    }


CALLBACKS = {
    "a logger of one's own": lambda folder: Logger(),
    "CSVLogger": lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "{epoch}.keras", monitor="val_loss", save_best_only=True
    ),
    "BackupAndRestore": lambda folder: keras.callbacks.BackupAndRestore(
        folder, delete_checkpoint=False
    ),
    "SwapEMAWeights": lambda folder: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "LearningRateScheduler": lambda folder: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
    "ReduceLROnPlateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        "val_loss", patience=0, min_delta=10.0, factor=0.25
    ),
    "EarlyStopping": lambda folder: keras.callbacks.EarlyStopping(
        "val_loss", patience=1, min_delta=10.0, restore_best_weights=True
    ),
    "TerminateOnNaN": lambda folder: keras.callbacks.TerminateOnNaN(),
}
# What changes no weight; the others are seen to change them
WATCHING = {
    "a logger of one's own", "CSVLogger", "ModelCheckpoint", "BackupAndRestore",
}  # fmt: skip


def trained(folder, name, prepare):
    """A training with a callback, or with none: the model, its history and the callback."""
    folder.mkdir()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    )
    model = prepare(model)
    model.compile(
        keras.optimizers.Adam(0.05, use_ema=True), "mse", metrics=["mae"],
        run_eagerly=prepare is not gradlabs,  # less time than a trace
    )  # fmt: skip
    callback = None if name is None else CALLBACKS[name](folder)
    x = np.where(np.arange(22)[:, None] == 13, np.nan, X) if name == "TerminateOnNaN" else X
    history = model.fit(
        x, Y, batch_size=8, epochs=4, shuffle=False, verbose=0, validation_data=HELD_OUT,
        validation_batch_size=5, callbacks=[callback] if callback else [],
    )  # fmt: skip
    return model, history, callback


def gradlabs(model):
    return gradlab.microbatched(model, 3)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_sees_and_does_what_it_does_with_the_large_batch(name, tmp_path, float64):
    expected, theirs, watched = trained(tmp_path / "large", name, lambda model: model)
    found, ours, watching = trained(tmp_path / "small", name, gradlabs)
    assert ours.epoch == theirs.epoch
    assert ours.history.keys() == theirs.history.keys()
    for key, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[key], values, rtol=1e-11, err_msg=key)
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    plain, *_ = trained(tmp_path / "without", None, lambda model: model)
    same = all(
        np.array_equal(one, other)
        for one, other in zip(plain.get_weights(), expected.get_weights(), strict=True)
    )
    assert same == (name in WATCHING)
    if name == "a logger of one's own":
        assert [one[:2] for one in watching.seen] == [one[:2] for one in watched.seen]
        for (*_, small), (*_, large) in zip(watching.seen, watched.seen, strict=True):
            np.testing.assert_allclose(list(small.values()), list(large.values()), rtol=1e-11)
    if name == "CSVLogger":
        small, large = (
            np.genfromtxt(tmp_path / way / "log.csv", delimiter=",", names=True)
            for way in ("small", "large")
        )
        assert small.dtype.names == large.dtype.names and len(small) == 4
        for column in large.dtype.names:
            np.testing.assert_allclose(small[column], large[column], rtol=1e-10)
    if name == "ModelCheckpoint":
        small, large = saved(tmp_path / "small"), saved(tmp_path / "large")
        assert small.keys() == large.keys() and small
        for file, weights in large.items():
            for one, other in zip(small[file], weights, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    if name == "EarlyStopping":
        assert len(ours.epoch) == 2 and watching.stopped_epoch == 1
    if name == "TerminateOnNaN":
        assert len(ours.epoch) == 1 and int(found.optimizer.iterations) == 2


def test_a_training_goes_on_from_its_backup(tmp_path, float64):
    """Interrupted after its second epoch, in micro-batches before and as a large batch after."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(prepare, *callbacks):
        keras.utils.set_random_seed(1)
        model = prepare(keras.Sequential([keras.Input([4]), keras.layers.Dense(2)]))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights(), int(model.optimizer.iterations)

    backup = lambda: keras.callbacks.BackupAndRestore(tmp_path)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        fit(gradlabs, backup(), Interrupt())
    resumed, updates = fit(lambda model: model, backup())
    whole, expected = fit(gradlabs)
    assert updates == expected == 12
    for one, other in zip(resumed, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)

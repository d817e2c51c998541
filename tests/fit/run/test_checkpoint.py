"""Checkpoints of `Trainer.fit`: their directory, what they are made by, and signals that come in
between."""

import errno
import functools
import os
import re
import shutil
import signal
import socket
import sys
import threading

import forked
import keras
import numpy as np
import pytest
import tensorflow as tf
from events import wait_until
from plain_and_microbatched import eagerly

import gradlab
from gradlab import runtime
from gradlab.fit.run import checkpoint, settings

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
RULE = "^checkpoint_dir must"


def trainer(optimizer=None, layers=None, loss="mse", microbatch_size=4, **options):
    keras.utils.set_random_seed(0)
    layers = layers or [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([3]), *layers])
    return gradlab.Trainer(
        model, optimizer or keras.optimizers.Adam(0.01), loss, microbatch_size, **options
    )


def fit(made, updates, folder, data=DATA, every=1, **options):
    return made.fit(
        data, updates, checkpoint_dir=folder, checkpoint_every=every, verbose=False, **options
    )


def values_of(made):
    return [variable.numpy() for variable in (*made.model.variables, *made.optimizer.variables)]


def assert_same_bits(one, other):
    for first, second in zip(values_of(one), values_of(other), strict=True):
        np.testing.assert_array_equal(first, second)


def checkpoints_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".npz")


@pytest.fixture
def untraced():
    """Runs without traces: what a run refuses, it refuses before the first update."""
    with eagerly():
        yield


# ---- the directory ----


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", ["run*", "run[12]", "checkpoint-*"])
def test_the_name_of_a_directory_is_not_a_pattern(name, tmp_path):
    for neighbor in ("run1", "run2", "checkpoint-1"):
        fit(trainer(), 2, tmp_path / neighbor)
    fit(trainer(), 4, tmp_path / name)
    assert [step.update for step in fit(trainer(), 5, tmp_path / name)] == [5]
    for neighbor in ("run1", "run2", "checkpoint-1"):
        assert checkpoints_in(tmp_path / neighbor) == ["checkpoint-1.npz", "checkpoint-2.npz"]


@pytest.mark.parametrize("directory", ["", 5, b"bytes", "zero\0byte", ["list"]])
def test_a_directory_is_a_path(directory):
    with pytest.raises(ValueError, match=f"{RULE} be the path of a directory, or None. Received: "):
        fit(trainer(), 2, directory)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("kind", ["a file", "below a file", "no files can be made"])
def test_a_directory_in_which_nothing_can_be_written_is_refused_before_the_first_update(
    kind, tmp_path
):
    """A directory in the place of a file that is written stands for one that is read-only, which
    root can write to."""
    folder = tmp_path / "folder"
    if kind == "no files can be made":
        (folder / "checkpoint-0.npz.part" / "full").mkdir(parents=True)
    else:
        folder.write_text("")
        folder = folder / "below" if kind == "below a file" else folder
    made, seen = trainer(), []
    rule = f"{RULE} be a directory in which files can be written. Received: {re.escape(str(folder))} \\(.+\\)$"
    with pytest.raises(ValueError, match=rule):
        fit(made, 2, folder, on_update=seen.append)
    assert not seen and made.updates == 0


def test_room_for_two_checkpoints_is_checked_before_the_first_update(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=60))
    seen = []
    with pytest.raises(
        ValueError,
        match=f"{RULE} have room for two checkpoints, .* MiB more. Received: .* MiB left$",
    ):
        fit(trainer(), 2, tmp_path, on_update=seen.append)
    assert not seen


def test_one_checkpoint_is_written_before_the_first_update_and_two_are_kept(tmp_path):
    seen = []
    fit(
        trainer(),
        5,
        tmp_path,
        every=2,
        on_update=lambda step: seen.append(checkpoints_in(tmp_path)),
    )
    names = [
        [f"checkpoint-{number}.npz" for number in numbers]
        for numbers in ([0], [0, 2], [0, 2], [2, 4], [4, 5])
    ]
    assert seen == names


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    whole = trainer()
    fit(whole, 6, tmp_path / "whole")
    folder = tmp_path / "full"

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_the_disk(step):
        if step.update == 3:
            monkeypatch.setattr(os, "fsync", full)

    sentence = (
        f"{RULE} be a directory in which files can be written. Received: {re.escape(str(folder))} "
        r"\(No space left on device\); the last complete checkpoint is checkpoint-3.npz$"
    )
    with pytest.raises(OSError, match=sentence):
        fit(trainer(), 6, folder, on_update=fill_the_disk)
    assert {path.name for path in folder.iterdir()} == {"checkpoint-3.npz", "lock"}
    monkeypatch.undo()
    resumed = trainer()
    assert [step.update for step in fit(resumed, 6, folder)] == [4, 5, 6]
    assert_same_bits(whole, resumed)


def test_half_written_checkpoints_are_removed_at_the_next_start(tmp_path):
    fit(trainer(), 2, tmp_path)
    (tmp_path / "checkpoint-9.npz.part").write_bytes(b"half")
    (tmp_path / "notes.npz.part").write_bytes(b"of the user")
    assert [step.update for step in fit(trainer(), 3, tmp_path)] == [3]
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-2.npz", "checkpoint-3.npz", "lock", "notes.npz.part",
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other"])
def test_a_damaged_checkpoint_is_named(damage, tmp_path):
    fit(trainer(), 3, tmp_path)
    file = tmp_path / "checkpoint-3.npz"
    whole = file.read_bytes()
    place = len(whole) // 2
    if damage == "other":
        np.savez(file, a=1)
    else:
        flipped = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
        file.write_bytes({"empty": b"", "cut": whole[:place], "changed": flipped}[damage])
    made = trainer()
    before = values_of(made)
    with pytest.raises(
        ValueError,
        match=f"{RULE} hold complete checkpoints. Received: {re.escape(str(file))}, which",
    ):
        fit(made, 4, tmp_path)
    for one, other in zip(values_of(made), before):
        np.testing.assert_array_equal(one, other)
    file.unlink()
    assert [step.update for step in fit(trainer(), 4, tmp_path)] == [3, 4]


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path):
    made = trainer()
    tf.train.CheckpointManager(
        tf.train.Checkpoint(v=made.model.variables[0].value), str(tmp_path), 2
    ).save()
    with pytest.raises(
        ValueError, match=f"{RULE} hold checkpoints of this version of gradlab, or none. Received: "
    ):
        fit(made, 2, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_kept_to_the_bit(dtype, tmp_path):
    def half():
        return trainer(
            keras.optimizers.SGD(0.1, momentum=0.9), [keras.layers.Dense(1, dtype=dtype)]
        )

    whole, resumed = half(), half()
    fit(whole, 5, tmp_path / "whole")
    fit(half(), 3, tmp_path / "resumed")
    assert [step.update for step in fit(resumed, 5, tmp_path / "resumed")] == [4, 5]
    assert_same_bits(whole, resumed)


def test_two_devices(tmp_path, two_devices):
    def made():
        with two_devices.scope():
            return trainer(strategy=two_devices)

    whole, resumed = made(), made()
    fit(whole, 5, tmp_path / "whole")
    fit(made(), 2, tmp_path / "resumed")
    assert [step.update for step in fit(resumed, 5, tmp_path / "resumed")] == [3, 4, 5]
    assert_same_bits(whole, resumed)
    for variable in resumed.model.variables:
        copies = two_devices.experimental_local_results(variable.value)
        np.testing.assert_array_equal(*(copy.numpy() for copy in copies))


def test_workers_that_find_different_checkpoints_are_refused(tmp_path, monkeypatch):
    said = []

    def over_workers(strategy, numbers):
        said.append(numbers)
        return np.array([numbers, [7]])

    monkeypatch.setattr("gradlab.fit.trainer.over_workers", over_workers)
    rule = f"{RULE} be a directory that all workers can use, with the same checkpoints. Received: .*, with checkpoints"
    with pytest.raises(
        ValueError, match=rf"{rule} after \[0, 7\] windows, where -1 stands for an error$"
    ):
        fit(trainer(), 2, tmp_path)
    with pytest.raises(ValueError, match="the path of a directory|in which files can be written"):
        fit(trainer(), 2, tmp_path / "lock" / "below")
    assert said == [[0], [-1]]  # the others hear of the error, too


# ---- what made the checkpoints ----


def grown(update):
    return 2


def fixed(update):
    return 2


def decay(steps):
    return keras.optimizers.schedules.ExponentialDecay(0.01, steps, 0.5)


class WithoutConfig(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01


ADAM, SGD = keras.optimizers.Adam, keras.optimizers.SGD
# For each setting: how two trainers are made that differ in it, and what is said of it.
CHANGES = {
    "learning rate": (
        lambda: trainer(ADAM(0.01)),
        lambda: trainer(ADAM(0.5)),
        "learning_rate 0.01 instead of 0.5",
    ),
    "beta": (
        lambda: trainer(ADAM(0.01)),
        lambda: trainer(ADAM(0.01, beta_1=0.5)),
        r"optimizer.beta_1 "
        r"0.9 instead of 0.5",
    ),
    "clipping": (
        lambda: trainer(ADAM(0.01)),
        lambda: trainer(ADAM(0.01, clipnorm=1.0)),
        "optimizer.clipnorm None instead of 1",
    ),
    "schedule": (
        lambda: trainer(SGD(decay(100))),
        lambda: trainer(SGD(decay(200))),
        "learning_rate.config.decay_steps 100 instead of 200",
    ),
    "scaled": (
        lambda: trainer(keras.optimizers.LossScaleOptimizer(SGD(0.25), 8.0)),
        lambda: trainer(keras.optimizers.LossScaleOptimizer(SGD(0.5), 8.0)),
        "learning_rate 0.25 instead of 0.5",
    ),
    "micro-batch": (trainer, lambda: trainer(microbatch_size=2), "microbatch_size 4 instead of 2"),
    "accumulation": (
        lambda: trainer(accumulation=grown),
        lambda: trainer(accumulation=fixed),
        "accumulation 'grown' instead of 'fixed'",
    ),
    "loss": (trainer, lambda: trainer(loss="mae"), "loss 'mse' instead of 'mae'"),
    "loss object": (
        lambda: trainer(loss=keras.losses.BinaryCrossentropy(True)),
        lambda: trainer(loss=keras.losses.BinaryCrossentropy(True, label_smoothing=0.5)),
        "loss.config.label_smoothing 0 instead of 0.5",
    ),
    "skipping": (
        trainer,
        lambda: trainer(skip_nonfinite=True),
        "skip_nonfinite False instead of True",
    ),
    "weights of the loss": (
        trainer,
        lambda: trainer(loss_weights=2.0),
        "loss_weights None instead of 2",
    ),
}


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", CHANGES)
def test_another_setting_is_refused_unless_changes_are_allowed(name, tmp_path):
    before, now, said = CHANGES[name]
    fit(before(), 2, tmp_path)
    rule = f"{RULE} hold checkpoints of a run with the same settings, or none, unless allow_changes=True. Received: "
    with pytest.raises(ValueError, match=f"{rule}{re.escape(str(tmp_path))}, with {said}$"):
        fit(now(), 3, tmp_path)
    assert [step.update for step in fit(now(), 3, tmp_path, allow_changes=True)] == [3]
    # These are the settings from now on
    assert [step.update for step in fit(now(), 4, tmp_path)] == [4]


@pytest.mark.usefixtures("untraced")
def test_another_size_of_the_dataset_or_another_seed_is_refused(tmp_path, monkeypatch):
    fit(trainer(), 2, tmp_path)
    with pytest.raises(ValueError, match="with batches of the dataset 4 instead of 3$"):
        fit(trainer(), 3, tmp_path, data=DATA.take(3))
    monkeypatch.setattr(runtime, "_runtime", runtime.Runtime(("/device:CPU:0",), 1, seed=1))
    fit(trainer(), 2, tmp_path / "seeded")
    monkeypatch.setattr(runtime, "_runtime", runtime.Runtime(("/device:CPU:0",), 1, seed=2))
    with pytest.raises(ValueError, match="with seed 1 instead of 2$"):
        fit(trainer(), 3, tmp_path / "seeded")
    monkeypatch.setattr(runtime, "_runtime", None)  # what is not known is not compared
    for unknown in (lambda epoch: iter(DATA), DATA.filter(lambda x, y: True)):
        assert fit(trainer(), 2, tmp_path, data=unknown) == []


def test_the_rate_that_was_asked_for_is_used_if_changes_are_allowed(tmp_path):
    fit(trainer(SGD(0.01, momentum=0.9)), 2, tmp_path)
    changed = trainer(SGD(0.5, momentum=0.9))
    fit(changed, 2, tmp_path, allow_changes=True)
    assert float(changed.optimizer.learning_rate) == 0.5 and changed.updates == 2
    saved = trainer(SGD(0.01, momentum=0.9))
    fit(saved, 2, tmp_path)
    for one, other in zip(saved.optimizer.variables, changed.optimizer.variables, strict=True):
        assert one.path.endswith("learning_rate") or (one.numpy() == other.numpy()).all()


def test_a_rate_that_the_program_changes_while_training_is_kept(tmp_path):
    def lower(made):
        def on_update(step):
            if step.update == 2:
                made.optimizer.learning_rate = 0.001

        return on_update

    def train(made, updates, folder):
        fit(made, updates, folder, on_update=lower(made))

    whole, resumed, again = trainer(), trainer(), trainer()
    train(whole, 6, tmp_path / "whole")
    train(again, 4, tmp_path / "again")
    train(again, 5, tmp_path / "again")  # in one program, which has lowered the rate already
    train(resumed, 6, tmp_path / "again")  # in a new one, which begins with the first rate
    assert_same_bits(whole, resumed)


class AnotherDense(keras.layers.Dense):
    pass


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            lambda: trainer(ADAM(0.01)),
            lambda: trainer(keras.optimizers.AdamW(0.01)),
            "optimizer 'Adam' instead of 'Ad",
        ),
        (
            lambda: trainer(ADAM(0.01)),
            lambda: trainer(keras.optimizers.Lamb(0.01)),
            "optimizer 'Adam' instead of 'La",
        ),
        (
            lambda: trainer(),
            lambda: trainer(layers=[keras.layers.Dropout(0.5), AnotherDense(1)]),
            r"layers\[\d\] 'Den",
        ),
        (
            lambda: trainer(layers=[keras.layers.Dense(1, dtype="float32")]),
            lambda: trainer(layers=[keras.layers.Dense(1, dtype="float16")]),
            r"variables\[0\]\[2\] 'float32' instead of 'float16'",
        ),
    ],
)
def test_another_model_or_optimizer_is_always_refused(before, now, said, tmp_path):
    fit(before(), 2, tmp_path)
    rule = f"{RULE} hold checkpoints of this model and optimizer, or none. Received: {re.escape(str(tmp_path))}"
    for allowed in (False, True):
        with pytest.raises(ValueError, match=f"{rule}, with {said}"):
            fit(now(), 3, tmp_path, allow_changes=allowed)


def test_variables_of_another_number_or_shape_are_always_refused(tmp_path):
    fit(trainer(), 2, tmp_path)
    for layers in (
        [keras.layers.Dense(2), keras.layers.Dense(1)],
        [keras.layers.Dropout(0.5), keras.layers.Dense(2)],
    ):
        with pytest.raises(
            ValueError, match="or none. Received: .*, whose variables differ in number or shape: "
        ):
            fit(trainer(layers=layers), 3, tmp_path, data=DATA, allow_changes=True)


SAME = {
    "names": lambda number: trainer(
        SGD(0.1, name=f"optimizer_{number}"), [keras.layers.Dense(1, name=f"layer_{number}")]
    ),
    "functions": lambda number: trainer(
        loss=lambda y, y_pred: keras.losses.mean_squared_error(y, y_pred),
        accumulation=lambda update: 2,
        weight_fn=functools.partial(lambda x, y: tf.ones(tf.shape(x)[:1])),
    ),
    "callable rate": lambda number: trainer(SGD(lambda: 0.1)),
    "schedule": lambda number: trainer(SGD(decay(100))),
    "schedule without a configuration": lambda number: trainer(SGD(WithoutConfig())),
    "chosen size": lambda number: trainer(microbatch_size="auto" if number else 4),
    "chosen size before": lambda number: trainer(microbatch_size=4 if number else "auto"),
    "outputs": lambda number: trainer(loss=["mse"], loss_weights=[np.float32(0.5)]),
}


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_the_run_is_not_refused(name, tmp_path):
    fit(SAME[name](0), 2, tmp_path)
    assert [step.update for step in fit(SAME[name](1), 3, tmp_path)] == [3]


def test_objects_are_described_without_addresses():
    found = settings.described(
        [object(), functools.partial(print), print, lambda: 0, {1: tf.float32}, tf.constant(2)]
    )
    assert found == ["object", "partial", "print", "<lambda>", {"1": "float32"}, 2]


# ---- signals, and other processes ----

PROGRAM = """
import os, signal, sys
import keras, numpy as np, tensorflow as tf
import gradlab

folder, at, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(8)
model = keras.Sequential([keras.Input([3]), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
trainer = gradlab.Trainer(model, keras.optimizers.Adam(0.01), "mse", 4)
force = os.fsync

def wait():
    with open(folder + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(folder + ".new", folder + ".pid")
    signal.pause()

def fsync(number):
    if mode == "write" and trainer.updates == at:
        wait()
    force(number)

def on_update(step):
    if mode == "update" and step.update == at:
        wait()

os.fsync = fsync
trainer.fit(data, 9, checkpoint_dir=folder, checkpoint_every=3, on_update=on_update, verbose=False)
print("complete")
"""


@pytest.fixture
def waiting(tmp_path):
    """Starts the program, and returns it with its process id when it waits; nothing is left of it
    afterwards."""
    started = []

    def start(at, mode):
        job = forked.start("-c", PROGRAM, tmp_path / "run", at, mode)
        file = tmp_path / "run.pid"
        wait_until(file.exists, job._process)
        pid = int(file.read_text())
        file.unlink()
        started.append((job, pid))
        return job, pid

    yield start
    for job, pid in started:
        if job._process.poll() is None:
            os.kill(pid, signal.SIGKILL)
            job.wait()


def assert_resumes_with_the_same_bits(folder, updates, tmp_path):
    whole, resumed = trainer(), trainer()
    fit(whole, 9, tmp_path / "whole", every=3)
    assert [step.update for step in fit(resumed, 9, folder, every=3)] == updates
    assert_same_bits(whole, resumed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_a_last_checkpoint_and_ends_the_process(number, waiting, tmp_path):
    job, pid = waiting(4, "update")
    os.kill(pid, number)
    assert job.wait() == 128 + number and "complete" not in job.stdout()
    folder = tmp_path / "run"
    assert checkpoints_in(folder) == ["checkpoint-3.npz", "checkpoint-5.npz"]
    assert_resumes_with_the_same_bits(folder, [6, 7, 8, 9], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_kill_during_a_write_leaves_the_checkpoint_before_it(waiting, tmp_path):
    job, pid = waiting(6, "write")
    os.kill(pid, signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint-3.npz",
        "checkpoint-6.npz.part",
        "lock",
    }
    assert_resumes_with_the_same_bits(folder, [4, 5, 6, 7, 8, 9], tmp_path)
    assert not (folder / "checkpoint-6.npz.part").exists()


@pytest.mark.skipif(checkpoint.fcntl is None, reason="Windows has no such locks")
def test_a_directory_in_use_is_refused_until_its_process_dies(waiting, tmp_path):
    job, pid = waiting(4, "update")
    owner = f"process {pid} on {re.escape(socket.gethostname())}"
    rule = (
        f"{RULE} be used by one training run at a time. Received: .*, which is in use by {owner}$"
    )
    with pytest.raises(ValueError, match=rule):
        fit(trainer(), 9, tmp_path / "run")
    os.kill(pid, signal.SIGKILL)
    job.wait()
    assert [step.update for step in fit(trainer(), 9, tmp_path / "run", every=3)] == [
        4,
        5,
        6,
        7,
        8,
        9,
    ]


def test_a_directory_is_free_again_after_an_error(tmp_path):
    def fail(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), 2, tmp_path, on_update=fail)
    with pytest.raises(ValueError, match="instead of"):
        fit(trainer(loss="mae"), 2, tmp_path)
    assert [step.update for step in fit(trainer(), 2, tmp_path)] == [2]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_run_says_which_signal_ended_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        trainer().fit(
            DATA,
            9,
            checkpoint_dir=tmp_path,
            on_update=lambda step: signal.raise_signal(signal.SIGTERM),
        )
    said = capsys.readouterr().out
    assert said.endswith(
        "\ngradlab: SIGTERM ends this run after update 2; the next one continues from its "
        "checkpoint\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_signal_in_the_last_update_is_not_lost(tmp_path):
    with pytest.raises(SystemExit) as ended:
        fit(
            trainer(),
            2,
            tmp_path,
            on_update=lambda step: step.update == 2 and signal.raise_signal(signal.SIGUSR1),
        )
    assert ended.value.code == 128 + signal.SIGUSR1
    assert "checkpoint-2.npz" in checkpoints_in(tmp_path)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_handler_of_the_program_stays(tmp_path):
    received = []

    def handler(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        steps = fit(
            trainer(), 3, tmp_path, on_update=lambda step: signal.raise_signal(signal.SIGUSR1)
        )
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(steps) == len(received) == 3


def test_signals_are_left_alone_without_checkpoints_and_in_other_threads(tmp_path):
    found = []

    def look(step):
        found.append(signal.getsignal(signal.SIGTERM))

    trainer().fit(DATA, 1, on_update=look, verbose=False)
    thread = threading.Thread(target=lambda: fit(trainer(), 1, tmp_path, on_update=look))
    thread.start()
    thread.join()
    fit(trainer(), 2, tmp_path, on_update=look)
    assert found[:2] == [signal.SIG_DFL, signal.SIG_DFL]
    assert callable(found[2]) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

"""Results: what they hold, saving and loading, and what happens when the disk is full or the file
is damaged."""

import dataclasses
import json
import pickle
import resource
import signal
import zipfile

import numpy as np
import pytest

from gradlab.lab.experiments import result_file
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.models import Model
from gradlab.lab.experiments.result import AXES, Result
from gradlab.lab.experiments.training import train

WAY = Experiment(
    model="dense",
    method="microbatched",
    microbatch_size=7,
    accumulation_steps=3,
    updates=5,
    seeds=2,
)


@pytest.fixture(scope="module")
def result():
    """Two seeds; their last window is ragged, as the budget cuts it."""
    return run(dataclasses.replace(WAY, updates=None, examples=4 * 21 + 8, eval_every=2))


def test_the_arrays_hold_what_the_trainings_gave(result):
    for i, seed in enumerate(result.seeds):
        updates = list(train(result.experiment, seed))
        np.testing.assert_allclose(result.window_losses[i], [u.loss for u in updates], rtol=1e-5)
        np.testing.assert_allclose(result.losses[i, 1], updates[1].losses, rtol=1e-5)
        np.testing.assert_allclose(
            result.gradient_norms[i, 2], updates[2].gradient_norms, rtol=1e-4
        )
        np.testing.assert_allclose(
            result.window_gradient_norms[i], [u.window_gradient_norm for u in updates], rtol=1e-4
        )
        np.testing.assert_allclose(
            result.accuracies[i, [1, 3, 4]], [updates[n].accuracy for n in (1, 3, 4)], atol=1e-3
        )
    assert result.weights[0, -1].tolist() == [7, 1, 0] and np.isnan(result.losses[0, -1, 2])
    assert np.isnan(result.accuracies[:, [0, 2]]).all()
    assert result.updates.tolist() == [5, 5] and result.examples[0, -1] == 92
    assert result.endings == ("finished", "finished")
    assert (result.update_seconds > 0).all() and (result.peak_memory_bytes > 50e6).all()
    for name, axes in AXES.items():
        assert getattr(result, name).ndim == len(axes)


def test_the_environment_tells_where_it_ran(result):
    import tensorflow as tf

    [first, second] = result.environments
    assert first == second
    assert first["tensorflow"] == tf.__version__ and first["device"] and first["processor"]
    assert first["deterministic"] and first["seeds_together"] == 2
    assert first["date"].startswith("20") and len(first["commit"].rstrip("+")) == 40


def test_scores(result):
    np.testing.assert_array_equal(result.last_accuracies, result.accuracies[:, 4])
    np.testing.assert_array_equal(result.best_accuracies, np.nanmax(result.accuracies, axis=1))
    assert [scale.along.shape for scale in result.noise_scale()] == [(5,), (5,)]


@pytest.mark.parametrize(
    ("budget", "measured"),
    [(dict(updates=60), 10), (dict(examples=1000), 10), (dict(updates=3), 3)],
)
def test_by_default_the_accuracy_is_measured_ten_times(budget, measured):
    found = run(dataclasses.replace(WAY, **{"updates": None, **budget}))
    assert np.isfinite(found.accuracies).sum(axis=1).tolist() == [measured] * 2
    assert np.isfinite(found.accuracies[:, -1]).all()


def test_the_frame_has_a_row_a_micro_batch(result):
    frame = result.to_frame()
    assert len(frame) == 2 * (4 * 3 + 2)
    row = frame[(frame.seed == 1) & (frame["update"] == 5) & (frame.microbatch == 1)].iloc[0]
    assert (row.loss, row.weight) == (result.losses[1, 4, 1], 1)
    assert row.window_loss == result.window_losses[1, 4] and row.accuracy == result.accuracies[1, 4]
    assert (
        row.update_seconds == result.update_seconds[1, 4]
        and row.peak_memory_bytes == result.peak_memory_bytes[1]
    )
    assert {"gradient_norm", "window_gradient_norm"} < set(frame.columns)


def test_saved_and_loaded_it_is_the_same_to_the_bit(result, tmp_path):
    path = tmp_path / "result.npz"
    result.save(path)
    again = Result.load(path)
    assert again == result
    for field in dataclasses.fields(Result):
        ours, theirs = getattr(result, field.name), getattr(again, field.name)
        same = (
            ours.tobytes() == theirs.tobytes() if isinstance(ours, np.ndarray) else ours == theirs
        )
        assert same, field.name
    assert [file.name for file in tmp_path.iterdir()] == ["result.npz"]


def test_the_file_is_json_and_arrays_without_pickles(result, tmp_path):
    path = tmp_path / "result.npz"
    result.save(path)
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("result.json"))["experiment"]["microbatch_size"] == 7
        assert {name for name in archive.namelist() if name.endswith(".npy")} == {
            f"{name}.npy" for name in AXES
        }
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["losses"].shape == (2, 5, 3)


def test_results_are_equal_by_their_numbers(result):
    again = run(result.experiment)
    assert again == result  # though it took another time
    changed = result.losses.copy()
    changed[0, 0, 0] = np.nextafter(changed[0, 0, 0], 9)
    assert dataclasses.replace(result, losses=changed) != result
    assert dataclasses.replace(result, update_seconds=result.update_seconds * 2) == result
    assert dataclasses.replace(result, endings=("finished", "stopped")) != result
    assert result != "a result"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("truncated", "which is damaged"),
        ("altered", "which is damaged"),
        ("no arrays", "which is damaged"),
        ("odd shapes", "which is damaged .*weights has 3 entries along the axis microbatch"),
        ("no experiment", "which is damaged"),
        ("another format", "whose format is not the format 1"),
        ("empty", "which is empty"),
        ("text", "which is a file of another kind"),
        ("arrays alone", "which is a file of another kind"),
        ("pickle", "which is a file of another kind"),
    ],
)
def test_a_damaged_file_gets_one_sentence(result, tmp_path, damage, reason):
    path = tmp_path / "result.npz"
    result.save(path)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "altered":
        middle = content.index(b"losses.npy") + 200
        path.write_bytes(
            content[:middle]
            + bytes(b ^ 255 for b in content[middle : middle + 20])
            + content[middle + 20 :]
        )
    elif damage in ("empty", "text", "pickle"):
        path.write_bytes(
            {"empty": b"", "text": b"hello", "pickle": pickle.dumps(np.ones(3))}[damage]
        )
    elif damage == "odd shapes":
        dataclasses.replace(result, losses=result.losses[..., :-1]).save(path)
    elif damage == "arrays alone":
        np.savez(path, losses=result.losses)
    elif damage == "no experiment":
        description, arrays = result_file.read(path, AXES)
        result_file.write(
            path, {name: description[name] for name in ("seeds", "endings", "environments")}, arrays
        )
    else:
        with zipfile.ZipFile(path) as old:
            about = json.loads(old.read("result.json"))
        with zipfile.ZipFile(path, "w") as new:
            new.writestr(
                "result.json",
                json.dumps(about | {"format": 0 if damage == "another format" else 1}),
            )
    rule = "a result must be an intact file that Result.save wrote. Received: .*result.npz, "
    with pytest.raises(ValueError, match=rule + reason) as caught:
        Result.load(path)
    assert "pickle" not in str(caught.value)  # NumPy advises to allow them


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        Result.load(tmp_path / "none.npz")


def test_a_full_disk_leaves_the_old_result_and_says_what_was_not_saved(result, tmp_path):
    """The system refuses to write beyond a limit: the same failure in the middle of writing as on a
    full disk."""
    path = tmp_path / "result.npz"
    result.save(path)
    before = path.read_bytes()
    other = dataclasses.replace(result, losses=result.losses + 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            OSError,
            match=r"Result: microbatched, dense .* was not saved \(.*\); the previous file is "
            r"unchanged",
        ):
            other.save(path)
        with pytest.raises(OSError, match=r"was not saved \([^;]*\):"):
            other.save(tmp_path / "new.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["result.npz"]


def test_an_interrupted_save_leaves_no_trace(result, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(result_file.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result.save(tmp_path / "result.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["microbatched", "variables"])
def test_a_seed_that_diverges_ends_alone(method, monkeypatch):
    """Seed 1 starts from weights that overflow at once; the others go on, and the result says
    so."""
    drawn = Model.initial_weights

    def overflowing(model, seed, dtype="float32"):
        return {
            name: value * (1e30 if seed == 1 else 1)
            for name, value in drawn(model, seed, dtype).items()
        }

    monkeypatch.setattr(Model, "initial_weights", overflowing)
    found = run(dataclasses.replace(WAY, method=method, seeds=3))
    assert found.endings == ("finished", "diverged", "finished") and found.updates.tolist() == [
        5,
        1,
        5,
    ]
    assert not np.isfinite(found.losses[1, 0]).all() and np.isfinite(found.losses[[0, 2]]).all()
    assert np.isfinite(found.last_accuracies).all()
    assert repr(found).endswith("2 finished, 1 diverged")
    assert found.summary()["endings"] == ["finished", "diverged", "finished"]


def test_joined_seeds_are_padded_to_the_longest(result):
    short = run(dataclasses.replace(WAY, updates=2).of_seeds(7))
    joined = Result.join(result.experiment, [result, short])
    assert joined.losses.shape == (3, 5, 3) and joined.updates.tolist() == [5, 5, 2]
    assert np.isnan(joined.losses[2, 2:]).all() and (joined.weights[2, 2:] == 0).all()
    assert joined.last_accuracies[2] == short.last_accuracies[0]
    assert np.isnan(joined.window_losses[2, 2:]).all()

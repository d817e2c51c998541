"""Trains the same model twice, as Keras does and through `microbatched`, and compares everything
that can be seen."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import gradlab


@contextlib.contextmanager
def eagerly():
    """Runs every function without tracing it, which is most of the cost of a small model that
    trains a few batches."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def train(build, run, microbatch_size=None, eager=True, **prepare):
    """Builds a model from a fixed seed, and runs a function of it, which returns what is to be
    compared, or None.

    Args:
        build: a function () -> a Keras model.
        run: a function (model) -> a dict of arrays, or None. It compiles and trains.
        microbatch_size: None for the model as it is.
        eager: whether the model as it is runs eagerly. Through micro-batches, it always runs as
            compiled.

    Returns:
        A dict of arrays: all weights by path, the optimizer's variables, and what run returned.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with eagerly() if eager and microbatch_size is None else contextlib.nullcontext():
        model = build()
        if microbatch_size is not None:
            assert gradlab.microbatched(model, microbatch_size, **prepare) is model
        results = dict(run(model) or {})
    weights = {f"weight {i} {w.path}": w.numpy() for i, w in enumerate(model.weights)}
    optimizer = model.optimizer.variables if model.optimizer else []
    state = {f"optimizer {i} {v.path.split('/')[-1]}": v.numpy() for i, v in enumerate(optimizer)}
    return weights | state | results


def history(fitted, name="history"):
    """The entries of a History, to be returned by run."""
    return {f"{name} {key}": np.array(values) for key, values in fitted.history.items()}


def differences(one, other, rtol, but=()):
    """What differs between two results of `train`, as lines of text; names that contain a word of
    `but` may differ."""
    if set(one) != set(other):
        return [f"only in one of them: {', '.join(sorted(set(one) ^ set(other)))}"]
    found = []
    for name, expected in one.items():
        seen = other[name]
        if any(word in name for word in but):
            continue
        if np.shape(expected) != np.shape(seen):
            found.append(f"{name}: shape {np.shape(expected)}, {np.shape(seen)}")
        elif not np.issubdtype(np.asarray(expected).dtype, np.number):
            if not np.array_equal(expected, seen):
                found.append(f"{name}: {expected}, {seen}")
        else:
            # One scale for an array: where a gradient's parts cancel, an element's own size says
            # nothing of rounding.
            scale = max(np.max(np.abs(expected), initial=0), 1e-3 if "optimizer" in name else 1e-6)
            error = np.max(np.abs(np.asarray(seen, "float64") - expected), initial=0) / scale
            if not error <= rtol:
                found.append(f"{name}: relative error {error:.2g}")
    return found


def assert_equal(build, run, *microbatch_sizes, rtol=1e-5, but=(), eager=True, **prepare):
    """Fails unless the model ends the same through micro-batches of each size.

    Returns:
        What `train` returned for the model as it is, and for the last size.
    """
    plain = train(build, run, eager=eager)
    for size in microbatch_sizes:
        small = train(build, run, size, **prepare)
        found = differences(plain, small, rtol, but)
        assert not found, "\n".join([f"in micro-batches of {size}:", *found])
    return plain, small

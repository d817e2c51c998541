"""Bugs to plant into gradlab one by one, and the tests that must fail on each: a check of the
tests.

`python tests/planted_bugs.py` plants every bug into a copy of the project, runs its tests and says
what caught it. The exit status is 1 if the tests pass with a bug, or cannot run. It takes about 15
seconds for each bug, so it is not part of `make test`: run it after changing what tests check.

    python tests/planted_bugs.py                 all bugs
    python tests/planted_bugs.py window tail     the bugs with one of these words in their name or file
    python tests/planted_bugs.py --jobs 2        two at a time
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What the tests of gradlab read.
COPIED = (
    "gradlab",
    "tests",
    "notebooks",
    "data",
    "benchmarks",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "conftest.py",
    "environment.yml",
    "pyproject.toml",
    "requirements.txt",
    "requirements-dev.txt",
)
# Planted code may wait forever, or take memory without end.
LONGEST = 1200  # seconds for the tests of one bug
MOST = 8 * 2**30  # bytes of a process
NO_TESTS = 5  # pytest's exit status if it was left nothing to run
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # in what pytest says


@dataclass(frozen=True)
class Bug:
    """A mistake that somebody could make in one place.

    Attributes:
        name: what the mistake is, in a few words with underscores.
        file: the file of the project that has it.
        old: the right text, which must occur exactly once in the file.
        new: the wrong text.
        targets: the tests of which one must fail: files or functions, as arguments of pytest.
        words: of the tests in these files only those with such names, as for `-k` of pytest. Empty:
            all.
    """

    name: str
    file: str
    old: str
    new: str
    targets: tuple[str, ...]
    words: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the tests said about a bug.

    Attributes:
        caught_by: the test that failed, or None.
        trouble: why no test said anything, or an empty string.
    """

    caught_by: str | None
    trouble: str = ""

    def __str__(self) -> str:
        if self.trouble:
            return f"NOT RUN: {self.trouble}"
        return f"caught by {self.caught_by}" if self.caught_by else "MISSED"


def planted_text(project: pathlib.Path, bug: Bug) -> str:
    """The text of the bug's file with the bug.

    Raises:
        ValueError: the right text is not there, or in several places.
    """
    text = (project / bug.file).read_text(encoding="utf-8")
    found = text.count(bug.old)
    if found != 1:
        raise ValueError(
            f"{bug.name}: the old text must occur once in {bug.file}. Received: {found} times"
        )
    return text.replace(bug.old, bug.new)


def examine(project: pathlib.Path, bug: Bug, longest: float = LONGEST) -> Outcome:
    """Plants a bug into a copy of the project and runs its targets there, until one fails."""
    try:
        text = planted_text(project, bug)
    except (OSError, ValueError) as error:
        return Outcome(None, str(error))
    with tempfile.TemporaryDirectory(prefix="gradlab-planted-") as folder:
        copy = _copied(project, folder)
        (copy / bug.file).unlink()  # it may be the same file as that of the project
        (copy / bug.file).write_text(text, encoding="utf-8")
        try:
            ended = _quick_then_slow(copy, ["-x", "-k", bug.words, *bug.targets], longest)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"the tests took more than {longest:g} seconds")
    failed = FAILED.findall(ended.stdout)
    if ended.returncode == 0:
        return Outcome(None)
    if ended.returncode == 1 and failed:
        return Outcome(failed[0])
    said = (ended.stdout + ended.stderr).strip().splitlines()
    return Outcome(
        None, f"pytest ended with {ended.returncode}: {said[-1] if said else 'no words'}"
    )


def _quick_then_slow(copy: pathlib.Path, arguments: list[str], longest: float) -> Any:
    """Runs tests, those that take long only if no other one fails."""
    quick = _pytest(copy, ["-m", "not slow", *arguments], longest)
    if quick.returncode not in (0, NO_TESTS):
        return quick
    slow = _pytest(copy, ["-m", "slow", *arguments], longest)
    return quick if slow.returncode == NO_TESTS else slow


def failing_without(project: pathlib.Path, tests: set[str]) -> set[str]:
    """Those of some tests that fail in a copy of the project without a bug, and so tell nothing."""
    with tempfile.TemporaryDirectory(prefix="gradlab-planted-") as folder:
        ended = _pytest(_copied(project, folder), sorted(tests), LONGEST)
    return (
        set(FAILED.findall(ended.stdout))
        if ended.returncode == 1
        else tests
        if ended.returncode
        else set()
    )


def _copied(project: pathlib.Path, folder: str) -> pathlib.Path:
    copy = pathlib.Path(folder)
    for name in COPIED:
        _copy(project / name, copy / name)
    return copy


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file or a folder, with the compiled modules; data, which no test changes, is
    linked."""
    if source.is_dir():
        of_file = _link if source.name == "data" else shutil.copy2
        shutil.copytree(
            source, target, copy_function=of_file, ignore=shutil.ignore_patterns("_build")
        )
    elif source.exists():
        shutil.copy2(source, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the temporary folder is on another disk
        shutil.copy2(source, target)


def _pytest(copy: pathlib.Path, arguments: list[str], longest: float) -> Any:
    """Runs tests in a folder, in a process that finds the folder's gradlab."""
    options = ["-q", "-p", "no:cacheprovider", "-rfE"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=longest,
    )


def _limit_memory() -> None:
    """Processes that are started from here get an error instead of more memory than `MOST`, where
    limits exist."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        resource.setrlimit(
            resource.RLIMIT_DATA, (MOST, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )


def report(project: pathlib.Path, bugs: list[Bug], jobs: int = 1) -> int:
    """Examines bugs, prints what is said about each as soon as it is known, and returns the exit
    status."""
    caught: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for bug, outcome in zip(bugs, pool.map(lambda bug: examine(project, bug), bugs)):
            print(f"{bug.name}: {outcome}", flush=True)
            if outcome.caught_by is not None:
                caught[bug.name] = outcome.caught_by
    failing = failing_without(project, set(caught.values())) if caught else set()
    for name, test in caught.items():
        if test in failing:
            print(f"{name}: NOT RUN: {test} fails without the bug, too")
    number = sum(test not in failing for test in caught.values())
    print(f"{number} of {len(bugs)} bugs caught")
    return int(number < len(bugs))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only bugs with one of these in their name or file"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many bugs to examine at once")
    parser.add_argument(
        "--project", type=pathlib.Path, default=ROOT, help="another checkout of the project"
    )
    chosen = parser.parse_args(arguments)
    bugs = [
        bug
        for bug in BUGS
        if not chosen.words or any(word in bug.name + bug.file for word in chosen.words)
    ]
    if not bugs:
        print(f"no bug has one of the words {' '.join(chosen.words)}", file=sys.stderr)
        return 2
    _limit_memory()
    return report(chosen.project.resolve(), bugs, chosen.jobs)


BUGS = (
    # ---- the loop over a window's micro-batches ----
    Bug(
        "sum_for_mean",
        "gradlab/window.py",
        "gradients = divide(sums.gradients, sums.weight / size, variables)",
        "gradients = divide(sums.gradients, None, variables)",
        ("tests/test_window.py",),
    ),
    Bug(
        "window_divided_by_k_with_a_ragged_tail",
        "gradlab/window.py",
        "gradients = divide(sums.gradients, sums.weight / size, variables)",
        "gradients = divide(sums.gradients, tf.cast(tf.size(sums.weights), dtype), variables)",
        ("tests/test_window.py",),
    ),
    Bug(
        "tail_dropped",
        "gradlab/_batches.py",
        "return -(-examples // microbatch_size)",
        "return examples // microbatch_size",
        ("tests/test_window.py",),
    ),
    Bug(
        "stale_accumulators",
        "gradlab/_gradient_sums.py",
        "        total.assign(tf.raw_ops",
        "        total.assign_add(tf.raw_ops",
        ("tests/test_window.py",),
    ),
    Bug(
        "clipped_per_microbatch",
        "gradlab/_gradient_sums.py",
        "added = total + tf.cast(gradient, total.dtype)\n",
        "added = total + tf.clip_by_norm(tf.cast(gradient, total.dtype), 1.0)\n",
        ("tests/test_window.py",),
    ),
    Bug(
        "sum_in_bfloat16",
        "gradlab/averaging.py",
        "return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype",
        "return tf.float32 if dtype == tf.float16 else dtype",
        ("tests/test_averaging.py", "tests/test_accumulator.py", "tests/test_window.py"),
    ),
    Bug(
        "accumulator_dtype_ignored",
        "gradlab/averaging.py",
        "return tf.as_dtype(chosen)",
        "return dtype",
        ("tests/fit/test_trainer.py",),
        "dtype",
    ),
    Bug(
        "weight_of_a_left_out_microbatch_counts",
        "gradlab/window.py",
        "leave_out = lambda: (carries, total, skipped + 1, state,",
        "leave_out = lambda: (carries, total + weight, skipped + 1, state,",
        ("tests/fit/test_trainer.py",),
        "finite or skip",
    ),
    Bug(
        "state_of_a_left_out_microbatch_counts",
        "gradlab/window.py",
        "leave_out = lambda: (carries, total, skipped + 1, state,",
        "leave_out = lambda: (carries, total, skipped + 1, result.state,",
        ("tests/fit/test_trainer.py",),
        "finite or skip",
    ),
    Bug(
        "rows_that_occur_twice_are_not_summed",
        "gradlab/_gradient_sums.py",
        "numbers, sums = sum_rows(values, indices)",
        "numbers, sums = indices, values",
        ("tests/fit/variables/test_sparse_tables.py",),
    ),
    Bug(
        "rows_of_the_last_microbatch_only",
        "gradlab/_gradient_sums.py",
        "        number = values.size()\n",
        "        number = 0\n",
        ("tests/fit/variables/test_sparse_tables.py",),
    ),
    Bug(
        "rows_of_other_replicas_are_left_out",
        "gradlab/fit/replicas.py",
        "sum_rows(values, context.all_gather(slices.indices, axis=0))",
        "sum_rows(slices.values, slices.indices)",
        ("tests/fit/variables/test_sparse_tables.py",),
    ),
    Bug(
        "never_several_in_flight",
        "gradlab/window.py",
        "parallel_iterations=loop.in_flight,",
        "parallel_iterations=1,",
        ("tests/fit/test_microbatched.py", "tests/fit/program/test_in_flight.py"),
        "under_way or in_flight",
    ),
    # ---- arithmetic on gradients, static graphs ----
    Bug(
        "none_left_out_of_the_average",
        "gradlab/averaging.py",
        "        total = float(len(gradients))",
        "        total = float(len(present))",
        ("tests/test_averaging.py",),
    ),
    Bug(
        "weights_of_sparse_gradients_ignored",
        "gradlab/averaging.py",
        "tf.cast(g.values, compute) * w for g, w in",
        "tf.cast(g.values, compute) for g, w in",
        ("tests/test_averaging.py",),
    ),
    Bug(
        "accumulator_mean_of_means",
        "gradlab/accumulator.py",
        "share = tf.cast(weight, total.dtype)",
        "share = tf.ones([], total.dtype)",
        ("tests/test_accumulator.py",),
    ),
    Bug(
        "accumulator_weight_never_zero_again",
        "gradlab/accumulator.py",
        "[variable.assign(tf.zeros_like(variable)) for variable in self.variables]",
        "[variable.assign(tf.zeros_like(variable)) for variable in self._sums]",
        ("tests/test_accumulator.py",),
    ),
    Bug(
        "static_graph_accumulates_without_weights",
        "gradlab/static_graph.py",
        (
            "                accum_ops = accumulator.add(\n"
            '                    [gradient for gradient, _ in fields["average"]], fields["weight"]\n'
            "                )"
        ),
        '                accum_ops = accumulator.add([gradient for gradient, _ in fields["average"]])',
        ("tests/test_static_graph.py", "tests/lab/experiments/test_methods.py"),
    ),
    Bug(
        "towers_drop_the_last_examples",
        "gradlab/towers.py",
        ("    start = examples * i // towers\n    end = examples * (i + 1) // towers"),
        ("    start = examples // towers * i\n    end = examples // towers * (i + 1)"),
        ("tests/test_static_graph.py", "tests/lab/experiments/test_methods.py"),
    ),
    # ---- processes, devices, texts ----
    Bug(
        "killed_worker_counts_as_success",
        "gradlab/cluster.py",
        "if process.returncode), None)",
        "if (process.returncode or 0) > 0), None)",
        ("tests/test_cluster.py::test_a_killed_worker_is_no_success",),
    ),
    Bug(
        "labels_not_sorted_with_their_texts",
        "gradlab/tokens.py",
        (
            "            _padded(tf.gather(part, order), splits, table, number)\n"
            "            if is_one\n"
            "            else tf.gather(part, order)"
        ),
        "            _padded(tf.gather(part, order), splits, table, number) if is_one else part",
        ("tests/test_tokens.py",),
    ),
    Bug(
        "microbatches_of_too_many_tokens",
        "gradlab/tokens.py",
        "stop = tf.minimum(alike, start + tokens // lengths[start])",
        "stop = tf.minimum(alike, start + 1 + tokens // lengths[start])",
        ("tests/test_tokens.py",),
    ),
    # ---- one update of a Keras model ----
    Bug(
        "regularization_per_microbatch",
        "gradlab/fit/program/update.py",
        "_with_regularization(gradients, variables, scale)\n",
        "_with_regularization(gradients, variables, scale * tf.cast(steps, dtype))\n",
        ("tests/fit/test_microbatched.py",),
    ),
    Bug(
        "window_norm_stays_scaled",
        "gradlab/fit/program/update.py",
        "tf.sqrt(squared_norm(gradients, dtype)) / scale",
        "tf.sqrt(squared_norm(gradients, dtype))",
        ("tests/fit/test_trainer.py",),
        "scale",
    ),
    Bug(
        "schedule_per_microbatch",
        "gradlab/fit/program/update.py",
        '        loss, term_losses = plan.loss(totals["losses"])\n',
        '        loss, term_losses = plan.loss(totals["losses"])\n'
        '        more = tf.cast(totals["steps"] - 1, self.optimizer.iterations.dtype)\n'
        "        self.optimizer.iterations.assign_add(more)\n",
        ("tests/fit/test_microbatched.py",),
    ),
    Bug(
        "update_of_a_window_without_a_finite_microbatch",
        "gradlab/fit/program/update.py",
        "        only_if = weight > 0 if self._loop.skip_nonfinite else None",
        "        only_if = None",
        ("tests/fit/test_trainer.py",),
        "finite or skip",
    ),
    Bug(
        "signal_of_one_microbatch_less",
        "gradlab/fit/metrics/epoch_metrics.py",
        "(others + 1) * big - small",
        "others * big - small",
        ("tests/fit/test_noise_scale_in_fit.py",),
    ),
    Bug(
        "losses_of_a_batch_count_what_was_left_out",
        "gradlab/fit/microbatched.py",
        "outcome, outcome.examples)",
        "outcome, examples_of(batch[0]))",
        ("tests/fit/test_skip_nonfinite.py",),
        "left",
    ),
    Bug(
        "skipped_of_all_epochs_together",
        "gradlab/fit/microbatched.py",
        "            metric.reset_state()\n",
        "            pass\n",
        ("tests/fit/test_skip_nonfinite.py",),
        "count",
    ),
    Bug(
        "divided_by_examples_that_were_left_out",
        "gradlab/fit/program/window_program.py",
        "and replicas == 1 and not self._loop.skip_nonfinite:",
        "and replicas == 1:",
        ("tests/fit/test_trainer.py",),
        "finite or skip",
    ),
    Bug(
        "tokens_counted_as_examples",
        "gradlab/fit/program/plan.py",
        (
            "        return (\n"
            "            examples\n"
            '            if self.divisor_kinds[0] == "examples"\n'
            "            else tf.cast(common_divisor(terms), examples.dtype)\n"
            "        )"
        ),
        "        return examples",
        ("tests/fit/test_microbatched.py",),
    ),
    Bug(
        "divisors_of_the_own_replica_only",
        "gradlab/fit/program/plan.py",
        "counts = sum_over_replicas(_count(traced.divisors, batch, microbatch_size, len(kinds)))",
        "counts = _count(traced.divisors, batch, microbatch_size, len(kinds))",
        ("tests/fit/test_trainer.py",),
        "two_devices or uneven or replica",
    ),
    Bug(
        "mask_not_counted",
        "gradlab/fit/losses/term.py",
        'return elements * tf.reduce_mean(mask), "own"',
        'return elements, "own"',
        ("tests/fit/test_microbatched.py",),
    ),
    Bug(
        "mask_and_weights_not_multiplied",
        "gradlab/fit/losses/term.py",
        "                weights = mask * weights\n",
        "                weights = weights * tf.ones_like(mask)\n",
        (
            "tests/fit/test_microbatched.py",
            "tests/fit/losses/test_every_loss.py",
            "tests/fit/program/test_precut.py",
        ),
    ),
    Bug(
        "gradients_summed_over_replicas_twice",
        "gradlab/fit/replicas.py",
        "        internals.take_gradients_as_summed(optimizer)\n",
        "        pass\n",
        ("tests/fit/test_trainer.py",),
        "two_devices or uneven or replica",
    ),
    Bug(
        "replicas_drop_the_last_examples",
        "gradlab/fit/replicas.py",
        "slice(examples * index // replicas, examples * (index + 1) // replicas)",
        "slice(examples // replicas * index, examples // replicas * (index + 1))",
        ("tests/fit/test_trainer.py",),
        "two_devices or uneven or replica",
    ),
    Bug(
        "assigned_once_for_each_microbatch",
        "gradlab/fit/variables/carried_variables.py",
        (
            "        carried = [\n"
            "            (v, value)\n"
            "            for i, (v, value) in enumerate(zip(self.carried, values))\n"
            "            if i not in self.once\n"
            "        ]"
        ),
        "        carried = [(v, value) for i, (v, value) in enumerate(zip(self.carried, values))]",
        ("tests/fit/test_model_as_in_keras.py",),
        "assign or spectral or random",
    ),
    Bug(
        "moving_variance_within_microbatches_only",
        "gradlab/fit/variables/batch_norm.py",
        "squares + tf.cast(more, mean.dtype) * variance + between",
        "squares + tf.cast(more, mean.dtype) * variance",
        ("tests/fit/test_microbatched.py",),
        "normalization or averages",
    ),
    Bug(
        "epoch_loss_is_a_mean_of_means",
        "gradlab/fit/metrics/window_metrics.py",
        "internals.loss_tracker(model).update_state(outcome.loss, sample_weight=examples)",
        "internals.loss_tracker(model).update_state(outcome.loss)",
        ("tests/fit/test_microbatched.py",),
        "history or metric or epoch",
    ),
    Bug(
        "metrics_count_each_microbatch",
        "gradlab/fit/metrics/window_metrics.py",
        (
            "            scope.state_mapping[key] = old + (new - old) * tf.cast(\n"
            "                of_loss if key in self.in_loss else share, old.dtype\n"
            "            )"
        ),
        "            scope.state_mapping[key] = new",
        ("tests/fit/test_model_as_in_keras.py",),
        "metric",
    ),
    Bug(
        "metrics_forget_the_padded_length",
        "gradlab/fit/metrics/padded_metrics.py",
        "variable.assign(old + variable.value * tf.cast(length, old.dtype))",
        "variable.assign(old + variable.value)",
        ("tests/fit/program/test_precut.py",),
    ),
    Bug(
        "evaluation_without_regularization",
        "gradlab/fit/evaluation.py",
        "        if self._objective.is_regularized:",
        "        if False:",
        ("tests/fit/test_microbatched.py", "tests/fit/losses/test_whole_batch.py"),
        "evaluat or history",
    ),
    # ---- losses over the whole batch, texts, losses of one's own ----
    Bug(
        "slopes_of_another_replica",
        "gradlab/fit/losses/whole_batch.py",
        "return slice(end - examples, end)",
        "return slice(0, examples)",
        ("tests/fit/losses/test_whole_batch.py",),
        "two_devices",
    ),
    Bug(
        "prediction_gradients_stay_scaled",
        "gradlab/fit/losses/whole_batch.py",
        "return tf.cast(prediction_gradients, dtype) / tf.cast(scale, dtype)",
        "return tf.cast(prediction_gradients, dtype)",
        ("tests/fit/losses/test_whole_batch.py",),
        "half_precision or scale",
    ),
    Bug(
        "loss_over_the_whole_batch_for_each_replica",
        "gradlab/fit/program/window_program.py",
        'results["losses"][i] = tf.cast(loss, dtype) / replicas, tf.ones([], dtype)',
        'results["losses"][i] = tf.cast(loss, dtype), tf.ones([], dtype)',
        ("tests/fit/losses/test_whole_batch.py",),
        "two_devices or trainer",
    ),
    Bug(
        "microbatches_keep_the_padding_of_the_window",
        "gradlab/_batches.py",
        "found.append(part if widths is None else part[:, : widths[step]])",
        "found.append(part)",
        ("tests/fit/program/test_precut.py",),
        "token",
    ),
    Bug(
        "sample_weight_lost_beside_weight_fn",
        "gradlab/fit/program/precut.py",
        "        weights *= tf.cast(sample_weight, weights.dtype)",
        "        weights *= tf.ones_like(weights)",
        ("tests/fit/program/test_precut.py", "tests/fit/test_trainer.py"),
        "weigh or token",
    ),
    Bug(
        "a_sum_taken_for_a_mean",
        "gradlab/fit/program/plan.py",
        'factor if reduction == "sum" else 1.0',
        "1.0",
        ("tests/fit/test_model_as_in_keras.py",),
        "layers_add or own_loss",
    ),
    Bug(
        "rows_of_a_mask_taken_for_rows_of_examples",
        "gradlab/fit/losses/term.py",
        "shape.rank > 0 and shape[0] == size",
        "shape.rank > 0",
        ("tests/fit/losses/test_unknown_losses.py",),
    ),
    Bug(
        "an_axis_over_the_batch_is_not_seen",
        "gradlab/fit/losses/term.py",
        "return not self._reduces_batch(y_pred)",
        "return True",
        ("tests/fit/losses/test_unknown_losses.py",),
    ),
    Bug(
        "a_subclass_is_taken_for_a_loss_of_keras",
        "gradlab/fit/keras_private.py",
        '        and getattr(type(loss), "call", None) is LossFunctionWrapper.call\n',
        "        and isinstance(loss, LossFunctionWrapper)\n",
        ("tests/fit/losses/test_unknown_losses.py",),
        "subclass",
    ),
    Bug(
        "a_new_loss_of_keras_is_taken_for_one_by_example",
        "gradlab/fit/keras_private.py",
        '        and getattr(function, "__name__", "") in BY_EXAMPLE\n',
        "",
        ("tests/fit/test_keras_private.py",),
    ),
    Bug(
        "what_layers_add_is_taken_for_a_mean",
        "gradlab/fit/program/tracing.py",
        '"mean" if internals.adds_means(one) else objective.said_of(one.name)',
        '"mean"',
        ("tests/fit/losses/test_unknown_losses.py",),
    ),
    Bug(
        "counters_count_micro_batches",
        "gradlab/fit/program/plan.py",
        "if not (only_counters and (one.of_data or one.draws)):",
        "if not only_counters:",
        ("tests/fit/variables/test_assigned_at_once.py",),
    ),
    Bug(
        "looks_at_the_model_leave_a_trace",
        "gradlab/fit/program/window_program.py",
        (
            "        plan.give_back(kept)\n"
            "        # A loss that is refused must not leave an update behind"
        ),
        "        # A loss that is refused must not leave an update behind",
        ("tests/fit/variables/test_assigned_at_once.py",),
    ),
    Bug(
        "a_loss_over_the_whole_batch_sees_what_the_first_pass_assigned",
        "gradlab/fit/program/window_program.py",
        "        plan.give_back(window.kept)\n        between",
        "        between",
        ("tests/fit/variables/test_assigned_at_once.py",),
    ),
    Bug(
        "a_model_is_always_told_that_it_trains",
        "gradlab/fit/keras_private.py",
        "return model(x, training=training) if model._call_has_training_arg else model(x)",
        "return model(x, training=training)",
        ("tests/fit/test_passed_over.py",),
        "without_training",
    ),
    Bug(
        "methods_of_the_instance_are_passed_over",
        "gradlab/fit/keras_private.py",
        'return not hasattr(own, "of_gradlab")',
        "return False",
        ("tests/fit/test_passed_over.py",),
        "instance",
    ),
    Bug(
        "an_optimizers_own_apply_gradients_is_passed_over",
        "gradlab/fit/replicas.py",
        "optimizer.apply_gradients(zip(gradients, variables))",
        "optimizer.apply(gradients, variables)",
        ("tests/fit/test_passed_over.py",),
        "optimizers",
    ),
    Bug(
        "a_replaced_optimizer_is_passed_over",
        "gradlab/fit/microbatched.py",
        "is_replaced = self._update.optimizer is not model.optimizer",
        "is_replaced = False",
        ("tests/fit/test_passed_over.py",),
        "optimizers",
    ),
    Bug(
        "regularization_differentiates_regularized_variables_only",
        "gradlab/fit/program/update.py",
        "for i, gradient in enumerate(own):",
        "for i, gradient in ((i, one) for i, one in enumerate(own) if variables[i].regularizer is "
        "not None):",
        ("tests/fit/test_passed_over.py",),
        "regularizer",
    ),
    Bug(
        "metrics_see_the_learning_rate_before_the_update",
        "gradlab/fit/metrics/window_metrics.py",
        "if reads and is_constant and internals",
        "if False and is_constant and internals",
        ("tests/fit/test_passed_over.py",),
        "metrics_that_read",
    ),
    Bug(
        "loss_checked_in_one_window_only",
        "gradlab/fit/losses/loss_check.py",
        "WINDOWS = 3",
        "WINDOWS = 1",
        ("tests/fit/losses/test_loss_check.py",),
    ),
    Bug(
        "reduction_never_checked",
        "gradlab/fit/losses/loss_check.py",
        "is_said = tf.abs(whole - said) <= margin",
        "is_said = tf.abs(whole - said) <= 1e9",
        ("tests/fit/test_value_and_gradients.py",),
        "check or refused or reduction or planted",
    ),
    Bug(
        "own_step_is_a_mean_of_means",
        "gradlab/fit/value_and_gradients.py",
        "share = tf.cast(examples, self.dtype) / tf.cast(self._examples, self.dtype)",
        "share = 1 / tf.cast(self._steps, self.dtype)",
        ("tests/fit/test_value_and_gradients.py",),
    ),
    # ---- input checks, datasets, checkpoints ----
    Bug(
        "stateful_layers_accepted",
        "gradlab/fit/program/input_checks.py",
        'if getattr(layer, "stateful", False) is True:',
        'if getattr(layer, "stateful", False) is None:',
        (
            "tests/fit/test_microbatched.py",
            "tests/fit/test_model_as_in_keras.py",
            "tests/fit/test_trainer.py",
        ),
        "refus",
    ),
    Bug(
        "negative_labels_accepted",
        "gradlab/fit/program/input_checks.py",
        "right = (labels >= 0) & (labels < classes)",
        "right = labels < classes",
        (
            "tests/fit/test_microbatched.py",
            "tests/fit/test_trainer.py",
            "tests/fit/test_model_as_in_keras.py",
        ),
        "refus",
    ),
    Bug(
        "examples_beyond_the_window_lost",
        "gradlab/fit/run/dataset_windows.py",
        "self._kept = _rows(window, size, _length(window))",
        "self._kept = None",
        ("tests/fit/test_trainer.py",),
        "interrupted or every_example or windows",
    ),
    Bug(
        "resumed_shuffles_as_the_first_epoch",
        "gradlab/fit/run/dataset_windows.py",
        (
            "            # A dataset that shuffles draws a new order each time it is iterated\n"
            "            for _ in range(epoch):"
        ),
        "            for _ in range(0):  # a dataset that shuffles draws a new order each time it is iterated",
        ("tests/fit/test_trainer.py",),
        "interrupted or resume or checkpoint",
    ),
    Bug(
        "optimizer_left_out_of_checkpoints",
        "gradlab/fit/trainer.py",
        "            [*self.model.variables, *self.optimizer.variables],\n",
        "            [*self.model.variables, self.optimizer.iterations],\n",
        ("tests/fit/test_trainer.py",),
        "interrupted or resume or checkpoint",
    ),
    Bug(
        "position_left_out_of_checkpoints",
        "gradlab/fit/trainer.py",
        "Position(done, windows.epoch, windows.examples)",
        "Position(done, windows.epoch, 0)",
        ("tests/fit/test_trainer.py",),
        "interrupted or resume or checkpoint",
    ),
    Bug(
        "iterator_of_another_type_as_before",
        "gradlab/fit/program/compiled_step.py",
        "if self._concrete is None or iterator.element_spec != self._specs:",
        "if self._concrete is None:",
        ("tests/fit/program/test_compiled_step.py",),
    ),
    # ---- automatic sizes, memory ----
    Bug(
        "window_applied_twice_after_memory_ran_out",
        "gradlab/fit/sizes/auto_size.py",
        "if not can_repeat or self._seen_started != started:",
        "if not can_repeat:",
        ("tests/fit/sizes/test_auto_size.py",),
    ),
    Bug(
        "another_batch_for_another_attempt",
        "gradlab/fit/sizes/auto_steps.py",
        "return self._size.run(lambda: self._step_for(data, batch)(batch))",
        "return self._size.run(lambda: self._step_for(data, batch)(_next(data)))",
        ("tests/fit/sizes/test_auto_size.py",),
    ),
    Bug(
        "a_short_batch_counts_as_a_whole_one_in_the_logs",
        "gradlab/fit/metrics/window_metrics.py",
        "update_state(outcome.loss, sample_weight=examples)",
        "update_state(outcome.loss)",
        ("tests/fit/test_callbacks.py",),
    ),
    Bug(
        "a_margin_of_a_cpu_on_a_gpu",
        "gradlab/fit/sizes/memory_room.py",
        "        return 4.2",
        "        return 1.25",
        ("tests/benchmarks/test_benchmarks.py",),
    ),
    Bug(
        "a_gpu_does_not_round_products",
        "gradlab/fit/losses/loss_check.py",
        "return 1e-2 if is_tf32 else",
        "return",
        ("tests/fit/losses/test_loss_check.py",),
    ),
    Bug(
        "a_verdict_that_xla_cannot_read",
        "gradlab/fit/losses/loss_check.py",
        "tf.Variable(0, trainable=False, dtype=tf.int64)",
        "tf.Variable(0, trainable=False)",
        ("tests/fit/losses/test_loss_check.py",),
    ),
    Bug(
        "a_divided_gpu_is_one",
        "gradlab/runtime.py",
        "1 if parts is None else len(parts) for parts",
        "1 for parts",
        ("tests/test_runtime.py",),
    ),
    Bug(
        "sizes_chosen_without_a_margin",
        "gradlab/fit/sizes/memory_room.py",
        "return times_planned() * self._replicas * total",
        "return self._replicas * total",
        ("tests/fit/sizes/test_auto_size.py",),
    ),
    Bug(
        "plan_of_one_in_flight",
        "gradlab/fit/sizes/memory_plan.py",
        "return int(self.in_flight * self.copies * (peak - gradients))",
        "return int(self.copies * (peak - gradients))",
        ("tests/fit/sizes/test_memory_plan.py",),
    ),
    Bug(
        "tensors_die_before_their_last_use",
        "gradlab/fit/sizes/liveness.py",
        "lives[name] = i, max(i, last.get(name, i))",
        "lives[name] = i, i",
        ("tests/fit/sizes/test_memory_plan.py",),
    ),
    # ---- measurements, the audit ----
    Bug(
        "signal_with_its_noise",
        "gradlab/measure/noise_scale.py",
        "(count * big - small) / (count - 1), np.nan)",
        "big, np.nan)",
        ("tests/measure/test_noise_scale.py",),
    ),
    Bug(
        "running_mean_drawn_to_zero",
        "gradlab/measure/noise.py",
        "means[i] = self._mean / self._weight",
        "means[i] = self._mean",
        ("tests/measure/test_noise.py",),
    ),
    Bug(
        "audit_takes_wrong_for_right",
        "gradlab/auditing/matching.py",
        "TOLERANCE = 2e-4  #",
        "TOLERANCE = 2e-1  #",
        ("tests/auditing/test_audit.py",),
    ),
    Bug(
        "audit_reference_of_embeddings",
        "gradlab/auditing/models.py",
        'slope @ weights["kernel"].T / x.shape[1])',
        'slope @ weights["kernel"].T)',
        ("tests/auditing/test_audit.py", "tests/auditing/test_adapters.py"),
    ),
    Bug(
        "audit_reference_of_pairs",
        "gradlab/auditing/models.py",
        "scale * slope.T @ points_x",
        "scale * slope @ points_x",
        ("tests/auditing/test_audit.py",),
    ),
    Bug(
        "audit_takes_other_masks_for_the_same",
        "gradlab/auditing/masks.py",
        "slopes.through(x * second[0], y * second[1])",
        "slopes.through(x * second[0], y * first[1])",
        ("tests/auditing/test_audit.py",),
    ),
    # ---- experiments ----
    Bug(
        "microbatches_draw_the_masks_of_others",
        "gradlab/lab/experiments/training.py",
        "                made += len(record.losses)",
        "                made += 1",
        ("tests/lab/experiments/test_training.py",),
    ),
    Bug(
        "rest_of_a_budget_of_examples_dropped",
        "gradlab/lab/experiments/training.py",
        "            if not updates or not examples:",
        "            if not updates or examples < experiment.effective_batch:",
        ("tests/lab/experiments/test_training.py",),
    ),
    Bug(
        "sums_of_the_window_before",
        "gradlab/lab/experiments/methods/session_graphs.py",
        "        self._session.run(self._graph.zero_ops)\n",
        "",
        ("tests/lab/experiments/test_methods.py",),
    ),
    Bug(
        "optimizer_keeps_its_state_in_the_next_training",
        "gradlab/lab/experiments/methods/compiled.py",
        "            variable.assign(np.zeros(variable.shape))",
        "            variable.assign(variable)",
        ("tests/lab/experiments/test_methods.py",),
    ),
    Bug(
        "together_divides_by_seeds",
        "gradlab/lab/experiments/batched_seeds.py",
        "examples = tf.cast(tf.shape(losses)[1], tf.float32)",
        "examples = tf.cast(tf.shape(losses)[0], tf.float32)",
        ("tests/lab/experiments/test_batched_seeds.py",),
    ),
    Bug(
        "dropped_units_have_a_gradient",
        "gradlab/lab/experiments/models.py",
        "lambda upstream: upstream * mask",
        "lambda upstream: upstream",
        ("tests/lab/experiments/test_models.py",),
    ),
    Bug(
        "window_loss_is_a_mean_of_means",
        "gradlab/lab/experiments/result.py",
        (
            "            return np.where(self.weights > 0, self.losses * self.weights, 0).sum(\n"
            "                axis=2\n"
            "            ) / self.weights.sum(axis=2)"
        ),
        (
            "            return np.where(self.weights > 0, self.losses, 0).sum(axis=2) / (self.weights > 0).sum(\n"
            "                axis=2\n"
            "            )"
        ),
        (
            "tests/lab/experiments/test_result.py",
            "tests/lab/widget/test_chart_rows.py",
            "tests/lab/figures/test_plots.py",
        ),
    ),
    Bug(
        "diverged_update_counts_as_sound",
        "gradlab/lab/experiments/result.py",
        'return self.updates - (np.array(self.endings) == "diverged")',
        "return self.updates",
        ("tests/lab/experiments/test_result.py", "tests/lab/figures/test_plots.py"),
        "diverge",
    ),
    Bug(
        "cache_of_another_version",
        "gradlab/lab/experiments/jobs/cache.py",
        (
            "        key = [\n"
            "            FORMAT,\n"
            "            TRAINING,\n"
            "            gradlab.__version__,\n"
            '            version("tensorflow"),\n'
            "            environment.device(),\n"
            "            job.to_json(),\n"
            "        ]"
        ),
        '        key = [FORMAT, TRAINING, version("tensorflow"), environment.device(), job.to_json()]',
        ("tests/lab/experiments/jobs/test_sweep.py",),
    ),
    Bug(
        "sweep_forgets_what_is_finished",
        "gradlab/lab/experiments/jobs/sweep.py",
        "                kept.write(outcome)\n",
        "",
        ("tests/lab/experiments/jobs/test_sweep.py",),
    ),
    Bug(
        "sweep_in_the_order_of_finishing",
        "gradlab/lab/experiments/jobs/sweep.py",
        "done = {job: result for job, result in results.items() if result is not None}",
        "done = dict(zip(results, reversed([r for r in results.values() if r is not None])))",
        ("tests/lab/experiments/jobs/test_sweep.py",),
    ),
    Bug(
        "full_gradient_without_the_last_block",
        "gradlab/lab/experiments/gradient_probe.py",
        "rows = np.arange(start, min(start + block, examples))",
        "rows = np.arange(start, min(start + block, examples - block))",
        ("tests/lab/experiments/test_gradient_probe.py",),
    ),
    # ---- figures, the lab, exercises ----
    Bug(
        "deviation_over_seeds_divided_by_n",
        "gradlab/lab/figures/curves.py",
        "np.sqrt(squares / np.maximum(count - 1, 1))",
        "np.sqrt(squares / np.maximum(count, 1))",
        ("tests/lab/figures/test_plots.py", "tests/lab/widget/test_chart_rows.py"),
    ),
    Bug(
        "noise_scale_of_seeds_is_a_mean_of_ratios",
        "gradlab/lab/figures/plots.py",
        "along = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)",
        "along = np.mean([scale.along[:length] for scale in scales], axis=0)",
        ("tests/lab/figures/test_plots.py",),
    ),
    Bug(
        "chart_rows_count_examples_from_zero_again",
        "gradlab/lab/widget/chart_rows.py",
        "rows[:, _EXAMPLES] = examples + new.examples[0]",
        "rows[:, _EXAMPLES] = new.examples[0]",
        ("tests/lab/widget/test_chart_rows.py",),
    ),
    Bug(
        "run_called_over_before_it_is_drawn",
        "gradlab/lab/widget/page_messages.py",
        '"again": None if over or run is None else _pause(run),',
        '"again": None if run is None or run.progress >= 1 else _pause(run),',
        ("tests/lab/widget/test_page_messages.py",),
    ),
    Bug(
        "one_stage_fewer_ahead_in_the_pipeline",
        "gradlab/lab/widget/course/schedules.py",
        "min(devices - stage, microbatches)",
        "min(devices - stage + 1, microbatches)",
        ("tests/lab/widget/course/test_timeline.py",),
    ),
    Bug(
        "examples_budget_read_as_updates",
        "gradlab/lab/widget/controls.py",
        "values |= dict.fromkeys(BUDGETS) | {kind:",
        'values |= dict.fromkeys(BUDGETS) | {"updates":',
        ("tests/lab/widget/test_accumulation_lab.py",),
    ),
    Bug(
        "toy_floor_without_k",
        "gradlab/lab/figures/toy.py",
        "(2 * accumulation_steps * (2 - learning_rate * CURVATURE))",
        "(2 * accumulation_steps * 2)",
        ("tests/lab/figures/test_toy.py",),
    ),
    Bug(
        "zero_divides_one_stage_early",
        "gradlab/lab/widget/course/memory_count.py",
        "        copy / training.devices if training.zero_stage >= stage else copy for stage in (0, 1, 2, 3)",
        "        copy / training.devices if training.zero_stage > stage else copy for stage in (0, 1, 2, 3)",
        ("tests/lab/widget/course/test_memory_bars.py",),
    ),
    Bug(
        "the_last_chunk_of_a_vocabulary_is_left_out",
        "gradlab/chunked.py",
        "        self._blocks = -(-self.classes // self._chunk)",
        "        self._blocks = max(1, self.classes // self._chunk)",
        ("tests/test_chunked.py",),
    ),
    Bug(
        "columns_of_two_chunks_count_twice",
        "gradlab/chunked.py",
        "            is_new = first + tf.range(size) >= number * size",
        "            is_new = first + tf.range(size) >= 0",
        ("tests/test_chunked.py",),
    ),
    Bug(
        "label_smoothing_is_rounded_to_float32",
        "gradlab/chunked.py",
        "    smoothing = tf.constant(label_smoothing, table.dtype)",
        "    smoothing = tf.cast(label_smoothing, table.dtype)",
        ("tests/test_chunked.py",),
    ),
    Bug(
        "a_label_that_is_no_class_counts_as_0",
        "gradlab/chunked.py",
        '            begin = (float("nan"), *rule.begin)',
        "            begin = (0.0, *rule.begin)",
        ("tests/test_chunked.py",),
    ),
    Bug(
        "a_second_derivative_is_wrong_in_silence",
        "gradlab/chunked.py",
        "tf.raw_ops.PreventGradient(input=each, message=ONCE)",
        "each",
        ("tests/test_chunked.py",),
    ),
    Bug(
        "a_lab_waits_for_matplotlib",
        "gradlab/lab/widget/layout.py",
        "from gradlab.lab.figures.shown import VIEWS, X_AXES",
        "from gradlab.lab.figures.lab_figure import VIEWS\nfrom gradlab.lab.figures.shown import X_AXES",
        ("tests/lab/widget/test_lab_controls.py",),
    ),
    Bug(
        "an_ignored_class_counts_in_the_mean",
        "gradlab/fit/losses/chunked_head.py",
        "        internals.set_mask(losses, counts)",
        "        pass",
        ("tests/fit/losses/test_chunked_head.py",),
    ),
    Bug(
        "metrics_take_hidden_states_for_logits",
        "gradlab/fit/microbatched.py",
        "        check_metrics(loss, internals.compiled_metrics(model))",
        "        pass",
        ("tests/fit/losses/test_chunked_head.py",),
    ),
    Bug(
        "a_saved_page_keeps_an_accumulator_for_one_micro_batch",
        "gradlab/lab/widget/course/memory_bars.js",
        "t.accumulation_steps > 1 ? shared[2] : 0",
        "shared[2]",
        ("tests/lab/widget/course/test_saved_widgets.py",),
    ),
    Bug(
        "a_saved_pipeline_starts_one_forward_pass_less",
        "gradlab/lab/widget/course/timeline.js",
        "Math.min(devices - stage, microbatches)",
        "Math.min(devices - stage - 1, microbatches)",
        ("tests/lab/widget/course/test_saved_widgets.py",),
    ),
    Bug(
        "a_saved_page_ignores_the_model",
        "gradlab/lab/widget/course/memory_bars.js",
        "values: training };",
        "values: {} };",
        ("tests/browser/test_saved_page.py",),
    ),
    Bug(
        "a_step_that_is_always_green",
        "gradlab/lab/exercises/build_your_own.py",
        "    if update is None:",
        "    if True:",
        ("tests/lab/test_build_your_own.py",),
    ),
    Bug(
        "a_decision_beyond_the_noise_scale",
        "gradlab/lab/widget/course/decide.py",
        "k = min(wanted, most)",
        "k = wanted",
        ("tests/lab/widget/course/test_decide.py",),
    ),
    Bug(
        "a_half_life_in_updates",
        "gradlab/lab/widget/course/decide.py",
        "kept = known.beta_2 ** (batch / known.batch)",
        "kept = known.beta_2",
        ("tests/lab/widget/course/test_decide.py",),
    ),
    Bug(
        "the_film_of_memory_has_one_accumulator_too_many",
        "gradlab/lab/widget/course/memory_film.py",
        "(plan.accumulators if k > 1 else 0)",
        "plan.accumulators",
        ("tests/lab/widget/course/test_memory_film.py",),
    ),
    Bug(
        "the_film_of_memory_skips_peaks",
        "gradlab/lab/widget/course/memory_film.py",
        "a + int(np.argmax(total[a:e]))",
        "a",
        ("tests/lab/widget/course/test_memory_film.py",),
    ),
    Bug(
        "a_film_shows_a_variable_before_it_is_written",
        "gradlab/lab/widget/course/graph_runs.py",
        "variables, steps = before, []",
        "variables, steps = after, []",
        ("tests/lab/widget/course/test_graph_film.py",),
    ),
    Bug(
        "what_is_fed_runs_what_it_replaces",
        "gradlab/lab/widget/course/graph_runs.py",
        "new += [tensor.op for tensor in op.inputs if tensor.name not in self._fed]",
        "new += [tensor.op for tensor in op.inputs]",
        ("tests/lab/widget/course/test_graph_film.py",),
    ),
    Bug(
        "a_film_lights_a_box_up_before_what_it_needs",
        "gradlab/lab/widget/course/graph_layout.py",
        "found[name] = 1 + max((found[other] for other in before[name]), default=-1)",
        "found[name] = 1 + min((found[other] for other in before[name]), default=-1)",
        ("tests/lab/widget/course/test_graph_film.py",),
    ),
    Bug(
        "a_half_life_that_grows_with_the_batch",
        "gradlab/lab/reproduce/half_life.py",
        "BETA_2 ** (batch / REFERENCE)",
        "BETA_2 ** (REFERENCE / batch)",
        ("tests/lab/reproduce/test_half_life.py",),
    ),
    Bug(
        "a_place_sees_the_one_after_it",
        "gradlab/lab/reproduce/half_life.py",
        "past = np.tril(np.ones([LENGTH, LENGTH], bool))",
        "past = np.tril(np.ones([LENGTH, LENGTH], bool), 1)",
        ("tests/lab/reproduce/test_half_life.py",),
    ),
    Bug(
        "any_k_is_right_for_a_recipe",
        "gradlab/lab/exercises/language_models.py",
        "require_close(got, 36,",
        "require_close(got, got,",
        ("tests/lab/test_language_models.py",),
    ),
    Bug(
        "game_shows_another_bug",
        "gradlab/lab/widget/course/bugs.py",
        'KNOWN["divided_by_k"].variants[1],',
        'KNOWN["divided_by_k"].variants[0],',
        ("tests/lab/widget/course/test_bug_lab.py",),
    ),
    Bug(
        "leaderboard_keeps_the_worst",
        "gradlab/lab/exercises/leaderboard.py",
        "for each in rows[:KEPT])",
        "for each in rows[-KEPT:])",
        ("tests/lab/test_leaderboard.py",),
    ),
    Bug(
        "growth_judged_by_the_mean_of_seeds",
        "gradlab/lab/reproduce/noise_scale.py",
        "bool((growth >= GROWTH).all()),",
        "bool((growth >= GROWTH).any()),",
        ("tests/lab/reproduce/test_study.py",),
    ),
    Bug(
        "classroom_forgets_the_seeds",
        "gradlab/lab/classroom/limits.py",
        "if seeds * number > most:",
        "if number > most:",
        ("tests/lab/classroom/test_limits.py",),
    ),
    Bug(
        "graph_hides_what_a_constant_waits_for",
        "gradlab/drawing/graph_boxes.py",
        (
            "        for before in itertools.chain(\n"
            "            op.control_inputs, *(constant.control_inputs for constant in constants)\n"
            "        ):"
        ),
        "        for before in op.control_inputs:",
        ("tests/drawing/test_graph_view.py",),
    ),
    Bug(
        "audit_with_bugs_ends_with_success",
        "gradlab/__main__.py",
        "return 0 if found.clean else 1",
        "return 0",
        ("tests/auditing/test_report.py", "tests/project/test_command_line.py"),
    ),
    Bug(
        "rows_of_a_sparse_gradient_not_summed_in_its_norm",
        "gradlab/averaging.py",
        "            _, gradient = sum_rows(gradient.values, gradient.indices)",
        "            gradient = gradient.values",
        ("tests/test_averaging.py",),
    ),
    Bug(
        "towers_drop_the_same_units",
        "gradlab/towers.py",
        "seed = inputs.dropout_seed + [0, i]",
        "seed = inputs.dropout_seed + [0, 0]",
        ("tests/lab/experiments/test_methods.py",),
    ),
    Bug(
        "adaptive_clipping_forgets_the_loss_scale",
        "gradlab/fit/clipping.py",
        "tf.constant(clipping, gradient.dtype) * tf.cast(scale, gradient.dtype)",
        "tf.constant(clipping, gradient.dtype)",
        ("tests/fit/test_clipping.py",),
        "scale",
    ),
    Bug(
        "regularization_forgets_the_loss_scale",
        "gradlab/fit/program/update.py",
        "_with_regularization(gradients, variables, scale)\n",
        "_with_regularization(gradients, variables, tf.ones_like(scale))\n",
        ("tests/fit/test_trainer.py",),
        "scale",
    ),
    Bug(
        "validation_images_are_trained_with",
        "gradlab/lab/experiments/datasets.py",
        "        train_images[:-VALIDATION],\n        train_labels[:-VALIDATION],\n",
        "        train_images[VALIDATION:],\n        train_labels[VALIDATION:],\n",
        ("tests/lab/experiments/test_datasets.py",),
    ),
    Bug(
        "sweep_file_overrides_the_other_way_round",
        "gradlab/lab/experiments/jobs/sweep_file.py",
        "Experiment.from_fields(shared | run | combination)",
        "Experiment.from_fields(combination | run | shared)",
        ("tests/lab/experiments/jobs/test_sweep_file.py",),
    ),
    Bug(
        "page_misses_new_rows",
        "gradlab/lab/widget/chart_rows.py",
        "        return min(",
        "        return max(",
        ("tests/lab/widget/test_chart_rows.py", "tests/lab/widget/test_page_messages.py"),
    ),
    # ---- batches that grow ----
    Bug(
        "ramp_begins_one_update_late",
        "gradlab/batch_ramp.py",
        'side="right"',
        'side="left"',
        ("tests/test_batch_ramp.py",),
    ),
    Bug(
        "ramp_reads_the_same_examples_again",
        "gradlab/batch_ramp.py",
        "examples.skip(passed)",
        "examples.skip(0 * passed)",
        ("tests/test_batch_ramp.py",),
    ),
    Bug(
        "ramp_reads_the_optimizer_too_early",
        "gradlab/batch_ramp.py",
        "        def reached() -> int:\n            return 0 if",
        "        known = 0 if optimizer is None else int(tf.convert_to_tensor(optimizer.iterations.value))\n\n"
        "        def reached() -> int:\n            return known if optimizer else 0 if",
        ("tests/test_batch_ramp.py",),
    ),
    Bug(
        "rate_grows_one_update_late",
        "gradlab/batch_ramp.py",
        "[update - 1 for update in later]",
        "[*later]",
        ("tests/test_batch_ramp.py",),
    ),
    # ---- the training in a page without a kernel ----
    Bug(
        "page_applies_the_sum",
        "gradlab/lab/widget/offline/training.js",
        "const mean = window[i] / examples;",
        "const mean = window[i];",
        ("tests/browser/test_offline_training.py",),
    ),
    Bug(
        "page_divides_by_k_times_b",
        "gradlab/lab/widget/offline/training.js",
        "this.divide(examples.length)",
        "this.divide(b * losses.length)",
        ("tests/browser/test_offline_training.py",),
    ),
    Bug(
        "page_drops_the_tail",
        "gradlab/lab/widget/offline/training.js",
        "first < examples.length; first += b",
        "first + b <= examples.length; first += b",
        ("tests/browser/test_offline_training.py",),
    ),
    Bug(
        "page_compares_windows_by_first_differences",
        "gradlab/lab/widget/offline/run_rows.js",
        "means[i] - 2 * means[i - 1] + means[i - 2]) ** 2 / 6",
        "means[i] - means[i - 1]) ** 2 / 2",
        ("tests/browser/test_offline_training.py",),
    ),
    Bug(
        "memory_bar_holds_the_whole_batch",
        "gradlab/lab/widget/layout.py",
        '("held", size)',
        '("held", batch)',
        ("tests/lab/widget/test_lab_controls.py",),
    ),
    Bug(
        "reset_leaves_the_lab_idle",
        "gradlab/lab/widget/lab_controller.py",
        "        self._page_messages.tell()\n        if self.layout.rerun.value:\n            self.start()\n",
        "        self._page_messages.tell()\n",
        ("tests/lab/widget/test_accumulation_lab.py",),
    ),
    Bug(
        "listing_of_a_bug_is_another_bug",
        "gradlab/lab/widget/course/bug_code.py",
        "mean = clip(total / count * len(window) / k)",
        "mean = clip(total / k)",
        ("tests/lab/widget/course/test_bug_lab.py",),
    ),
    Bug(
        "diagram_forgets_what_a_loop_writes",
        "gradlab/drawing/graph_boxes.py",
        "number for number, tensor in enumerate(inside.inputs) if _key(tensor) in changed",
        "number for number, tensor in enumerate(inside.inputs) if not changed",
        ("tests/drawing/test_graph_view.py",),
    ),
    Bug(
        "lost_trainer_of_a_busy_machine_stays_lost",
        "gradlab/lab/classroom/local_cluster.py",
        "with dask.config.set(patience), cluster:",
        "with cluster:",
        ("tests/lab/classroom/test_local_cluster.py",),
    ),
)


if __name__ == "__main__":
    sys.exit(main())

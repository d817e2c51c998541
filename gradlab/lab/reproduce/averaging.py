"""Reproduction of a published table: does the accuracy depend on how a batch of 100 is divided into
micro-batches?

Source: G. Chlebus, "Gradient averaging with TensorFlow", gchlebus.github.io, and its code. The
published score of a run is the best of the test accuracies that were measured after every 100
micro-batches. These are 10 measurements for 1x100 and 200 for 20x5, and the best of more
measurements is higher by chance alone. Each run is therefore scored by three protocols: as
published, as the best of equally many measurements ("equal looks"), and by its last measurement.

The check was decided before the thirty seeds of each row were complete; docs/evidence.md says which
were known. Scored as published, the four means of a method are compared with the published means
together, by the sum of their squared distances in standard errors. If all four agree, this sum
follows roughly a chi-squared distribution with four degrees of freedom, which exceeds 13.28 in one
case out of a hundred. Above that, the means are said to differ.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import plots
from gradlab.lab.reproduce.study import csv_of, json_of, write_files

# (k, b): mean and standard deviation of ten runs, in percent
PUBLISHED = {
    (1, 100): (95.0, 0.172),
    (5, 20): (94.9, 0.325),
    (10, 10): (95.1, 0.36),
    (20, 5): (95.2, 0.303),
}
PUBLISHED_RUNS = 10
SEEDS = 30  # runs of each row here
LIMIT = 13.28  # 99 % of a chi-squared distribution with four degrees of freedom
# The method of the publication, and gradlab's fastest one
METHODS = ("placeholders", "microbatched")
PROTOCOLS = ("as published", "equal looks", "last value")
# Measurements of the accuracy in a run of this many updates, for "equal looks"
LOOKS = {1000: 10, 20: 4}


@dataclasses.dataclass(frozen=True)
class Averaging:
    """The outcome of the experiments: what `gradlab reproduce averaging` prints and writes."""

    results: Sequence[Result]

    def summary(self) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        return table(self.results)

    def text(self) -> str:
        """Format the table and the conclusion for a terminal."""
        return text(self.summary())

    def write(self, folder: str | os.PathLike) -> list[pathlib.Path]:
        """Write the files of `write`, and return their paths."""
        return write(self.results, folder)


def experiments(quick: bool = False) -> list[Experiment]:
    """Return the published experiments for both methods.

    Args:
        quick: whether to return a small version instead, with 20 updates in place of 1000 and two
            seeds.
    """
    updates, seeds = (20, 2) if quick else (1000, SEEDS)
    return [
        Experiment(
            model="lenet",
            method=method,
            microbatch_size=b,
            accumulation_steps=k,
            updates=updates,
            seeds=seeds,
            eval_every=math.gcd(100 // k, updates // LOOKS[updates]),
        )
        for method in METHODS
        for k, b in PUBLISHED
    ]


def scores(result: Result) -> dict[str, np.ndarray]:
    """Return each seed's accuracy in percent, shape (seed,), for each protocol."""
    number = np.arange(1, result.accuracies.shape[1] + 1)

    def best(every: int) -> np.ndarray:
        measured = result.accuracies[:, (number % every == 0) | (number == number[-1])]
        return 100 * np.fmax.reduce(measured, axis=1)

    every = _updates_between(result.experiment)
    return {
        "as published": best(every["as published"]),
        "equal looks": best(every["equal looks"]),
        "last value": 100 * result.last_accuracies,
    }


def looks(experiment: Experiment, protocol: str) -> int:
    """Return how often a protocol measures the test accuracy in one run."""
    every = _updates_between(experiment)
    return math.ceil(every["last value"] / every[protocol])


def _updates_between(experiment: Experiment) -> dict[str, int]:
    """The number of updates between two measurements of the test accuracy, for each protocol."""
    updates = experiment.updates
    assert updates is not None  # `experiments` makes only experiments with this budget
    return {
        "as published": 100 // experiment.accumulation_steps,
        "equal looks": updates // LOOKS[updates],
        "last value": updates,
    }


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the rows of the table: one for each result and protocol, with accuracies in percent.

    "standard_errors" is the difference from the published mean, divided by the standard error of
    this difference. Two samples from the same distribution differ by more than 2 standard errors in
    about one case in twenty.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        e = result.experiment
        published, published_std = PUBLISHED[e.accumulation_steps, e.microbatch_size]
        for protocol, values in scores(result).items():
            mean = float(values.mean())
            std = float(values.std(ddof=1))
            error = math.sqrt(std**2 / len(values) + published_std**2 / PUBLISHED_RUNS)
            rows.append(
                {
                    "method": e.method,
                    "accumulation_steps": e.accumulation_steps,
                    "microbatch_size": e.microbatch_size,
                    "protocol": protocol,
                    "looks": looks(e, protocol),
                    "seeds": len(values),
                    "updates": e.updates,
                    "mean": round(mean, 3),
                    "std": round(std, 3),
                    "published_mean": published,
                    "published_std": published_std,
                    "standard_errors": round((mean - published) / error, 2),
                }
            )
    return rows


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the table and the conclusion for a terminal."""
    first = rows[0]
    found = conclusion(rows)
    # What cannot be compared says so before its numbers stand beside the published ones.
    before, after = ([], ["", found]) if _is_whole(rows) else ([found, ""], [])
    lines = [
        *before,
        f"Test accuracy in %, mean ± standard deviation of {first['seeds']} seeds, "
        f"{first['updates']} updates of 100.",
        "In brackets: how often the test accuracy is measured in a run. The best measurement "
        "counts.",
    ]
    for method in METHODS:
        lines += [
            "",
            f"{method:14}{'published':>15}" + "".join(f"{protocol:>23}" for protocol in PROTOCOLS),
        ]
        for k, b in PUBLISHED:
            cells = [
                row for row in rows if (row["method"], row["accumulation_steps"]) == (method, k)
            ]
            line = f"{k:>6} x {b:<5}{cells[0]['published_mean']:>9.1f} ± {cells[0]['published_std']:.2f}"
            lines.append(line + "".join(f"{_cell(row):>23}" for row in cells))
    return "\n".join([*lines, *after])


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe what the rows show, with their numbers."""
    if not _is_whole(rows):
        return (
            f"A small version, with {rows[0]['updates']} updates and {rows[0]['seeds']} seeds in "
            f"place of 1000 and {SEEDS}: its accuracies cannot be compared with the published ones."
        )
    sums = {method: distance(rows, method) for method in METHODS}
    agree = "agree with" if max(sums.values()) <= LIMIT else "differ from"
    found = " and ".join(f"{value:.1f} ({method})" for method, value in sums.items())
    rise = {}
    error = 0.0
    above = 0.0
    for protocol in PROTOCOLS:
        first, last = (_mean_over_methods(rows, protocol, k) for k in (1, 20))
        rise[protocol] = last["mean"] - first["mean"]
        error = max(error, math.sqrt((first["std"] ** 2 + last["std"] ** 2) / rows[0]["seeds"]))
        above = last["mean"] if protocol == "as published" else above
    above -= _mean_over_methods(rows, "last value", 20)["mean"]
    change = (
        "no change beyond chance"
        if abs(rise["last value"]) <= 2 * error
        else "a change beyond chance"
    )
    return (
        f"As published, the means {agree} the published ones: the sum of their squared distances "
        f"is {found}, with a limit of {LIMIT}. From 1x100 to 20x5 the score changes by "
        f"{rise['as published']:+.2f} as published, by {rise['equal looks']:+.2f} with equally "
        f"many looks, and by {rise['last value']:+.2f} in the last value, each ± {error:.2f} "
        f"(standard error): {change}. The best of 200 looks at 20x5 is {above:.2f} above the last "
        "one: that much comes from looking more often."
    )


def _is_whole(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows are those of the published experiments, not of the small version."""
    return rows[0]["updates"] == 1000


def distance(rows: Sequence[Mapping[str, Any]], method: str) -> float:
    """The sum over a method's rows, scored as published, of the squared distance in standard
    errors."""
    chosen = [row for row in rows if (row["method"], row["protocol"]) == (method, "as published")]
    return math.fsum(row["standard_errors"] ** 2 for row in chosen)


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the table as dots with intervals of one standard deviation."""
    series: dict[str, Sequence[tuple[float, float]]] = {"published": list(PUBLISHED.values())}
    for method in METHODS:
        for protocol in ("as published", "last value"):
            chosen = [
                row for row in rows if row["method"] == method and row["protocol"] == protocol
            ]
            series[f"{method}, {protocol}"] = [(row["mean"], row["std"]) for row in chosen]
    names = [f"{k} x {b}" for k, b in PUBLISHED]
    return plots.accuracy_table(names, series, "Effective batch 100, cut into k x b")


def write(results: Sequence[Result], folder: str | os.PathLike) -> list[pathlib.Path]:
    """Write three CSV files (the table, the scores of each run, all measurements), the
    environments, and the figure.

    Args:
        results: the results of `experiments`.
        folder: where to write; created if it does not exist.

    Returns:
        The paths of the files.

    Raises:
        OSError: a file could not be written.
    """
    rows = table(results)
    runs, measurements = _runs_and_measurements(results)
    contents = {
        "reproduce.csv": csv_of(rows),
        "reproduce_runs.csv": csv_of(runs),
        "reproduce_looks.csv": csv_of(measurements),
        "reproduce.json": json_of(_description(results, rows)),
        "reproduce.png": plots.to_png(figure(rows)),
    }
    return write_files(folder, contents)


def _runs_and_measurements(
    results: Sequence[Result],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The score of each run by each protocol, and every measured accuracy of it, in percent."""
    runs: list[dict[str, Any]] = []
    measurements: list[dict[str, Any]] = []
    for result in results:
        e = result.experiment
        shape = {
            "method": e.method,
            "accumulation_steps": e.accumulation_steps,
            "microbatch_size": e.microbatch_size,
        }
        by_protocol = scores(result)
        for i, seed in enumerate(result.seeds):
            run = {
                name.replace(" ", "_"): round(float(values[i]), 2)
                for name, values in by_protocol.items()
            }
            runs.append(shape | {"seed": seed, "ending": result.endings[i]} | run)
            for update in np.flatnonzero(np.isfinite(result.accuracies[i])):
                measured = {
                    "update": update + 1,
                    "accuracy": round(100 * result.accuracies[i, update], 2),
                }
                measurements.append(shape | {"seed": seed} | measured)
    return runs, measurements


def _description(results: Sequence[Result], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was run, where, when, and with which outcome."""
    environments: list[dict[str, Any]] = []
    for environment in (each for result in results for each in result.environments):
        known = {name: value for name, value in environment.items() if name != "date"}
        if known not in environments:
            environments.append(known)
    dates = sorted(each["date"] for result in results for each in result.environments)
    return {
        "source": 'G. Chlebus, "Gradient averaging with TensorFlow", gchlebus.github.io',
        "from": dates[0],
        "to": dates[-1],
        "environments": environments,
        "experiments": [json.loads(result.experiment.to_json()) for result in results],
        "table": rows,
        "conclusion": conclusion(rows),
    }


def _cell(row: Mapping[str, Any]) -> str:
    count = f" ({row['looks']})" if row["looks"] > 1 else ""
    return f"{row['mean']:.2f} ± {row['std']:.2f}{count}"


def _mean_over_methods(
    rows: Sequence[Mapping[str, Any]], protocol: str, accumulation_steps: int
) -> dict[str, float]:
    chosen = [
        r
        for r in rows
        if r["protocol"] == protocol and r["accumulation_steps"] == accumulation_steps
    ]
    return {name: float(np.mean([row[name] for row in chosen])) for name in ("mean", "std")}

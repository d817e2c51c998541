"""The published table, again: does it matter into how many micro-batches a batch of 100 is cut?

Source: G. Chlebus, "Gradient averaging with TensorFlow", gchlebus.github.io, and its code. The published score of a run
is the best of the test accuracies measured after every 100 micro-batches. That gives 1x100 ten looks and 20x5 two
hundred, and the best of more looks is higher. So each run is scored three ways: as published, as the best of equally
many looks, and by its last value.
"""

import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.result import Result, replacing
from gradlab.lab.figures import plots

# (k, b): mean and standard deviation of ten runs, in percent
PUBLISHED = {(1, 100): (95.0, 0.172), (5, 20): (94.9, 0.325), (10, 10): (95.1, 0.36), (20, 5): (95.2, 0.303)}
PUBLISHED_RUNS = 10
METHODS = ("placeholders", "microbatched")  # the published one, and gradlab's fastest
PROTOCOLS = ("as published", "equal looks", "last value")
LOOKS = 10  # of "equal looks"


def experiments(quick: bool = False) -> list[Experiment]:
    """What is run: the published experiments with both methods, ten seeds each; or a small version."""
    updates, seeds = (100, 2) if quick else (1000, 10)
    return [
        Experiment(
            model="lenet",
            method=method,
            microbatch_size=b,
            accumulation_steps=k,
            updates=updates,
            seeds=seeds,
            eval_every=math.gcd(100 // k, updates // LOOKS),
        )
        for method in METHODS
        for k, b in PUBLISHED
    ]


def scores(result: Result) -> dict[str, np.ndarray]:
    """Each seed's accuracy in percent by each protocol, shape (seed,)."""
    number = np.arange(1, result.accuracies.shape[1] + 1)

    def best(every: int) -> np.ndarray:
        looked = result.accuracies[:, (number % every == 0) | (number == number[-1])]
        return 100 * np.fmax.reduce(looked, axis=1)

    e = result.experiment
    every = (100 // e.accumulation_steps, e.updates // LOOKS)
    return dict(zip(PROTOCOLS, (best(every[0]), best(every[1]), 100 * result.last_accuracies)))


def looks(experiment: Experiment, protocol: str) -> int:
    """How often a protocol looks at the test accuracy in a run."""
    every = {"as published": 100 // experiment.accumulation_steps, "equal looks": experiment.updates // LOOKS}
    return math.ceil(experiment.updates / every.get(protocol, experiment.updates))


def table(results: Sequence[Result]) -> list[dict]:
    """The table's rows, one a result and protocol; accuracies in percent.

    "standard_errors" is the difference to the published mean in units of its standard error: two samples of the same
    kind differ by more than 2 in about one case of twenty.
    """
    rows = []
    for result in results:
        e = result.experiment
        published, published_std = PUBLISHED[e.accumulation_steps, e.microbatch_size]
        for protocol, values in scores(result).items():
            mean, std = float(values.mean()), float(values.std(ddof=1))
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


def text(rows: Sequence[dict]) -> str:
    """The table, and what it shows, for a terminal."""
    first = rows[0]
    lines = [
        f"Test accuracy in %, mean ± standard deviation of {first['seeds']} seeds, {first['updates']} updates of 100.",
        "In brackets: looks at the test accuracy in a run, the best of which counts.",
    ]
    for method in METHODS:
        lines += ["", f"{method:14}{'published':>15}" + "".join(f"{protocol:>23}" for protocol in PROTOCOLS)]
        for k, b in PUBLISHED:
            cells = [row for row in rows if (row["method"], row["accumulation_steps"]) == (method, k)]
            line = f"{k:>6} x {b:<5}{cells[0]['published_mean']:>9.1f} ± {cells[0]['published_std']:.2f}"
            lines.append(line + "".join(f"{_cell(row):>23}" for row in cells))
    return "\n".join([*lines, "", conclusion(rows)])


def conclusion(rows: Sequence[dict]) -> str:
    """What the rows show, in sentences made from them."""
    if (rows[0]["updates"], rows[0]["seeds"]) != (1000, 10):
        return (
            f"A small version, with {rows[0]['updates']} updates and {rows[0]['seeds']} seeds in place of 1000 and 10: "
            "its accuracies are not to be compared with the published ones."
        )
    far = max(abs(row["standard_errors"]) for row in rows if row["protocol"] == "as published")
    agree = "agree with" if far <= 2 else "differ from"
    rise, error, above = {}, 0.0, 0.0
    for protocol in PROTOCOLS:
        first, last = (_mean_over_methods(rows, protocol, k) for k in (1, 20))
        rise[protocol] = last["mean"] - first["mean"]
        error = max(error, math.sqrt((first["std"] ** 2 + last["std"] ** 2) / rows[0]["seeds"]))
        above = last["mean"] if protocol == "as published" else above
    above -= _mean_over_methods(rows, "last value", 20)["mean"]
    change = "no change beyond chance" if abs(rise["last value"]) <= 2 * error else "a change beyond chance"
    return (
        f"As published, the means {agree} the published ones: at most {far:.1f} standard errors away. "
        f"From 1x100 to 20x5 the score changes by {rise['as published']:+.2f} as published, by "
        f"{rise['equal looks']:+.2f} with equally many looks, and by {rise['last value']:+.2f} in the last value, each "
        f"± {error:.2f} (standard error): {change}. The best of 200 looks at 20x5 is {above:.2f} above the last one: "
        "that much comes from looking more often."
    )


def figure(rows: Sequence[dict]):
    """The table as dots with intervals."""
    series = {"published": list(PUBLISHED.values())}
    for method in METHODS:
        for protocol in ("as published", "last value"):
            chosen = [row for row in rows if row["method"] == method and row["protocol"] == protocol]
            series[f"{method}, {protocol}"] = [(row["mean"], row["std"]) for row in chosen]
    names = [f"{k} x {b}" for k, b in PUBLISHED]
    return plots.accuracy_table(names, series, "Effective batch 100, cut into k x b")


def write(results: Sequence[Result], folder: str | os.PathLike) -> list[pathlib.Path]:
    """Writes the table, each run's scores, each look, all as CSV; the environment as JSON; and the figure.

    Returns:
        The files.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = table(results)
    runs, every_look = [], []
    for result in results:
        e = result.experiment
        about = {"method": e.method, "accumulation_steps": e.accumulation_steps, "microbatch_size": e.microbatch_size}
        by_protocol = scores(result)
        for i, seed in enumerate(result.seeds):
            run = {name.replace(" ", "_"): round(float(values[i]), 2) for name, values in by_protocol.items()}
            runs.append(about | {"seed": seed, "ending": result.endings[i]} | run)
            for update in np.flatnonzero(np.isfinite(result.accuracies[i])):
                look = {"update": update + 1, "accuracy": round(100 * result.accuracies[i, update], 2)}
                every_look.append(about | {"seed": seed} | look)
    environments = []
    for environment in (each for result in results for each in result.environments):
        known = {name: value for name, value in environment.items() if name != "date"}
        if known not in environments:
            environments.append(known)
    dates = sorted(each["date"] for result in results for each in result.environments)
    about = {
        "source": 'G. Chlebus, "Gradient averaging with TensorFlow", gchlebus.github.io',
        "from": dates[0],
        "to": dates[-1],
        "environments": environments,
        "experiments": [json.loads(result.experiment.to_json()) for result in results],
        "table": rows,
        "conclusion": conclusion(rows),
    }
    contents = {
        "reproduce.csv": _csv(rows),
        "reproduce_runs.csv": _csv(runs),
        "reproduce_looks.csv": _csv(every_look),
        "reproduce.json": (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode(),
        "reproduce.png": plots.to_png(figure(rows)),
    }
    for name, content in contents.items():
        with replacing(folder / name) as file:
            file.write(content)
    return [folder / name for name in contents]


def _cell(row: dict) -> str:
    looked = f" ({row['looks']})" if row["looks"] > 1 else ""
    return f"{row['mean']:.2f} ± {row['std']:.2f}{looked}"


def _mean_over_methods(rows: Sequence[dict], protocol: str, accumulation_steps: int) -> dict[str, float]:
    chosen = [r for r in rows if r["protocol"] == protocol and r["accumulation_steps"] == accumulation_steps]
    return {name: float(np.mean([row[name] for row in chosen])) for name in ("mean", "std")}


def _csv(rows: Sequence[dict]) -> bytes:
    content = io.StringIO()
    writer = csv.DictWriter(content, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return content.getvalue().encode()

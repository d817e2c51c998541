"""TOML files that describe the experiments of a sweep.

[all]                           # fields that all experiments share
model = "lenet"
seeds = 10

[[run]]                         # fields of one experiment; any number of these tables, or none
accumulation_steps = 5
microbatch_size = 20

[grid]                          # every [[run]] is repeated with each combination of these values
method = ["placeholders", "microbatched"]
learning_rate = [1e-3, 1e-4]
"""

import itertools
import os
import pathlib
import tomllib

from gradlab.lab.experiments.experiment import Experiment


def read(path: str | os.PathLike) -> list[Experiment]:
    """Read the experiments of a TOML file.

    Args:
        path: the file, in the form that this module's docstring shows.

    Returns:
        The experiments: the first [[run]] with every combination of [grid], then the second, and so
        on.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not TOML, has other tables, or describes an invalid experiment.
    """
    try:
        tables = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"a sweep file must be TOML. Received: {path} ({error})") from None
    for name, table in tables.items():
        if name not in ("all", "run", "grid"):
            raise ValueError(
                f"a sweep file may have the tables [all], [[run]] and [grid]. Received: {name}"
            )
        of_run = isinstance(table, list) and all(isinstance(each, dict) for each in table)
        if not (of_run if name == "run" else isinstance(table, dict)):
            raise ValueError(
                "a sweep file must have at most one table [all], one [grid], and [[run]] in "
                f"double brackets. Received: {name} = {table!r}"
            )
    shared = tables.get("all", {})
    runs = tables.get("run", [{}])
    grid = tables.get("grid", {})
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"[grid] must give each field a list of values. Received: {name} = {values!r}"
            )
    combinations = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    return [
        Experiment.from_fields(shared | run | combination)
        for run in runs
        for combination in combinations
    ]

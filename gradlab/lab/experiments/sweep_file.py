"""A sweep in a TOML file.

[all]                           # fields of every experiment
model = "lenet"
seeds = 10

[[run]]                         # an experiment's own fields; any number of these, or none
accumulation_steps = 5
microbatch_size = 20

[grid]                          # each of them with every combination of these
method = ["placeholders", "microbatched"]
learning_rate = [1e-3, 1e-4]
"""

import itertools
import os
import pathlib
import sys

from gradlab.lab.experiments.experiment import Experiment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: str | os.PathLike) -> list[Experiment]:
    """The experiments of a TOML file, in order.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML, has other tables, or describes an experiment that there cannot be.
    """
    try:
        tables = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"a sweep's file must be TOML. Received: {path} ({error})") from None
    for name in tables:
        if name not in ("all", "run", "grid"):
            raise ValueError(f"a sweep's file has the tables [all], [[run]] and [grid]. Received: {name}")
    shared, runs, grid = tables.get("all", {}), tables.get("run", [{}]), tables.get("grid", {})
    if not isinstance(shared, dict) or not isinstance(grid, dict) or not isinstance(runs, list):
        raise ValueError("a sweep's file has one table [all], one [grid], and [[run]] in double brackets.")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"[grid] must give each field a list of values. Received: {name} = {values!r}")
    combinations = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    return [Experiment.from_fields(shared | run | combination) for run in runs for combination in combinations]

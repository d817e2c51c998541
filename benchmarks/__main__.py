"""Benchmarks of gradlab and its alternatives, side by side in one run.

`make bench` runs all of them and writes the tables.

Speed: each thread setting of each framework has a process that lives through the whole run. The
processes measure in turn, never two at once, in one order and in the next round in the reverse
order. Every way, gradlab's and the alternatives', is measured in all settings of its framework, and
its fastest setting counts. A time is the median over the rounds. A ratio is computed within each
round, and then the median is taken.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence

from benchmarks import (
    first_update,
    growth,
    memory,
    plan_error,
    report,
    six_models,
    speed,
    tokens,
    training,
    whole_batch,
)
from benchmarks.worker import ONE_PER_FRAMEWORK

QUICK_SHAPES = ((1, 4), (2, 2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures tables and prints them as Markdown.

    Args:
        arguments: the arguments of the command line. None: those of this process.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.quick and asked.write:
        parser.error(
            "--quick must be used without --write, because its figures mean nothing. Received: both"
        )
    commit = report.environment()["commit"] if asked.write else None
    if commit is not None and commit.endswith("+"):
        parser.error(
            f"--write must run on a clean commit, which the figures then name. Received: {commit}"
        )
    if asked.quick:
        asked.repeats = asked.processes = 1
    found = report.read() if asked.write else {}
    measure: dict[str, Callable] = {
        "speed": lambda: _speed(asked, found.get("speed", {"cells": [], "rounds": {}})),
        "memory": lambda: [
            ("memory", memory.measure(asked.processes, asked.ways, found.get("memory")))
        ],
        "curve": lambda: [("curve", memory.curve(asked.processes))],
        "first": lambda: [("first", first_update.measure(asked.processes))],
        "whole": lambda: [("whole", whole_batch.measure(asked.processes))],
        "tokens": lambda: [("tokens", tokens.measure(asked.processes))],
        "six": lambda: [("six", six_models.measure(asked.processes))],
        "plan": lambda: [("plan", plan_error.measure())],
        "growth": lambda: [("growth", growth.measure(asked.processes))],
        "training": lambda: [("training", training.measure(asked.repeats))],
    }
    for table in asked.tables:
        print(f"=== {table}", flush=True)
        # Written after each network: a later failure loses no measurement
        for part, result in measure[table]():
            found[table] = result
            if asked.write:
                origins = found.setdefault("environment", {})
                origins[part] = report.environment() | {"commit": commit}
                report.write(found)
    print(report.as_markdown(found) if found else json.dumps(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tables = [
        "speed",
        "memory",
        "curve",
        "first",
        "whole",
        "tokens",
        "six",
        "plan",
        "growth",
        "training",
    ]
    networks = list(speed.SHAPES)
    parser.add_argument(
        "--tables", nargs="+", choices=tables, default=tables, help="the tables to measure"
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=networks,
        default=networks,
        help="the networks of the speed table",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=7,
        help="rounds of the speed and training tables (default: 7)",
    )
    parser.add_argument(
        "--big",
        type=int,
        default=7,
        help="the most rounds for VGG-16 in the speed table (default: 7)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=3,
        help="processes for each figure of memory and growth (default: 3)",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        help="measure only the memory of these ways, and keep the other figures",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round or process; in the speed table, tiny updates in one thread setting per "
        "framework. It checks "
        "that every way runs; the figures mean nothing",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write data/results/bench.json, its figure and benchmarks/RESULTS.md",
    )
    return parser


def _speed(asked: argparse.Namespace, kept: dict) -> Iterator[tuple[str, dict]]:
    """Measures the speed table. Yields each network's name, and the table with the earlier cells of
    the others."""
    how: dict = (
        dict(shapes=QUICK_SHAPES, settings=ONE_PER_FRAMEWORK, seconds=0.01) if asked.quick else {}
    )
    for network in asked.networks:
        rounds = min(asked.repeats, asked.big) if network == "vgg16" else asked.repeats
        cells, missing = speed.measure(network, rounds, **how)
        others = [cell for cell in kept["cells"] if cell["network"] != network]
        kept = {
            "cells": others + cells,
            "missing": missing,
            "rounds": kept["rounds"] | {network: rounds},
        }
        yield network, kept


if __name__ == "__main__":
    main()

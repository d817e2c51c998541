"""Check that gradlab has not become slower: compares ratios to one big batch with recorded ratios.

    python -m benchmarks.guard            fails if a ratio is 30 % worse than recorded in each of six measurements
    python -m benchmarks.guard --record   records the ratios measured now

All times are taken in one process, so the speed of the machine cancels out of the ratios. The
processor does not: an Intel Xeon computes large batches relatively faster than an AMD EPYC. So each
has ratios of its own, and any other processor is held against the largest of them.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.networks import Run

RECORDED = pathlib.Path(__file__).parent / "recorded.json"
WORSE = 1.3  # a ratio this many times the recorded one is too slow
# Other work on the machine can slow down one side of a ratio: two micro-batches in flight need a
# second free core. So the best ratio of several measurements counts. Code that has become slower is
# slower in all of them.
MEASUREMENTS = 6
# For each case: the way, the network, k and b. They are the ways that people call.
CASES = {
    "fit, lenet 5x20": ("gradlab in fit", "lenet", 5, 20),
    "fit, lenet 20x5": ("gradlab in fit", "lenet", 20, 5),
    "fit, one in flight, lenet 20x5": ("gradlab in fit, one in flight", "lenet", 20, 5),
    "fit, dense 5x20": ("gradlab in fit", "dense", 5, 20),
    "Trainer, lenet 20x5": ("gradlab.Trainer", "lenet", 20, 5),
    "your function, lenet 20x5": ("gradlab in your function", "lenet", 20, 5),
    "your function, dense 20x5, XLA": ("gradlab in your function, XLA", "dense", 20, 5),
}
UPDATES = {"lenet": 30, "dense": 100}  # of each case in each round


def too_slow(found: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """Describes the cases that have become too slow.

    Args:
        found: the ratio of each case.
        recorded: the recorded ratio of each case.

    Returns:
        A sentence for each case that is too slow.

    Example:
        >>> too_slow({"a": 1.4, "b": 1.2}, {"a": 1.0, "b": 1.0})
        ['a: 1.40 times the big batch, recorded 1.00']
    """
    return [
        f"{case}: {ratio:.2f} times the big batch, recorded {recorded[case]:.2f}"
        for case, ratio in found.items()
        if ratio > WORSE * recorded[case]
    ]


def recorded_for(processor: str) -> dict[str, float]:
    """The recorded ratios of a processor; of one that has none, the largest of all."""
    by_processor = json.loads(RECORDED.read_text())
    largest = {case: max(ratios[case] for ratios in by_processor.values()) for case in CASES}
    return by_processor.get(processor, largest)


def measure(rounds: int = 7) -> dict[str, float]:
    """Measures the ratios. In each round the cases and their big batches take turns.

    Args:
        rounds: the number of rounds.

    Returns:
        The median ratio of each case.
    """
    from benchmarks import networks
    from benchmarks.speed import reference_of
    from benchmarks.tensorflow_ways import WAYS

    ways: dict[str, Run] = {}
    big: dict[tuple[str, str], Run] = {}
    for case, (way, name, k, b) in CASES.items():
        network = networks.build(name)
        batch = networks.batch(network, k * b)
        ways[case] = WAYS[way][""](network, k, b, *batch)
        if (reference_of(way), name) not in big:
            big[reference_of(way), name] = WAYS[reference_of(way)][""](network, 1, k * b, *batch)
    for run in (*ways.values(), *big.values()):
        run(3)
    ratios: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        reference = {key: _seconds(run, UPDATES[key[1]]) for key, run in big.items()}
        for case, run in ways.items():
            way, name, *_ = CASES[case]
            ratios[case].append(_seconds(run, UPDATES[name]) / reference[reference_of(way), name])
    return {case: round(statistics.median(values), 3) for case, values in ratios.items()}


def _seconds(run: "Run", updates: int) -> float:
    began = time.perf_counter()
    measured = run(updates)
    return measured if isinstance(measured, float) else time.perf_counter() - began


def main() -> None:
    """Measures, compares, and ends with an error if a case is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="record the ratios measured now")
    arguments = parser.parse_args()
    import gradlab
    from gradlab.lab.experiments.environment import describe

    gradlab.setup()
    found, processor = measure(), describe()["processor"]
    if arguments.record:
        RECORDED.write_text(
            json.dumps(json.loads(RECORDED.read_text()) | {processor: found}, indent=1) + "\n"
        )
        print(found)
        return
    recorded = recorded_for(processor)
    for _ in range(MEASUREMENTS - 1):
        if not (slow := too_slow(found, recorded)):
            break
        print("measuring again, because of", *slow, sep="\n  ")
        found = {case: min(ratio, found[case]) for case, ratio in measure().items()}
    print(found)
    if slow := too_slow(found, recorded):
        sys.exit("gradlab has become slower:\n  " + "\n  ".join(slow))


if __name__ == "__main__":
    main()

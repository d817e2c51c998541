"""gradlab beside the alternatives, in one run: `make bench`, or

    python -m benchmarks [--tables speed memory growth training] [--networks lenet dense vgg16] [--ways ...] [--write]

Speed: every way in processes that live through the whole run, one measuring at a time, in turn, forwards and
backwards; each way in every thread setting that it may like, and the best one counts, for the alternatives as for
gradlab. A figure is the median over the rounds; a ratio is taken within each round before its median.
"""

import argparse
import json
import statistics

from benchmarks import growth, memory, report, speed


def training(repeats: int, say=print) -> dict:
    """The published experiment, a fixed slice of it, and seeds together: medians over rounds."""
    slices = {
        "training, microbatched": ("lenet", 20, 5, 100),
        "training, placeholders": ("lenet", 20, 5, 100),
        "training, 1 seed": ("dense", 5, 20, 100),
        "training, 5 seeds": ("dense", 5, 20, 100),
    }
    workers = [speed.Worker("tensorflow-auto"), speed.Worker("tensorflow-default")]
    try:
        found = {}
        for _ in range(repeats):
            for way, shape in slices.items():
                for worker in workers:
                    say(f"{way}, {worker.setting}")
                    seconds = worker.seconds(way, *shape)
                    found.setdefault(way, {}).setdefault(worker.setting, []).append(1000 * seconds / shape[-1])
    finally:
        for worker in workers:
            worker.close()
    best = {way: min(settings.values(), key=statistics.median) for way, settings in found.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(best[one], best[other]))

    return {
        "milliseconds": {way: statistics.median(values) for way, values in best.items()},
        "placeholders over microbatched": ratio("training, placeholders", "training, microbatched"),
        "5 seeds over 1": ratio("training, 5 seeds", "training, 1 seed"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ["speed", "memory", "growth", "training"]
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    parser.add_argument("--networks", nargs="+", choices=list(speed.SHAPES), default=list(speed.SHAPES))
    parser.add_argument("--repeats", type=int, default=7, help="rounds of the times")
    parser.add_argument("--big", type=int, default=7, help="rounds of VGG-16's times, at most")
    parser.add_argument("--processes", type=int, default=3, help="how often memory and growth are measured")
    parser.add_argument("--ways", nargs="+", help="memory: measure only these, and keep the others' figures")
    parser.add_argument("--write", action="store_true", help="to data/results/bench.json and benchmarks/RESULTS.md")
    arguments = parser.parse_args()

    def speeds():
        kept = found.get("speed", {"cells": [], "missing": [], "rounds": {}})
        for network in arguments.networks:
            rounds = min(arguments.repeats, arguments.big) if network == "vgg16" else arguments.repeats
            cells, missing = speed.measure(network, rounds)
            others = [cell for cell in kept["cells"] if cell["network"] != network]
            kept = {"cells": others + cells, "missing": missing, "rounds": kept["rounds"] | {network: rounds}}
            yield kept

    run = {
        "speed": speeds,
        "memory": lambda: [memory.measure(arguments.processes, arguments.ways, found.get("memory"))],
        "growth": lambda: [growth.measure(arguments.processes)],
        "training": lambda: [training(arguments.repeats)],
    }
    found = report.read() if arguments.write else {}
    for table in arguments.tables:
        print(f"=== {table}", flush=True)
        for part in run[table]():  # each part as soon as it is there: a later fault loses none
            found[table] = part
            if arguments.write:
                found["environment"] = report.environment()
                report.write(found)
    print(report.as_markdown(found) if found else json.dumps(found))


if __name__ == "__main__":
    main()

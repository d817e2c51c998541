"""Times the five methods beside each other: milliseconds an update, and the ratio to one big batch.

    python benchmarks/methods.py [--repeats 7] [--models lenet dense]

All methods run in this one process, in turn, round after round, so that a machine that slows down slows all of them.
A figure is the median over the rounds; the ratio is taken within each round before its median.
"""

import argparse
import statistics
import time

import gradlab

SHAPES = ((1, 100), (5, 20), (10, 10), (20, 5))
UPDATES = 10  # in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count, after one that does not")
    parser.add_argument("--models", nargs="+", default=["lenet", "dense"])
    arguments = parser.parse_args()
    gradlab.setup(seed=0)
    from gradlab.lab import datasets, methods, models, optimizers

    data = datasets.load("mnist")
    features, labels = data.train_images[:100], data.train_labels[:100]
    for name in arguments.models:
        model = models.build(name)
        ways = {}
        for method in methods.METHODS:
            ways[method] = methods.build(method, model, optimizers.OptimizerConfig("adam"))
            ways[method].reset(model.initial_weights(0))
        print(f"\n{name}: milliseconds an update of 100 examples (ratio to one big batch), {arguments.repeats} rounds")
        print(f"{'k x b':>8}" + "".join(f"{method:>20}" for method in ways))
        for steps, microbatch_size in SHAPES:
            rounds = [
                {method: _milliseconds(way, features, labels, microbatch_size) for method, way in ways.items()}
                for _ in range(arguments.repeats + 1)
            ][1:]
            row = f"{f'{steps}x{microbatch_size}':>8}"
            for method in ways:
                median = statistics.median(found[method] for found in rounds)
                ratio = statistics.median(found[method] / found["large_batch"] for found in rounds)
                row += f"{f'{median:.2f} ({ratio:.2f})':>20}"
            print(row)


def _milliseconds(way, features, labels, microbatch_size: int) -> float:
    began = time.perf_counter()
    for _ in range(UPDATES):
        way.update(features, labels, microbatch_size, 1e-3)
    return 1000 * (time.perf_counter() - began) / UPDATES


if __name__ == "__main__":
    main()
